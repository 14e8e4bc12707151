"""Checkpoints between iterations, and what makes a resumed run exact."""
