"""Several reward functions, named and weighted, made into one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from litgrpo.rewards.lookup import nearest, parameters, resolved
from litgrpo.rewards.runner.calls import DOUBLE_EPS, Call, Scores
from litgrpo.rewards.runner.in_process import RewardRunner
from litgrpo.rewards.runner.process_guard import ProcessRunner
from litgrpo.rewards.shaping import Normalize, gated, normalized, scheduled
from litgrpo.types import RewardTable, Rollout

RewardFormat = Literal["text", "chat"]


@dataclass
class Reward:
    """One reward function and how much it counts.

    Args:
        function: a function `f(prompts, completions, **columns) -> list[float | None]` or its
            import path, such as `litgrpo.rewards.library.math.correctness`. It gets the columns
            that its signature names (all of them with `**kwargs`), among them `completion_ids`,
            `completion_lengths` and `truncated`. None abstains.
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

    function: str | Callable[..., Any]
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    gate: str | None = None
    gate_threshold: float = 1.0
    normalize: Normalize = "none"
    schedule: dict[int, float] = field(default_factory=dict)


class Pending:
    """Rewards that are being computed.

    Args:
        gather: waits for them.
    """

    def __init__(self, gather: Callable[[], RewardTable]) -> None:
        """Nothing is waited for yet."""
        self.gather = gather

    def result(self) -> RewardTable:
        """The [B, G] rewards."""
        return self.gather()


class Scorer:
    """The weighted sum of named reward functions.

    Args:
        parts: {name: Reward}; names appear in logs as `reward/<name>`.
        reward_format: `text` hands texts to the functions, `chat` hands lists of messages as TRL
            does.
        runner: how the functions are run; default is `ProcessRunner()`.
    """

    def __init__(
        self,
        parts: Mapping[str, Reward],
        reward_format: RewardFormat = "text",
        runner: RewardRunner | None = None,
    ) -> None:
        """See the class."""
        if reward_format not in ("text", "chat"):
            raise ValueError(f"reward_format must be 'text' or 'chat', got {reward_format!r}")
        if not parts:
            raise ValueError("there are no rewards; give at least one under `rewards`")
        self.parts = dict(parts)
        self.weights = {name: _checked_weight(name, part) for name, part in self.parts.items()}
        for name, part in self.parts.items():
            _check_shaping(name, part, list(self.parts))
        self.functions = {
            name: resolved(name, part.function, part.kwargs) for name, part in self.parts.items()
        }
        self.reward_format = reward_format
        self.runner = ProcessRunner() if runner is None else runner
        _check_names(list(self.parts))
        _check_duplicates(self.parts, self.functions)
        if not any(self.weights.values()):
            raise ValueError(f"every reward has weight 0: {', '.join(self.parts)}")

    @property
    def failures(self) -> dict[str, dict[str, int]]:
        """{part: {reason: rows that failed for it so far}}."""
        return {name: dict(counts) for name, counts in self.runner.failures.items()}

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, list[Any]],
        group_size: int,
        context: Mapping[str, Any] | None = None,
        iteration: int = 0,
    ) -> RewardTable:
        """Judge N completions; see `start`.

        Returns:
            Table of [B, G] rewards.
        """
        return self.start(prompts, completions, columns, group_size, context, iteration)()

    def submit(
        self, rollout: Rollout, iteration: int = 0, max_iterations: int | None = None
    ) -> Pending:
        """Begin to judge a rollout; the functions' processes work until the rewards are needed.

        Args:
            rollout: N completions with texts.
            iteration: finished iterations, for schedules and for functions that ask.
            max_iterations: of the run, for functions that ask.

        Returns:
            Whose `result()` waits for the [B, G] rewards.
        """
        prompts, group_size = rollout.prompts, rollout.group_size
        columns = {
            name: [value for value in values for _ in range(group_size)]
            for name, values in prompts.columns.items()
        }
        columns |= {
            "completion_ids": rollout.token_lists(),
            "completion_lengths": rollout.lengths.tolist(),
            "truncated": rollout.truncated.tolist(),
        }
        texts = [text for text in prompts.prompts for _ in range(group_size)]
        # What reward functions written for TRL may ask for by name.
        state = SimpleNamespace(global_step=iteration, max_steps=max_iterations)
        context = {"trainer_state": state}
        return Pending(
            self.start(texts, rollout.completions, columns, group_size, context, iteration)
        )

    def start(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, list[Any]],
        group_size: int,
        context: Mapping[str, Any] | None = None,
        iteration: int = 0,
    ) -> Callable[[], RewardTable]:
        """Begin to judge N completions, in other processes where the runner has some.

        Args:
            prompts: N prompts, each repeated for its group.
            completions: N completions.
            columns: {name: list of length N}, everything else that is known of each row.
            group_size: G.
            context: {name: value} the same for all rows, for functions that ask by name (TRL's
                `trainer_state`); `group_size` is always among them.
            iteration: finished iterations, for schedules.

        Returns:
            What waits for the table of [B, G] rewards.
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
        context = {"group_size": group_size, **(context or {})}
        calls = [self._call(name, rows, context) for name in self.parts]
        gather = self.runner.start(calls)
        return lambda: self._table(
            dict(zip(self.parts, gather(), strict=True)), group_size, iteration
        )

    def _call(self, name: str, rows: Mapping[str, list[Any]], context: Mapping[str, Any]) -> Call:
        """A call with what the signature names, or with every column if it takes `**kwargs`."""
        function, kwargs = self.functions[name], self.parts[name].kwargs
        named, takes_all = parameters(function)
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

    def _table(self, scores: Mapping[str, Scores], group_size: int, iteration: int) -> RewardTable:
        """Add up the parts that answered; a row is valid if one did and none that counts failed."""
        parts = {
            name: torch.tensor(part.values, dtype=torch.float64).view(-1, group_size)
            for name, part in scores.items()
        }
        factors = {name: scheduled(part.schedule, iteration) for name, part in self.parts.items()}
        weights = {name: self.weights[name] * factors[name] for name in parts}
        counted = {name: self._shaped(name, parts, scores[name].precision) for name in parts}
        total = torch.zeros_like(next(iter(parts.values())))
        answered = torch.zeros_like(total, dtype=torch.bool)
        failed = answered.clone()
        counting = [name for name, weight in self.weights.items() if weight]
        for name in counting:
            total += weights[name] * counted[name].nan_to_num(0.0)
            answered |= ~counted[name].isnan()
        gates = [gate for name in counting if (gate := self.parts[name].gate) is not None]
        for name in {*counting, *gates}:
            failed.view(-1)[list(scores[name].failures)] = True
        precision = max((scores[name].precision for name in counting), default=DOUBLE_EPS)
        return RewardTable(parts, weights, total, answered & ~failed, precision, counted)

    def _shaped(self, name: str, parts: Mapping[str, Tensor], precision: float) -> Tensor:
        part = self.parts[name]
        if part.gate is None:
            return normalized(parts[name], part.normalize, precision)
        gate = parts[part.gate]
        return gated(parts[name], gate, part.gate_threshold, part.normalize, precision)


def _messages(role: str, text: Any) -> Any:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _checked_weight(name: str, part: Reward) -> float:
    if isinstance(part.weight, bool) or not isinstance(part.weight, int | float):
        raise ValueError(f"the weight of reward '{name}' must be a number, got {part.weight!r}")
    if not isfinite(part.weight):
        raise ValueError(f"the weight of reward '{name}' must be finite, got {part.weight}")
    return float(part.weight)


def _check_shaping(name: str, part: Reward, names: Sequence[str]) -> None:
    if part.gate is not None and (part.gate not in names or part.gate == name):
        others = [other for other in names if other != name]
        raise ValueError(
            f"the gate of reward '{name}' is {part.gate!r}{nearest(part.gate, others)}; it must"
            f" name another reward: {', '.join(others) or 'there is none'}"
        )
    if part.normalize not in ("none", "group", "batch"):
        raise ValueError(
            f"normalize of reward '{name}' must be none, group or batch, got {part.normalize!r}"
        )
    for iteration, factor in part.schedule.items():
        if not (isinstance(iteration, int) and iteration >= 0 and isfinite(factor)):
            raise ValueError(
                f"the schedule of reward '{name}' must map iterations to factors, such as"
                f" {{0: 1.0, 200: 0.0}}, got {iteration!r}: {factor!r}"
            )


def _check_names(names: Sequence[str]) -> None:
    keys = RewardTable.stat_names(names)
    for name in names:
        if keys.count(name) > 1:
            raise ValueError(f"a reward cannot be named '{name}': reward/{name} is logged already")


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
