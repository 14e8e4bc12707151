"""Random state of every process, so that a resumed run draws what the whole run would have."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from litgrpo.distributed.random_state import random_state, set_random_state

KEY = "random_state"


def all_random_state() -> dict[str, Any]:
    """Where Python, numpy, torch and the device stand, as plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": random_state(),
    }


def set_all_random_state(state: dict[str, Any]) -> None:
    """Put them back."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    set_random_state(state["torch"])


class RngState(Callback):
    """Keeps the random state of every process in the checkpoint.

    Lightning keeps none. Sampling needs none either, but dropout and functions of the user's draw
    from it. With more processes than the checkpoint had, those beyond keep their fresh state.
    """

    def __init__(self) -> None:
        """Nothing to put back."""
        self.states: list[dict[str, Any]] = []

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Gather the states of all processes; each of them is here."""
        states: list[Any] = [all_random_state()]
        if trainer.world_size > 1:
            states *= trainer.world_size
            torch.distributed.all_gather_object(states, all_random_state())
        checkpoint[KEY] = states

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Hold them until nothing draws any more before the training."""
        self.states = checkpoint.get(KEY, [])  # one of weights alone has none

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Put this process's state back."""
        if trainer.global_rank < len(self.states):
            set_all_random_state(self.states[trainer.global_rank])
        self.states = []
