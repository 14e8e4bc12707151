"""XLA devices (TPU): Lightning strategies, requirement checks and the torch-xla backend."""
