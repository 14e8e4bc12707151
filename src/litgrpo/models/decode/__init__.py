"""Decoding of one token per row: caches, and steps of few calls."""
