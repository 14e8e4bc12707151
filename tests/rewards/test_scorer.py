"""Rewards of rollouts and episodes."""

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch

from litgrpo.environments.base import StepResult
from litgrpo.rewards import (
    Criterion,
    LLMJudge,
    Reward,
    RewardFailure,
    Scorer,
    Scoring,
)
from litgrpo.rewards.builtin.math import correctness
from litgrpo.rewards.reward import name_rewards
from litgrpo.rewards.scorer import overlong_reward
from tests.learning.parts import rollouter_of
from tests.support.models import prompt_batch, tiny_policy
from tests.support.playing import Echo, episodes_of

PROMPTS = ["p", "p", "q", "q"]
TEXTS = ["a", "bb", "ccc", "dddd"]
COLUMNS: dict[str, list[Any]] = {
    "answer": ["1", "1", "2", "2"],
    "completion_ids": [[1], [2], [3], [4]],
}


def size(prompts, completions, **columns):
    return [len(text) for text in completions]


def returning(values):
    def function(completions):
        return values

    return function


def table(context=None, reward_format="text", **parts: Any):
    rewards = {
        name: part if isinstance(part, Reward) else Reward(part) for name, part in parts.items()
    }
    composite = Scorer(rewards, Scoring(reward_format, num_workers=0))
    return composite(PROMPTS, TEXTS, COLUMNS, 2, context)


def definitions(weights=None, **rewards):
    scorer = Scorer(rewards, Scoring(num_workers=0))
    return scorer.definitions(scorer.weights | (weights or {}))


def test_the_definition_of_a_reward_changes_with_all_that_enters_the_sum() -> None:
    size_of, shown = Reward(size, weight=0.2), Reward(correctness, weight=0.0)
    before = definitions(size=size_of, shown=shown)
    assert before == {
        "reward": f"0.2 * size ({__name__}.size)",
        "rewards/size": f"{__name__}.size",
        "rewards/shown": "litgrpo.rewards.builtin.math.correctness",
    }
    assert (
        definitions(size=size_of, shown=replace(shown, kwargs={"require_tags": True}))["reward"]
        == (before["reward"])
    ), "a reward that is only shown"
    changes = [
        dict(weight=5.0),
        dict(kwargs={"a": 1}),
        dict(kwargs={"a": 2}),
        dict(normalize="group"),
        dict(gate="shown"),
        dict(gate="shown", gate_threshold=0.5),
        dict(tasks=["math"]),
        dict(function=partial(size)),
    ]
    all_rewards = [
        definitions(size=replace(size_of, **change), shown=shown)["reward"] for change in changes
    ]
    all_rewards.append(definitions({"size": 0.1}, size=size_of, shown=shown)["reward"])  # scheduled
    assert len({before["reward"], *all_rewards}) == len(changes) + 2


def test_keys_and_addresses_are_not_in_a_definition() -> None:
    one, other = (Reward(size, kwargs={"api_key": k, "x": object()}) for k in ("abc123", "def456"))
    assert definitions(size=one) == definitions(size=other)


def test_weighted_parts_add_up_by_hand() -> None:
    result = table(
        size=Reward(size, weight=2.0), sign=Reward(returning([1, -1, 0.5, True]), weight=-1.0)
    )
    assert result.components["size"].tolist() == [[1, 2], [3, 4]]
    assert result.total.tolist() == [[1, 5], [5.5, 7]]
    assert result.total.dtype == torch.float64
    assert result.valid.all()
    assert result.weights == {"size": 2.0, "sign": -1.0}


@pytest.mark.parametrize(
    "values",
    [
        np.arange(4), np.arange(4, dtype=np.float32), list(np.arange(4.0)), torch.arange(4),
        torch.arange(4).bfloat16(), list(torch.arange(4.0)),
    ],
)  # fmt: skip
def test_arrays_tensors_and_lists_of_their_numbers_are_rewards(values) -> None:
    assert table(a=returning(values)).total.tolist() == [[0, 1], [2, 3]]


def test_an_abstaining_part_is_left_out_of_the_sum() -> None:
    result = table(a=returning([None, 1, None, 2]), b=returning([3, None, None, 4]))
    assert result.total.tolist() == [[3, 1], [0, 6]]
    assert result.valid.tolist() == [[True, True], [False, True]]
    assert result.components["a"].isnan().tolist() == [[True, False], [True, False]]


def test_a_failed_part_makes_its_sample_invalid_and_no_other() -> None:
    composite = Scorer({"a": Reward(returning([1, float("nan"), "x", 2])), "b": Reward(size)})
    result = composite(PROMPTS, TEXTS, COLUMNS, 2)
    assert result.valid.tolist() == [[True, False], [False, True]]
    assert result.total.tolist() == [[2, 2], [3, 6]]
    assert composite.failures == {"a": {"returned nan": 1, "returned str": 1}}


def test_a_reward_of_weight_zero_is_shown_and_changes_nothing() -> None:
    result = table(a=size, b=Reward(returning([None, float("inf"), 7, 7]), weight=0.0))
    assert result.valid.all()
    assert result.total.tolist() == [[1, 2], [3, 4]]
    assert result.components["b"][1].tolist() == [7, 7]


def test_a_function_gets_what_its_signature_names() -> None:
    seen: list[set[str]] = []

    def name_values(completions, answer, *, scale=1):
        seen.append({*completions, *answer, scale})
        return [0.0] * 4

    def everything(prompts, completions, **kwargs):
        seen.append(set(kwargs))
        return [0.0] * 4

    table(a=Reward(name_values, kwargs={"scale": 3}), b=Reward(everything, kwargs={"extra": 1}))
    assert seen == [{*TEXTS, "1", "2", 3}, {"answer", "completion_ids", "extra"}]


def test_functions_written_for_trl_work_unchanged() -> None:
    # from TRL's documentation of custom reward functions: signatures and formats
    def by_ids(completions_ids=None, completion_ids=None, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def chat(completions, answer, **kwargs):
        return [
            float(turns[0]["content"] == gold)
            for turns, gold in zip(completions, answer, strict=True)
        ]

    def with_state(prompts, completions, trainer_state, log_metric=None, **kwargs):
        log_metric("step", trainer_state.global_step)
        return [float(trainer_state.global_step)] * len(completions)

    def asking(prompts, **kwargs):
        return [float(prompt[-1]["role"] == "user") for prompt in prompts]

    state = {"trainer_state": SimpleNamespace(global_step=5)}
    result = table(state, "chat", ids=by_ids, chat=chat, state=with_state, asking=asking)
    assert result.metrics == {"reward/step": 5.0}
    assert {name: part.flatten().tolist() for name, part in result.components.items()} == {
        "ids": [1, 1, 1, 1], "chat": [0, 0, 0, 0], "state": [5, 5, 5, 5], "asking": [1, 1, 1, 1],
    }  # fmt: skip


def test_a_column_never_replaces_the_texts() -> None:
    columns = {"completions": ["x"] * 4, "prompts": ["x"] * 4}
    result = Scorer({"size": Reward(size)})(PROMPTS, TEXTS, columns, 2)
    assert result.total.tolist() == [[1, 2], [3, 4]]


class Judge:
    def __call__(self, completions):
        return [1.0] * len(completions)


def test_partials_and_callable_objects_are_functions_too() -> None:
    result = table(a=Judge(), b=partial(correctness, require_tags=False))
    assert result.total.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("litgrpo.rewards.corectness",
        "'litgrpo.rewards' has no 'corectness' .did you mean 'correctness'"),
        ("litgrpo.rewards.builtin.math.corectness",
        "'litgrpo.rewards.builtin.math' has no 'corectness' .did you mean 'correctness'"),
        ("tests.rewards.faulty.lengthz", "did you mean 'lengths'"),
        ("litgrpo.rewards.maths.correctness",
        "cannot import module 'litgrpo.rewards.maths'.*'litgrpo.rewards.correctness'"),
        ("correctnes",
        "'correctnes' is not an import path.*built in is 'litgrpo.rewards.correctness'"),
        ("no_such_module.f", "reward 'r': cannot import module 'no_such_module'"),
        ("litgrpo.rewards.builtin.math.Fraction", "expected a function or an object"),
        ("litgrpo.rewards.calls.LARGEST", "must be a function"), ("", "has no function; name one"),
        (".math.correctness", "is not an import path"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_imported_is_named_with_its_nearest(
    path: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Scorer({"r": Reward(path)})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "there are no rewards"),
        ({"a": Reward(size, weight=float("nan"))}, "reward 'a' must be a finite number, got nan"),
        ({"a": Reward(size, weight=0)}, "every reward has weight 0"),
        ({"a": Reward(size), "b": Reward(size)}, "'a' and 'b' are the same function"),
        ({"mean": Reward(size)}, "cannot be named 'mean'"),
        ({"a": Reward(correctness, kwargs={"require_tag": 1})}, "did you mean 'require_tags'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_at_once(parts: dict[str, Reward], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scorer(parts)


def test_wrong_inputs_are_refused_with_names_and_numbers() -> None:
    composite = Scorer({"a": Reward(correctness)})
    with pytest.raises(
        ValueError, match=r"reward 'a' needs answer, which is neither a column \(comp"
    ):
        composite(PROMPTS, TEXTS, {}, 2)
    with pytest.raises(ValueError, match="column 'answer' has 3 entries for 4 completions"):
        composite(PROMPTS, TEXTS, {"answer": ["1"] * 3}, 2)
    with pytest.raises(ValueError, match="4 completions do not make whole groups of 3"):
        composite(PROMPTS, TEXTS, COLUMNS, 3)
    with pytest.raises(ValueError, match=r"scoring\.format is 'json'"):
        Scoring("json")  # type: ignore[arg-type]


def test_a_result_of_the_wrong_length_is_one_clear_sentence() -> None:
    with pytest.raises(ValueError, match=r"^reward 'a' returned 3 rewards for 4 completions$"):
        table(a=returning([1, 2, 3]))
    with pytest.raises(
        ValueError, match=r"^reward 'a' returned NoneType instead of a list of 4 rewards$"
    ):
        table(a=returning(None))


@dataclass
class Holder:
    rewards: dict[str, Reward] = field(default_factory=dict)


def test_rewards_are_read_from_yaml(tmp_path) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Holder, "holder")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "holder: {rewards: {correct: {function: litgrpo.rewards.correctness, weight: 1e-1,"
        " kwargs: {require_tags: false}}, size: {function: litgrpo.rewards.think_format}}}"
    )
    arguments = [f"--config={path}", "--holder.rewards.size.weight=0.5"]
    rewards = parser.instantiate(parser.parse_args(arguments)).holder.rewards
    composite = Scorer(rewards)
    assert composite.functions["correct"] is correctness
    assert composite.weights == {"correct": 0.1, "size": 0.5}
    result = composite(PROMPTS, ["1", "2", "2", "1"], COLUMNS, 2)
    assert result.components["correct"].tolist() == [[1, 0], [1, 0]]


def shape_rewards(**parts: Reward):
    composite = Scorer(parts, Scoring(num_workers=0))
    return lambda iteration=0: composite(PROMPTS, TEXTS, COLUMNS, 2, iteration=iteration)


def test_a_gated_reward_counts_only_where_the_gate_is_open_by_hand() -> None:
    right = Reward(returning([1, 0, 0, None]))
    result = shape_rewards(
        right=right, quality=Reward(returning([0.5, 0.9, 0.7, 0.3]), gate="right")
    )()
    assert result.total.tolist() == [[1.5, 0], [0, 0]]
    assert result.components["quality"].tolist() == [[0.5, 0.9], [0.7, 0.3]]
    assert result.processed["quality"][0].tolist() == [0.5, 0]
    assert result.valid.tolist() == [[True, True], [True, False]]  # nothing is known of the last
    low = Reward(returning([1, 1, 1, 1]), gate="right", gate_threshold=-1.0)
    assert shape_rewards(right=right, q=low)().processed["q"][0].tolist() == [1, 1]


def test_a_failed_gate_makes_its_sample_invalid_also_without_weight() -> None:
    gate = Reward(returning([1, float("nan"), 1, 0]), weight=0.0)
    result = shape_rewards(gate=gate, q=Reward(size, gate="gate"))()
    assert result.valid.tolist() == [[True, False], [True, True]]
    assert result.total[result.valid].tolist() == [1, 3, 0]


def test_a_failed_gate_masks_its_sample_even_if_another_reward_answers() -> None:
    gate = Reward(returning([1, float("nan"), 1, 0]), weight=0.0)
    one = Reward(returning([1] * 4))
    result = shape_rewards(gate=gate, q=Reward(size, gate="gate"), one=one)()
    assert result.valid.tolist() == [[True, False], [True, True]]


def test_a_schedule_moves_the_weight_over_iterations() -> None:
    table_at = shape_rewards(
        size=Reward(size, weight=2.0, schedule={10: 1.0, 20: 0.0}), one=Reward(returning([1] * 4))
    )
    assert [table_at(n).weights["size"] for n in (0, 10, 15, 20, 99)] == [2.0, 2.0, 1.0, 0.0, 0.0]
    assert table_at(15).total.tolist() == [[2, 3], [4, 5]]
    assert table_at(99).valid.all()


def test_a_component_whose_schedule_is_at_zero_masks_the_same_rows() -> None:
    broken = Reward(returning([1, float("nan"), 1, 1]), schedule={0: 1.0, 10: 0.0})
    table_at = shape_rewards(broken=broken, one=Reward(returning([1] * 4)))
    for iteration in (0, 10):
        assert table_at(iteration).valid.tolist() == [[True, False], [True, True]]


def test_a_single_completion_is_a_group_of_one() -> None:
    composite = Scorer({"size": Reward(size)}, Scoring(num_workers=0))
    assert composite(["p"], ["abc"], {}, 1).total.tolist() == [[3.0]]


@pytest.mark.parametrize("weight", [True, False])
def test_a_truth_value_is_no_weight(weight) -> None:
    with pytest.raises(TypeError, match="expected float"):
        Scorer({"size": Reward(size, weight=weight)})


def test_normalization_by_group_and_by_batch_by_hand() -> None:
    # groups (1, 2) and (3, 4): deviations -0.5, 0.5, std sqrt(0.5); batch mean 2.5, std sqrt(5/3)
    group = shape_rewards(size=Reward(size, normalize="group"))().processed["size"]
    half = 0.5 / (0.5**0.5 + 1e-4)
    assert group.tolist() == [pytest.approx([-half, half])] * 2
    batch = shape_rewards(size=Reward(size, normalize="batch"))().processed["size"]
    std = (5 / 3) ** 0.5 + 1e-4
    assert batch.flatten().tolist() == pytest.approx([-1.5 / std, -0.5 / std, 0.5 / std, 1.5 / std])
    noise = shape_rewards(x=Reward(returning([0.1 + 0.2, 0.3, 7, 7]), normalize="group"))()
    assert noise.processed["x"].tolist() == [[0, 0], [0, 0]]


def test_only_rewards_behind_open_gates_are_compared() -> None:
    right = Reward(returning([1, 1, 1, 0]))
    result = shape_rewards(right=right, size=Reward(size, gate="right", normalize="group"))()
    half = 0.5 / (0.5**0.5 + 1e-4)
    assert result.processed["size"].tolist() == [pytest.approx([-half, half]), [0, 0]]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Reward(size, gate="rigth"), "gate of reward 'b' is 'rigth' .did you mean 'right'"),
        (Reward(size, gate="b"), "must name another reward: right"),
        (Reward(size, schedule={-1: 1.0}), "schedule of reward 'b' must map iterations"),
        (Reward(size, schedule={0: float("nan")}), "got 0: nan"),
    ],
)
def test_a_wrong_shape_is_refused_at_once(reward: Reward, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scorer({"right": Reward(correctness), "b": reward})


def test_names_that_would_be_logged_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be named 'size_std'"):
        Scorer({"size": Reward(size), "size_std": Reward(correctness)})


def test_gates_schedules_and_normalization_are_read_from_yaml(tmp_path) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Holder, "holder")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "holder: {rewards: {right: {function: litgrpo.rewards.correctness}, size: {function:"
        " litgrpo.rewards.think_format, gate: right, gate_threshold: 0.5, normalize: group,"
        " schedule: {0: 1.0, 100: 0}}}}"
    )
    config = parser.parse_args([f"--config={path}"])
    size = parser.instantiate(config).holder.rewards["size"]
    assert (size.gate, size.gate_threshold, size.normalize) == ("right", 0.5, "group")
    assert size.schedule == {0: 1.0, 100: 0.0}
    again = tmp_path / "again.yaml"
    again.write_text(parser.dump(config))
    reread = parser.instantiate(parser.parse_args([f"--config={again}"])).holder.rewards["size"]
    assert reread == size


def test_a_function_may_ask_for_the_group_size() -> None:
    def by_group(completions, group_size):
        return [float(group_size)] * len(completions)

    assert table(g=by_group).total.tolist() == [[2, 2], [2, 2]]


def counts(completions, log_metric, log_extra):
    log_metric("letters", sum(map(len, completions)))
    log_extra("first", [text[:1] for text in completions])
    return [1.0] * len(completions)


@pytest.mark.parametrize("num_workers", [0, None])
def test_what_a_function_logs_is_in_the_table(num_workers):
    """Metrics are means over calls and functions; extras stay with their completions."""
    scorer = Scorer({"a": counts}, Scoring(num_workers=num_workers))
    table = scorer(["p"] * 4, ["ab", "c", "d", "e"], {}, 2)
    scorer.close()
    assert table.metrics == {"reward/letters": 5.0}
    assert table.extras == {"first": {0: "a", 1: "c", 2: "d", 3: "e"}}


def test_rows_that_are_asked_alone_keep_their_own_extras():
    def picky(completions, log_metric, log_extra):
        log_metric("n", len(completions))
        log_extra("own", list(completions))
        if len(completions) > 1 or completions == ["bad"]:
            raise KeyError
        return [1.0]

    table = Scorer([picky], Scoring(num_workers=0))(["p"] * 3, ["a", "bad", "c"], {}, 3)
    assert table.extras == {"own": {0: "a", 2: "c"}}
    assert table.metrics == {"reward/n": 1.0}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [("mean", ["x"] * 2, "rename it"), ("fine", ["x"] * 3, "3 values for 2 completions")],
)
def test_what_cannot_be_logged_is_refused(name, values, message):
    def logs(completions, log_metric, log_extra):
        log_metric(name, 1.0)
        log_extra("column", values)
        return [1.0] * len(completions)

    with pytest.raises((ValueError, RewardFailure), match=message):
        Scorer([logs], Scoring(num_workers=0))(["p"] * 2, ["a", "b"], {}, 2)


def test_bare_functions_count_one_and_are_named_after_themselves():
    def long(completions):
        return [float(len(text)) for text in completions]

    for rewards in ({"long": long}, [long]):
        scorer = Scorer(rewards, Scoring(num_workers=0))
        assert scorer(["p"] * 2, ["a", "bb"], {}, 2).total.tolist() == [[1.0, 2.0]]
        assert list(scorer.components) == ["long"]
    with pytest.raises(ValueError, match="the same name: long, long"):
        Scorer([long, long])


def test_a_number_whose_square_overflows_fails_its_row():
    settings = Scoring(num_workers=0, max_failed_frac=1.0)
    scorer = Scorer([lambda completions: [1e38, 1.0, -1e16, 1e15]], settings)
    table = scorer(["p"] * 4, list("abcd"), {}, 4)
    assert table.valid.tolist() == [[False, True, False, True]]
    assert "returned 1e+38, beyond 1e+15" in scorer.failures["<lambda>"]


def test_a_failure_names_the_cause_the_line_and_the_prompt():
    def raises(completions):
        return {}[len(completions)]

    with pytest.raises(RewardFailure) as caught:
        Scorer([raises], Scoring(num_workers=0))(["p", "p", "q", "q"], list("abcd"), {}, 2)
    told = str(caught.value)
    assert "(completion 0 of prompt 0)" in told
    assert "the first cause: KeyError: 4 (test_scorer.py, line " in told
    assert "\n" not in told


class Halved(Scorer):
    """Overrides what training uses."""

    def combine(self, results, group_size, iteration):
        table = super().combine(results, group_size, iteration)
        return replace(table, total=table.total / 2)


def test_a_subclass_changes_what_every_caller_gets():
    scorer = Halved([lambda completions: [4.0] * len(completions)], Scoring(num_workers=0))
    assert scorer(["p"] * 2, ["a", "b"], {}, 2).total.tolist() == [[2.0, 2.0]]


def test_counts_of_judges_are_kept_by_part(tmp_path):
    judge = LLMJudge("http://h/v1", "m", {"a": Criterion()}, api_key_env=None)
    judge.counts["calls"] = 3
    state = Scorer({"j": judge, "f": counts}).state_dict()
    assert state == {"j": {"calls": 3}}
    judge.load_state_dict({})
    scorer = Scorer({"j": judge})
    scorer.load_state_dict(state)
    assert judge.counts["calls"] == 3


def test_one_bare_function_is_a_reward_under_its_own_name():
    def right(prompts, completions):
        return [1.0] * len(prompts)

    assert name_rewards(right) == {"right": Reward(right)}
    with pytest.raises(ValueError, match=r"rewards is 5; give \{name: function\}, a list of func"):
        name_rewards(5)


class Breaking(Echo):
    """Fails where the prompt is `b`; abstains in its second turn."""

    def step(self, action):
        if self.opening == "" and self.row["prompt"] == "b":
            raise RuntimeError("away")
        heard = super().step(action)
        return heard if len(self.turns) != 2 else StepResult(heard.observation, reward=None)

    def reset(self, row, seed):
        self.row = row
        return super().reset(row, seed)


def play_episodes(environment, purpose="val"):
    policy = tiny_policy("qwen2")
    rollouter = rollouter_of(policy, episodes=episodes_of(environment), max_completion_length=60)
    return rollouter.generate(prompt_batch("a", "b", "cc"), purpose)


def score_with(rollout, reward_format="text", **parts):
    scorer = Scorer(parts, Scoring(reward_format, num_workers=0))
    return scorer.start(rollout).wait()


def test_failed_episodes_have_no_reward_and_are_no_valid_rows():
    rollout = play_episodes(Breaking())
    assert all(each.failed.startswith("RuntimeError: away") for each in rollout.episodes[4:8])
    always = Reward(lambda prompts, completions: [1.0] * len(prompts))
    table = score_with(rollout, environment=Reward(), other=always)
    assert table.valid.tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert table.components["environment"][1].isnan().all()
    assert table.components["other"][1].isnan().all()
    assert (table.total[1] == 0).all()
    turns = len(rollout.episodes[0].assistant_texts)
    assert turns == 3
    assert table.components["environment"][0, 0] == 1 + 3
    assert torch.equal(rollout.turn_rewards[0].isnan(), torch.tensor([False, True, False]))


def test_functions_read_the_last_turn_and_may_ask_for_the_rest():
    rollout, seen = play_episodes(Echo()), {}

    def look(prompts, completions, messages, turns, completion_ids, turn_rewards):
        seen.update(locals())
        return [0.0] * len(prompts)

    score_with(rollout, look=Reward(look))
    decode = tiny_policy("qwen2").tokenizer.decode
    for row, played_ in enumerate(rollout.episodes):
        assert seen["turns"][row] == played_.assistant_texts
        assert len(seen["messages"][row]) == 2 * len(played_.assistant_texts) - 1
        assert seen["completions"][row] == decode(seen["completion_ids"][row]).removesuffix("<eos>")
        last = rollout.turns[row] == rollout.turns[row].max()
        assert seen["completion_ids"][row] == rollout.completion_ids[row][last].tolist()
        assert "xxx" not in seen["completions"][row]
        assert len(seen["turn_rewards"][row]) == len(played_.assistant_texts)


def test_chat_functions_are_given_who_said_what():
    rollout, seen = play_episodes(Echo()), []

    def look(prompts, completions):
        seen.extend(completions)
        return [0.0] * len(prompts)

    score_with(rollout, "chat", look=Reward(look))
    assert [each["role"] for each in seen[0]] == ["assistant", "user"] * 2 + ["assistant"]


def test_a_reward_without_a_function_must_be_the_environments():
    with pytest.raises(ValueError, match="reward 'other' has no function; name one"):
        score_with(None, other=Reward())


CONVERSATION = [{"role": "system", "content": "S"}, {"role": "user", "content": "ab"}]
RENDERED = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<think>\n"


def trl_reward(prompts, completions, **kwargs):
    """A reward in TRL's conversational format."""
    return [
        float(prompt[-1]["content"] == "ab" and answer[0]["content"] == "yes")
        for prompt, answer in zip(prompts, completions, strict=True)
    ]


def strip_text(prompts, completions):
    return [float(text.strip() == "yes") for text in completions]


def test_prompts_in_chat_format_are_the_messages_of_the_data():
    scorer = Scorer({"a": Reward(trl_reward)}, Scoring("chat", num_workers=0))
    columns = {"conversation": [CONVERSATION] * 2}
    assert scorer([RENDERED] * 2, ["yes", "no"], columns, 2).total.tolist() == [[1.0, 0.0]]
    # Data without chat format give one user message.
    assert scorer(["ab"] * 2, ["yes", "no"], {}, 2).total.tolist() == [[1.0, 0.0]]
    assert CONVERSATION[1] == {"role": "user", "content": "ab"}


@pytest.mark.parametrize("reward_format", ["text", "chat"])
def test_a_function_may_name_the_rendered_prompts(reward_format):
    def look(prompts, completions, prompt_texts):
        return [float(text == RENDERED) for text in prompt_texts]

    scorer = Scorer({"a": Reward(look)}, Scoring(reward_format, num_workers=0))
    columns = {"conversation": [CONVERSATION]}
    scorer.check(columns)
    assert scorer([RENDERED], ["yes"], columns, 1).total.tolist() == [[1.0]]


@pytest.mark.parametrize("reward_format", ["text", "chat"])
@pytest.mark.parametrize("name", ["think_format", "reasoning_answer"])
def test_a_thought_that_the_template_begins_belongs_to_the_completion(reward_format, name):
    completion, tag = "two and two</think>4", "<think>"
    if name == "reasoning_answer":
        completion, tag = "two</reasoning>\n<answer>4</answer>", "<reasoning>"
    function = Reward(f"litgrpo.rewards.{name}")
    scorer = Scorer({"a": function}, Scoring(reward_format, num_workers=0))
    columns = {"conversation": [CONVERSATION] * 4}
    asked = [f"q\n{tag}\n", f"q{tag}", "q\n", f"{tag} q"]
    assert scorer(asked, [completion] * 4, columns, 4).total.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    # A completion that opens the thought a second time has the tag twice.
    assert scorer(asked, [tag + completion] * 4, columns, 4).total.tolist() == [
        [0.0, 0.0, 1.0, 1.0]
    ]


@pytest.mark.parametrize(
    ("function", "reward_format", "other"),
    [(trl_reward, "text", "chat"), (strip_text, "chat", "text")],
)
def test_a_function_for_the_other_format_is_an_error_that_names_it(function, reward_format, other):
    named = pytest.raises(RewardFailure, match=f"model.scoring.format to {other}")
    scorer = Scorer({"a": Reward(function)}, Scoring(reward_format, num_workers=0))
    with named:
        scorer(["ab"] * 2, ["yes", "no"], {}, 2)


def test_the_end_of_long_completions_is_punished():
    assert overlong_reward(Scoring(), 100) == {}
    (reward,) = overlong_reward(Scoring(overlong_buffer_frac=0.25), 100).values()
    assert reward.kwargs == {"max_completion_length": 100, "soft_punish_cache": 25}
    (reward,) = overlong_reward(Scoring(overlong_buffer_frac=0.001), 100).values()
    assert reward.kwargs["soft_punish_cache"] == 1
