import json

import pytest
import torch

from litgrpo.callbacks.evaluation_files import EvaluationFiles, each_once, prompt_rows
from litgrpo.evaluation.evaluator import Evaluated
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn, prompts, rewards_of, rollout_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def answered(*texts: str, name: str = "", cut: bool = False) -> dict:
    rollout = rollout_of(prompts(*texts))
    rollout.truncated[:] = cut
    rewards, greedy = rewards_of(rollout), rollout_of(prompts(*texts), 1)
    judged = rewards_of(greedy)
    right, likely = rewards.total >= 1, judged.total >= 1
    return vars(Evaluated(rollout, rewards, right, greedy, judged, likely, name))


def test_every_prompt_of_an_evaluation_is_a_line_with_all_its_completions(tmp_path):
    fit(tmp_path, EvaluationFiles(), module=StandIn(2))
    folder = tmp_path / "evaluation"
    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration-000000.jsonl",
        "iteration-000002.jsonl",
    ]
    lines = (folder / "iteration-000002.jsonl").read_text().splitlines()
    # The stand-in numbers the prompts of each batch from 0, so two of four are another's.
    first = json.loads(lines[0])
    assert (len(lines), first["prompt"], first["index"]) == (2, "A", 0)
    assert (first["reward"], first["right"], first["greedy"]) == (0.5, 0.5, None)
    sample = {"completion": "<answer>0</answer>", "reward": 1.0, "right": True, "length": 3}
    sample |= {"rewards": {"correct": 1.0, "format": None}, "truncated": False}
    assert first["samples"][0] == sample
    assert first["columns"] == {"answer": "0"}


def test_a_completion_that_was_cut_off_is_marked_and_the_set_is_named():
    row, other = prompt_rows(answered("A", "B", name="hard", cut=True))
    assert row["set"] == "hard"
    assert row["samples"][1]["completion"] == "<answer>1</answer> [cut]"
    assert row["greedy"]["completion"] == "<answer>0</answer>"
    assert other["index"] == 1


def test_prompts_of_all_processes_stand_in_order_and_once():
    rows = [{"index": 2, "a": 1}, {"index": 0, "a": 2}, {"index": 2, "a": 3}]
    assert each_once(rows) == [{"index": 0, "a": 2}, {"index": 2, "a": 1}]
    named = [{"set": "b", "index": 0}, {"set": "a", "index": 1}]
    assert [row["set"] for row in each_once(named)] == ["a", "b"]


def test_they_can_be_switched_off(tmp_path):
    fit(tmp_path, EvaluationFiles(enabled=False), module=StandIn(1))
    assert not (tmp_path / "evaluation").exists()


def test_a_reward_that_nobody_gave_is_null():
    given = answered("A")
    given["rewards"].valid[:] = False
    given["rewards"].parts["correct"][:] = torch.nan
    (row,) = prompt_rows(given)
    assert row["reward"] is None
    assert row["samples"][0]["rewards"]["correct"] is None
