"""Processes in which foreign code may hang, crash or flood its output without hurting the run."""
