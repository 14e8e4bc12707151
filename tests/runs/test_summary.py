import json
import shutil

import pytest
import torch

from litgrpo.callbacks.evaluation_files import EvaluationFiles
from litgrpo.callbacks.loggers import MetricsCSV
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.resume import LoggerState
from litgrpo.evaluation.intervals import Change, Comparison
from litgrpo.runs.run import Run
from litgrpo.runs.summary import (
    Evaluation,
    RunSummary,
    Summary,
    format_samples,
    format_table,
)
from tests.support.fitting import fit
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_the_file_holds_before_and_after_with_exactly_these_fields(tmp_path):
    fit(tmp_path, Summary(num_samples=1), module=StandIn(2, scores=[0.25, 0.75]))
    written = summary(tmp_path)
    names = ["before", "after", "change", "seconds", "seed", "versions", "samples"]
    assert list(written) == names
    rewards = {"correct": 0.5, "format": 1.0}
    rest = dict(
        n=4,
        success={"rewards": {"": "correct"}, "threshold": 1.0},
        reward=dict(mean=None, low=None, high=None),
        rewards=rewards,
        text_quality={},
    )
    before = dict(avg_at_k=0.25, low=0.15, high=0.35, greedy=0.25, **rest)
    after = dict(avg_at_k=0.75, low=0.65, high=0.85, greedy=0.75, **rest)
    assert written["before"] == before
    assert written["after"] == after
    assert list(written["versions"]) == ["python", "litgrpo", "torch", "lightning", "transformers"]
    sample = {"prompt": "A", "completion": "<answer>0</answer>", "reward": 1.0}
    sample |= {"rewards": {"correct": 1.0, "format": None}}  # no format reward
    sample |= {"correct": True, "length": 3, "truncated": False}
    assert written["samples"] == {"before": [sample], "after": [sample]}


def test_the_terminal_shows_a_table_and_the_next_commands(tmp_path, capsys):
    fit(tmp_path, Summary(num_samples=1), module=StandIn(2, scores=[0.25, 0.75]))
    shown = capsys.readouterr().out
    assert "2 iterations, " in shown
    line = "avg@2    0.250 [0.150, 0.350]  0.750 [0.650, 0.850]  +0.000 [+0.000, +0.000]"
    assert line in shown.splitlines()
    assert f"tensorboard --logdir {tmp_path}" in shown


def fit_recorded(folder, module, resume=None):
    """Train with everything that the summary reads, and a checkpoint; return the summary."""
    callbacks = EvaluationFiles(), Summary(), LoggerState(folder), IterationCheckpoint(keep_best=0)
    fit(folder, *callbacks, module=module, logger=MetricsCSV(folder), resume=resume)
    return callbacks[1]


def test_a_run_that_is_resumed_twice_has_one_before_and_one_row_per_iteration(tmp_path):
    resume, seconds = None, [0.0]
    for stop, scores in (2, [0.25, 0.5]), (3, [0.6]), (4, [0.6, 0.75]):
        seconds.append(fit_recorded(tmp_path, StandIn(stop, scores=scores), resume).trained_s)
        resume = tmp_path / "checkpoints/last.ckpt"
    assert seconds == sorted(seconds)
    written = summary(tmp_path)
    assert written["before"]["avg_at_k"] == 0.25
    assert written["after"]["avg_at_k"] == 0.75
    assert written["before"]["n"] == written["after"]["n"] == 4
    assert written["change"][""]["reward"]["mean"] == 0.0
    rows = [row.split(",")[0] for row in (tmp_path / "metrics.csv").read_text().splitlines()]
    # Each evaluation has a row of its own.
    assert rows == ["step", "0", "1", "2", "2", "3", "3", "4", "4"]
    assert Run(tmp_path).metrics.index.tolist() == [0, 1, 2, 3, 4]


def test_evaluations_after_the_checkpoint_that_a_run_resumes_from_are_not_its_last(tmp_path):
    fit_recorded(tmp_path, StandIn(2, scores=[0.25, 0.5]))
    last, older = tmp_path / "checkpoints/last.ckpt", tmp_path / "older.ckpt"
    shutil.copy(last, older)
    fit_recorded(tmp_path, StandIn(4, scores=[0.9]), last)
    fit_recorded(tmp_path, StandIn(3, scores=[0.6]), older)
    assert summary(tmp_path)["after"]["avg_at_k"] == 0.6


def test_a_run_resumed_into_another_folder_has_its_own_before(tmp_path):
    fit_recorded(tmp_path / "a", StandIn(2, scores=[0.25, 0.5]))
    resume = tmp_path / "a/checkpoints/last.ckpt"
    fit_recorded(tmp_path / "b", StandIn(4, scores=[0.75]), resume)
    assert summary(tmp_path / "b")["before"] is None
    assert summary(tmp_path / "b")["after"]["avg_at_k"] == 0.75


def test_the_checkpoint_has_only_the_seconds(tmp_path):
    fit_recorded(tmp_path, StandIn(2))
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=False)
    assert state["callbacks"]["Summary"].keys() == {"trained_s"}


def test_files_of_an_earlier_run_are_not_read_where_none_are_written(tmp_path):
    fit_recorded(tmp_path, StandIn(4, scores=[0.25, 0.9]))
    callbacks = EvaluationFiles(enabled=False), Summary()
    fit(tmp_path, *callbacks, module=StandIn(1, scores=[0.1, 0.2]))
    written = summary(tmp_path)
    assert (written["before"]["avg_at_k"], written["after"]["avg_at_k"]) == (0.1, 0.2)
    assert (written["after"]["n"], written["change"]) == (0, {})


def test_a_finished_run_that_is_resumed_evaluates_all_prompts_again(tmp_path):
    fit_recorded(tmp_path, StandIn(2))
    module = StandIn(2)
    fit_recorded(tmp_path, module, tmp_path / "checkpoints/last.ckpt")
    assert module.evaluations == 1
    assert summary(tmp_path)["after"]["n"] == 4


def test_after_is_evaluated_also_if_no_validation_was_due(tmp_path):
    # One epoch is two iterations; Lightning validates at the end only if someone sets should_stop.
    module = StandIn(None, scores=[0.25, 0.75])
    fit(tmp_path, Summary(), module=module, max_epochs=1)
    assert module.evaluations == 2
    assert summary(tmp_path)["after"]["avg_at_k"] == 0.75


def test_lightning_validates_at_max_iterations(tmp_path):
    # Trainer.should_stop makes Lightning validate; if it did not, Summary would, later.
    module = fit(tmp_path, module=StandIn(2))
    assert module.evaluations == 2


def test_without_a_validation_before_only_after_is_shown(tmp_path):
    fit(tmp_path, Summary(), module=StandIn(2, scores=[0.75]), num_sanity_val_steps=0)
    assert summary(tmp_path)["before"] is None
    assert summary(tmp_path)["after"]["avg_at_k"] == 0.75


def rows_of(count, **more):
    """Rows of an evaluation file."""
    sample = {"completion": "2", "correct": True}
    return [{"index": n, "prompt": f"{n}", "samples": [sample], **more} for n in range(count)]


def test_columns_are_aligned():
    before = Evaluation({"loss": 12.5, "accuracy": 0.5})
    after = Evaluation({"loss": 1.5, "accuracy": 0.75})
    assert format_table({"before": before, "after": after}).splitlines() == [
        "held-out data",
        "          before  after",
        "-----------------------",
        "loss      12.5    1.500",
        "accuracy  0.500   0.750",
    ]


@pytest.mark.parametrize(("columns", "starts"), [(79, "0.500   "), (87, "0.500 [0.450")])
def test_a_narrow_terminal_shows_intervals_of_the_changes_only(monkeypatch, columns, starts):
    report = {"greedy": 0.5, "greedy_low": 0.45, "greedy_high": 0.55, "initial_perplexity": 1.0}
    comparison = Comparison({"greedy": Change(0.25, 0.2, 0.3)}, "greedy", [], [])
    evaluations = dict.fromkeys(("before", "after"), Evaluation(report, rows_of(10)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = format_table(evaluations, {"": comparison}).splitlines()
    assert max(map(len, lines)) <= columns
    greedy = lines[3]
    assert greedy.startswith("greedy              " + starts)
    assert greedy.endswith("+0.250 [+0.200, +0.300]")


def test_the_table_shows_unscored_completions_and_what_only_one_evaluation_has():
    before = {"avg@2": 0.5, "unscored_frac": 0.0, "reward": 0.25}
    after = {"unscored_frac": 1.0, "greedy_unscored_frac": 0.0}
    reports = {"before": before, "after": after}
    evaluations = {name: Evaluation(report, rows_of(20)) for name, report in reports.items()}
    table = format_table(evaluations)
    rows = [line.split() for line in table.splitlines()[3:]]
    assert rows == [["unscored_frac", "0.000", "1.000"], ["avg@2", "0.500"], ["reward", "0.250"]]
    scored = format_table({"evaluated": Evaluation(before, rows_of(20))})
    assert "unscored" not in scored


@pytest.mark.parametrize(("count", "is_told"), [(5, True), (19, True), (20, False), (500, False)])
def test_intervals_of_few_prompts_are_said_to_be_too_narrow(count, is_told):
    report = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6}
    evaluation = Evaluation(report, rows_of(count))
    assert ("too narrow" in format_table({"evaluated": evaluation})) == is_told
    several = Evaluation(report, [*rows_of(count, set="a"), *rows_of(count, set="b")])
    assert ("too narrow" in format_table({"evaluated": several})) == is_told
    without = Evaluation({"loss": 0.5}, rows_of(count))
    assert "too narrow" not in format_table({"evaluated": without})


def test_samples_before_and_after_are_grouped_by_prompt():
    before, after = (dict(prompt="1+1=", completion=text) for text in "32")
    assert format_samples([(before, after)]) == "prompt: 1+1=\nbefore: 3\nafter:  2"
    assert format_samples([(None, after)]) == "prompt: 1+1=\nafter:  2"
    played = after | {"messages": [{"role": "assistant", "content": "5"}], "turn_rewards": [1.0]}
    page = format_samples([(before, played)])
    assert page.endswith("\n\nafter:\nprompt     | 1+1=\npolicy 1   | 5   (reward 1)"), page


def evaluation(prompts, scores):
    """An evaluation of prompts by their place in the data."""
    rows = [
        {
            "index": n,
            "prompt": text,
            "samples": [{"completion": f"said {n}", "reward": 0.0, "correct": bool(score)}],
        }
        for n, (text, score) in enumerate(zip(prompts, scores, strict=True))
    ]
    return Evaluation({"avg@1": sum(scores) / len(scores)}, rows)


def test_other_validation_prompts_of_a_resumed_run_are_not_compared(tmp_path):
    same = RunSummary(evaluation("abcd", [0, 0, 1, 1]), evaluation("abcd", [1, 0, 1, 1]))
    assert same.comparisons[""].changes["avg@1"].mean == 0.25
    assert "validation data changed" not in same.page(tmp_path, 3)
    # Of the same places, but other prompts; two of them moved.
    moved = RunSummary(evaluation("abcd", [0, 0, 1, 1]), evaluation("xdybz", [1, 1, 0, 1, 0]))
    assert moved.comparisons[""].changes["avg@1"].mean == 0.5
    assert moved.comparisons[""].gained == [3]
    page = moved.page(tmp_path, 3)
    assert "measured on 4 prompts, `after` on 5; 2 are in both" in page
    shown = page[page.index("prompt: ") :]
    # Row 2 is incorrect, the others come in the order of the data; "d" was row 3.
    assert shown.startswith(
        "prompt: y\nafter:  said 2\n\nprompt: x\nafter:  said 0\n\nprompt: b\nbefore: said 1"
    )
    assert "note" not in moved.content()
    others = RunSummary(evaluation("ab", [0, 1]), evaluation("cd", [1, 1]))
    assert others.comparisons == {}
    assert others.content()["change"] == {}
    assert "0 are in both" in others.page(tmp_path, 3)


def test_a_reward_with_another_weight_is_not_compared(tmp_path):
    before, after = evaluation("abcd", [0, 0, 1, 1]), evaluation("abcd", [1, 0, 1, 1])
    for weight, side in (1, before), (5, after):
        for row in side.rows:
            row |= {"reward": weight / 2, "definitions": {"reward": f"{weight} * letters"}}
    changed = RunSummary(before, after)
    assert list(changed.comparisons[""].changes) == ["avg@1"]
    note = "Not compared, because the definition changed: reward was 1 * letters, now 5 * letters."
    assert changed.content()["note"] == note
    assert note in changed.page(tmp_path, 3)
