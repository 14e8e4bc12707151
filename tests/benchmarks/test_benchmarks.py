"""Each benchmark starts, and its arithmetic is right."""

import json
import sys
import textwrap

import pytest
import torch

from tests.benchmarks import gpu, parity, random_model, seeds, step
from tests.benchmarks.gpu import Case
from tests.benchmarks.workload import SIZES, Work
from tests.cuda_device.run import needs_cuda, run_on_cuda

SIDE = dict(step_s=2.0, rollout_s=1.0, learn_s=1.0, peak_device_mib=9.0, mean_completion_len=40.0)
BASELINE = dict(step_s=12.0, gen_s=3.0, train_s=9.0, peak_device_mib=50.0, mean_completion_len=60.0)
# An environment's Python: it has vLLM, and its TRL is too large for the GPU with vLLM.
TRL = f"""\
    #!{sys.executable}
    import json, sys
    if sys.argv[1] == "-c":
        sys.exit(0)
    assert sys.argv[2] == "tests.benchmarks.trl_steps", sys.argv
    assert "--device cuda --size tiny --bf16" in " ".join(sys.argv), sys.argv
    if "--vllm" in sys.argv:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    print(json.dumps({BASELINE}))
    """


def test_both_sides_have_the_same_weights():
    litgrpo = Work(SIZES["tiny"], stop_prob=0.02, max_new=32).policy().model
    baseline = random_model.RandomModel(random_model.SIZES["tiny"], 0.02, 64 + 32 + 8).model()
    pairs = zip(litgrpo.parameters(), baseline.parameters(), strict=True)
    assert all(one.equal(other) for one, other in pairs)


def test_a_step_is_timed(monkeypatch, capsys):
    words = "--turn --threads 1 --steps 1 --warmup 0 --group 2 --max-new 4 --stop-prob 0.2"
    monkeypatch.setattr(sys, "argv", ["step", *words.split()])
    step.main()
    measures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measures["step_s"] > measures["rollout_s"] > 0
    assert 1 <= measures["mean_completion_len"] <= 4


def test_times_are_compared_at_equal_lengths():
    memory = {"peak_rss_mib": 5.0, "cpu_s": 2.0}, {"peak_rss_mib": 50.0, "cpu_s": 24.0}
    assert step.ratios(SIDE | memory[0], BASELINE | memory[1]) == {
        "length_ratio": 1.5,
        "ratio_wall": 4.0,
        "ratio_cpu": 8.0,
        "ratio_rollout": 2.0,
        "ratio_learn": 6.0,
        "memory_frac": 0.1,
    }


def test_seeds_are_listed_with_their_mean(tmp_path, monkeypatch, capsys):
    for seed, after in enumerate((0.5, 0.7)):
        before = dict(avg_at_k=0.2, low=0.1, high=0.3, greedy=0.25)
        change = {"avg@4": dict(mean=after - 0.2, low=0.1, high=0.6)}
        change["greedy"] = change["avg@4"]
        summary = {"seed": seed, "before": before, "after": before | {"avg_at_k": after}}
        folder = tmp_path / f"seed {seed}"
        folder.mkdir()
        (folder / "summary.json").write_text(
            json.dumps(summary | {"change": {"": change}, "seconds": 40 + seed})
        )
    words = ["--seeds", "0", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["seeds", *words])
    seeds.main()
    *_, second, mean = capsys.readouterr().out.splitlines()
    assert second.startswith("| 1 | 0.200 [0.100, 0.300] | 0.700 [0.100, 0.300] | +0.500 [+0.100,")
    assert mean == "| mean | 0.200 | 0.600 | +0.400 | 0.250 | 0.250 | +0.000 | median 40 |"


def test_a_run_leaves_what_trl_needs(program, tmp_path):
    folder = tmp_path / "run"
    recorder = ["--trainer.callbacks+=tests.benchmarks.parity.Recorder"]
    recorder += [f"--trainer.callbacks.folder={folder}", "--trainer.callbacks.every=1"]
    words = "-c configs/quickstart.yaml --data.val null --data.batch_size 2 --model.group_size 2"
    words += f" --model.max_iterations 1 --model.max_completion_length 8 --run_dir {folder}"
    assert program("fit", *words.split(), *recorder) == 0
    settings = json.loads((folder / "settings.json").read_text())
    assert (settings["loss_type"], settings["batch_size"], settings["iterations"]) == ("dapo", 2, 1)
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    (handed,) = torch.load(folder / "handed.pt")
    assert handed["prompt_ids"] == [prompts[0]["ids"]] * 2 + [prompts[1]["ids"]] * 2
    one, other = (
        parity.flat(weights)
        for weights in (
            parity.load_initial_weights(folder / "start"),
            torch.load(folder / "weights 1.pt"),
        )
    )
    assert one.shape == other.shape


def test_difference_of_two_samples_has_welchs_interval():
    """Against scipy.stats.ttest_ind(equal_var=False).confidence_interval(), whose freedom is 8."""
    litgrpo, theirs = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0]
    assert parity.interval(litgrpo, theirs) == pytest.approx((-1.0, -3.306004, 1.306004), abs=1e-5)
    assert parity.interval([1.0, 1.0], [0.5, 0.5]) == (0.5, 0.5, 0.5)


@needs_cuda
def test_one_command_measures_all_sides_of_a_gpu(tmp_path):
    python = tmp_path / "python"
    python.write_text(textwrap.dedent(TRL))
    python.chmod(0o755)
    words = "--sizes tiny --repetitions 1 --steps 1 --warmup 1 --group 2 --max-new 8"
    words += f" --threads 1 --stop-prob 0.2 --parity-iterations 2 --baseline-python {python}"
    done = run_on_cuda("-m", "tests.benchmarks.gpu", *words.split())
    assert done.returncode == 0, done.stderr
    assert "2 of 2 iterations" in done.stdout
    assert "**within tolerance**" in done.stdout
    *_, litgrpo, trl, by_vllm = done.stdout.splitlines()
    assert litgrpo.startswith("| tiny | litgrpo | 1 |")
    assert litgrpo.endswith("| 1.00 |")
    assert " + " in litgrpo
    assert trl.startswith("| tiny | TRL | 1 | 60 | 12 | 3 | 9 | 50 |")
    assert by_vllm.startswith("| tiny | TRL, vLLM | 0 | out of memory |")


def test_steps_of_a_gpu_are_compared_at_equal_lengths():
    counts = {"rollout": {"launches": 1010, "waits": 3}, "update": {"launches": 99, "waits": 1}}
    cases = [Case("tiny", "litgrpo", [SIDE | {"counts": counts}]), Case("tiny", "TRL", [BASELINE])]
    cases.append(Case("tiny", "TRL, vLLM", failure="OSError: a|b"))
    litgrpo, trl, failed = gpu.build_rows(cases)
    shared = ["1", "40", "2", "1", "1", "9", "1,010 + 99", "3 + 1", "1.00"]
    assert litgrpo == ["tiny", "litgrpo", *shared]
    assert trl == ["tiny", "TRL", "1", "60", "12", "3", "9", "50", "", "", "4.00"]
    assert failed == ["tiny", "TRL, vLLM", "0", "OSError: a/b", *[""] * 7]


def test_iterations_are_compared_until_a_sampled_token_differs():
    row = {"perf/generated_tokens": 50.0, "reward/mean": 0.5, "reward/group_std": 0.1}
    row |= {"policy/loss": 0.25, "optim/grad_norm": 2.0}
    close = row | {"policy/loss": 0.25 + 5e-5, "optim/grad_norm": 2.001}
    other = row | {"perf/generated_tokens": 51.0, "optim/grad_norm": 9.0}
    gaps = gpu.compare_metrics([row] * 3, [row, close, other])
    assert gaps == pytest.approx(
        {"compared": 2, "loss_gap": 5e-5, "grad_norm_gap": 5e-4, "within": True}
    )
    assert not gpu.compare_metrics([row], [row | {"optim/grad_norm": 2.1}])["within"]
    # Runs that differ at once prove nothing.
    assert not gpu.compare_metrics([row], [other])["within"]


def test_launches_and_waits_are_read_from_a_profile():
    calls = {"cudaLaunchKernel": 5, "cuLaunchKernelEx": 2, "cudaGraphLaunch": 1, "aten::add": 9}
    calls |= {"cudaStreamSynchronize": 2, "cudaDeviceSynchronize": 1, "cudaMemcpyAsync": 4}
    assert gpu.sum_calls(calls) == {"launches": 8.0, "waits": 3.0}
    with gpu.count_calls() as counts:
        torch.ones(2) + 1
    assert counts == {"launches": 0.0, "waits": 0.0}  # there is no GPU
