"""Memory of a recipe, before it runs."""
