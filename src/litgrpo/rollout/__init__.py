"""Sampling: prompts to groups of completions."""
