"""Measure the project's own code: `python -m tests.house`."""
