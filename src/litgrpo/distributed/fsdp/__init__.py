"""Fully sharded data parallelism: weights, gradients and optimizer state sharded over ranks."""
