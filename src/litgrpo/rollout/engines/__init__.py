"""Rollout engines: prompts to completions."""
