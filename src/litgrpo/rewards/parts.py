"""One reward of several: its function, how much it counts, and what may not stand beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite
from typing import Any, Literal, get_args

from litgrpo.arguments import did_you_mean, one_of, require
from litgrpo.rewards.builtin.episode import environment
from litgrpo.rewards.lookup import resolved
from litgrpo.types import RewardTable

RewardFormat = Literal["text", "chat"]
OWN = {"environment": environment}  # functions of rewards that need not name one
Normalize = Literal["none", "group", "batch"]


@dataclass
class Reward:
    """One reward function and how much it counts.

    Args:
        function: a function `f(prompts, completions, **columns) -> list[float | None]` or its
            import path, such as `litgrpo.rewards.correctness`. It gets the columns
            that its signature names (all of them with `**kwargs`), among them `completion_ids`,
            `completion_lengths` and `truncated`; in episodes `completions` are what the policy said
            in its last turn, and there are `messages`, `turns` and `turn_rewards`, too. None
            abstains. The reward named `environment` needs none: it is the environment's own.
        weight: factor in the total; 0 only shows the reward.
        kwargs: further arguments of the function.
        gate: name of another reward, without which this one counts nothing (`quality` only where
            `correct`).
        gate_threshold: the gate is open where that reward is at least this.
        normalize: compare the reward before it is weighted: `group` gives its distance from the
            mean of the prompt's completions in standard deviations, `batch` from that of all
            completions of this process.
        schedule: factors of the weight at iterations, linear in between: `{0: 1.0, 200: 0.0}`.
    """

    function: str | Callable[..., Any] = ""
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    gate: str | None = None
    gate_threshold: float = 1.0
    normalize: Normalize = "none"
    schedule: dict[int, float] = field(default_factory=dict)

    @property
    def is_shaped(self) -> bool:
        """Whether it is made into something else before it is weighted."""
        return self.gate is not None or self.normalize != "none"


def named_rewards(parts: Any) -> dict[str, Reward]:
    """Rewards by name: a bare function counts 1, alone or in a list it is named after itself.

    Example:
        >>> named_rewards([len])["len"].weight, list(named_rewards(len))
        (1.0, ['len'])
    """
    parts = [parts] if callable(parts) else parts
    require(
        isinstance(parts, Mapping | list | tuple),
        f"rewards is {parts!r:.80}; give {{name: function}}, a list of functions, or one function",
    )
    if isinstance(parts, Sequence):
        names = [_name_of(each) for each in parts]
        require(
            len(set(names)) == len(names),
            f"rewards: several functions of a list have the same name: {', '.join(names)}; give"
            " {name: function}",
        )
        parts = dict(zip(names, parts, strict=True))
    return {
        name: part if isinstance(part, Reward) else Reward(part) for name, part in parts.items()
    }


def _name_of(function: Callable[..., Any]) -> str:
    known = function if "__name__" in dir(function) else type(function)
    return str(known.__name__)


def _check_weight(name: str, part: Reward) -> None:
    number = isinstance(part.weight, int | float) and not isinstance(part.weight, bool)
    require(
        number and isfinite(part.weight),
        f"the weight of reward '{name}' must be a finite number, got {part.weight!r}",
    )


def _check_shaping(name: str, part: Reward, names: Sequence[str]) -> None:
    others = [other for other in names if other != name]
    require(
        part.gate is None or part.gate in others,
        f"the gate of reward '{name}' is {part.gate!r}{did_you_mean(str(part.gate), others)}; it"
        f" must name another reward: {', '.join(others) or 'there is none'}",
    )
    one_of(f"normalize of reward '{name}'", part.normalize, get_args(Normalize))
    for iteration, factor in part.schedule.items():
        require(
            isinstance(iteration, int) and iteration >= 0 and isfinite(factor),
            f"the schedule of reward '{name}' must map iterations to factors, such as"
            f" {{0: 1.0, 200: 0.0}}, got {iteration!r}: {factor!r}",
        )


def _check_names(names: Sequence[str]) -> None:
    keys = RewardTable.stat_names(names)
    for name in names:
        require(
            keys.count(name) == 1,
            f"a reward cannot be named '{name}': reward/{name} is logged already",
        )


def _check_duplicates(parts: Mapping[str, Reward], functions: Mapping[str, object]) -> None:
    for one, other in combinations(parts, 2):
        require(
            functions[one] is not functions[other] or parts[one].kwargs != parts[other].kwargs,
            f"rewards '{one}' and '{other}' are the same function with the same kwargs;"
            " keep one and add their weights",
        )


def lacking(name: str, missing: Sequence[str], columns: Iterable[str]) -> ValueError:
    """What to raise for a reward that needs columns which are not there."""
    return ValueError(
        f"reward '{name}' needs {', '.join(missing)}, which is neither a column"
        f" ({', '.join(sorted(columns))}) nor among its kwargs; map a column of the data set"
        " to that name"
    )


def checked(parts: Mapping[str, Reward]) -> dict[str, Callable[..., Any]]:
    """{name: function} of rewards that go together.

    Raises:
        ValueError: there are none, a function is not found, or a setting is not allowed.
    """
    require(bool(parts), "there are no rewards; give at least one under `rewards`")
    for name, part in parts.items():
        _check_weight(name, part)
        _check_shaping(name, part, list(parts))
    given = {name: part.function or OWN.get(name, "") for name, part in parts.items()}
    for name, function in given.items():
        require(bool(function), f"reward '{name}' has no function; name one: function: my.reward")
    functions = {name: resolved(name, given[name], part.kwargs) for name, part in parts.items()}
    _check_names(list(parts))
    _check_duplicates(parts, functions)
    counts = any(part.weight for part in parts.values())
    require(counts, f"every reward has weight 0: {', '.join(parts)}")
    return functions
