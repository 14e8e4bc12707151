"""What is maximized: an `Objective`, composed of advantages, a surrogate, a weighting and a KL."""
