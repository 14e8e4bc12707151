"""A step with a number that is not finite is not taken; one for which memory is short is halved."""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from litgrpo.algorithm.objective import Objective
from litgrpo.callbacks.non_finite import NonFinite
from litgrpo.learner.config import UpdateConfig
from litgrpo.parallel.device import is_out_of_memory
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import Skipped
from tests.conftest import prompt_batch
from tests.modules import test_grpo
from tests.modules.test_grpo import batches, loader, step_gradient, train

BATCH = ("a", "hello there")


def module(**settings):
    """Without the invariants, which would find what is broken here."""
    return test_grpo.module(**{"check_invariants": False} | settings)


@dataclass(frozen=True)
class Broken(Objective):
    """The loss of rows that were asked `prompt`, and of one kind of number in it, is no number."""

    prompt: int = 0
    kind: str = "loss"
    value: float = float("nan")

    def loss(self, new, experience, *rest):
        output = super().loss(new, experience, *rest)
        asked = experience.prompt_ids[experience.prompt_of]
        if not bool((asked == self.prompt).any()):
            return output
        if self.kind == "loss":
            return replace(output, loss=output.loss * self.value)
        # The square root of 0 is 0, but its slope there is infinite.
        return replace(output, loss=output.loss + (new.logprobs * 0).sum().sqrt())


def first_token(text: str) -> int:
    """The token after the begin token."""
    return int(prompt_batch(text).prompt_ids[0, 1])


@pytest.mark.parametrize(
    ("kind", "value"), [("loss", float("nan")), ("loss", float("inf")), ("gradient", 0.0)]
)
def test_one_bad_micro_batch_of_eight_leaves_weights_and_moments_bitwise(kind, value):
    objective = Broken(prompt=first_token("a"), kind=kind, value=value)
    grpo = module(objective=objective, update=UpdateConfig(micro_batch_size=1), max_iterations=3)
    before = {name: value.clone() for name, value in grpo.policy.state_dict().items()}
    runner = train(grpo, batches(*BATCH))
    for name, weight in grpo.policy.state_dict().items():
        assert torch.equal(weight, before[name])
    assert not runner.optimizers[0].state
    assert grpo.iteration == 3
    # Rows 0 to 3 were asked the first prompt; those without advantage are not looked at.
    (skipped,) = grpo.steps
    assert set(skipped.reasons) <= {0, 1, 2, 3}
    assert set(skipped.reasons.values()) == {kind}


def test_the_moments_of_earlier_steps_stay_and_training_goes_on():
    good, bad = Objective(), Broken(prompt=first_token("a"))
    seen = []

    class Now(type(module())):
        def training_step(self, prompts, batch_idx):
            self.objective = bad if self.iteration == 1 else good
            output = super().training_step(prompts, batch_idx)
            state = self.optimizers().optimizer.state_dict()["state"]
            flat = torch.cat([p.detach().flatten() for p in self.policy.parameters()])
            seen.append((flat, state[0]["exp_avg"].clone(), float(state[0]["step"])))
            return output

    grpo = module(max_iterations=3)
    grpo.__class__ = Now
    train(grpo, batches(*BATCH))
    for second, first in zip(seen[1], seen[0], strict=True):
        assert torch.equal(torch.as_tensor(second), torch.as_tensor(first))
    assert not torch.equal(seen[2][0], seen[1][0])
    assert [step for *_, step in seen] == [1.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore:.*1 of 1 optimizer steps skipped")
def test_skipped_steps_are_counted_shown_and_stop_the_run_in_the_end(tmp_path):
    grpo = module(objective=Broken(prompt=first_token("a")), max_iterations=9)
    callback = NonFinite(stop_after=3)
    said = r"iteration 1: 1 of 1 optimizer steps skipped, not finite: loss of \d rows; they are in "
    with (
        pytest.warns(UserWarning, match=said),
        pytest.raises(ValueError, match=r"Stopped in iteration 3: 3 optimizer steps in a row were"),
    ):
        train(grpo, batches(*BATCH), callbacks=[callback], default_root_dir=tmp_path)
    assert callback.skipped == 3
    files = sorted((tmp_path / "non_finite").iterdir())
    assert [path.name for path in files] == [f"iteration-00000{n}.jsonl" for n in (1, 2, 3)]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert {row["not_finite"] for row in rows} == {"loss"}
    assert {row["prompt"] for row in rows} == {"a"}
    assert set(rows[0]) >= {"completion", "rewards", "advantage"}


@pytest.mark.filterwarnings("ignore:.*optimizer steps skipped, not finite")
def test_a_step_that_is_taken_ends_the_row():
    callback = NonFinite(stop_after=2)
    grpo = module()
    trainer = train(grpo, batches(*BATCH))
    for steps in ([Skipped({})], [None, Skipped({})], [None]):
        grpo.steps = steps
        grpo.log = lambda *_: None
        callback.on_train_batch_end(trainer, grpo, {}, None, 0)
    assert (callback.skipped, callback.in_a_row) == (2, 0)
    state = callback.state_dict()
    other = NonFinite()
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(ValueError, match=r"non_finite.stop_after is 0; give 1 or more"):
        NonFinite(stop_after=0)


def test_weights_that_are_no_numbers_sample_without_a_crash_and_are_named():
    grpo = module(max_iterations=1)
    next(grpo.policy.parameters()).data.fill_(torch.nan)
    train(grpo, batches(*BATCH))
    assert set(grpo.steps[0].reasons.values()) <= {"log-probability at sampling", "advantage"}
    assert len(grpo.steps) == 1
    assert grpo.steps[0] is not None


# --- memory ---


@dataclass(frozen=True)
class Tight(Objective):
    """Memory suffices for two rows, the first ones of a step excepted: those are done already."""

    def loss(self, new, experience, *rest):
        if len(experience) > 2:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
        return super().loss(new, experience, *rest)


def test_short_memory_halves_the_micro_batch_and_keeps_the_gradient():
    batch = prompt_batch("a", "hello there", "xyz")
    whole = step_gradient(module(update=UpdateConfig(micro_batch_tokens=None)), batch)
    grpo = module(objective=Tight(), update=UpdateConfig(micro_batch_size=5))
    with pytest.warns(UserWarning, match="out of memory in learning: micro_batch_size is 2 from"):
        found = step_gradient(grpo, batch)
    assert (found - whole).norm() / whole.norm() < 1e-6
    assert grpo.lowered == {"micro_batch_size": 2}
    again = module()
    again.lower(grpo.lowered)
    assert again.learning.micro_batch_size == 2


@dataclass(frozen=True)
class TooTight(Objective):
    def loss(self, new, experience, *rest):
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.filterwarnings("ignore:out of memory")
def test_memory_too_short_for_one_row_says_what_to_do():
    message = "Out of memory in learning, with a single row at once: shorten completions, or set"
    with pytest.raises(RuntimeError, match=message):
        train(module(objective=TooTight()), batches(*BATCH))


@dataclass(frozen=True)
class TightEngine(LocalEngine):
    """Memory suffices for eight rows."""

    def generate(self, policy, prompts, group_size, uniforms, sampling):
        if self.max_rows is None or self.max_rows > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ...")
        return super().generate(policy, prompts, group_size, uniforms, sampling)


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
def test_short_memory_halves_the_rollout_and_keeps_the_completions():
    prompts = prompt_batch(*"abcdefgh")
    rollouts = []
    for engine in (LocalEngine(), TightEngine()):
        grpo = module(engine=engine)
        if rollouts:
            with pytest.warns(UserWarning, match=r"engine.max_rows is 8 from now on"):
                rollouts.append(grpo.generate(prompts, "train", 4, Sampling()))
            assert grpo.lowered == {"max_rows": 8}
        else:
            rollouts.append(grpo.generate(prompts, "train", 4, Sampling()))
    assert torch.equal(rollouts[0].completion_ids, rollouts[1].completion_ids)


def test_each_way_to_say_that_memory_is_short_is_known():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(10**15)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_lower_limits_are_part_of_the_checkpoint(tmp_path):
    first = module(objective=Tight(), update=UpdateConfig(micro_batch_size=4))
    with pytest.warns(UserWarning, match="micro_batch_size is 2"):
        train(first, loader(prompt_batch(*BATCH))).save_checkpoint(tmp_path / "a.ckpt")
    again = module(max_iterations=2, update=UpdateConfig(micro_batch_size=4))
    train(again, batches(*BATCH), ckpt=tmp_path / "a.ckpt")
    assert again.learning.micro_batch_size == 2
