"""Adapters against the packages themselves, each in an environment of its own."""
