"""Data sets of the built-in example tasks, generated in Python: nothing is downloaded."""
