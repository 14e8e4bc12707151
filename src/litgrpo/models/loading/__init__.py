"""Policies and references from folders, the Hub, GGUF files and configs, and back to folders."""
