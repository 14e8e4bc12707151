"""Which numbers share a chart, in the order of reading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from litgrpo.callbacks.metric_table import definition
from litgrpo.callbacks.number_texts import BOUNDS
from litgrpo.tools.report.curves import Line
from litgrpo.tools.report.run_files import Series

LINES = 5  # of a chart; more cannot be told apart


@dataclass(frozen=True)
class Panel:
    """A chart: its title, and expressions for the names of the numbers in it."""

    title: str
    names: tuple[str, ...]


PART = r"reward/(?!mean$|min$|max$|std$|group_std$|.*_(?:std|share|frac)$|cosine_)[^/]+"
PANELS = (
    Panel(
        "Held-out accuracy",
        (r"val/(.+/)?(avg@|greedy)\d*", r"val/(.+/)?pass@(?!1$)\d+"),
    ),
    Panel("Held-out reward", (r"val/(.+/)?reward",)),
    Panel("Held-out loss", (r"val/(.+/)?loss",)),
    Panel("Loss on pairs", (r"sft/loss",)),
    Panel("Tokens guessed right", (r"sft/token_accuracy", r"val/(.+/)?token_accuracy")),
    Panel("Reward in training", (r"reward/mean",)),
    Panel("Reward parts", (PART,)),
    Panel("What moves the reward", (r"reward/.+_share",)),
    Panel("Groups that teach nothing", (r"reward/(equal_groups|all_right|all_wrong)_frac",)),
    Panel("Tokens of a completion", (r"completion/(terminated_)?len_mean", r"completion/len_max")),
    Panel("Right and wrong ones", (r"completion/len_(right|wrong)(_mean)?",)),
    Panel("Cut off or ended", (r"completion/(truncated|eos|end_token)_frac",)),
    Panel("Loops and repeats", (r"completion/(loop|unique|distinct)_frac",)),
    Panel("Turns of an episode", (r"env/turns", r"tools/.+_calls")),
    Panel("Episodes that failed", (r"env/(failed|timeout)_frac", r"tools/.+_failed")),
    Panel("Entropy", (r"policy/entropy", r"policy/entropy_trained")),
    Panel("Distance to the reference", (r"policy/kl",)),
    Panel("Log ratio", (r"policy/log_ratio",)),
    Panel("Clipped tokens", (r"policy/clip_(low|high)_frac",)),
    Panel("Norm of the gradient", (r"optim/grad_norm",)),
    Panel("Learning rate", (r"optim/lr",)),
    Panel("Skipped steps", (r"optim/skipped_steps",)),
    Panel("Sampler against trainer", (r"policy/sampler_mismatch",)),
    Panel("Text under the start's weights", (r"val/(.+/)?start_perplexity",)),
    Panel("Seconds of an iteration", (r"time/(step|rollout|learn|reward|reference)_s",)),
    Panel("Peak memory (GiB)", (r"perf/peak_memory_gib",)),
)


def panels(series: Series) -> Iterator[tuple[str, list[Line], str]]:
    """Title, lines and explanation of each chart that there are numbers for.

    Args:
        series: every logged number of a run.
    """
    for panel in PANELS:
        known = [name for name in series if not name.endswith(BOUNDS)]
        fitting = [n for each in panel.names for n in known if re.fullmatch(each, n)]
        if fitting:
            lines = [line_of(series, name) for name in dict.fromkeys(fitting[:LINES])]
            yield panel.title, lines, definition(fitting[0])


def line_of(series: Series, name: str) -> Line:
    """A number with its interval, where it has one."""
    low, high = (series.get(name + end, []) for end in BOUNDS)
    return Line(name, series[name], low, high)


def part_names(series: Series) -> list[str]:
    """The reward functions of a run, by what was logged of them.

    Example:
        >>> part_names({"reward/mean": [], "reward/format": [], "reward/format_std": []})
        ['format']
    """
    found = [name.removeprefix("reward/") for name in series if re.fullmatch(PART, name)]
    return [name for name in found if f"reward/{name}_std" in series]
