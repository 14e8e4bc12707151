"""Shared by tests of models.adapters."""

import torch


def moved(policy, std=0.1):
    """The policy after a change of everything that is trained."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return policy.eval()
