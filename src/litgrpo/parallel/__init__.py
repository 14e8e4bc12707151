"""What Lightning's support for XLA devices lacks."""
