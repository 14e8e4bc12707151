"""Adapters against the packages themselves, each in a separate virtual environment."""
