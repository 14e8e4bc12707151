"""Several reward functions, named and weighted, made into one table."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from types import ModuleType
from typing import Any, Literal

import torch

from litgrpo.rewards.calls import DOUBLE_EPS, Call, Scores
from litgrpo.rewards.guard import Guard
from litgrpo.rewards.process_guard import ProcessGuard
from litgrpo.types import RewardTable

SHIPPED = ("litgrpo.rewards.math", "litgrpo.rewards.format")
TAKEN = (
    "mean",
    "group_std",
    "failed_frac",
    "equal_groups_frac",
)  # keys under reward/ of RewardTable.stats

RewardFormat = Literal["text", "chat"]


@dataclass
class Reward:
    """One reward function and how much it counts.

    Args:
        function: a function `f(prompts, completions, **columns) -> list[float | None]` or its
            import path, such as `litgrpo.rewards.math.correctness`. It gets the columns that its
            signature names (all of them with `**kwargs`), among them `completion_ids`,
            `completion_lengths` and `truncated`. None abstains.
        weight: factor in the total; 0 only shows the reward.
        kwargs: further arguments of the function.
    """

    function: str | Callable[..., Any]
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)


class Composite:
    """The weighted sum of named reward functions.

    Args:
        parts: {name: Reward}; names appear in logs as `reward/<name>`.
        reward_format: `text` hands texts to the functions, `chat` hands lists of messages as TRL
            does.
        guard: how the functions are run; default is `ProcessGuard()`.
    """

    def __init__(
        self,
        parts: Mapping[str, Reward],
        reward_format: RewardFormat = "text",
        guard: Guard | None = None,
    ) -> None:
        """See the class."""
        if reward_format not in ("text", "chat"):
            raise ValueError(f"reward_format must be 'text' or 'chat', got {reward_format!r}")
        if not parts:
            raise ValueError("there are no rewards; give at least one under `rewards`")
        self.parts = dict(parts)
        self.weights = {name: _checked_weight(name, part) for name, part in self.parts.items()}
        self.functions = {name: _resolved(name, part) for name, part in self.parts.items()}
        self.reward_format = reward_format
        self.guard = ProcessGuard() if guard is None else guard
        _check_duplicates(self.parts, self.functions)
        if not any(self.weights.values()):
            raise ValueError(f"every reward has weight 0: {', '.join(self.parts)}")

    @property
    def failures(self) -> dict[str, dict[str, int]]:
        """{part: {reason: rows that failed for it so far}}."""
        return {name: dict(counts) for name, counts in self.guard.failures.items()}

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, list[Any]],
        group_size: int,
        context: Mapping[str, Any] | None = None,
    ) -> RewardTable:
        """Judge N completions.

        Args:
            prompts: N prompts, each repeated for its group.
            completions: N completions.
            columns: {name: list of length N}, everything else that is known of each row.
            group_size: G.
            context: {name: value} the same for all rows, for functions that ask by name (TRL's
                `trainer_state`).

        Returns:
            Table of [B, G] rewards.
        """
        if group_size < 1 or not completions or len(completions) % group_size:
            raise ValueError(
                f"{len(completions)} completions do not make whole groups of {group_size}"
            )
        texts = {"prompts": list(prompts), "completions": list(completions)}
        rows = texts | dict(columns) | texts  # in this order, and no column can replace the texts
        for name, values in rows.items():
            if len(values) != len(completions):
                raise ValueError(
                    f"column '{name}' has {len(values)} entries for {len(completions)} completions"
                )
        if self.reward_format == "chat":
            rows["prompts"] = [_messages("user", text) for text in prompts]
            rows["completions"] = [_messages("assistant", text) for text in completions]
        calls = [self._call(name, rows, context or {}) for name in self.parts]
        scores = dict(zip(self.parts, self.guard(calls), strict=True))
        return _table(scores, self.weights, group_size)

    def _call(self, name: str, rows: Mapping[str, list[Any]], context: Mapping[str, Any]) -> Call:
        """A call with what the signature names, or with every column if it takes `**kwargs`."""
        function, kwargs = self.functions[name], self.parts[name].kwargs
        named, takes_all = _parameters(function)
        known = {**context, **rows, **kwargs}
        missing = [key for key, required in named.items() if required and key not in known]
        if missing:
            raise ValueError(
                f"reward '{name}' needs {', '.join(missing)}, which is neither a column"
                f" ({', '.join(sorted(rows))}) nor among its kwargs; map a column of the data set"
                " to that name"
            )
        wanted = [key for key in rows if (takes_all or key in named) and key not in kwargs]
        asked = {key: context[key] for key in context if key in named and key not in kwargs}
        chosen = {key: rows[key] for key in wanted}
        return Call(name, function, chosen, kwargs, len(rows["completions"]), asked)


def _table(
    scores: Mapping[str, Scores], weights: Mapping[str, float], group_size: int
) -> RewardTable:
    """Add up the parts that answered; a row is valid if a weighted part did and none failed."""
    parts = {
        name: torch.tensor(part.values, dtype=torch.float64).view(-1, group_size)
        for name, part in scores.items()
    }
    total = torch.zeros_like(next(iter(parts.values())))
    answered = torch.zeros_like(total, dtype=torch.bool)
    failed = answered.clone()
    counting = [name for name, weight in weights.items() if weight]
    for name in counting:
        total += weights[name] * parts[name].nan_to_num(0.0)
        answered |= ~parts[name].isnan()
        failed.view(-1)[list(scores[name].failures)] = True
    precision = max((scores[name].precision for name in counting), default=DOUBLE_EPS)
    return RewardTable(parts, dict(weights), total, answered & ~failed, precision)


def _messages(role: str, text: Any) -> Any:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _checked_weight(name: str, part: Reward) -> float:
    if name in TAKEN:
        raise ValueError(f"a reward cannot be named '{name}': reward/{name} is logged already")
    if isinstance(part.weight, bool) or not isinstance(part.weight, int | float):
        raise ValueError(f"the weight of reward '{name}' must be a number, got {part.weight!r}")
    if not isfinite(part.weight):
        raise ValueError(f"the weight of reward '{name}' must be finite, got {part.weight}")
    return float(part.weight)


def _check_duplicates(parts: Mapping[str, Reward], functions: Mapping[str, object]) -> None:
    names = list(parts)
    for place, name in enumerate(names):
        for earlier in names[:place]:
            same = functions[name] is functions[earlier]
            if same and parts[name].kwargs == parts[earlier].kwargs:
                raise ValueError(
                    f"rewards '{earlier}' and '{name}' are the same function with the same kwargs;"
                    " keep one and add their weights"
                )


def _resolved(name: str, part: Reward) -> Callable[..., Any]:
    """The function of a part, imported and with kwargs that fit it."""
    function = _imported(name, part.function) if isinstance(part.function, str) else part.function
    if inspect.isclass(function) or not callable(function):
        raise ValueError(f"reward '{name}' must be a function, got {part.function!r}")
    named, takes_all = _parameters(function)
    unknown = [] if takes_all else [key for key in part.kwargs if key not in named]
    if unknown:
        allowed = [key for key in named if key not in ("prompts", "completions")]
        raise ValueError(
            f"reward '{name}' has no argument '{unknown[0]}'{_nearest(unknown[0], allowed)};"
            f" it takes {', '.join(allowed) or 'none'}"
        )
    return function


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """{parameter given by name: whether it is required}, and whether there is a `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _imported(name: str, path: str) -> Callable[..., Any]:
    """What an import path names; the error says what was not found and what is near it."""
    module_path, _, attribute = path.rpartition(".")
    if not module_path or not all(word.isidentifier() for word in path.split(".")):
        raise ValueError(
            f"reward '{name}': '{path}' is not an import path such as"
            f" 'litgrpo.rewards.math.correctness'{_nearest(path, _shipped())}"
        )
    try:
        module = import_module(module_path)
    except ImportError as error:
        # A module of that path exists but itself imports something that does not.
        own = isinstance(error, ModuleNotFoundError) and (module_path + ".").startswith(
            f"{error.name}."
        )
        hint = _nearest(path, _shipped()) if own else ""
        raise ValueError(
            f"reward '{name}': cannot import module '{module_path}' of '{path}' ({error}){hint}"
        ) from error
    if attribute not in vars(module):
        hint = _nearest(attribute, _functions(module))
        raise ValueError(f"reward '{name}': module '{module_path}' has no '{attribute}'{hint}")
    return vars(module)[attribute]  # type: ignore[no-any-return]


def _functions(module: ModuleType) -> list[str]:
    """Names of the public functions that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]


def _shipped() -> list[str]:
    return [f"{path}.{name}" for path in SHIPPED for name in _functions(import_module(path))]


def _nearest(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, compared by the last component, or nothing if nothing is near."""
    by_end = {path.rpartition(".")[2]: path for path in known}
    near = difflib.get_close_matches(word.rpartition(".")[2], by_end, n=1)
    return f" (did you mean '{by_end[near[0]]}'?)" if near else ""
