"""Language models as rollouts and the learning step see them."""
