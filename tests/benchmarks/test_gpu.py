import json
import sys
from types import SimpleNamespace

import pytest
import transformers

from tests.benchmarks import gpu, random_model
from tests.benchmarks.workload import SIZES, Work

PAGE = "before\n<!-- gpu -->\nNot run.\n<!-- end -->\nafter\n"


def test_the_baseline_has_the_same_weights():
    litgrpo = Work(SIZES["tiny"], stop_prob=0.02, max_new=32).policy().model
    baseline = random_model.RandomModel(random_model.SIZES["tiny"], 0.02, 64 + 32 + 8).model()
    assert all(
        one.equal(other)
        for one, other in zip(litgrpo.parameters(), baseline.parameters(), strict=True)
    )


def test_one_command_measures_our_engines_and_writes_the_page(tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(PAGE)
    words = "--device cpu --sizes tiny --turns 1 --steps 1 --warmup 1 --group 2 --max-new 8"
    words += f" --threads 1 --stop-prob 0.2 --page {page} --results {results}"
    monkeypatch.setattr(sys, "argv", ["gpu", *words.split()])
    gpu.main()
    (case,) = json.loads(results.read_text())["cases"]
    assert list(case["sides"]) == list(gpu.ENGINES)
    assert all(side["step_s"] > 0 and side["rollout_s"] > 0 for side in case["sides"].values())
    text = page.read_text()
    assert f"transformers {transformers.__version__}" in text
    assert "| tiny | bf16 | litgrpo, recorded steps |" in text
    assert "Not run" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")


def test_a_side_that_fails_ends_with_what_it_said(monkeypatch):
    monkeypatch.setattr(gpu, "command", lambda *given: [sys.executable, "-c", "raise OSError(7)"])
    with pytest.raises(SystemExit, match=r"TRL, tiny: .* failed:(.|\n)*OSError: 7"):
        gpu.turn(SimpleNamespace(), "tiny", "TRL")


def test_a_step_is_compared_at_equal_lengths():
    side = dict(step_s=2.0, rollout_s=1.0, learn_s=1.0, peak_device_mib=9.0, peak_rss_mib=5.0)
    baseline = dict(step_s=12.0, gen_s=6.0, train_s=6.0, peak_device_mib=0.0, peak_rss_mib=50.0)
    sides = {
        "litgrpo": side | {"mean_completion_len": 40.0},
        "TRL": baseline | {"mean_completion_len": 60.0},
    }
    litgrpo, other = gpu.rows({"cases": [{"size": "tiny", "bf16": False, "sides": sides}]})
    assert litgrpo == ["tiny", "float32", "litgrpo", "40", "2", "1", "1", "9", "1.00"]
    assert other == ["tiny", "float32", "TRL", "60", "12", "6", "6", "50", "4.00"]
