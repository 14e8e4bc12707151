"""Training through XLA on the processor: the CPU's run, compiled once, with few looks."""

import math

import pytest
import torch

from tests.xla.fitting import SMALL, Watcher, distance, fit, same_tokens
from tests.xla.own_process import own_process

LONGEST, LOOK_EVERY = 40, 16  # tokens of a completion; of the overlay


@own_process()
def test_the_quickstart_is_the_run_of_the_cpu_and_is_compiled_once():
    import torch_xla

    from litgrpo.distributed.device import backend

    torch_xla.device()  # autograd counts devices at its first backward pass, on the CPU here
    expected = fit("cpu", 1, SMALL)
    Watcher.look = lambda trainer, module: backend(module.device).counters()
    found = fit("xla", 12, SMALL)
    assert same_tokens(expected.rollouts[0], found.rollouts[0]) >= 0.999
    loss, same_loss = (seen.rows[0]["policy/loss"] for seen in (expected, found))
    assert same_loss == pytest.approx(loss, abs=1e-4)
    assert distance(expected.gradients, found.gradients) < 1e-4
    assert_steady(found.rows)
    assert found.at_end["cpu_fallbacks"] == 0
    assert len({int(n) for rollout in found.rollouts for n in rollout.lengths}) > 3  # ragged


def assert_steady(rows, warm_up=2):
    """Nothing is compiled after two iterations, and the host looks as rarely as it can.

    Two epochs have ended meanwhile, checkpoints were written and held-out prompts were answered.
    """
    compiled = [row["perf/compilations"] for row in rows]
    assert sum(compiled[warm_up:]) == 0, compiled
    most = math.ceil(LONGEST / LOOK_EVERY) + 2
    reads = [row["perf/host_reads"] for row in rows[warm_up:]]
    # What is read to write a checkpoint, or to validate, counts in the iteration that follows it.
    assert sorted(reads)[len(reads) // 2] <= most, reads
    assert all(row["perf/cpu_fallbacks"] == 0 for row in rows[warm_up:])


def settings(**values):
    return {"model": {"init_args": values}}


@own_process()
def test_lora_lower_precision_and_clipping_behind_the_reduction():
    import torch_xla.core.xla_model as xm

    plain = fit("xla", 1, SMALL)
    # Several processes add up their gradients here; clipping must see the sum.
    doubled = lambda optimizer: [  # noqa: E731
        each.grad.mul_(2) for group in optimizer.param_groups for each in group["params"]
    ]
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(xm, "reduce_gradients", doubled)
        found = fit("xla", 1, SMALL, settings(update={"max_grad_norm": 0.01}))
    # What clipping measured is what it scaled down.
    norms = [seen.rows[0]["optim/grad_norm"] for seen in (plain, found)]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5)
    low = fit(
        "xla", 4, SMALL, settings(precision={"compute": "bfloat16", "gradient_checkpointing": True})
    )
    assert {each.dtype for each in low.weights.values()} == {torch.float32}
    assert low.rows[0]["policy/loss"] == pytest.approx(plain.rows[0]["policy/loss"], abs=0.02)
    assert low.rows[0]["policy/loss"] != plain.rows[0]["policy/loss"]

    adapters = fit("xla", 4, SMALL, settings(lora={"rank": 4}, objective={"kl_coef": 0.05}))
    assert all("lora" in name for name in adapters.gradients)
    assert adapters.rows[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    for seen in (low, adapters):
        compiled = seen.column("perf/compilations")
        assert sum(compiled[2:]) == 0, compiled
