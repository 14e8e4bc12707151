"""Whole runs on the device: several devices, another device, resuming, and too little memory."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from litgrpo.distributed.memory import RowLimit
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import RolloutKey
from litgrpo.rollout.rollouter import Rollouter
from tests.cuda_device.features import (
    Config,
    config_of,
    distance,
    final_weights,
    fit,
    of_class,
    write_inputs,
)
from tests.cuda_device.run import ROOT, needs_cuda, on_cuda, run_on_cuda
from tests.support.models import prompt_batch, tiny_policy

# Of the final weights, as in test_features.py.
TOLERANCE = 1e-3
MIB = 2**20
CUDA = ("--trainer.accelerator", "cuda", "--trainer.devices", "1")
CPU = ("--trainer.accelerator", "cpu", "--trainer.devices", "1")


def by_prompt(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """A reward that differs within each group, and is the same on any number of ranks."""
    numbers = [prompts[:row].count(prompt) for row, prompt in enumerate(prompts)]
    pairs = zip(numbers, prompts, strict=True)
    return [(number * 5 + len(prompt)) % 7 / 7 for number, prompt in pairs]


def build_config(folder: Path, name: str = "qwen2", **options: Any) -> Config:
    """Build the recipe of a feature, with other options of the model."""
    found = config_of(name, folder)
    given = {"check_invariants": False} if found["model"]["class_path"].endswith("GRPO") else {}
    found["model"]["init_args"] |= given | options
    return found


def find_start(recipe: Config) -> Path:
    return Path(recipe["model"]["init_args"]["pretrained"])


def read_limits(run: Path) -> dict[str, int]:
    """Read the limits that out-of-memory errors lowered, from the last checkpoint of a run."""
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)["lowered"]


def read_messages(folder: Path) -> str:
    return (folder / "messages.txt").read_text()


def read_gradient_norms(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        logged = [row.get("optim/grad_norm") for row in csv.DictReader(file)]
    return [float(number) for number in logged if number]


def measure_peak(work: Callable[[], object], device: int = 0) -> int:
    """Measure the bytes of a device at the peak of this work."""
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)


@needs_cuda
@pytest.mark.timeout(900)
def test_ddp_and_fsdp2_on_two_devices_end_with_the_weights_of_two_cpu_processes(tmp_path):
    reward = {"function": "tests.cuda_device.test_runs.by_prompt", "weight": 1.0}
    recipe = build_config(write_inputs(tmp_path / "inputs"), rewards={"by_prompt": reward})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    kinds = {
        "cpu": ("--trainer.strategy", "ddp", "--trainer.accelerator", "cpu"),
        "ddp": ("--trainer.strategy", "ddp", "--trainer.accelerator", "cuda"),
        "fsdp2": ("-c", ROOT / "configs/hardware/fsdp2.yaml", "--trainer.accelerator", "cuda"),
    }
    for name, words in kinds.items():
        given = ("-c", tmp_path / "recipe.yaml", *words, "--trainer.devices", "2")
        settings = {"CUDA_DEVICE_COUNT": 2, "PL_GLOBAL_SEED": 0}
        done = run_on_cuda("cli.py", "fit", *given, "--run_dir", tmp_path / name, **settings)
        assert done.returncode == 0, f"{name}: {done.stderr[-4000:]}"
    for name in ("ddp", "fsdp2"):
        assert distance(tmp_path / name, tmp_path / "cpu", find_start(recipe)) < TOLERANCE, name


@on_cuda(CUDA_DEVICE_COUNT=2)
def test_a_run_on_the_second_device_uses_no_other(tmp_path):
    tmp_path = Path(tmp_path)
    recipe = build_config(write_inputs(tmp_path / "inputs"), "kl", check_invariants=True)
    words = ("--trainer.accelerator", "cuda", "--trainer.devices", "[1]")
    run = fit(recipe, tmp_path / "second", *words, "--trainer.precision", "bf16-mixed")
    assert torch.cuda.max_memory_allocated(1) > 0
    assert torch.cuda.max_memory_allocated(0) == 0
    assert final_weights(run)


# With a large eps, AdamW does not enlarge rounding; its kernel is fused on CUDA.
OPTIMIZERS = {
    "SGD": of_class("torch.optim.SGD", lr=0.05, momentum=0.9),
    "AdamW": of_class("torch.optim.AdamW", lr=0.02, eps=0.1),
}


@on_cuda()
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_resumes_on_the_other_device_as_the_uninterrupted_run(tmp_path, name):
    tmp_path, optimizer = Path(tmp_path), OPTIMIZERS[name]
    inputs = write_inputs(tmp_path / "inputs")
    half, whole = (
        build_config(inputs, "kl", optimizer=optimizer, max_iterations=number) for number in (2, 4)
    )
    uninterrupted = fit(whole, tmp_path / "whole", *CPU)
    for first, second in ((CPU, CUDA), (CUDA, CPU)):
        run = fit(half, tmp_path / f"half {first[1]}", *first)
        words = ("--ckpt_path", str(run / "checkpoints" / "last.ckpt"))
        resumed = fit(whole, tmp_path / f"resumed {second[1]}", *second, *words)
        assert distance(resumed, uninterrupted, find_start(whole)) < TOLERANCE, second
        assert distance(run, uninterrupted, find_start(whole)) > 10 * TOLERANCE


@on_cuda()
@pytest.mark.parametrize("name", ["kl", "sft"])
def test_an_update_halves_to_the_largest_micro_batch_that_fits(name, tmp_path):
    from tests.cuda_device.device import set_memory_limit

    tmp_path = Path(tmp_path)
    inputs = write_inputs(tmp_path / "inputs")
    rows = {"sft": (8, 4, 2), "kl": (16, 8, 4)}[name]

    def run_with(size: int | None, folder: str) -> Path:
        given = {"micro_batch_size": size}
        recipe = build_config(inputs, name, **(given if name == "sft" else {"update": given}))
        recipe["trainer"]["limit_val_batches"] = 0
        return fit(recipe, tmp_path / folder, *CUDA)

    peaks = [measure_peak(lambda size=size: run_with(size, f"{size} rows")) for size in rows]
    assert sorted(peaks, reverse=True) == peaks
    for (more, less), size in zip(pairwise(peaks), rows[1:], strict=True):
        set_memory_limit((more + less) // 2)
        run = run_with(None, f"at most {size}")
        assert read_limits(run)["micro_batch_size"] == size
        assert distance(run, tmp_path / f"{rows[0]} rows" / "run") < TOLERANCE
        set_memory_limit(0)


@on_cuda()
def test_a_rollout_halves_to_the_most_rows_that_fit():
    from tests.cuda_device.device import set_memory_limit

    policy, prompts = tiny_policy("qwen2").cuda(), prompt_batch(*"abcd").to("cuda")

    def sample(max_rows: int | None) -> tuple[torch.Tensor, RowLimit]:
        limit = RowLimit("model.engine.max_rows", "", max_rows)
        engine = LocalEngine()
        rollouter = Rollouter(policy, 4, 40, engine=engine, row_limit=limit)
        key = RolloutKey(0, "train", 0, 0)
        return rollouter.run_engine(
            rollouter.build_request(prompts, key), key
        ).completion_ids, limit

    sample(None)  # the fused decoder is compared with the model at the first call
    expected, _ = sample(None)
    peaks = [measure_peak(lambda rows=rows: sample(rows)) for rows in (16, 8, 4)]
    for (more, less), rows in zip(pairwise(peaks), (8, 4), strict=True):
        set_memory_limit((more + less) // 2)
        with pytest.warns(UserWarning, match="model.engine.max_rows"):
            found, limit = sample(None)
        assert limit.max_rows == rows
        assert torch.equal(found, expected)
        set_memory_limit(0)


@on_cuda()
def test_start_up_checks_and_evaluations_fit_where_the_update_fits(tmp_path):
    from tests.cuda_device.device import set_memory_limit

    tmp_path = Path(tmp_path)
    recipe = build_config(write_inputs(tmp_path / "inputs"), "kl", check_invariants=True)
    whole: list[Path] = []
    peak = measure_peak(lambda: whole.append(fit(recipe, tmp_path / "whole", *CUDA)))
    for share in (0.75, 0.5):
        set_memory_limit(int(share * peak))
        run = fit(recipe, tmp_path / str(share), *CUDA)
        set_memory_limit(0)
        assert distance(run, *whole, find_start(recipe)) < TOLERANCE
        assert read_limits(run)
        # The comparison with the initial policy.
        assert "are not measured" not in read_messages(tmp_path / str(share))


@on_cuda()
def test_an_optimizer_state_that_does_not_fit_is_one_clear_error(tmp_path):
    from tests.cuda_device.device import set_memory_limit

    tmp_path = Path(tmp_path)
    inputs, one = write_inputs(tmp_path / "inputs"), {"micro_batch_size": 1}
    recipe = build_config(inputs, "llama", update=one)
    peak = measure_peak(lambda: fit(recipe, tmp_path / "sgd", *CUDA))
    recipe["model"]["init_args"]["optimizer"] = of_class("torch.optim.AdamW", lr=1e-4)
    set_memory_limit(peak + MIB)
    with pytest.raises(AssertionError, match=r"^error: Out of memory in the optimizer step") as it:
        fit(recipe, tmp_path / "adamw", *CUDA)
    assert "model.lora" in str(it.value)
    assert "Traceback" not in read_messages(tmp_path / "adamw")


@on_cuda(HIDDEN_PACKAGES="accelerate,peft,bitsandbytes")
@pytest.mark.parametrize("name", ["qwen2", "t5", "sft"])
def test_without_optional_packages_a_model_loads_trains_and_exports(name, tmp_path):
    tmp_path = Path(tmp_path)
    recipe = build_config(write_inputs(tmp_path / "inputs"), name)
    run = fit(recipe, tmp_path / "run", *CUDA)
    assert torch.cuda.max_memory_allocated() > 0
    start = find_start(recipe)
    distance(run, run, start if start.is_dir() else None)  # raises if the weights did not move
    for package in ("accelerate", "peft", "bitsandbytes"):
        assert package not in sys.modules


@on_cuda()
@pytest.mark.parametrize("name", ["qwen2", "sft"])
def test_float16_trains_by_the_command_line(name, tmp_path):
    tmp_path = Path(tmp_path)
    recipe = build_config(write_inputs(tmp_path / "inputs"), name)
    runs = [
        fit(recipe, tmp_path / precision, *CUDA, "--trainer.precision", precision)
        for precision in ("16-mixed", "32-true")
    ]
    # Rounding changes some sampled tokens, so this only bounds the step, as in test_features.py.
    start = find_start(recipe)
    assert distance(*runs, start if start.is_dir() else None) < 1.5
    # Gradients were scaled down before they were clipped.
    low, exact = map(read_gradient_norms, runs)
    assert low == pytest.approx(exact, rel=0.3)
