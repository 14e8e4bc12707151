"""A dropped iteration leaves no trace in what is saved, however far it got."""

import os
import random
import signal
from contextlib import suppress

import numpy as np
import pytest
import torch
from lightning import Callback

from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.adaptive import EntropyTarget, KLTarget
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.resume import RngState
from litgrpo.data.modules import PromptData
from litgrpo.models.loading.load import LoRA, Precision, build_policy
from tests.support.checkpoints import digest_parts
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.training import module, train

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg", "hhhhhhhh"]
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Interrupted(Callback):
    """Draws random numbers in every iteration; in the third one the process is asked to stop.

    Args:
        at: `rollout` or `backward`; anything else is never.
        is_error: an error is raised instead.
    """

    def __init__(self, at: str, is_error: bool) -> None:
        self.at, self.is_error = at, is_error

    def _here(self, place, pl_module) -> None:
        if place == self.at and pl_module.iteration == 2:
            self.at = "never"
            if self.is_error:
                raise ArithmeticError("a bug")
            os.kill(os.getpid(), signal.SIGTERM)

    def setup(self, trainer, pl_module, stage) -> None:
        embedding = pl_module.policy.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda *_: self._here("rollout", pl_module))

    def on_train_batch_start(self, *_) -> None:
        random.random(), np.random.random(), torch.rand(())

    def on_before_backward(self, trainer, pl_module, *_) -> None:
        self._here("backward", pl_module)


def learner():
    """A module in which everything that a checkpoint holds moves."""
    grpo = module(
        max_iterations=4,
        objective=Objective(kl_coef=0.1, entropy_coef=0.01),
        dynamic_sampling_attempts=1,
        check_invariants=False,
    )
    policy = build_policy(
        tiny_model("qwen2"), byte_tokenizer(), precision=Precision(), lora=LoRA(rank=2)
    )
    grpo.policy = policy
    return grpo


def save_and_digest(folder, at, every_n_iterations, is_error=False):
    """Digests of the parts of the checkpoint after the second iteration."""
    checkpoint = IterationCheckpoint(every_n_iterations, keep_last=9)
    adaptive = [EntropyTarget(target=9.0), KLTarget(target=0.1)]
    callbacks = [Interrupted(at, is_error), RngState(), checkpoint, *adaptive]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    settings = dict(callbacks=callbacks, default_root_dir=folder, enable_checkpointing=True)
    with suppress(SystemExit, ArithmeticError):
        train(learner(), PromptData(TEXTS, batch_size=3), **settings)
    path = folder / "checkpoints/iteration=000002.ckpt"
    return digest_parts(path)


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize("at", ["rollout", "backward"])
def test_a_dropped_iteration_saves_the_state_before_it(tmp_path, at, is_error):
    whole = save_and_digest(tmp_path / "whole", "never", every_n_iterations=2)
    assert set(whole) >= {"loops", "random_state", "optimizer_states", "callbacks"}
    stopped = save_and_digest(tmp_path / "stopped", at, every_n_iterations=0, is_error=is_error)
    assert stopped == whole
