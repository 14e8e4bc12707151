"""One process on four virtual chips shards everything large and computes equal gradients."""

from pathlib import Path
from typing import Any

from tests.xla.fitting import SMALL, Watcher, distance, fit, same_tokens
from tests.xla.own_process import own_process

FOUR = {"trainer": {"strategy": {"class_path": "litgrpo.xla.strategy.XLASPMDStrategy"}}}
KINDS: dict[str, list[str]] = {"cache": [], "batch": [], "gradients": []}


def spec_of(tensor) -> str:
    """Return the sharding annotation of a tensor; empty if it has none."""
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def piece_of(tensor) -> str:
    """Return the shape of one chip's shard of a computed tensor."""
    import torch_xla

    pieces = torch_xla._XLAC._get_local_shards([tensor])[0]
    whole = pieces[0][0].shape == tensor.shape
    return "replicated" if whole else f"devices={list(pieces[0][0].shape)}"


def is_cut(spec: str) -> bool:
    return "devices=" in spec and "replicated" not in spec


def note_caches_and_batches(monkey) -> None:
    """Look at the cache after each token, and at every tensor of rows that goes to the device."""
    from litgrpo.xla.backend import SpmdBackend

    compile_steps, rows_to = SpmdBackend.compile, SpmdBackend.rows_to

    def compile_and_record(self, function):
        compiled = compile_steps(self, function)

        def call(*arguments: Any):
            output, state = compiled(*arguments)
            KINDS["cache"] += [spec_of(each) for each in (*state.completions, *state.prompts)]
            return output, state

        return call

    def move_and_record(self, tensor):
        found = rows_to(self, tensor)
        KINDS["batch"].append(spec_of(found))
        return found

    monkey.setattr(SpmdBackend, "compile", compile_and_record)
    monkey.setattr(SpmdBackend, "rows_to", move_and_record)


def note_gradients(monkey) -> None:
    """Look at gradients where the program of a micro-batch has ended."""
    import torch_xla

    from litgrpo.xla.backend import SpmdBackend
    from litgrpo.xla.strategy import XLASPMDStrategy

    flush, post_backward = SpmdBackend.flush, XLASPMDStrategy.post_backward
    models, fresh = [], []

    def after_backward(self, loss):
        models[:] = [self.model]
        fresh[:] = [True]
        post_backward(self, loss)

    def at_end(self):
        flush(self)
        if not fresh:
            return
        fresh.clear()
        torch_xla.sync(wait=True)
        large = [p for model in models for p in model.parameters() if p.numel() >= 1024]
        KINDS["gradients"] += [piece_of(p.grad) for p in large if p.grad is not None]

    monkey.setattr(XLASPMDStrategy, "post_backward", after_backward)
    monkey.setattr(SpmdBackend, "flush", at_end)


def shards(trainer, module) -> dict[str, list[str]]:
    """Return the shardings of large parameters and of their optimizer state."""
    (optimizer,) = trainer.optimizers
    large = [p for p in module.policy.parameters() if p.numel() >= 1024]
    kept = [optimizer.state[p][name] for p in large for name in ("exp_avg", "exp_avg_sq")]
    return {"weights": list(map(spec_of, large)), "optimizer state": list(map(spec_of, kept))}


@own_process(CPU_NUM_DEVICES="4")
def test_training_on_four_chips_equals_training_on_one(tmp_path: str):
    import pytest

    Watcher.look, run = shards, Path(tmp_path) / "run"
    with pytest.MonkeyPatch.context() as monkey:
        note_caches_and_batches(monkey)
        note_gradients(monkey)
        found = fit("xla", 7, SMALL, FOUR, folder=run)
    for kind, specs in (KINDS | found.at_end).items():
        assert specs, kind
        assert all(map(is_cut, specs)), (kind, [each for each in specs if not is_cut(each)][:4])
    compiled = found.column("perf/compilations")
    assert sum(compiled[3:]) == 0, compiled

    whole = found.weights
    (run / "checkpoints/iteration=000007.ckpt").unlink()
    before = str(run / "checkpoints/iteration=000006.ckpt")
    resumed = fit("xla", 7, SMALL, FOUR, folder=run, words=("--ckpt_path", before))
    assert all(map(is_cut, resumed.at_end["optimizer state"])), resumed.at_end["optimizer state"][
        :4
    ]
    assert distance(whole, resumed.weights) == 0

    # Last, because torch-xla does not expect tensors of before in a process of several chips.
    Watcher.look = None
    expected = fit("cpu", 1, SMALL)
    assert same_tokens(expected.rollouts[0], found.rollouts[0]) >= 0.999
    assert distance(expected.gradients, found.gradients) < 1e-5
