"""Estimate memory, run time and cost of a recipe before it runs."""
