"""Diagnose a run from its metrics, sampled completions and config.

A rule is a pure function of a `RunLog` that returns a `Finding`, or None if it finds no problem.
The same rules run during training (`callback`) and on a run folder afterwards (`command`).
"""
