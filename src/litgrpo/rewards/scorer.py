"""Named and weighted reward functions, combined into one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.metrics import reward_stat_names
from litgrpo.rewards.builtin.length import soft_overlong
from litgrpo.rewards.calls import (
    Call,
    Notes,
    Scores,
    UnusableReward,
    find_check,
    find_state_owner,
)
from litgrpo.rewards.reward import (
    Normalize,
    Reward,
    describe_function,
    missing_columns_error,
    name_rewards,
    parameters,
    resolve_functions,
)
from litgrpo.rewards.runner import Runner, StartedCalls
from litgrpo.rewards.scoring import Scoring
from litgrpo.types import TASK, RewardTable, Rollout, compare_within_groups

EPS = 1e-4


def normalize(values: Tensor, how: Normalize) -> Tensor:
    """Return the deviation from the mean in standard deviations, [B, G]; NaN is left out and stays.

    Values that are equal up to rounding get exactly 0.
    """
    if how == "none":
        return values
    deviation, std, _ = compare_within_groups(values if how == "group" else values.reshape(1, -1))
    return (deviation / (std + EPS)).view(values.shape)


def apply_gate(values: Tensor, gate: Tensor, threshold: float, how: Normalize) -> Tensor:
    """Return the values where the gate is at least the threshold, and 0 elsewhere, [B, G].

    NaN in the gate, nothing is known, gives NaN. Only values behind open gates are normalized.
    """
    is_open = gate >= threshold
    compared = normalize(values.where(is_open, torch.nan), how)
    return compared.where(is_open, 0.0).where(~gate.isnan(), torch.nan)


def schedule_factor(schedule: Mapping[int, float], iteration: int) -> float:
    """The factor at an iteration: linear between the given points, constant outside.

    Example:
        >>> schedule_factor({0: 1.0, 100: 0.0}, 25)
        0.75
    """
    points = sorted(schedule.items()) or [(0, 1.0)]
    # Outside of the points, the nearest one is on both sides.
    start, low = max((p for p in points if p[0] <= iteration), default=points[0])
    end, high = min((p for p in points if p[0] > iteration), default=points[-1])
    return low + (high - low) * (iteration - start) / max(1, end - start)


def normalize_and_gate(
    name: str, values: Mapping[str, Tensor], rewards: Mapping[str, Reward]
) -> Tensor:
    """Return a component [B, G] after normalization, and 0 where its gate is closed."""
    reward = rewards[name]
    if reward.gate is None:
        return normalize(values[name], reward.normalize)
    gate = values[reward.gate]
    return apply_gate(values[name], gate, reward.gate_threshold, reward.normalize)


OF_EPISODES = ("messages", "turns", "turn_rewards")


def episode_columns(rollout: Rollout) -> dict[str, list[Any]]:
    """Return the columns of episodes; `completion_ids` are those of the last turn only."""
    assert rollout.turns is not None
    is_last_turn = (rollout.turns == rollout.turns.amax(1, keepdim=True)) & (rollout.turns >= 0)
    ids = zip(rollout.completion_ids, is_last_turn, strict=True)
    return {
        "completion_ids": [row[in_last_turn].tolist() for row, in_last_turn in ids],
        "messages": [episode.messages for episode in rollout.episodes],
        "turns": [episode.assistant_texts for episode in rollout.episodes],
        "turn_rewards": [
            episode.turn_rewards[: len(episode.turn_states)] for episode in rollout.episodes
        ],
    }


def mask_failed_episodes(rewards: RewardTable, rollout: Rollout) -> RewardTable:
    """Mark failed episodes as invalid rows without a reward."""
    failed = torch.tensor([bool(episode.failed) for episode in rollout.episodes])
    failed = failed.view_as(rewards.valid)

    def mask(components: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: part.masked_fill(failed, torch.nan) for name, part in components.items()}

    return replace(
        rewards,
        components=mask(rewards.components),
        processed=mask(rewards.processed),
        total=rewards.total.masked_fill(failed, 0.0),
        valid=rewards.valid & ~failed,
    )


# What a rollout adds to the columns of its prompts.
OF_ROLLOUT = ("completion_ids", "completion_lengths", "truncated")


def overlong_reward(scoring: Scoring, max_completion_length: int) -> dict[str, Reward]:
    """Return DAPO's soft overlong punishment as a reward; {} if it is off."""
    if not scoring.overlong_buffer_frac:
        return {}
    kwargs: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "soft_punish_cache": max(1, round(scoring.overlong_buffer_frac * max_completion_length)),
    }
    return {"soft_overlong": Reward(soft_overlong, kwargs=kwargs)}


class Scorer:
    """The weighted sum of named reward functions.

    `start` sends the calls to worker processes and returns. The caller computes log-probabilities
    meanwhile. `PendingRewards.wait` runs the remaining functions in the training process, collects
    the scores of the workers, and passes all of them to `combine`.

    Args:
        components: {name: Reward}; names appear in logs as `reward/<name>`. A bare function has
            weight 1; functions in a list are named after themselves.
        scoring: format of completions, limits and worker processes of the functions.
        max_iterations: length of the run, for functions that name `trainer_state`.

    Example:
        >>> from litgrpo.rewards import Scoring
        >>> def is_two(completions):
        ...     return [float(text == "2") for text in completions]
        >>> scorer = Scorer({"two": Reward(is_two, weight=0.5)}, Scoring(num_workers=0))
        >>> scorer(["1+1?"] * 2, ["2", "3"], {}, group_size=2).total.tolist()
        [[0.5, 0.0]]
    """

    def __init__(
        self,
        components: Mapping[str, Reward],
        scoring: Scoring = Scoring(),  # noqa: B008 (frozen)
        max_iterations: int | None = None,
    ) -> None:
        self.components = name_rewards(components)
        self.max_iterations = max_iterations
        self.functions = resolve_functions(self.components)
        # {component: ({parameter: True if required}, True if it takes `**kwargs`)}
        self.signatures = {name: parameters(function) for name, function in self.functions.items()}
        self.descriptions = {
            name: describe_function(function, self.components[name].kwargs)
            for name, function in self.functions.items()
        }
        self.scoring, self.runner = scoring, Runner(scoring)
        self.weights = {name: float(reward.weight) for name, reward in self.components.items()}

    @property
    def failures(self) -> dict[str, dict[str, int]]:
        """{component: {reason: rows that failed for it so far}}."""
        return {name: dict(counts) for name, counts in self.runner.failures.items()}

    def definitions(self, weights: Mapping[str, float]) -> dict[str, str]:
        """Return {`reward` or `rewards/<component>`: what it is}; equal texts can be compared.

        Args:
            weights: of the components, at an iteration.
        """
        functions, terms = self.descriptions, []
        for name, reward in self.components.items():
            if self.weights[name]:
                notes = [functions[name]]
                if reward.gate is not None:
                    gate = f"{reward.gate} >= {reward.gate_threshold:g}"
                    notes.append(f"gate {gate} ({functions[reward.gate]})")
                if reward.normalize != "none":
                    notes.append(f"normalized by {reward.normalize}")
                if reward.tasks:
                    notes.append(f"tasks {' '.join(reward.tasks)}")
                terms.append(f"{weights[name]:g} * {name} ({', '.join(notes)})")
        of_components = {f"rewards/{name}": text for name, text in functions.items()}
        return {"reward": " + ".join(terms), **of_components}

    def close(self) -> None:
        """Cancel pending rewards and shut down the worker processes."""
        self.runner.close()

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, list[Any]],
        group_size: int,
        context: Mapping[str, Any] | None = None,
        iteration: int = 0,
    ) -> RewardTable:
        """Score N completions.

        Args:
            prompts: N prompts, each repeated for its group.
            completions: N completions.
            columns: {name: list of length N}, everything else that is known of each row.
            group_size: G.
            context: {name: value} the same for all rows, for functions that ask by name (TRL's
                `trainer_state`); `group_size` is always among them.
            iteration: finished iterations, for schedules.

        Returns:
            Table of [B, G] rewards.

        Raises:
            ValueError: columns and completions do not fit each other, the group size or what the
                functions ask for; or a function that never worked returns no list of N rewards.
            RewardFailure: too many rows of a function failed.
        """
        texts = {"prompts": list(prompts), "completions": list(completions)}
        prompt_numbers = range(len(completions) // max(1, group_size))
        context = context or {}
        return self._start(texts, columns, group_size, context, iteration, prompt_numbers).wait()

    def start(self, rollout: Rollout, iteration: int = 0) -> PendingRewards:
        """Start scoring a rollout; worker processes run while the caller continues.

        Functions that run in this process run in `wait()`. A rollout that was started before and
        not waited for is cancelled.

        Args:
            rollout: N completions with texts.
            iteration: finished iterations, for schedules and for functions that name
                `trainer_state`.

        Raises:
            ValueError: a column is missing or has the wrong length.

        Example:
            >>> pending = scorer.start(rollout, iteration=3)  # doctest: +SKIP
            >>> rewards = pending.wait()  # doctest: +SKIP
        """
        prompts, group_size = rollout.prompts, rollout.group_size
        texts: dict[str, list[Any]] = {
            "prompts": [text for text in prompts.prompts for _ in range(group_size)],
            "completions": list(rollout.completions),
        }
        if (
            rollout.episodes and self.scoring.format == "chat"
        ):  # roles separate turns from tool output
            texts["completions"] = [episode.messages for episode in rollout.episodes]
        columns = {
            name: [value for value in values for _ in range(group_size)]
            for name, values in prompts.columns.items()
        }
        columns |= {
            "completion_ids": rollout.token_lists(),
            "completion_lengths": rollout.lengths.tolist(),
            "truncated": rollout.truncated.tolist(),
        }
        columns |= episode_columns(rollout) if rollout.episodes else {}
        # What reward functions written for TRL may ask for by name.
        state = SimpleNamespace(global_step=iteration, max_steps=self.max_iterations)
        context, prompt_numbers = {"trainer_state": state}, prompts.index.tolist()
        pending = self._start(texts, columns, group_size, context, iteration, prompt_numbers)
        if rollout.episodes:
            pending.rollout = rollout
        return pending

    def check(self, columns: Mapping[str, Sequence[Any]], episodes: bool = False) -> None:
        """Raise if the data do not suit a function, before anything is generated.

        Args:
            columns: {name: values}, what is known of the prompts of one set.
            episodes: completions are episodes.

        Raises:
            ValueError: a column is missing, or a function's own check rejects the values.
        """
        added = (*OF_ROLLOUT, *(OF_EPISODES if episodes else ()))
        tasks = [_task_of(columns, row) for row in range(len(next(iter(columns.values()), [])))]
        self._check_tasks({*tasks})
        for name, reward in self.components.items():
            scored = [n for n, task in enumerate(tasks) if not reward.tasks or task in reward.tasks]
            if reward.tasks and not scored:
                continue
            rows: dict[str, list[Any]] = {
                **{"prompts": [], "prompt_texts": []},
                **{column: [values[row] for row in scored] for column, values in columns.items()},
                **{column: [] for column in ("completions", *added)},
            }
            call = self._call(name, rows, {"group_size": 0, "trainer_state": None})
            check = find_check(call.function)
            if check is not None:
                arguments, names = call.rows | call.settings, parameters(check)[0]
                try:
                    check(**{key: arguments[key] for key in names if key in arguments})
                except UnusableReward as error:
                    raise ValueError(f"reward '{name}': {error}") from error

    def _check_tasks(self, tasks: set[str]) -> None:
        """Raise ValueError if no reward that counts scores the rows of a task."""
        counting = {n: reward.tasks for n, reward in self.components.items() if self.weights[n]}
        listed = "; ".join(f"{name}: {', '.join(scored)}" for name, scored in counting.items())
        for task in sorted(tasks):
            is_scored = any(not scored or task in scored for scored in counting.values())
            which = f"of the task {task!r}" if task else "without a column `task`"
            require(is_scored, f"no reward scores the rows {which}; tasks of the rewards: {listed}")

    def _start(
        self,
        texts: dict[str, list[Any]],
        columns: Mapping[str, list[Any]],
        group_size: int,
        context: Mapping[str, Any],
        iteration: int,
        prompt_numbers: Sequence[int],
    ) -> PendingRewards:
        """Start scoring rows; the `group_size` rows of a prompt follow each other.

        `prompt_numbers` are the positions of the prompts in the data, for error messages.
        """
        rows = {**texts, **columns, **texts}  # in this order, and no column can replace the texts
        rows["prompt_texts"] = rows["prompts"]
        num_rows = len(rows["completions"])
        if min(group_size, num_rows) < 1 or num_rows % group_size:
            raise ValueError(f"{num_rows} completions do not make whole groups of {group_size}")
        lengths = {name: len(values) for name, values in rows.items() if len(values) != num_rows}
        if lengths:
            name, length = next(iter(lengths.items()))
            raise ValueError(f"column '{name}' has {length} entries for {num_rows} completions")
        if self.scoring.format == "chat":
            # Messages as the data have them; texts of data without chat format become one message.
            prompts = rows.get("conversation") or rows["prompts"]
            rows["prompts"] = [_messages("user", prompt) for prompt in prompts]
            rows["completions"] = [_messages("assistant", text) for text in rows["completions"]]
        context = {"group_size": group_size, **context}
        places = [
            f"completion {g} of prompt {n}" for n in prompt_numbers for g in range(group_size)
        ]
        calls = [
            replace(self._call(name, rows, context), places=places) for name in self.components
        ]
        # Rewards of other tasks are not called.
        scored = {call.name: self._find_rows(call.name, rows) for call in calls}
        calls = [
            call if len(scored[call.name]) == num_rows else call.only(scored[call.name])
            for call in calls
            if scored[call.name]
        ]
        # From here on worker processes run the user's functions, and a thread of this process sends
        # the requests of judges. Built-in functions and reward models run in this process, when
        # PendingRewards.wait is called.
        started = self.runner.start(calls)
        tasks = [_task_of(rows, row) for row in range(0, num_rows, group_size)]
        return PendingRewards(self, started, group_size, iteration, scored=scored, tasks=tasks)

    def _find_rows(self, name: str, rows: Mapping[str, Sequence[Any]]) -> Sequence[int]:
        """Return the numbers of the rows whose task a reward is for."""
        wanted, count = self.components[name].tasks, range(len(rows["completions"]))
        return [row for row in count if _task_of(rows, row) in wanted] if wanted else count

    def _call(self, name: str, rows: Mapping[str, list[Any]], context: Mapping[str, Any]) -> Call:
        """A call with what the signature names, or with every column if it takes `**kwargs`."""
        function, kwargs = self.functions[name], self.components[name].kwargs
        parameters_of, takes_all = self.signatures[name]
        values = {**dict.fromkeys(Notes.NAMES), **context, **rows, **kwargs}
        missing = [key for key, required in parameters_of.items() if required and key not in values]
        if missing:
            raise missing_columns_error(name, missing, rows)
        # A kwarg goes before a column of its name. The context is only for those who name it, as
        # functions with `**kwargs` often hand everything on.
        by_name = parameters_of.keys() - kwargs.keys()
        free = rows.keys() - kwargs.keys() - ({"prompt_texts"} - by_name)
        columns = {key: rows[key] for key in rows if key in (free if takes_all else by_name)}
        named_context = {key: context[key] for key in context if key in by_name}
        notes = tuple(method for method in Notes.NAMES if method in by_name)
        return Call(name, function, columns, kwargs, len(rows["completions"]), named_context, notes)

    def combine(self, results: Sequence[Scores], group_size: int, iteration: int) -> RewardTable:
        """Add up the rewards that returned a value.

        A row is valid if at least one weighted reward returned a value and none of them failed.

        Training, resampling and evaluation use what this returns: a subclass may override it, and
        `GRPO.scorer_class` names that.

        Args:
            results: the scores of each component.
            group_size: G.
            iteration: finished iterations, for schedules.
        """
        scores = dict(zip(self.components, results, strict=True))
        values = {
            name: torch.tensor(result.values, dtype=torch.float64).view(-1, group_size)
            for name, result in scores.items()
        }
        weights = self.weights | {
            name: self.weights[name] * schedule_factor(reward.schedule, iteration)
            for name, reward in self.components.items()
            if reward.schedule
        }
        processed = values | {
            name: normalize_and_gate(name, values, self.components)
            for name, reward in self.components.items()
            if reward.is_normalized_or_gated
        }
        total = torch.zeros_like(next(iter(values.values())))
        answered = torch.zeros_like(total, dtype=torch.bool)
        failed = answered.clone()
        # Weights, not scheduled weights, decide which components count: one whose schedule is at 0
        # now masks the same rows as before.
        counting = [name for name, weight in self.weights.items() if weight]
        for name in counting:
            total += weights[name] * processed[name].nan_to_num(0.0)
            answered |= ~processed[name].isnan()
        gates = [gate for name in counting if (gate := self.components[name].gate) is not None]
        for name in {*counting, *gates}:
            failed.view(-1)[list(scores[name].failures)] = True
        table = RewardTable(values, weights, total, answered & ~failed, processed)
        return replace(table, metrics=self._metrics(results), extras=extras_of(results))

    def _metrics(self, results: Sequence[Scores]) -> dict[str, float]:
        """{name to log: mean} of what functions logged by `log_metric`."""
        logged: dict[str, list[float]] = {}
        for scores in results:
            for name, numbers in scores.metrics.items():
                logged.setdefault(name, []).extend(numbers)
        taken = logged.keys() & set(reward_stat_names(list(self.components)))
        if taken:
            name = min(taken)
            raise ValueError(f"log_metric({name!r}): reward/{name} is logged already; rename it")
        return {f"reward/{name}": sum(numbers) / len(numbers) for name, numbers in logged.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return {component: state} of the objects that have a state."""
        return {name: owner.state_dict() for name, owner in self._state_owners().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the states of a checkpoint."""
        for name, owner in self._state_owners().items():
            if name in state:
                owner.load_state_dict(state[name])

    def _state_owners(self) -> dict[str, Any]:
        """{component: object with `state_dict` and `load_state_dict`}."""
        owners = {name: find_state_owner(function) for name, function in self.functions.items()}
        return {name: owner for name, owner in owners.items() if owner is not None}


class PendingRewards:
    """Rewards of a rollout that are being computed; `wait` for them.

    Args:
        scorer: scorer that started them.
        started: the calls of its reward functions.
        group_size: G.
        iteration: finished iterations, for schedules.
        scored: {component: numbers of the rows that it scores}.
        tasks: [B] task of each prompt, "" without one.
    """

    def __init__(
        self,
        scorer: Scorer,
        started: StartedCalls,
        group_size: int,
        iteration: int,
        *,
        scored: Mapping[str, Sequence[int]],
        tasks: list[str],
    ) -> None:
        self.scorer, self.started = scorer, started
        self.group_size, self.iteration = group_size, iteration
        self.scored, self.tasks = scored, tasks
        self.rollout: Rollout | None = None  # if completions are episodes
        self._table: RewardTable | None = None

    def wait(self) -> RewardTable:
        """Call the functions that run in this process, wait for the workers, add up the rewards.

        Returns:
            Table of [B, G] rewards.

        Raises:
            ValueError: a function that never worked before returned no list of N rewards.
            RewardFailure: more than `max_failed_frac` of a function's rows failed.
            RuntimeError: the scorer was closed, or has started another rollout.
        """
        if self._table is None:
            # Runs built-in functions and reward models in this thread, then waits for the workers.
            results = self.started.wait()
            names = [call.name for call in self.started.calls]
            by_name = dict(zip(names, results, strict=True))
            scores = [self._in_all_rows(by_name.get(n), rows) for n, rows in self.scored.items()]
            # Gates, normalizes and weights the components, and masks rows that failed.
            table = self.scorer.combine(scores, self.group_size, self.iteration)
            table = replace(table, tasks=self.tasks)
            if self.rollout is not None:
                table = mask_failed_episodes(table, self.rollout)
            self._table = table
        return self._table

    def _in_all_rows(self, scores: Scores | None, rows: Sequence[int]) -> Scores:
        """Return the scores of all rows from those of some; a reward has none of other tasks."""
        count = len(self.tasks) * self.group_size
        if scores is not None and len(rows) == count:
            return scores
        all_scores = Scores([nan] * count)
        if scores is not None:
            all_scores.put(rows, scores)
        return all_scores


def extras_of(results: Sequence[Scores]) -> dict[str, dict[int, Any]]:
    """{column: {row: value}} of what functions logged by `log_extra`."""
    merged: dict[str, dict[int, Any]] = {}
    for scores in results:
        for column, values in scores.extras.items():
            merged.setdefault(column, {}).update(values)
    return merged


def _task_of(rows: Mapping[str, Sequence[Any]], row: int) -> str:
    """Return the task of a row, its column `task`; "" without one."""
    task = rows[TASK][row] if TASK in rows else None
    return "" if task is None else str(task)


def _messages(role: str, text: Any) -> Any:
    return [{"role": role, "content": text}] if isinstance(text, str) else text
