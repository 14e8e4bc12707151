"""Devices, processes and memory; `xla` holds everything of XLA."""
