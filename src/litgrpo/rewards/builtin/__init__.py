"""Built-in reward functions, public as `litgrpo.rewards.<name>`, which has their arguments."""
