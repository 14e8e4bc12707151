import json

import pytest
import yaml

from litgrpo.runs.pairing import pair_evaluations
from litgrpo.runs.report.results import (
    compare_first_and_last,
    compare_with_first_run,
    write_verdict,
)
from litgrpo.runs.run import Run, read_evaluation, table_of
from tests.runs.report.run_folders import evaluation, make_run


def test_a_gain_has_an_interval_and_a_paired_p_value(tmp_path):
    run = Run(make_run(tmp_path / "better"))
    text = write_verdict(run, compare_first_and_last(run))
    assert text.startswith(
        "Held-out accuracy (reward 'correct' >= 1) rose: 0.250 before, 0.750 after (+0.500, 95 % "
    )
    assert "paired p 0.00034, 20 prompts)" in text  # t = 4.359 with 19 degrees of freedom
    (pair,) = compare_first_and_last(run)
    assert (len(pair.comparison.gained), len(pair.comparison.lost)) == (10, 0)
    assert pair.comparison.p_value == pytest.approx(2 / 2**10)


@pytest.mark.parametrize(
    ("before", "after", "direction"),
    [(5, 6, "none"), (5, 5, "none"), (15, 2, "down"), (2, 15, "up")],
)
def test_the_direction_needs_a_significant_change(before, after, direction):
    (pair,) = pair_evaluations(evaluation(before, ["a"]), evaluation(after, ["b"]))
    assert pair.direction == direction


@pytest.mark.parametrize(("count", "direction"), [(5, "few"), (19, "few"), (20, "up")])
def test_a_change_on_few_prompts_is_not_called_one(count, direction, tmp_path):
    before, after = evaluation(0, ["a"])[:count], evaluation(count, ["b"])[:count]
    (pair,) = pair_evaluations(before, after)
    assert pair.direction == direction
    text = write_verdict(Run(make_run(tmp_path / "run")), [pair])
    said = f"({count} prompts: too few to decide)" in text
    assert (said, " rose: " in text) == (direction == "few", direction == "up")


def test_unscored_prompts_do_not_count_as_prompts_of_a_comparison():
    before, after = evaluation(0, ["a"]), evaluation(20, ["b"])
    for row in after[5:]:
        row["samples"] = [sample | {"correct": None, "reward": None} for sample in row["samples"]]
        row |= {"correct": None, "reward": None, "greedy": None}
    (pair,) = pair_evaluations(before, after)
    assert (pair.count, pair.after["avg@2"], pair.direction) == (5, 1.0, "few")
    for row in after:
        row["samples"] = [{"correct": None, "reward": None}] * 2
        row |= {"correct": None, "reward": None, "greedy": None}
    assert pair_evaluations(before, after) == []


def test_the_reward_is_the_main_metric_if_no_sample_is_correct():
    before, after = (
        [row | {"reward": x + row["index"] / 100} for row in evaluation(0, ["a"])]
        for x in (0.25, 0.5)
    )
    (pair,) = pair_evaluations(before, after)
    assert (pair.main_metric, pair.direction) == ("reward", "up")


def defined(rows, **definitions):
    return [row | {"definitions": definitions} for row in rows]


def test_what_was_redefined_between_two_evaluations_is_not_compared(tmp_path):
    before, after = evaluation(5, ["a"]), evaluation(15, ["b"])
    old = defined(before, reward="1 * correct", correct="correct >= 1")
    (pair,) = pair_evaluations(old, defined(after, reward="5 * correct", correct="correct >= 1"))
    assert list(pair.comparison.changes) == ["avg@2", "greedy", "correct", "format"]
    (pair,) = pair_evaluations(old, defined(after, reward="1 * correct", correct="correct >= 2"))
    assert list(pair.comparison.changes) == ["reward", "correct", "format"]
    assert (pair.comparison.solved_by, pair.comparison.gained) == ("", [])
    (pair,) = pair_evaluations(
        *(defined(rows, **{"rewards/format": x}) for rows, x in ((before, "old"), (after, "new")))
    )
    assert "format" not in pair.comparison.changes
    (pair,) = pair_evaluations(before, old)  # nothing is known of one of them
    assert len(pair.comparison.changes) == 5

    folder = make_run(tmp_path / "run")
    names = ("reward", "correct", "rewards/correct", "rewards/format")
    for file, text in zip(sorted((folder / "evaluation").iterdir()), ("old", "new"), strict=True):
        rows = defined(read_evaluation(file)[0], **dict.fromkeys(names, text))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run(folder)
    assert compare_first_and_last(run) == []
    verdict = write_verdict(run, [])
    assert "accuracy" not in verdict
    assert "reward was old, now new; correct was old, now new" in verdict
    ((_, pairs, note),) = compare_with_first_run([Run(make_run(tmp_path / "other")), run])
    assert (len(pairs), note) == (1, "")


def test_different_prompts_are_not_paired():
    other = [row | {"prompt": "another"} for row in evaluation(5, ["a"])]
    assert pair_evaluations(evaluation(5, ["a"]), other) == []


def test_prompts_are_paired_by_text_and_not_by_row_number():
    rows = evaluation(5, ["a"])
    part = [row | {"index": n} for n, row in enumerate(reversed(rows[3:10]))]
    (pair,) = pair_evaluations(rows, part)
    assert (pair.count, pair.comparison.changes["avg@2"].mean) == (7, 0.0)
    assert pair.before["avg@2"] == pair.after["avg@2"]


def test_a_prompt_with_another_answer_is_another_prompt():
    rows = [row | {"columns": {"answer": "2"}} for row in evaluation(5, ["a"])]
    changed = [row | {"columns": {"answer": "two"}} for row in rows[:6]] + rows[6:]
    (pair,) = pair_evaluations(rows, changed)
    assert pair.count == 14


def test_equal_prompts_are_paired_in_their_order():
    rows = [row | {"prompt": "the same"} for row in evaluation(2, ["a"])]
    (pair,) = pair_evaluations(rows, rows[:4])
    assert (pair.count, pair.before["avg@2"]) == (4, pair.after["avg@2"])


def test_sets_of_other_names_are_paired_by_text():
    rows = evaluation(5, ["a"])
    (pair,) = pair_evaluations(rows, [row | {"set": "hard"} for row in rows[:6]])
    assert pair.count == 6


def test_sets_of_prompts_are_paired_separately():
    easy, hard = ([r | {"set": s} for r in evaluation(5, ["a"])] for s in ("easy", "hard"))
    assert [pair.set_name for pair in pair_evaluations(easy + hard, hard + easy)] == [
        "easy",
        "hard",
    ]


def test_the_verdict_names_the_reward_that_decides_correctness(tmp_path):
    run = make_run(tmp_path / "run")
    config = {"model": {"init_args": {"rewards": {"format": {"weight": 0.2}, "exact": {}}}}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    files = Run(run)
    verdict = write_verdict(files, compare_first_and_last(files))
    assert verdict.startswith("Held-out accuracy (reward 'exact' >= 1) rose: ")


def test_an_unfinished_run_is_reported_as_such(tmp_path):
    run = make_run(tmp_path / "short")
    (run / "summary.json").unlink()
    assert "60 of 60 iterations" in write_verdict(Run(run), [])


def test_the_verdict_of_sft_is_its_loss():
    rows = [{"step": 0, "val/loss": 2.0}, {"step": 9, "val/loss": 1.5}]
    run = Run(metrics=table_of(rows), summary={"seed": 0})
    assert write_verdict(run, []) == "Held-out loss (val/loss): 2.000 before, 1.500 after."


def test_without_evaluation_files_the_verdict_is_the_logged_accuracy(tmp_path):
    run = make_run(tmp_path / "bare")
    for path in (run / "evaluation").iterdir():
        path.unlink()
    assert "(val/avg@2): 0.250 [0.100, 0.400] before, 0.750" in write_verdict(Run(run), [])


def test_other_runs_are_paired_with_the_first(tmp_path):
    runs = [Run(make_run(tmp_path / name, right=n)) for name, n in (("a", 15), ("b", 6))]
    ((name, (pair,), note),) = compare_with_first_run(runs)
    assert (name, pair.direction, len(pair.comparison.lost)) == ("b", "down", 9)
    assert note == ""
    assert compare_with_first_run([Run(), runs[0]]) == [("a", [], "")]
