"""Attention over prompts that several completions share."""
