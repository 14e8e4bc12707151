"""Verbs besides training."""
