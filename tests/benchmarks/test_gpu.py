import json
import sys
import textwrap

import pytest
import torch

from tests.benchmarks import gpu, random_model
from tests.benchmarks.gpu import Budget, Case
from tests.benchmarks.workload import SIZES, Work
from tests.cuda_device.run import needs_cuda, run_on_cuda

PAGE = "before\n<!-- gpu -->\nNot run on a GPU.\n<!-- end -->\nafter\n"
SIDE = dict(step_s=2.0, rollout_s=1.0, learn_s=1.0, peak_device_mib=9.0, mean_completion_len=40.0)
BASELINE = dict(step_s=12.0, gen_s=6.0, train_s=6.0, peak_device_mib=50.0, mean_completion_len=60.0)
# An environment's Python: it has vLLM, and its TRL is too large for the GPU with vLLM.
TRL = f"""\
    #!{sys.executable}
    import json, sys
    if sys.argv[1] == "-c":
        sys.exit(0)
    assert sys.argv[2] == "tests.benchmarks.trl_steps", sys.argv
    assert "--device cuda --size tiny --steps 2 --bf16" in " ".join(sys.argv), sys.argv
    if "--vllm" in sys.argv:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    print(json.dumps({BASELINE}))
    """


def test_the_baseline_has_the_same_weights():
    litgrpo = Work(SIZES["tiny"], stop_prob=0.02, max_new=32).policy().model
    baseline = random_model.RandomModel(random_model.SIZES["tiny"], 0.02, 64 + 32 + 8).model()
    assert all(
        one.equal(other)
        for one, other in zip(litgrpo.parameters(), baseline.parameters(), strict=True)
    )


@needs_cuda
def test_one_command_measures_all_sides_and_writes_the_page(tmp_path):
    page, results, python = tmp_path / "page.md", tmp_path / "gpu.json", tmp_path / "python"
    page.write_text(PAGE)
    python.write_text(textwrap.dedent(TRL))
    python.chmod(0o755)
    words = "--sizes tiny --repetitions 1 --steps 1 --warmup 1 --group 2 --max-new 8"
    words += f" --threads 1 --stop-prob 0.2 --parity-iterations 2 --baseline-python {python}"
    words += f" --page {page} --results {results}"
    done = run_on_cuda("-m", "tests.benchmarks.gpu", *words.split())
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert found["parity"]["within"]
    assert found["parity"]["compared"] == 2
    litgrpo, trl, by_vllm = found["cases"]
    assert [case["side"] for case in found["cases"]] == ["litgrpo", "TRL", "TRL, vLLM"]
    assert len(litgrpo["turns"]) == len(trl["turns"]) == 1
    assert "out of memory" in by_vllm["failure"]
    (turn,) = litgrpo["turns"]
    assert turn["step_s"] > turn["rollout_s"] > 0
    assert turn["peak_device_mib"] > 0
    assert all(phase["launches"] > 100 and phase["waits"] > 0 for phase in turn["counts"].values())
    assert list(turn["counts"]) == ["rollout", "update"]
    text = page.read_text()
    assert text.startswith("before\n<!-- gpu -->\nSimulated")
    assert "2 of 2 iterations" in text
    assert "| tiny | litgrpo | 1 |" in text
    assert "| tiny | TRL, vLLM | 0 | out of memory |" in text
    assert "Not run" not in text
    assert text.endswith("|\n<!-- end -->\nafter\n")


def test_without_a_device_the_command_ends_in_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="CUDA"):
        gpu.main()


def test_time_is_saved_by_repetitions_and_not_by_rows():
    budget, case = Budget(100.0), Case("tiny", "litgrpo")
    budget.began -= 99.5
    # The first repetition runs, within a tenth of the time.
    case.repeat(budget, lambda limit: {"limit": limit})
    assert case.turns == [{"limit": 10.0}]
    case.seconds = 2.0
    case.repeat(budget, lambda limit: {"limit": limit})
    assert (len(case.turns), case.left_out) == (1, 1)
    result = {
        "machine": {"device": "H100"},
        "settings": {"bf16": True, "minutes": 20},
        "cases": [vars(case) | {"turns": [SIDE]}],
    }
    text = gpu.build_table(result)
    assert "Repetitions left out after 20 minutes: tiny, litgrpo: 1." in text


def test_a_repetition_that_hangs_is_stopped_and_costs_its_row():
    case, words = Case("tiny", "TRL"), [sys.executable, "-c", "import time; time.sleep(3600)"]
    case.repeat(Budget(5.0), lambda _: gpu.last_line(words, gpu.ROOT, timeout=0.5))
    assert case.failure == "stopped after 0 s"


def test_a_side_that_fails_shows_what_it_printed():
    case, words = Case("tiny", "TRL"), [sys.executable, "-c", "raise OSError('a|b')"]
    case.repeat(Budget(60.0), lambda limit: gpu.last_line(words, gpu.ROOT, timeout=limit))
    (row,) = gpu.build_rows([case])
    assert row[:4] == ["tiny", "TRL", "0", "OSError: a/b"]
    assert len(row) == len(gpu.HEAD)


def test_a_step_is_compared_at_equal_lengths():
    counts = {"rollout": {"launches": 1010, "waits": 3}, "update": {"launches": 99, "waits": 1}}
    cases = [Case("tiny", "litgrpo", [SIDE | {"counts": counts}]), Case("tiny", "TRL", [BASELINE])]
    litgrpo, other = gpu.build_rows(cases)
    shared = ["1", "40", "2", "1", "1", "9", "1,010 + 99", "3 + 1", "1.00"]
    assert litgrpo == ["tiny", "litgrpo", *shared]
    assert other == ["tiny", "TRL", "1", "60", "12", "6", "6", "50", "", "", "4.00"]


def test_iterations_are_compared_until_a_sampled_token_differs():
    row = {"perf/generated_tokens": 50.0, "reward/mean": 0.5, "reward/group_std": 0.1}
    row |= {"policy/loss": 0.25, "optim/grad_norm": 2.0, "time/step_s": 1.0}
    close = row | {"policy/loss": 0.25 + 5e-5, "optim/grad_norm": 2.001, "time/step_s": 3.0}
    other = row | {"perf/generated_tokens": 51.0, "optim/grad_norm": 9.0}
    found = gpu.compare_metrics([row] * 3, [row, close, other])
    assert (found["iterations"], found["compared"], found["within"]) == (3, 2, True)
    assert found["loss_gap"] == pytest.approx(5e-5)
    assert found["grad_norm_gap"] == pytest.approx(5e-4)
    assert found["step_s"] == {"cpu": 1.0, "gpu": 1.0}
    far = row | {"optim/grad_norm": 2.1}
    assert not gpu.compare_metrics([row], [far])["within"]
    # Runs that differ at once prove nothing.
    assert not gpu.compare_metrics([row], [other])["within"]


def test_launches_and_waits_are_read_from_a_profile():
    calls = {"cudaLaunchKernel": 5, "cuLaunchKernelEx": 2, "cudaGraphLaunch": 1, "aten::add": 9}
    calls |= {"cudaStreamSynchronize": 2, "cudaDeviceSynchronize": 1, "cudaMemcpyAsync": 4}
    assert gpu.sum_calls(calls) == {"launches": 8.0, "waits": 3.0}
    with gpu.count_calls() as found:
        torch.ones(2) + 1
    assert found == {"launches": 0.0, "waits": 0.0}  # there is no GPU


def test_two_environments_are_asked_for_vllm():
    assert gpu.list_sides(None)[0] == "litgrpo"
    assert not gpu.has_vllm(sys.executable) or "litgrpo, vLLM" in gpu.list_sides(None)
