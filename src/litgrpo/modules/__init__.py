"""The LightningModules, and what assembles and checks their parts."""
