"""Tests of `compare`: runs, results and significance."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from litgrpo.cli.main import main
from litgrpo.runs import compare as comparing
from litgrpo.runs.compare import (
    SeedResult,
    compare,
    compare_runs,
    describe_table,
    find_words,
    holm,
    read_result,
    tabulate,
    without_intervals,
)
from litgrpo.runs.run import Run
from litgrpo.runs.training import train
from tests.support.raises import raises_for

ROOT = Path(__file__).parents[2]
METRICS = ("pass@1", "pass@8")
ALL = (*METRICS, "reward")


def run(pass_at_1, tokens=1000, reward=2.5):
    before = dict.fromkeys(ALL, 0.25)
    after = {"pass@1": pass_at_1, "pass@8": 0.5, "reward": reward}
    return SeedResult(before, after, tokens, 4)


def rows(**values):
    return compare_runs(
        {name: [run(value) for value in some] for name, some in values.items()}, ALL
    )


def test_holm_corrects_p_values_and_keeps_their_order():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx(
        {"a": 0.06, "b": 0.03, "c": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_a_difference_is_significant_if_seeds_agree():
    first, better, worse, unclear = rows(
        first=[0.50, 0.60, 0.55, 0.52, 0.58],
        better=[0.61, 0.70, 0.65, 0.63, 0.68],
        worse=[0.41, 0.50, 0.45, 0.43, 0.48],
        unclear=[0.90, 0.20, 0.55, 0.30, 0.70],
    )
    assert first.verdict("pass@1") == "baseline"
    assert better.verdict("pass@1").startswith("yes, better (p 0.00")
    assert worse.verdict("pass@1").startswith("yes, worse (p 0.00")
    assert unclear.verdict("pass@1").startswith("no (p ")
    # Differences 0.11, 0.10, 0.10, 0.11, 0.10: mean 0.104, t(4) 2.776 times error 0.00245.
    gain = better.gains["pass@1"]
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.104, 0.0972, 0.1108), abs=1e-4)


def test_the_table_has_a_row_for_every_algorithm_and_the_initial_policy():
    cells = tabulate(rows(plain=[0.5, 0.6], other=[0.6, 0.7]), METRICS)
    assert cells[0][:3] == ["algorithm", "pass@1", "pass@8"]
    assert [line[0] for line in cells[1:]] == ["before training", "plain", "other"]
    assert cells[1][1] == "0.250 [0.250, 0.250]"
    # t(1) is 12.706, the error 0.05: an interval of more than a share can be.
    assert cells[2][1] == "0.550 [0.000, 1.000]"
    assert cells[3][3] == "2.500 [2.500, 2.500]"  # a reward is no share: it may be above 1
    assert cells[3][4].startswith("+0.100 ")
    assert cells[3][6:] == ["4", "1,000"]
    assert "2 seeds" in describe_table([3, 4])
    # In a terminal: without the intervals of the means, iterations and tokens.
    _, untrained, *_, other = without_intervals(cells)
    assert untrained[1] == "0.250"
    assert other[4] == cells[3][4]
    assert len(other) == len(cells[3]) - 2


def test_without_any_success_the_mean_reward_is_compared():
    found = {"plain": [1.0, 1.1, 1.2], "other": [2.0, 2.1, 2.2]}
    runs = {name: [run(0.0, reward=x) for x in values] for name, values in found.items()}
    head, *_, last = tabulate(compare_runs(runs, ALL), METRICS)
    assert head[4] == "reward minus baseline"
    assert last[4] == "+1.000 [+1.000, +1.000]"
    assert last[5].startswith("yes, better")


def test_an_unknown_algorithm_raises_before_any_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # built-in overrides are found from any folder
    assert find_words("plain") == []
    assert find_words("dapo") == ["--model.objective", "dapo"]
    assert find_words("distillation/gkd")[1].endswith("gkd.yaml")
    with pytest.raises(ValueError, match=r"'dappo'.*plain, grpo, .*dapo"):
        compare("configs/quickstart.yaml", ["plain", "dappo"], run_dir=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("algorithms", "seeds", "setting"),
    [
        (["plain"], [0, 1], "algorithms"),
        (["plain", "plain"], [0, 1], "algorithms"),
        (["plain", "dapo"], [0], "seeds"),
        (["plain", "dapo"], [0, 0], "seeds"),
    ],
)
def test_fewer_than_two_algorithms_or_seeds_raise(algorithms, seeds, setting):
    with pytest.raises(ValueError, match=setting):
        compare("configs/quickstart.yaml", algorithms, seeds=seeds)


def test_a_failed_run_is_named_with_its_error(tmp_path, monkeypatch):
    """Although a library writes more at exit."""
    written = 'import atexit, sys\natexit.register(sys.stderr.write, "leaked\\n" * 9)\n'
    (tmp_path / "sitecustomize.py").write_text(written)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    text = r"seed=1 failed with exit code 2:\nerror: recipe 'none'"
    with pytest.raises(ValueError, match=text):
        train(tmp_path / "seed=1", ["-c", "none"], OMP_NUM_THREADS="1")


def test_a_run_is_read_from_its_metrics(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,val/pass@1,val/pass@8,reward/mean,perf/generated_tokens\n"
        "0,0.25,0.5,,\n1,,,0.3,120\n2,,,0.4,250\n2,0.75,1.0,,\n"
    )
    found = read_result(Run(tmp_path), METRICS)
    assert found.before == {"pass@1": 0.25, "pass@8": 0.5}
    assert found.after == {"pass@1": 0.75, "pass@8": 1.0}
    assert (found.tokens, found.iterations) == (250, 2)


def test_a_run_whose_held_out_completions_were_not_scored_is_named(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,perf/generated_tokens,val/unscored_frac\n0,,1.0\n1,10,1.0\n"
    )
    with raises_for(str(tmp_path), "val/pass@1", "scored"):
        read_result(Run(tmp_path), METRICS)


def test_the_command_writes_table_numbers_and_plot(monkeypatch, tmp_path, capsys):
    """The runs are already finished, so nothing is trained."""
    for name, value in {"plain": 0.5, "dapo": 0.75}.items():
        for seed in (0, 1):
            folder = tmp_path / name / f"seed={seed}"
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text("{}")
            (folder / "metrics.csv").write_text(
                "step,val/pass@1,val/pass@2,val/reward,reward/mean,perf/generated_tokens\n"
                f"0,0.25,0.5,0.1,,\n1,,,,0.3,120\n1,{value + seed / 100},0.9,0.2,,\n"
            )
    words = ["compare", "configs/quickstart.yaml", "--algorithms=[plain, dapo]", "--seeds=[0, 1]"]
    words += ["--samples=2", f"--run_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["cli.py", *words])
    monkeypatch.chdir(ROOT)
    assert main() == 0
    printed = capsys.readouterr().out
    assert re.search(r"^dapo +0.755 ", printed, re.MULTILINE)
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert numbers["algorithms"]["dapo"]["after"][1]["pass@1"] == 0.76
    assert re.search(r"\| dapo +\| 0.755 \[0.691, 0.819\] ", (tmp_path / "table.md").read_text())
    assert (tmp_path / "table.md").read_text().startswith("| algorithm ")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_raises_with_the_install_command(monkeypatch):
    monkeypatch.setattr(comparing, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        compare("configs/quickstart.yaml")
