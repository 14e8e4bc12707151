from litgrpo.tools.report.prompts import MOST, followed, ranked
from litgrpo.tools.report.run_files import RunFiles, read
from tests.tools.report.run_folders import evaluation, make_run


def test_the_same_prompts_are_followed_and_the_telling_ones_come_first(tmp_path):
    found = followed(read(make_run(tmp_path / "run")))
    assert len(found) == MOST
    assert [each.why for each in found[:5]] == ["most improved"] * 3 + ["wrong, highest reward"] * 2
    assert all(len(each.answers) == 2 for each in found)
    first = found[0]
    assert first.prompt == "5+1?"
    assert [answer.when for answer in first.answers] == ["before training", "after 60 iterations"]
    assert [answer.right for answer in first.answers] == [False, True]
    assert first.answers[1].notes[:2] == ["right", "reward 1.000 (correct 1.000, format 1.000)"]


def test_prompts_that_got_worse_or_were_cut_off_are_among_them():
    after = evaluation(0, ["b"], truncated=True)
    found = followed(RunFiles("a", evaluations={0: evaluation(2, ["a"]), 9: after}))
    assert {each.why for each in found} >= {"got worse", "cut off"}


def test_hardest_and_easiest_are_different_prompts():
    run = RunFiles("a", evaluations={0: evaluation(0, ["a"]), 9: evaluation(15, ["a"])})
    hardest, easiest = ranked(run)
    assert [row.prompt for row in hardest] == [f"{n}+1?" for n in range(15, 20)]
    assert [row.prompt for row in easiest] == [f"{n}+1?" for n in reversed(range(10, 15))]
    assert (easiest[0].before, easiest[0].after) == ("0.000", "1.000")


def test_without_evaluations_there_is_nothing():
    assert followed(RunFiles("a")) == []
    assert ranked(RunFiles("a")) == ([], [])
