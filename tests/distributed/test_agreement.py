"""Two processes halve together where memory is short on one."""

import warnings
from functools import partial

import pytest
import torch

from litgrpo.data.prompt_data import PromptData
from litgrpo.distributed.agreement import ShortElsewhere, check_others, on_all
from litgrpo.distributed.memory import is_out_of_memory
from litgrpo.models.sharded_weights import gather_weights
from litgrpo.training.grpo import GRPO
from litgrpo.training.update_config import UpdateConfig
from tests.distributed.fsdp.training import TEXTS, grpo, save_models, trainer
from tests.support.gloo import run_by


class Other:
    """Of two processes the other is short of memory, or not."""

    world_size = 2

    def __init__(self, short):
        self.short = short

    def max(self, value):
        return value.clamp(min=float(self.short))


def test_what_is_short_elsewhere_is_short_here():
    check_others(Other(short=False))
    check_others(Other(short=True), short=True)  # it raises its own error
    with pytest.raises(ShortElsewhere):
        check_others(Other(short=True))


def test_an_attempt_is_repeated_until_no_process_is_short():
    other, limits = Other(short=True), []

    def attempt(limit):
        limits.append(limit)
        other.short = len(limits) < 3
        return "done"

    assert on_all(attempt, other, repeats=True)(4) == "done"
    assert limits == [4, 4, 4]


def short(limit):
    raise torch.OutOfMemoryError("a test")


def test_own_shortness_is_raised_and_where_nothing_repeats_it_says_what_to_do():
    with pytest.raises(torch.OutOfMemoryError):
        on_all(short, Other(short=False), repeats=True)(4)
    with pytest.raises(RuntimeError, match=r"lower update\.micro_batch_size") as found:
        on_all(short, Other(short=False), repeats=False)(4)
    assert not is_out_of_memory(found.value)


class ShortOnOne(GRPO):
    """The second process has room for two rows at once."""

    def on_train_start(self):
        super().on_train_start()
        logprobs = self.policy.logprobs

        def limited(rows, **settings):
            if self.global_rank == 1 and len(rows.completion_ids) > 2 and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("a test")
            return logprobs(rows, **settings)

        self.policy.logprobs = limited


def halve(processes, folder):
    """Two iterations with whole weights on each process."""
    warnings.simplefilter("ignore")
    update = UpdateConfig(micro_batch_size=8, epochs_per_rollout=2)
    module = grpo(folder, module=ShortOnOne, update=update)
    runner = trainer(processes, strategy="ddp" if processes > 1 else "auto")
    runner.fit(module, PromptData(TEXTS[:4], batch_size=4))
    assert module.learner.max_rows == (2 if module.global_rank == 1 else None)
    weights = {name: each.detach() for name, each in gather_weights(module.policy.model)}
    torch.save(weights, folder / f"halved {processes} {module.global_rank}.pt")


@pytest.mark.timeout(900)
def test_processes_halve_together_and_learn_the_same(tmp_path):
    save_models(tmp_path)
    for processes in (1, 2):
        run_by(processes, halve, tmp_path)
    names = ("halved 1 0", "halved 2 0", "halved 2 1")
    one, *two = (torch.load(tmp_path / f"{name}.pt") for name in names)
    close = partial(torch.testing.assert_close, atol=1e-6, rtol=1e-5)
    for weights in two:
        for name, weight in one.items():
            close(weights[name], weight)
