"""GRPO for language models as a LightningModule, on CPU, CUDA and TPU."""

__version__ = "0.1.0"
