"""Runs reward functions under a deadline."""
