"""Fully sharded data parallelism: weights, gradients and moments divided over processes."""
