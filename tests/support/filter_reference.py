"""The filters as their definitions say it, over the whole vocabulary."""

import torch
from torch import Tensor

from litgrpo.rollout.sampling import Sampling
from litgrpo.tensors import widen


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits after temperature, with the tokens that may not be drawn at -inf.

    Args:
        logits: [n, V].
        sampling: the filters.

    Returns:
        [n, V] float32.
    """
    logits = widen(logits) / sampling.policy_temperature
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        probs, order = logits.softmax(-1).sort(stable=True, dim=-1, descending=True)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # more likely tokens suffice
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if sampling.min_p:
        probs = logits.softmax(-1)
        too_rare = probs < sampling.min_p * probs.amax(-1, keepdim=True)
        logits = logits.masked_fill(too_rare, -torch.inf)
    return logits
