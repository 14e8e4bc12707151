import pytest

from litgrpo.tools.report.results import against_first, of_run, pairs, verdict
from litgrpo.tools.report.run_files import RunFiles, read
from tests.tools.report.run_folders import evaluation, make_run


def test_a_gain_is_told_with_interval_and_paired_p(tmp_path):
    run = read(make_run(tmp_path / "better"))
    said = verdict(run, of_run(run))
    assert said.startswith("Held-out accuracy rose: 0.250 before, 0.750 after (+0.500, 95 % ")
    assert "paired p 0.00034, 20 prompts)" in said  # t = 4.359 with 19 degrees of freedom
    (pair,) = of_run(run)
    assert (len(pair.comparison.gained), len(pair.comparison.lost)) == (10, 0)
    assert pair.comparison.p_value == pytest.approx(2 / 2**10)


@pytest.mark.parametrize(
    ("before", "after", "way"), [(5, 6, "none"), (5, 5, "none"), (15, 2, "down"), (2, 15, "up")]
)
def test_the_verdict_needs_evidence(before, after, way):
    (pair,) = pairs(evaluation(before, ["a"]), evaluation(after, ["b"]))
    assert pair.way == way


def test_a_graded_reward_decides_where_nothing_is_right():
    before, after = (
        [row | {"reward": x + row["index"] / 100} for row in evaluation(0, ["a"])]
        for x in (0.25, 0.5)
    )
    (pair,) = pairs(before, after)
    assert (pair.decides, pair.way) == ("reward", "up")


def test_other_prompts_are_not_paired():
    other = [row | {"prompt": "another"} for row in evaluation(5, ["a"])]
    assert pairs(evaluation(5, ["a"]), other) == []


def test_sets_of_prompts_are_paired_apart():
    easy, hard = ([r | {"set": s} for r in evaluation(5, ["a"])] for s in ("easy", "hard"))
    assert [pair.set_name for pair in pairs(easy + hard, hard + easy)] == ["easy", "hard"]


def test_a_run_that_goes_on_says_so(tmp_path):
    run = make_run(tmp_path / "short")
    (run / "summary.json").unlink()
    assert "It goes on or was stopped: 60 of 60 iterations, no summary." in verdict(read(run), [])


def test_supervised_training_is_told_by_its_loss():
    run = RunFiles("sft", series={"val/loss": [(0, 2.0), (9, 1.5)]}, summary={"seed": 0})
    assert verdict(run, []).startswith("val/loss: 2.000 before, 1.500 after; ")


def test_without_the_answers_the_logged_accuracy_is_told(tmp_path):
    run = make_run(tmp_path / "bare")
    for path in (run / "evaluation").iterdir():
        path.unlink()
    assert "val/avg@2: 0.250 [0.100, 0.400] before, 0.750" in verdict(read(run), [])


def test_other_runs_are_paired_with_the_first(tmp_path):
    runs = [read(make_run(tmp_path / name, right=n)) for name, n in (("a", 15), ("b", 6))]
    ((name, (pair,)),) = against_first(runs)
    assert (name, pair.way, len(pair.comparison.lost)) == ("b", "down", 9)
    assert against_first([RunFiles("none"), runs[0]]) == [("a", [])]
