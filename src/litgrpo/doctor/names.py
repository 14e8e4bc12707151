"""How logged numbers are read: unit, healthy range, and what TRL and verl call the same number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """How a number is read.

    Args:
        unit: of the number.
        healthy: what it is like in a run that learns; "" where that says nothing.
        trl: its name in `trainer_state.json`; "" where TRL has none that means the same.
        verl: its name in verl's console log, likewise.
    """

    unit: str
    healthy: str = ""
    trl: str = ""
    verl: str = ""


READINGS: dict[str, Reading] = {
    "reward/mean": Reading("reward", "rises", "reward", "critic/score/mean"),
    "reward/min": Reading("reward", "", "", "critic/score/min"),
    "reward/max": Reading("reward", "", "", "critic/score/max"),
    "reward/group_std": Reading("reward", "above 0", "reward_std"),
    "reward/equal_groups_frac": Reading("share", "below 0.5", "frac_reward_zero_std"),
    "completion/len_mean": Reading(
        "tokens", "steady", "completions/mean_length", "response_length/mean"
    ),
    "completion/len_min": Reading("tokens", "", "completions/min_length", "response_length/min"),
    "completion/len_max": Reading("tokens", "", "completions/max_length", "response_length/max"),
    "completion/truncated_frac": Reading(
        "share", "below 0.05", "completions/clipped_ratio", "response_length/clip_ratio"
    ),
}

STEP = {"step": "step"}
TRL = STEP | {each.trl: name for name, each in READINGS.items() if each.trl}
VERL = STEP | {each.verl: name for name, each in READINGS.items() if each.verl}
