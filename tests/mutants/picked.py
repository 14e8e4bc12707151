"""Mutants chosen by hand, and changes that have no effect."""

# (file below src/litgrpo, text that occurs there once, what it becomes)
PICKED: list[tuple[str, str, str]] = []

# (file below src/litgrpo, a line after the change, why nothing observable differs)
EQUIVALENT: list[tuple[str, str, str]] = []
