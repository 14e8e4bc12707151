import asyncio
import math
import os
import pickle

import jsonargparse
import pytest
import torch

from litgrpo.rewards import Reward, Scorer, Scoring
from litgrpo.rewards.reward_model import Judge, load_judges
from litgrpo.rewards.rubric import Criterion, Rubric

TEXTS = ["short and right", "wrong", "", "right"]
PROMPTS = ["p"] * 4
CRITERIA = {
    "correct": Criterion("the answer is right", weight=3.0),
    "brief": Criterion(),
}


def judge(prompts, completions, criterion):
    """Mark `correct` by the word, `brief` by the number of words; None for an empty text."""
    if criterion == "the answer is right":
        return [10.0 * ("right" in text) for text in completions]
    return [None if not text else 10.0 * (" " not in text) for text in completions]


def test_the_weighted_mean_of_the_marks_by_hand():
    rubric = Rubric(CRITERIA, judge, max_score=10.0)
    # 3/4 for being right and 1/4 for being brief; the empty one is judged by the first alone.
    assert rubric(PROMPTS, TEXTS) == [0.75, 0.25, 0.0, 1.0]


def test_nothing_applies_is_no_reward():
    def silent(prompts, completions, criterion):
        return [None] * len(completions)

    assert Rubric(CRITERIA, silent)(PROMPTS, TEXTS) == [None] * 4


@pytest.mark.parametrize("mark", [math.nan, math.inf, -0.1, 1.1])
def test_a_mark_off_the_scale_masks_its_completion(mark):
    def odd(prompts, completions, criterion):
        return [1.0, mark, 0.0, 1.0]

    first, second, third, _ = Rubric(CRITERIA, odd)(PROMPTS, TEXTS)
    assert (first, third) == (1.0, 0.0)
    assert math.isnan(second)


def test_a_judge_gets_the_columns_that_it_names_and_is_judged_as_one_part():
    def knowing(completions, criterion, answer, prompts):
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    columns = {"answer": ["right", "wrong", "x", "right"], "other": [0] * 4}
    scorer = Scorer({"rubric": Reward(Rubric(CRITERIA, knowing), weight=2.0)})
    table = scorer(PROMPTS, TEXTS, columns, group_size=2)
    assert table.total.tolist() == [[0.0, 2.0], [0.0, 2.0]]


def test_coroutines_of_all_criteria_wait_together():
    waiting = 0

    async def slow(prompts, completions, criterion):
        nonlocal waiting
        waiting += 1
        while waiting < len(CRITERIA):  # would never end one after the other
            await asyncio.sleep(0)
        return [0.5] * len(completions)

    assert Rubric(CRITERIA, slow)(PROMPTS, TEXTS) == [0.5] * 4


def test_marks_may_be_a_tensor():
    def coarse(prompts, completions, criterion):
        return torch.tensor([0.5, 1.0, 0.0, 0.25], dtype=torch.bfloat16)

    table = Scorer({"rubric": Reward(Rubric(CRITERIA, coarse))})(PROMPTS, TEXTS, {}, 2)
    assert table.total.tolist() == [[0.5, 1.0], [0.0, 0.25]]


def test_a_judge_that_cannot_work_is_refused_early():
    def deaf(prompts, completions):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match="no parameter `criterion`"):
        Rubric(CRITERIA, deaf)
    with pytest.raises(ValueError, match="weight above 0"):
        Rubric({"a": Criterion(weight=0.0)}, judge)
    with pytest.raises(ValueError, match="at least one criterion"):
        Rubric({}, judge)
    with pytest.raises(ValueError, match="max_score is 0"):
        Rubric(CRITERIA, judge, max_score=0)

    def short(prompts, completions, criterion):
        return [1.0]

    with pytest.raises(ValueError, match=r"for 4 completions the judge gave \[1.0\].*'correct'"):
        Rubric(CRITERIA, short)(PROMPTS, TEXTS)


def test_a_rubric_can_go_to_another_process_unless_its_judge_holds_weights():
    rubric = Rubric(CRITERIA, judge)
    assert not rubric.in_process
    copied = pickle.loads(pickle.dumps(rubric))
    assert copied(PROMPTS, TEXTS) == rubric(PROMPTS, TEXTS)


class Heavy(Judge):
    """Marks everything with what it was loaded for."""

    def load(self, device=None, policy=None):
        self.mark = {"cpu": 0.5}[device]

    def __call__(self, prompts, completions, criterion, **columns):
        return [self.mark] * len(completions)


def test_a_judge_that_holds_weights_is_loaded_through_its_rubric():
    rubric = Rubric(CRITERIA, Heavy())
    assert rubric.in_process
    load_judges([rubric], "cpu", "policy")
    assert rubric(PROMPTS, TEXTS) == [0.5] * 4


class Placed(Heavy):
    """Marks with the number of the process that it runs in."""

    def __call__(self, prompts, completions, criterion=None, **columns):
        return [float(os.getpid())] * len(completions)


def score_place(prompts, completions, criterion):
    return [float(os.getpid())] * len(completions)


def test_what_holds_weights_runs_in_this_process_and_other_judges_do_not():
    parts = {
        "weights": Placed(),
        "with_weights": Rubric(CRITERIA, Placed(), max_score=1e9),
        "plain": Rubric(CRITERIA, score_place, max_score=1e9),
    }
    rewards = {name: Reward(function) for name, function in parts.items()}
    scorer = Scorer(rewards, Scoring(num_workers=1))
    table = scorer(PROMPTS, TEXTS, {}, group_size=2)
    scorer.close()
    here = os.getpid()
    assert table.components["weights"][0, 0] == here
    assert table.components["with_weights"][0, 0] == pytest.approx(here / 1e9, rel=1e-12)
    assert table.components["plain"][0, 0] != pytest.approx(here / 1e9, rel=1e-12)


def test_a_recipe_can_say_all_of_it():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--rewards", type=dict[str, Reward])
    of = "litgrpo.rewards."
    text = f"""
rewards:
  by_function:
    function:
      class_path: {of}Rubric
      init_args:
        criteria: {{correct: {{text: the answer is right, weight: 3}}, brief: {{}}}}
        judge: tests.rewards.test_rubric.judge
        max_score: 10
  by_model:
    weight: 0.5
    function:
      class_path: {of}Rubric
      init_args:
        criteria: {{clear: {{weight: 1}}}}
        judge: {{class_path: tests.rewards.test_rubric.Placed}}
"""
    rewards = parser.instantiate(parser.parse_string(text)).rewards
    assert rewards["by_function"].function(PROMPTS, TEXTS) == [0.75, 0.25, 0.0, 1.0]
    assert isinstance(rewards["by_model"].function.judge, Placed)
    assert rewards["by_model"].function.in_process
