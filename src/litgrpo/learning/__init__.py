"""Training batches, gradients and optimizer steps; no LightningModule."""
