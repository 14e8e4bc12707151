"""What speaks: models that are loaded, prefilled, stepped and asked for log-probabilities."""
