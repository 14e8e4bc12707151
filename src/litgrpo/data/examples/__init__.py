"""Generators of the embedded example tasks."""
