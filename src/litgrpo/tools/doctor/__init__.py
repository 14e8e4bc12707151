"""What is wrong with a run, read from its numbers, samples and configuration.

A rule is a pure function `(metrics, samples, config) -> Finding`, or None where all is well; the
same rules look at a run while it trains and at its folder afterwards.
"""
