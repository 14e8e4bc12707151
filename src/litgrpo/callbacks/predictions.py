"""Answers to a user's prompts: printed, and written as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo.callbacks import episodes
from litgrpo.callbacks.run_folder import run_folder
from litgrpo.text.visible import visible


class Predictions(Callback):
    """Prints reasoning and answer of each prediction and appends it to a JSONL file.

    Args:
        path: where to write; `predictions.jsonl` in the run folder when not given.
        show: print them, too.
    """

    def __init__(self, path: str | None = None, show: bool = True) -> None:
        self.path = path
        self.show = show

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start an empty file."""
        path = self._path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        """Write and print one batch: a list of dictionaries, one per prompt."""
        with self._path(trainer).open("a", encoding="utf-8") as file:
            for row in outputs:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                if self.show:
                    pl_module.print(visible(readable(row)))

    def on_predict_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Say where they are."""
        pl_module.print(f"written to {self._path(trainer)}")

    def _path(self, trainer: Trainer) -> Path:
        path = run_folder(trainer) / "predictions.jsonl" if self.path is None else Path(self.path)
        # Processes must not write over each other.
        rank = f"-{trainer.global_rank}" if trainer.global_rank else ""
        return path.with_name(path.stem + rank + path.suffix)


def readable(row: dict[str, Any]) -> str:
    """One prediction for the terminal; an episode as a whole, message by message.

    Example:
        >>> print(readable({"prompt": "1+1?", "completion": "2", "reasoning": "", "answer": "2"}))
        prompt:    1+1?
        answer:    2
        <BLANKLINE>
    """
    if "messages" in row:
        return episodes.readable(row) + "\n"
    names = ("prompt", "reasoning", "answer") if row["answer"] else ("prompt", "completion")
    shown = {name: str(row[name]).strip() for name in names if row[name]}
    return "".join(f"{name + ':':<10} {text}\n" for name, text in shown.items())
