"""Rounding of float32 matrix products."""

from __future__ import annotations

import warnings

import torch


def matmul_precision() -> str:
    """Return the float32 matmul precision, without torch 2.9's advice on CUDA."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        return torch.get_float32_matmul_precision()
