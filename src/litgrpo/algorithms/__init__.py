"""Objectives: advantages, surrogate losses, loss aggregation and KL estimators."""
