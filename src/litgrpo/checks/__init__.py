"""What must be true before training starts."""
