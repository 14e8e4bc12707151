"""One reward of several: its function, weight and shaping."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from math import isfinite
from typing import Any, Literal

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import did_you_mean, import_by_path, require
from litgrpo.metrics import reward_stat_names
from litgrpo.text.secrets import mask_settings


def resolve_function(
    name: str, source: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function of a component, imported if it is a path, and check its kwargs."""
    function = _import_function(name, source) if isinstance(source, str) else source
    if inspect.isclass(function):
        path = f"{function.__module__}.{function.__qualname__}"
        raise ValueError(
            f"reward '{name}' is the class {path}, expected a function or an object: in a recipe "
            f"function: {{class_path: {path}}}, in Python {function.__name__}(...)"
        )
    require(
        callable(function),
        f"reward '{name}' must be a function, its import path or a Reward, got {source!r:.60} "
        f"({type(source).__name__})",
    )
    names, takes_all = parameters(function)
    unknown = [key for key in kwargs if not takes_all and key not in names]
    if unknown:
        allowed = [key for key in names if key not in ("prompts", "completions")]
        raise ValueError(
            f"reward '{name}' has no argument '{unknown[0]}'{did_you_mean(unknown[0], allowed)};"
            f" it takes {', '.join(allowed) or 'none'}"
        )
    return function


def parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return {parameter: True if required}, and True if there is a `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    required = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return required, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _import_function(name: str, path: str) -> Any:
    """Import a path; the error of one of this package names the nearest built-in reward."""
    try:
        return import_by_path(path)
    except ValueError as error:
        module, _, word = path.rpartition(".")
        is_own = module.partition(".")[0] in ("", "litgrpo")
        is_own &= "did you mean" not in str(error)
        near = difflib.get_close_matches(word, builtin_rewards(), n=1) if is_own else []
        hint = f" (built in is 'litgrpo.rewards.{near[0]}')" if near else ""
        raise ValueError(f"reward '{name}': {error}{hint}") from error


def builtin_rewards() -> list[str]:
    """Names of the reward functions in `litgrpo.rewards`."""
    builtin = "litgrpo.rewards.builtin."
    # The package imports this module, so it cannot be imported here.
    members = inspect.getmembers(sys.modules["litgrpo.rewards"], inspect.isfunction)
    return [name for name, function in members if function.__module__.startswith(builtin)]


def environment(
    prompts: Sequence[object],
    completions: Sequence[object],
    turn_rewards: Sequence[list[float | None]],
) -> list[float | None]:
    """Return the sum of the rewards of an episode's turns; None if all of them abstained.

    Args:
        prompts: N prompts.
        completions: N completions.
        turn_rewards: rewards of the turns of N episodes; None if the environment abstained.

    Example:
        >>> environment(["?"] * 2, ["a", "b"], [[0.5, None, 1.0], [None]])
        [1.5, None]
    """
    given_rewards = [[reward for reward in row if reward is not None] for row in turn_rewards]
    return [sum(row) if row else None for row in given_rewards]


# {name of a reward: its function if it names none}
DEFAULT_FUNCTIONS = {"environment": environment}
Normalize = Literal["none", "group", "batch"]


@check_field_types
@dataclass
class Reward:
    """One component of the reward: a function, its weight, its normalization and its gate.

    Args:
        function: a function `f(prompts, completions, **columns) -> list[float | None]` or its
            import path, such as `litgrpo.rewards.correctness`. It gets the columns
            that its signature names (all of them with `**kwargs`), among them `completion_ids`,
            `completion_lengths` and `truncated`; in episodes `completions` are the text of the
            last turn, and `messages`, `turns` and `turn_rewards` are added. None abstains. The
            reward named `environment` needs no function: it is the environment's reward.
        weight: factor in the total; 0 only shows the reward.
        kwargs: further arguments of the function.
        gate: name of another reward, without which this one counts nothing (`quality` only where
            `correct`).
        gate_threshold: the gate is open where that reward is at least this.
        normalize: compare the reward before it is weighted: `group` gives its deviation from the
            mean of the prompt's completions in standard deviations, `batch` from that of all
            completions of this process.
        schedule: factors of the weight at iterations, linear in between: `{0: 1.0, 200: 0.0}`.
        tasks: score only rows of these tasks, by their column `task`
            (docs/howto/tasks_and_rollouts.md); other rows have no such reward. Empty: all rows.

    Example:
        >>> correct = Reward("litgrpo.rewards.correctness", weight=0.8)
        >>> style = Reward("litgrpo.rewards.quality", weight=0.2, gate="correct")
        >>> correct.is_normalized_or_gated, style.is_normalized_or_gated
        (False, True)
    """

    function: str | Callable[..., Any] = ""
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    gate: str | None = None
    gate_threshold: float = 1.0
    normalize: Normalize = "none"
    schedule: dict[int, float] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)

    @property
    def is_normalized_or_gated(self) -> bool:
        """True if it is gated or normalized before it is weighted."""
        return self.gate is not None or self.normalize != "none"


def describe_function(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """Return the import path of a reward function, and a digest of its kwargs.

    Of an object, such as a judge, it is the path of its class, without constructor arguments.
    """
    owner = function if hasattr(function, "__qualname__") else type(function)
    path = f"{owner.__module__}.{owner.__qualname__}"
    if not kwargs:
        return path
    plain = mask_settings(kwargs)
    text = json.dumps(plain, default=lambda value: type(value).__name__, skipkeys=True)
    return f"{path} with kwargs {hashlib.sha256(text.encode()).hexdigest()[:8]}"


OneReward = Reward | str | Callable[..., Any] | Mapping[str, Any]
# What `GRPO` takes as rewards in Python.
Rewards = Mapping[str, OneReward] | Sequence[OneReward] | OneReward


def name_rewards(rewards: Any) -> dict[str, Reward]:
    """Return the rewards by name; a function or an import path alone has weight 1."""
    # Alone or in a list, the function's name is used.
    rewards = [rewards] if callable(rewards) or isinstance(rewards, str | Reward) else rewards
    require(
        isinstance(rewards, Mapping | list | tuple),
        f"rewards is {rewards!r:.80}; give {{name: function}}, a list of functions, or one"
        " function",
    )
    if isinstance(rewards, Sequence):
        listed = [_as_reward(f"rewards[{n}]", item) for n, item in enumerate(rewards)]
        names = [_name_of(item.function) for item in listed]
        require(
            len(set(names)) == len(names),
            f"rewards: several functions of a list have the same name: {', '.join(names)}; give"
            " {name: function}",
        )
        return dict(zip(names, listed, strict=True))
    return {str(name): _as_reward(f"reward {name!r}", reward) for name, reward in rewards.items()}


def _as_reward(where: str, part: Any) -> Reward:
    """Return a reward; a mapping has its arguments."""
    if isinstance(part, Reward):
        return part
    if isinstance(part, Mapping):
        options = [option.name for option in fields(Reward)]
        for key in part:
            require(
                key in options,
                f"{where} has no option {key!r}{did_you_mean(str(key), options)}: it takes "
                f"{', '.join(options)}",
            )
        return Reward(**part)
    require(
        callable(part) or isinstance(part, str),
        f"{where} is {part!r:.60} ({type(part).__name__}), expected a function, an import path or "
        "a Reward",
    )
    return Reward(part)


def find_main_reward(weights: Mapping[str, float]) -> str:
    """Return the reward with the largest weight, of equal ones the first; "" without rewards.

    It decides whether a completion is correct, unless `evaluation.success_reward` names another.
    """
    return max(weights, key=lambda name: weights[name], default="")


def find_success_rewards(
    weights: Mapping[str, float], tasks: Mapping[str, Sequence[str]], preferred: str | None = None
) -> dict[str, str]:
    """Return {task: the reward that decides there}; the key "" is for all tasks not listed.

    It is the given one where that scores the task, else the one with the largest weight there.

    Example:
        >>> find_success_rewards({"math": 1.0, "judge": 0.5}, {"math": ["gsm"], "judge": ["chat"]})
        {'': 'math', 'gsm': 'math', 'chat': 'judge'}
    """
    deciding = {"": preferred or find_main_reward(weights)}
    for task in (task for name in weights for task in tasks.get(name, [])):
        scoring = {n: w for n, w in weights.items() if not tasks.get(n) or task in tasks[n]}
        deciding[task] = preferred if preferred in scoring else find_main_reward(scoring)
    return deciding


def _name_of(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function.rpartition(".")[2]
    # Callable objects, such as a judge, have no name: their class has one.
    owner = function if hasattr(function, "__name__") else type(function)
    return str(owner.__name__)


NO_OTHER = "there is no other reward to name"


def _check_weight(name: str, reward: Reward) -> None:
    require(
        isfinite(reward.weight),
        f"the weight of reward '{name}' must be a finite number, got {reward.weight!r}",
    )


def _check_shaping(name: str, reward: Reward, rewards: Mapping[str, Reward]) -> None:
    gate, other_names = reward.gate, [other for other in rewards if other != name]
    require(
        gate is None or gate in other_names,
        f"the gate of reward '{name}' is {gate!r}{did_you_mean(str(gate), other_names)}; "
        + (f"it must name another reward: {', '.join(other_names)}" if other_names else NO_OTHER),
    )
    require(
        gate is None or not rewards[gate].tasks or {*reward.tasks} == {*rewards[gate].tasks},
        f"reward '{name}' is for the tasks {reward.tasks or 'all'}, but its gate '{gate}' for "
        f"{rewards[gate].tasks if gate else []}; give both the same tasks",
    )
    for iteration, factor in reward.schedule.items():
        require(
            isinstance(iteration, int) and iteration >= 0 and isfinite(factor),
            f"the schedule of reward '{name}' must map iterations to factors, such as"
            f" {{0: 1.0, 200: 0.0}}, got {iteration!r}: {factor!r}",
        )


def _check_names(names: Sequence[str]) -> None:
    keys = reward_stat_names(names)
    for name in names:
        require(
            keys.count(name) == 1,
            f"a reward cannot be named '{name}': reward/{name} is logged already",
        )


def _check_duplicates(rewards: Mapping[str, Reward], functions: Mapping[str, object]) -> None:
    for one, other in combinations(rewards, 2):
        require(
            functions[one] is not functions[other] or rewards[one].kwargs != rewards[other].kwargs,
            f"rewards '{one}' and '{other}' are the same function with the same kwargs;"
            " keep one and add their weights",
        )


def missing_columns_error(name: str, missing: Sequence[str], columns: Iterable[str]) -> ValueError:
    """Build the error for a reward that needs missing columns."""
    return ValueError(
        f"reward '{name}' needs {', '.join(missing)}, which is neither a column"
        f" ({', '.join(sorted(columns))}) nor among its kwargs; map a column of the data set"
        " to that name"
    )


def resolve_functions(rewards: Mapping[str, Reward]) -> dict[str, Callable[..., Any]]:
    """Check the rewards against each other, and return {name: function}."""
    require(bool(rewards), "there are no rewards; give at least one under `rewards`")
    for name, reward in rewards.items():
        _check_weight(name, reward)
        _check_shaping(name, reward, rewards)
    sources = {
        name: reward.function or DEFAULT_FUNCTIONS.get(name, "") for name, reward in rewards.items()
    }
    for name, function in sources.items():
        require(bool(function), f"reward '{name}' has no function; name one: function: my.reward")
    functions = {
        name: resolve_function(name, source, rewards[name].kwargs)
        for name, source in sources.items()
    }
    _check_names(list(rewards))
    _check_duplicates(rewards, functions)
    counts = any(reward.weight for reward in rewards.values())
    require(counts, f"every reward has weight 0: {', '.join(rewards)}")
    return functions
