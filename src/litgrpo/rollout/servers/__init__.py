"""Servers that sample with a copy of the weights, or compute a reference."""
