import json

import pytest
import torch
from lightning.pytorch import Trainer

from litgrpo.callbacks.evaluation_files import (
    EvaluationFiles,
    Predictions,
    format_prediction,
    known_mean,
    prompt_rows,
    unique_prompts,
)
from litgrpo.evaluation.evaluator import Evaluated
from litgrpo.runs.summary import Summary
from tests.support.fitting import QUIET, fit
from tests.support.standin import StandIn, StandInData, prompts, rewards_of, rollout_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def evaluate(*texts: str, name: str = "", cut: bool = False) -> dict:
    rollout = rollout_of(prompts(*texts))
    rollout.truncated[:] = cut
    rewards, greedy = rewards_of(rollout), rollout_of(prompts(*texts), 1)
    judged = rewards_of(greedy)
    right, likely = rewards.total >= 1, judged.total >= 1
    return vars(Evaluated(rollout, rewards, right, greedy, judged, likely, name))


def test_an_evaluation_file_has_one_line_per_prompt_with_all_completions(tmp_path):
    fit(tmp_path, EvaluationFiles(), module=StandIn(2))
    folder = tmp_path / "evaluation"
    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration-000000.jsonl",
        "iteration-000002.jsonl",
    ]
    lines = (folder / "iteration-000002.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert (len(lines), first["prompt"], first["index"]) == (4, "A", 0)
    assert (first["reward"], first["correct"], first["greedy"]) == (0.5, 0.5, None)
    sample = {"completion": "<answer>0</answer>", "reward": 1.0, "correct": True, "length": 3}
    sample |= {"rewards": {"correct": 1.0, "format": None}, "truncated": False}
    assert first["samples"][0] == sample
    assert first["columns"] == {"answer": "0"}


def test_a_truncated_completion_is_marked_and_the_set_is_named():
    row, other = prompt_rows(evaluate("A", "B", name="hard", cut=True))
    assert row["set"] == "hard"
    assert row["samples"][1]["completion"] == "<answer>1</answer> [cut]"
    assert row["greedy"]["completion"] == "<answer>0</answer>"
    assert other["index"] == 1


def test_prompts_of_all_ranks_are_sorted_and_unique():
    rows = [{"index": 2, "a": 1}, {"index": 0, "a": 2}, {"index": 2, "a": 3}]
    assert unique_prompts(rows) == [{"index": 0, "a": 2}, {"index": 2, "a": 1}]
    named = [{"set": "b", "index": 0}, {"set": "a", "index": 1}]
    assert [row["set"] for row in unique_prompts(named)] == ["a", "b"]


def test_a_new_fit_in_the_folder_of_another_moves_its_files_and_a_resumed_one_none(tmp_path):
    def names(folder):
        return sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".jsonl"))

    folder = tmp_path / "evaluation"
    settings = dict(val_check_interval=2)
    fit(tmp_path, Summary(), module=StandIn(4, scores=[0.1, 0.2, 0.3]), **settings)
    Trainer(default_root_dir=tmp_path, callbacks=[EvaluationFiles()], **QUIET).validate(
        StandIn(), StandInData(), verbose=False
    )
    first = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    # Without an evaluation before, the first file is that after two iterations.
    module = StandIn(2, scores=[0.5])
    fit(tmp_path, Summary(), module=module, num_sanity_val_steps=0, **settings)
    assert names(folder) == ["iteration-000002.jsonl", "validate-start.jsonl"]
    earlier = [f"iteration-00000{n}.jsonl" for n in (0, 2, 4)]
    assert names(folder / "earlier-1") == [*earlier, "summary.json"]
    moved = {path.name: path.read_bytes() for path in (folder / "earlier-1").iterdir()}
    assert moved == {path.name: x for path, x in first.items() if path.name in moved}
    assert json.loads((tmp_path / "summary.json").read_text())["before"] is None
    # The same module is trained further, as by a new trainer.
    module.max_iterations, module.scores = 4, [0.5, 0.6, 0.7]
    fit(tmp_path, Summary(), module=module, num_sanity_val_steps=0, **settings)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["earlier-1"]
    assert names(folder) == [*earlier[1:], "validate-start.jsonl"]


def test_evaluation_files_can_be_disabled(tmp_path):
    fit(tmp_path, EvaluationFiles(enabled=False), module=StandIn(1))
    assert not (tmp_path / "evaluation").exists()


def test_a_row_has_the_definitions_of_its_numbers():
    given = evaluate("A")
    assert "definitions" not in prompt_rows(given)[0]
    definitions = {"reward": "1 * correct"}
    assert prompt_rows(given | {"definitions": definitions})[0]["definitions"] == definitions


def test_a_missing_reward_is_null():
    given = evaluate("A")
    given["rewards"].valid[:] = False
    given["rewards"].components["correct"][:] = torch.nan
    (row,) = prompt_rows(given)
    assert row["reward"] is None
    assert row["samples"][0]["rewards"]["correct"] is None


def predict(folder, callback):
    settings = QUIET | dict(enable_checkpointing=False, accelerator="cpu")
    trainer = Trainer(default_root_dir=folder, callbacks=[callback], **settings)
    trainer.predict(StandIn(), StandInData(["x", "y", "z"]), return_predictions=False)


def test_every_prediction_is_printed_and_written(tmp_path, capsys):
    predict(tmp_path, Predictions())
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    # Batches of two: x and y, then z.
    assert [(row["prompt"], row["answer"]) for row in written] == [
        ("x", "0"),
        ("y", "1"),
        ("z", "0"),
    ]
    assert "prompt:    y\nanswer:    1\n" in capsys.readouterr().out


def test_predictions_keep_the_files_of_earlier_ones(tmp_path, capsys):
    for name in ("predictions.jsonl", "predictions_2.jsonl", "predictions_3.jsonl"):
        predict(tmp_path, Predictions(show=False))
        assert len((tmp_path / name).read_text().splitlines()) == 3
        assert f"written to {tmp_path / name}" in capsys.readouterr().out
    (tmp_path / "predictions_2.jsonl").write_text("")  # of a run that was killed at once
    predict(tmp_path, Predictions(show=False))
    assert (tmp_path / "predictions_2.jsonl").read_text()
    assert len([*tmp_path.glob("predictions*")]) == 3


def test_predictions_replace_a_file_that_the_recipe_names(tmp_path):
    path = tmp_path / "out" / "p.jsonl"
    for _ in range(2):
        predict(tmp_path, Predictions(str(path), show=False))
    assert len(path.read_text().splitlines()) == 3


def test_an_answer_is_shown_with_its_reasoning():
    row = dict(prompt="q", completion="", reasoning="1+1=2", answer="2")
    assert format_prediction(row) == "prompt:    q\nreasoning: 1+1=2\nanswer:    2\n"


def test_without_an_answer_the_whole_completion_is_shown():
    row = dict(prompt="q", completion="hm", reasoning="hm", answer=None)
    assert format_prediction(row) == "prompt:    q\ncompletion: hm\n"


def test_a_predicted_episode_is_shown_turn_by_turn():
    messages = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "<low>"}]
    row = {"prompt": "q", "completion": "7", "reasoning": "", "answer": "7", "messages": messages}
    shown = format_prediction(
        row | {"turn_rewards": [0.5], "calls": {"guess": [1, 0]}, "failed": ""}
    )
    assert "policy 1   | 7   (reward 0.5)\nuser       | <low>\n" in shown
    assert shown.endswith("guess 1 (0 failed)\n")


def test_a_mean_leaves_out_what_was_not_scored():
    assert (known_mean([1.0, None, 0.0]), known_mean([None])) == (0.5, None)
