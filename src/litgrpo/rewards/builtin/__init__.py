"""Built-in reward functions; each is public as `litgrpo.rewards.<name>`."""
