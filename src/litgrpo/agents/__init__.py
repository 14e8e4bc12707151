"""Agents behind an OpenAI-compatible proxy: episodes that the user's own program plays."""
