"""One reward of several: its function, weight and shaping."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite
from typing import Any, Literal, get_args

from litgrpo.arguments import did_you_mean, import_by_path, one_of, require
from litgrpo.types import RewardTable


def resolved(
    name: str, given: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function of a part, imported if it is a path, and with kwargs that fit it.

    Raises:
        ValueError: there is no such function, or it does not take the kwargs.
    """
    function = _imported(name, given) if isinstance(given, str) else given
    require(
        callable(function) and not inspect.isclass(function),
        f"reward '{name}' must be a function, got {given!r}",
    )
    named, takes_all = parameters(function)
    unknown = [key for key in kwargs if not takes_all and key not in named]
    if unknown:
        allowed = [key for key in named if key not in ("prompts", "completions")]
        raise ValueError(
            f"reward '{name}' has no argument '{unknown[0]}'{did_you_mean(unknown[0], allowed)};"
            f" it takes {', '.join(allowed) or 'none'}"
        )
    return function


def parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """{parameter given by name: whether it is required}, and whether there is a `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _imported(name: str, path: str) -> Any:
    """What an import path names; the error says what was not found and what is near it."""
    try:
        return import_by_path(path)
    except ValueError as error:
        module_path, _, word = path.rpartition(".")
        if module_path.partition(".")[0] in ("", "litgrpo"):
            known = {one: f"litgrpo.rewards.{one}" for one in builtin_rewards()}
        else:
            known = {one: f"{module_path}.{one}" for one in _functions(module_path)}
        near = difflib.get_close_matches(word, known, n=1)
        hint = f" (did you mean {known[near[0]]!r}?)" if near else ""
        raise ValueError(f"reward '{name}': {error}{hint}") from error


def builtin_rewards() -> list[str]:
    """Names of the reward functions in `litgrpo.rewards`."""
    builtin = "litgrpo.rewards.builtin."
    # The package imports this module, so it cannot be imported here.
    members = inspect.getmembers(sys.modules["litgrpo.rewards"], inspect.isfunction)
    return [name for name, function in members if function.__module__.startswith(builtin)]


def _functions(module_path: str) -> list[str]:
    """Names of the public functions that a module defines; none if it is not imported."""
    members = inspect.getmembers(sys.modules.get(module_path), inspect.isfunction)
    return [name for name, value in members if value.__module__ == module_path and name[0] != "_"]


def environment(
    prompts: Sequence[object],
    completions: Sequence[object],
    turn_rewards: Sequence[list[float | None]],
) -> list[float | None]:
    """The sum of the rewards of an episode's turns; abstains where all of them do.

    Args:
        prompts: N prompts.
        completions: N completions.
        turn_rewards: of each episode, one for each turn; None where the environment abstained.
    """
    known = [[reward for reward in row if reward is not None] for row in turn_rewards]
    return [sum(row) if row else None for row in known]


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
