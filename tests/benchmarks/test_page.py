import json

import pytest

from tests.benchmarks import page, step
from tests.benchmarks.roofline import Machine, floor
from tests.benchmarks.workload import SIZES, Size, Work

MACHINE = Machine(1.0, 2.0, 1.0, 1.0, 1)  # GFLOP/s and GB/s


def test_the_least_time_is_that_of_a_step_worked_out_by_hand():
    # One layer of 2 x 2 weights for query, output, keys and values and 3 of 2 x 4: 40 weights.
    size = Size(hidden=2, layers=1, heads=1, kv_heads=1, inner=4, vocab=8, prompts=1, prompt_len=3)
    assert size.linear_weights == 4 * 4 + 3 * 8
    work = Work(size, group=2, max_new=4, stop_prob=1.0)
    least = floor(work, [2.0, 4.0], MACHINE)
    # 3 prompt tokens and 2 fed ones through the body, 4 said ones through the head, and pairs of
    # tokens in attention: 9 / 2 in the prompt, 2 x 3 to it, 2 x 4 / 2 among the completions' own.
    forward = 2 * 40 * 5 + 2 * 4 * 2 * 8 + 4 * 1 * 2 * (4.5 + 6 + 4)
    moved = 4 * (40 + 16) * 7
    assert least["rollout_s"] == pytest.approx(max(forward, 4 * 56 * 4) / 1e9)
    assert least["learn_s"] == pytest.approx((3 * forward + moved) / 1e9)


@pytest.mark.parametrize("name", SIZES)
def test_models_have_the_sizes_that_the_page_states(name):
    millions = {"tiny": 1.05, "30m": 29.4, "100m": 100.0, "135m": 134.5}
    millions |= {"360m": 362.0, "0.5b": 494.0, "1.5b": 1543.6}
    size = SIZES[name]
    assert size.linear_weights + size.hidden * size.vocab == pytest.approx(
        millions[name] * 1e6, rel=0.02
    )


def test_tables_show_what_was_measured(tmp_path, monkeypatch):
    side = {"step_s": 2.0, "cpu_s": 3.0, "peak_rss_mib": 100.0, "mean_completion_len": 45.0}
    litgrpo = side | {
        "floor": {"rollout_s": 0.2, "learn_s": 0.6},
        "machine": {"float32_gflops": 110.0, "bfloat16_gflops": 220.0, "read_gb_s": 9.0},
        "roofline_frac": 0.4,
        "largest_loss": "learn_s",
        "mean_completion_len": 46.0,
        **dict.fromkeys(("rollout_s", "learn_s"), 1.0),
        **dict.fromkeys(("rollout_tok_per_s", "learn_tok_per_s"), 50.0),
    }
    found = {
        "size": "tiny",
        "stop_prob": 0.02,
        "bf16": False,
        "litgrpo": litgrpo,
        "baseline": side | {"step_s": 9.0, "peak_rss_mib": 400.0},
        "memory_frac": 0.25,
        **{f"ratio_{name}": 4.5 for name in ("wall", "cpu", "rollout", "learn")},
    }
    monkeypatch.setattr(page, "PAGE", tmp_path / "docs" / "page.md")
    monkeypatch.setattr(page, "EVIDENCE", tmp_path / "docs")
    page.PAGE.parent.mkdir()
    page.PAGE.write_text(
        "".join(f"<!-- {name} of zen4 -->\nold\n<!-- end -->\n" for name in page.TABLES)
        + "<!-- steps of zen5 -->\nnothing\n<!-- end -->\n"
    )
    results = {f"step {page.STEPS[0]}": found, page.before(page.STEPS[0]): found}
    page.results_of("zen4").write_text(json.dumps(results))
    page.write()
    text = page.PAGE.read_text()
    assert "| tiny | 0.02 | float32 | 9.00 | 2.00 | **4.50** |" in text
    assert "| tiny | 0.02 | float32 | 46, 45 | 2.00 | 9.00 | **4.5** |" in text
    assert "100 of 400 MiB (25%)" in text
    assert "| 1.00 (0.20) | 1.00 (0.60) | 50 | 50 | 110 | 9 | learn |" in text
    assert "old" not in text
    assert text.count("| tiny | 0.02 | float32 | 46, 45 |") == 1


def test_what_was_not_reached_says_what_would_have_to_become_of_the_time():
    litgrpo = {"step_s": 10.0, "rollout_s": 4.0, "learn_s": 5.0, "floor": {"rollout_s": 1.0}}
    found = {
        "size": "tiny",
        "stop_prob": 0.02,
        "bf16": False,
        "litgrpo": litgrpo,
        "memory_frac": 0.5,
    }
    shares = {"products": 0.5, "attention": 0.1}
    profile = {"rollout": {"products": 0.25, "attention": 0.25}, "learning": shares}
    results = {
        f"step {page.STEPS[0]}": found | {"ratio_wall": 3.0},
        page.before(page.STEPS[0]): found | {"ratio_wall": 1.4},
        "profile --size tiny --stop-prob 0.02": profile,
        f"step {page.STEPS[6]}": found | {"size": "100m", "ratio_wall": 5.0},
    }
    assert page.aims_table(results).splitlines()[2:] == [
        # 10 x 3 / 4 = 7.5 s are allowed, and 4 / 2 + 5 x 0.6 = 5 taken.
        "| tiny | 0.02 | float32 | times TRL | 4.00 | **3.00** | 5.00 | 5.00 | 2.50 |",
        "| tiny | 0.02 | float32 | times 7f06854 | 1.40 | 1.40 |  |  |  |",
        # 1 / 0.25 = 4 s are allowed.
        f"| tiny | 0.02 | float32 | {page.ROLLOUT} | 25% | 25% |  |  |  |",
        f"| tiny | 0.02 | float32 | {page.MEMORY} | 45% | **50%** |  |  |  |",
        "| 100m | 0.02 | float32 | times TRL | 6.50 | **5.00** |  |  |  |",
    ]
    slower = found | {"ratio_wall": 1.0, "litgrpo": litgrpo | {"floor": {"rollout_s": 0.25}}}
    assert page.aim(page.ROLLOUT, 0.25, slower, profile)[2:] == ["2.00", "2.00", "below 0"]


def test_times_are_compared_at_equal_lengths():
    litgrpo = {"step_s": 2.0, "cpu_s": 2.0, "rollout_s": 1.0, "learn_s": 1.0, "peak_rss_mib": 5.0}
    baseline = {"step_s": 12.0, "cpu_s": 24.0, "gen_s": 3.0, "train_s": 9.0, "peak_rss_mib": 50.0}
    found = step.ratios(
        litgrpo | {"mean_completion_len": 40.0}, baseline | {"mean_completion_len": 60.0}
    )
    assert found == {
        "length_ratio": 1.5,
        "ratio_wall": 4.0,
        "ratio_cpu": 8.0,
        "ratio_rollout": 2.0,
        "ratio_learn": 6.0,
        "memory_frac": 0.1,
    }


def test_sweeps_show_the_baseline_where_it_could_run(tmp_path, monkeypatch):
    litgrpo = {"rollout_s": 1.0, "learn_s": 2.0, "step_s": 3.5, "peak_rss_mib": 1000.0}
    both = {
        "litgrpo": litgrpo,
        "baseline": {"step_s": 14.0, "peak_rss_mib": 4000.0},
        "ratio_wall": 4.0,
    }
    alone = {"litgrpo": litgrpo, "baseline_failed": "Cannot allocate memory"}
    points = [("vocabulary", 512, both), ("vocabulary", 256000, alone)]
    points += [("million parameters", 1, both), ("million parameters", 30, both)]
    found = {f"step {page.swept(name, value)}": each for name, value, each in points}
    lines = page.sweeps_table(found).splitlines()
    assert "| vocabulary | 512 | 1.00 + 2.00 | 14.00 | 4.0 | 1,000 | 4,000 |" in lines
    assert "| vocabulary | 256,000 | 1.00 + 2.00 | does not fit |  | 1,000 |  |" in lines
    assert page.swept("million parameters", 1).startswith("--size tiny --stop-prob 0.02 --turns")
    assert page.swept("million parameters", 360).startswith("--size 360m")
    monkeypatch.setattr(page, "PLOT", tmp_path / "plot.png")
    page.plot(found)
    assert page.PLOT.stat().st_size > 10_000


def test_the_page_has_a_place_for_each_table_and_nothing_else():
    marks = page.MARKS.findall(page.PAGE.read_text())
    assert {name for _, name, _, _ in marks} == set(page.TABLES)
    assert len({mark[1:3] for mark in marks}) == len(marks)
    assert len(marks) == page.PAGE.read_text().count("<!-- end -->")
    assert all(page.results_of(processor).exists() for _, _, processor, _ in marks)


def test_an_unknown_table_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("<!-- stairs of zen4 -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="a place for 'stairs'; tables are \\['steps', 'phases'"):
        page.write()


def test_measuring_without_a_name_for_the_results_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["page", "--measure", "head"])
    with pytest.raises(SystemExit):
        page.main()
    assert "--measure needs --processor" in capsys.readouterr().err
