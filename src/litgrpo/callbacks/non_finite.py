"""Optimizer steps that were skipped because a number is not finite: shown, counted, limited."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from litgrpo.arguments import at_least
from litgrpo.callbacks.completions import sample_rows, write_jsonl
from litgrpo.callbacks.run_folder import run_folder, writes_files
from litgrpo.types import StepReport


class NonFinite(Callback):
    """Tells of optimizer steps that were skipped, and stops when that does not end.

    A step with a loss, gradient, log-probability or advantage that is NaN or infinite is not taken:
    weights and moments stay as they are. The completions behind it go to
    `non_finite/iteration-000123.jsonl`.

    Args:
        stop_after: stop the training after so many skipped steps in a row; null never stops.
    """

    def __init__(self, stop_after: int | None = 10) -> None:
        at_least("non_finite.stop_after", stop_after, 1)
        self.stop_after = stop_after
        self.skipped = 0
        self.in_a_row = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the steps of the iteration.

        Raises:
            ValueError: too many were skipped in a row.
        """
        reports: list[StepReport] = outputs.get("reports", [])
        skipped = [report.skipped for report in reports if report.skipped is not None]
        self.skipped += len(skipped)
        if skipped:
            said = f"iteration {pl_module.iteration}: {len(skipped)} of {len(reports)} optimizer "
            said += f"steps skipped, not finite: {self._reasons(trainer, pl_module, outputs)}"
            rank_zero_warn(said)
        for report in reports:
            self.in_a_row = 0 if report.skipped is None else self.in_a_row + 1
            if self.stop_after is not None and self.in_a_row >= self.stop_after:
                raise ValueError(
                    f"Stopped in iteration {pl_module.iteration}: {self.in_a_row} optimizer steps "
                    "in a row were skipped, because a number was not finite. The weights are as "
                    f"before them; see {run_folder(trainer) / 'non_finite'}. Lower the learning "
                    "rate or max_grad_norm, or take a wider precision."
                )
        if self.skipped:
            pl_module.log("optim/skipped_steps", float(self.skipped))

    def _reasons(self, trainer: Trainer, pl_module: Any, outputs: Any) -> str:
        """What was not finite in how many rows; the rows are written to a file."""
        n, reasons = pl_module.iteration, dict[int, str]()
        for report in outputs["reports"]:
            reasons |= report.skipped or {}
        counted = Counter(reasons.values()).items()
        said = ", ".join(f"{reason} of {count} rows" for reason, count in counted)
        if reasons and "rollout" in outputs and writes_files(trainer):
            rows = sample_rows(n, outputs["rollout"], outputs["rewards"], outputs["advantages"])
            path = run_folder(trainer) / "non_finite" / f"iteration-{n:06d}.jsonl"
            write_jsonl(path, [rows[row] | {"not_finite": reasons[row]} for row in sorted(reasons)])
            said += f"; they are in {path}"
        return said or "the gradient of all rows together"

    def state_dict(self) -> dict[str, int]:
        """The counts, so that a resumed run stops where the whole one would have."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take the counts up."""
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]
