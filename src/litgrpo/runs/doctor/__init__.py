"""Diagnose a run from its metrics, sampled completions and config.

`rules.RULES` is a table of checks of a `Run`. The same rules run during training (`callback`) and
on a run folder afterwards (`command`).
"""
