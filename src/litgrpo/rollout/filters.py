"""Which tokens top-k, top-p and min-p leave."""

import math

import torch
from torch import Tensor


def candidates(
    scores: Tensor, top_k: int, top_p: float, min_p: float, static_shapes: bool = False
) -> tuple[Tensor, Tensor]:
    """The tokens that filters leave.

    Without top_k the most likely 64 tokens are looked at, and more only if they are not enough:
    sorting a whole vocabulary costs more than the model.

    Args:
        scores: [n, V] float32 logits after temperature.
        top_k: keep so many; 0 keeps all.
        top_p: keep the most likely up to this cumulative probability.
        min_p: keep those at least this fraction as likely as the most likely one.
        static_shapes: S is top_k, or V without it: then the whole vocabulary is sorted.

    Returns:
        [n, S] scores, -inf where fewer than S are left, and [n, S] their ids; most likely first.
    """
    size = scores.shape[1]
    total = None if top_k else scores.logsumexp(-1, keepdim=True)
    most = top_k or (size if static_shapes else 64)
    while True:
        top, ids = scores.topk(min(most, size))
        keep = torch.ones_like(top, dtype=torch.bool)
        if top_p < 1:
            probs = top.softmax(-1) if total is None else (top - total).exp()
            keep = probs.cumsum(-1) - probs < top_p  # more likely tokens do not suffice
        if min_p:
            keep = keep & (top >= top[:, :1] + math.log(min_p))
        if static_shapes:
            return top.masked_fill(~keep, -torch.inf), ids
        width = max(1, int(keep.sum(-1).max()))  # none is kept where no score is a number
        if top_k or width < most or most >= size:
            return top.masked_fill(~keep, -torch.inf)[:, :width], ids[:, :width]
        most = 8 * most if 64 * most < size else size
