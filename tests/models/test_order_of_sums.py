"""No gradient is summed into repeated indices, where CPU threads add in a random order."""

from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import ARCHITECTURES, tiny_policy
from tests.support.packing import rows


class Sums(TorchDispatchMode):
    """Notes each `index_put(accumulate=True)` that meets one place more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.strip("_") in ("index_put", "unsafe_index_put"):
            indices = [each for each in args[1] if each is not None]
            if len(args) > 3 and args[3] and indices[0].dtype != torch.bool:
                places = torch.broadcast_tensors(*indices)
                flat = torch.stack([each.flatten() for each in places], 1)
                if len(flat.unique(dim=0)) < prod(places[0].shape):
                    self.repeated.append((str(func), tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_gradient_is_added_in_an_order_that_threads_choose(architecture, share):
    policy = tiny_policy(architecture)
    policy.share_prompts = share
    out = policy.logprobs(rows(), entropy_grad=True)
    with Sums() as sums:
        (out.logprobs.sum() + out.entropy.sum()).backward()
    assert sums.repeated == []


def test_a_sum_in_thread_dependent_order_is_found():
    x = torch.zeros(3, requires_grad=True)
    with Sums() as sums:
        x[torch.tensor([0, 0, 2])].sum().backward()
    assert len(sums.repeated) == 1
