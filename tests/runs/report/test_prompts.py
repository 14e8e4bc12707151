from litgrpo.runs.report.prompts import MAX_PROMPTS, follow_prompts, rank_prompts
from litgrpo.runs.run import Run
from tests.runs.report.run_folders import evaluation, make_run


def test_the_same_prompts_are_shown_and_the_most_informative_come_first(tmp_path):
    found = follow_prompts(Run(make_run(tmp_path / "run")))
    assert len(found) == MAX_PROMPTS
    assert [each.reason for each in found[:5]] == ["most improved"] * 3 + [
        "incorrect, highest reward"
    ] * 2
    assert all(len(each.completions) == 2 for each in found)
    first = found[0]
    assert first.prompt == "5+1?"
    assert [view.when for view in first.completions] == ["before training", "after 60 iterations"]
    assert [view.correct for view in first.completions] == [False, True]
    assert first.completions[1].notes[:2] == [
        "correct",
        "reward 1.000 (correct 1.000, format 1.000)",
    ]


def test_prompts_that_got_worse_or_were_truncated_are_shown():
    after = evaluation(0, ["b"], truncated=True)
    found = follow_prompts(Run(evaluations={0: evaluation(2, ["a"]), 9: after}))
    assert {each.reason for each in found} >= {"got worse", "truncated"}


def test_hardest_and_easiest_are_different_prompts():
    run = Run(evaluations={0: evaluation(0, ["a"]), 9: evaluation(15, ["a"])})
    hardest, easiest = rank_prompts(run)
    assert [row.prompt for row in hardest] == [f"{n}+1?" for n in range(15, 20)]
    assert [row.prompt for row in easiest] == [f"{n}+1?" for n in reversed(range(10, 15))]
    assert (easiest[0].before, easiest[0].after) == ("0.000", "1.000")


def test_unscored_prompts_are_neither_hard_nor_easy_nor_incorrect():
    rows = evaluation(10, ["a"])
    for row in rows[8:]:
        row |= {"correct": None, "reward": None}
        row["samples"] = [sample | {"correct": None, "reward": None} for sample in row["samples"]]
    run = Run(evaluations={0: evaluation(0, ["a"]), 9: rows})
    hardest, easiest = rank_prompts(run)
    assert {row.after for row in hardest + easiest} == {"1.000"}
    found = follow_prompts(run)
    assert {each.reason for each in found} == {"most improved", "one of the others"}
    notes = [each.completions[-1].notes[:2] for each in found]
    assert any(note[0] == "unscored" for note in notes)


def test_without_evaluations_no_prompts_are_shown():
    assert follow_prompts(Run()) == []
    assert rank_prompts(Run()) == ([], [])
