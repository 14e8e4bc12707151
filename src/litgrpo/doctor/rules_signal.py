"""Rules about what there is to learn from: equal groups, completions that were cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litgrpo.doctor.config import Config
from litgrpo.doctor.finding import Finding
from litgrpo.doctor.metrics import Metrics
from litgrpo.doctor.rule import Rule

TRUNCATED = 0.15
LATELY = 10


def truncated(
    metrics: Metrics, samples: Sequence[dict[str, Any]], config: Config
) -> Finding | None:
    """The length limit cuts completions off. Source: verl's best practices; TRL #5697."""
    share = metrics["completion/truncated_frac"].means()
    if not len(share) or share.values[-1] < TRUNCATED:
        return None
    limit = config.get("model.max_completion_len")
    cut = [row for row in samples if row.get("truncated")]
    return Finding(
        rule="truncated",
        what=f"The length limit cuts off {share.values[-1]:.0%} of the completions.",
        severity="critical",
        since=share.since(share.values >= TRUNCATED),
        evidence=(
            f"completion/truncated_frac: {share.values[0]:.2f} at the start, "
            f"{share.values[-1]:.2f} lately",
        ),
        samples=tuple(cut[-3:]),
        key="model.max_completion_len",
        value=str(2 * int(limit)) if limit else "",
    )


RULES = (
    Rule(
        truncated,
        ("completion/truncated_frac",),
        "Completions end by themselves.",
    ),
)
