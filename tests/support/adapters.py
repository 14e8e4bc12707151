"""Shared by tests of models.adapters."""

import torch


def perturb(policy, std=0.1):
    """Add noise to all trained parameters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return policy.eval()
