"""Training through XLA on the processor: the CPU's run, compiled once, with few looks."""

from pathlib import Path

import pytest
import torch

from tests.xla.fitting import SMALL, Watcher, assert_steady, distance, fit, same_tokens
from tests.xla.own_process import own_process


@own_process()
def test_the_quickstart_trains_as_on_the_cpu_and_is_compiled_once():
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


def settings(**values):
    return {"model": {"init_args": values}}


@own_process()
def test_lora_trains_in_lower_precision_and_clips_the_reduced_gradient():
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
        "xla",
        4,
        SMALL,
        settings(precision={"autocast_dtype": "bfloat16", "gradient_checkpointing": True}),
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


@own_process()
def test_a_teacher_pulls_the_policy_as_on_the_cpu(tmp_path: str):
    import torch_xla

    from litgrpo.models.loading.load import load_policy

    torch_xla.device()
    teacher = load_policy("builtin:tiny-gemma2")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in teacher.model.parameters():
            weight.add_(weight.std() * torch.randn(weight.shape, generator=generator))
    teacher.model.save_pretrained(Path(tmp_path, "teacher"))
    teacher.tokenizer.save_pretrained(Path(tmp_path, "teacher"))
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        objective = {"reward_coef": 0.0, "kl_coef": 1.0, "kl_estimator": kind}
        distilled = settings(reference=str(Path(tmp_path, "teacher")), objective=objective)
        expected = fit("cpu", 1, SMALL, distilled)
        found = fit("xla", 4 if kind == "jsd" else 1, SMALL, distilled)
        on_cpu, on_xla = (seen.rows[0]["policy/kl"] for seen in (expected, found))
        assert on_cpu > 0.01
        assert on_xla == pytest.approx(on_cpu, rel=1e-3)
        assert distance(expected.gradients, found.gradients) < 1e-4
        assert sum(found.column("perf/compilations")[2:]) == 0
