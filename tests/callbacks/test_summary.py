import json
from pathlib import Path

import pytest

import litgrpo
from litgrpo import PromptData
from litgrpo.callbacks.summary import Summary, choose_samples, format_samples, format_table
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.evaluation.intervals import Change, Comparison
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
        success={},
        reward=dict(mean=None, low=None, high=None),
        rewards=rewards,
        text_quality={},
    )
    before = dict(avg_at_k=0.25, low=0.15, high=0.35, greedy=0.25, **rest)
    after = dict(avg_at_k=0.75, low=0.65, high=0.85, greedy=0.75, **rest)
    assert written["before"] == before
    assert written["after"] == after
    assert list(written["versions"]) == ["python", "litgrpo", "torch", "lightning", "transformers"]
    sample = {"prompt": "A", "completion": "<answer>0</answer>"}
    sample["rewards"] = {"correct": 1.0, "format": None}  # no format reward
    sample["reward"] = 1.0
    assert written["samples"] == {"before": [sample], "after": [sample]}


def test_the_terminal_shows_a_table_and_the_next_commands(tmp_path, capsys):
    fit(tmp_path, Summary(num_samples=1), module=StandIn(2, scores=[0.25, 0.75]))
    shown = capsys.readouterr().out
    assert "2 iterations, " in shown
    line = "avg@2    0.250 [0.150, 0.350]  0.750 [0.650, 0.850]"
    assert line in shown.splitlines()
    assert f"tensorboard --logdir {tmp_path}" in shown


def test_before_and_the_clock_survive_a_resume(tmp_path):
    first = Summary()
    module = StandIn(2, scores=[0.25, 0.5])
    fit(tmp_path, first, IterationCheckpoint(2, keep_best=0), module=module)
    second = Summary()
    resume = tmp_path / "checkpoints/last.ckpt"
    checkpoint, module = IterationCheckpoint(keep_best=0), StandIn(4, scores=[0.75])
    fit(tmp_path, second, checkpoint, module=module, resume=resume)
    assert summary(tmp_path)["before"]["avg_at_k"] == 0.25
    assert summary(tmp_path)["after"]["avg_at_k"] == 0.75
    assert second.trained_s > first.trained_s > 0


def test_a_finished_run_that_is_resumed_evaluates_all_prompts_again(tmp_path):
    fit(tmp_path, Summary(), IterationCheckpoint(), module=StandIn(2))
    resume = tmp_path / "checkpoints/last.ckpt"
    fit(tmp_path, Summary(), IterationCheckpoint(), module=StandIn(2), resume=resume)
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


def test_columns_are_aligned():
    before = dict(report={"loss": 12.5, "accuracy": 0.5}, n=0)
    after = dict(report={"loss": 1.5, "accuracy": 0.75}, n=0)
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
    evaluations = {name: dict(report=report, n=10) for name in ("before", "after")}
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
    table = format_table({name: dict(report=report, n=20) for name, report in reports.items()})
    rows = [line.split() for line in table.splitlines()[3:]]
    assert rows == [["unscored_frac", "0.000", "1.000"], ["avg@2", "0.500"], ["reward", "0.250"]]
    scored = format_table({"evaluated": dict(report=before, n=20)})
    assert "unscored" not in scored


@pytest.mark.parametrize(("count", "is_told"), [(5, True), (19, True), (20, False), (500, False)])
def test_intervals_of_few_prompts_are_said_to_be_too_narrow(count, is_told):
    report = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6}
    evaluation = dict(report=report, n=count)
    assert ("too narrow" in format_table({"evaluated": evaluation})) == is_told
    several = evaluation | {"n": 2 * count, "counts": {"a": count, "b": count}}
    assert ("too narrow" in format_table({"evaluated": several})) == is_told
    without = dict(report={"loss": 0.5}, n=count)
    assert "too narrow" not in format_table({"evaluated": without})


def test_samples_before_and_after_are_grouped_by_prompt():
    before, after = [[dict(prompt="1+1=", completion=said)] for said in "32"]
    assert format_samples(before, after) == "prompt: 1+1=\nbefore: 3\nafter:  2"
    assert format_samples([], after) == "prompt: 1+1=\nafter:  2"
    played = after[0] | {"messages": [{"role": "assistant", "content": "5"}], "turn_rewards": [1.0]}
    page = format_samples(before, [played])
    assert page.endswith("\n\nafter:\nprompt     | 1+1=\npolicy 1   | 5   (reward 1)"), page


def samples(said, rewards):
    rows = zip("abcde", said, rewards, strict=False)
    return [dict(prompt=p, completion=c, reward=r) for p, c, r in rows]


@pytest.mark.parametrize(
    ("said", "rewards", "shown"),
    [
        # Of equal rewards before: the largest gain, the largest loss, a changed completion.
        ("xyxyz", [0.5, 0.6, 0.5, 0.1, 0.9], [4, 3, 1]),
        # Nothing fell: the lowest reward; then what changed.
        ("xxyxz", [0.5, 0.5, 0.6, 0.5, 0.9], [4, 0, 2]),
        # Nothing changed: in the order of the data.
        ("xxxxx", [0.5] * 5, [0, 1, 2]),
        # No reward is neither the lowest one nor a loss.
        ("xxxxx", [0.5, None, 0.5, 0.5, 0.5], [0, 2, 1]),
        ("xxxxx", [None, -0.5, None, -0.7, -0.9], [1, 4, 0]),
        ("xyxxx", [None] * 5, [1, 0, 2]),
    ],
)
def test_shown_samples_are_those_that_changed_most(said, rewards, shown):
    assert choose_samples(samples("xxxxx", [0.5] * 5), samples(said, rewards), 3) == shown


def test_without_an_evaluation_before_the_best_and_the_worst_are_shown():
    after = samples("vwxyz", [0.5, 0.6, 0.5, 0.1, 0.9])
    assert choose_samples([], after, 3) == [4, 3, 0]
    assert choose_samples([], after, 1) == [4]
    assert choose_samples([], after, 0) == []
    assert choose_samples([], after[:1], 3) == [0]
    assert choose_samples([], [], 3) == []


def evaluation(prompts, scores):
    """An evaluation as a resumed run has it: prompts by their place in the data."""
    return {
        "report": {"avg@4": sum(scores) / len(scores)},
        "n": len(prompts),
        "reward_names": ["correct"],
        "samples": [
            dict(prompt=text, completion=f"said {n}", reward=0.0) for n, text in enumerate(prompts)
        ],
        "of_prompts": {
            "": {
                "index": [float(n) for n in range(len(prompts))],
                "avg@4": list(map(float, scores)),
            }
        },
        "digests": {"": dict(enumerate(prompts))},
    }


def compare(before, after):
    summary = Summary()
    summary.before, summary.after = before, after
    return summary


def test_other_validation_prompts_of_a_resumed_run_are_not_compared(tmp_path):
    same = compare(evaluation("abcd", [0, 0, 1, 1]), evaluation("abcd", [1, 0, 1, 1]))
    assert same.comparisons()[""].changes["avg@4"].mean == 0.25
    assert "validation data changed" not in same.page(tmp_path, 3)
    # Of the same places, but other prompts; two of them moved.
    moved = compare(evaluation("abcd", [0, 0, 1, 1]), evaluation("xdybz", [1, 1, 0, 1, 0]))
    assert moved.comparisons()[""].changes["avg@4"].mean == 0.5
    assert moved.comparisons()[""].gained == [3]
    page = moved.page(tmp_path, 3)
    assert "measured on 4 prompts, `after` on 5; 2 are in both" in page
    shown = page[page.index("prompt: ") :]
    assert shown.startswith(
        "prompt: x\nafter:  said 0\n\nprompt: d\nbefore: said 3\nafter:  said 1"
    )
    others = compare(evaluation("ab", [0, 1]), evaluation("cd", [1, 1]))
    assert others.comparisons() == {}
    assert others.content()["change"] == {}
    assert "0 are in both" in others.page(tmp_path, 3)


TINY = Path(litgrpo.__file__).parent / "assets" / "tiny-gemma2"


def test_validation_prompts_are_known_by_text_answer_and_number():
    def digests(rows, **options):
        data = PromptData(val=rows, tokenizer=str(TINY), batch_size=1, **options)
        data.setup("validate")
        return data.validation_digests()

    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "1+2?", "answer": "3"}]
    (first,) = [digests(rows)[""]]
    assert digests(rows[::-1])[""] == {0: first[1], 1: first[0]}
    assert len({*digests([*rows, rows[0]])[""].values()}) == 3
    changed = digests([rows[0] | {"answer": "two"}, rows[1]])[""]
    assert changed[0] != first[0]
    assert changed[1] == first[1]
    assert not {*digests(rows, template="Q: {{ prompt }}")[""].values()} & {*first.values()}
    assert [*digests({"a": rows[:1], "b": rows[1:]})] == ["a", "b"]
