"""Ranks repeat a pass together if one of them runs out of memory."""

import warnings
from itertools import product

import pytest
import torch

from litgrpo.data.modules import PromptData
from litgrpo.distributed.memory import (
    OutOfMemoryElsewhere,
    RowLimit,
    check_other_ranks,
    is_out_of_memory,
)
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.loading.sharded_weights import gather_weights
from litgrpo.modules.grpo import GRPO
from tests.distributed.fsdp.training import grpo, save_models
from tests.support.gloo import run_by
from tests.support.processes import TEXTS, trainer


class Other:
    """Collectives of two ranks, of which the other is out of memory or not."""

    world_size = 2

    def __init__(self, out_of_memory):
        self.out_of_memory = out_of_memory

    def max(self, value):
        return value.clamp(min=float(self.out_of_memory))


def test_out_of_memory_on_another_rank_is_raised_here():
    check_other_ranks(Other(out_of_memory=False))
    check_other_ranks(Other(out_of_memory=True), out_of_memory=True)  # it raises its own error
    with pytest.raises(OutOfMemoryElsewhere):
        check_other_ranks(Other(out_of_memory=True))


def test_an_attempt_is_repeated_until_no_rank_is_out_of_memory():
    other, limits = Other(out_of_memory=True), []

    def attempt(limit):
        limits.append(limit)
        other.out_of_memory = len(limits) < 3
        return "done"

    limit = RowLimit("model.update.micro_batch_size", "", 4)
    assert limit.run(attempt, lambda: 4, comm=other) == "done"
    assert limits == [4, 4, 4]  # the other rank has fewer rows at once, this one as many as before


@pytest.mark.filterwarnings("ignore:Out of memory with")
def test_a_failing_rank_repeats_with_fewer_rows_or_names_the_remedy():
    def attempt(max_rows):
        if max_rows is None:
            raise torch.OutOfMemoryError("a test")
        return "done"

    other, limit = Other(out_of_memory=False), RowLimit("model.update.micro_batch_size", "")
    with pytest.raises(RuntimeError, match="micro_batch_size") as raised:
        limit.run(attempt, lambda: 4, comm=other, computes_alone=False)
    assert not is_out_of_memory(raised.value)
    assert limit.run(attempt, lambda: 4, comm=other) == "done"
    assert limit.max_rows == 2


class LimitedOnOne(GRPO):
    """The second rank has memory for two rows at once, in its forward or its backward passes."""

    fails_backward = False

    def on_train_start(self):
        super().on_train_start()
        logprobs = self.policy.logprobs

        def fail(*_):
            raise torch.OutOfMemoryError("a test")

        def limit_rows(rows, **settings):
            limited = self.global_rank == 1 and len(rows.completion_ids) > 2
            if not limited or not torch.is_grad_enabled():
                return logprobs(rows, **settings)
            if not self.fails_backward:
                fail()
            found = logprobs(rows, **settings)
            found.logprobs.register_hook(fail)
            return found

        self.policy.logprobs = limit_rows


class LimitedBackward(LimitedOnOne):
    """The other rank waits for gradients that the second one cannot compute."""

    fails_backward = True


LIMITED = (LimitedOnOne, LimitedBackward)


def learn(processes, folder):
    """Two iterations with whole weights on each process; leaves those of each training."""
    warnings.simplefilter("ignore")
    for kind in LIMITED if processes > 1 else (GRPO,):
        update = UpdateConfig(micro_batch_size=8, epochs_per_rollout=2)
        module = grpo(folder, module=kind, update=update)
        trainer(processes).fit(module, PromptData(TEXTS[:4], batch_size=4))
        assert module.learner.row_limit.max_rows == (2 if module.global_rank == 1 else None)
        weights = {name: each.detach() for name, each in gather_weights(module.policy.model)}
        torch.save(weights, folder / f"{kind.__name__} {module.global_rank}.pt")


@pytest.mark.timeout(900)
def test_ranks_retry_together_and_learn_the_same(tmp_path):
    save_models(tmp_path)
    for processes in (1, 2):
        run_by(processes, learn, tmp_path)
    one = torch.load(tmp_path / "GRPO 0.pt")
    for kind, rank in product(LIMITED, (0, 1)):
        weights = torch.load(tmp_path / f"{kind.__name__} {rank}.pt")
        for name, weight in one.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-5)
