"""The script of 300 lines ends with the weights of litgrpo: an independent reference."""

import ast
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from litgrpo import GRPO, Objective, PromptData, UpdateConfig

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "grpo_in_300_lines.py"
MODEL = str(ROOT / "src" / "litgrpo" / "assets" / "tiny-gemma2")


def load_script():
    """Import the script, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("grpo_in_300_lines", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load_script()


def train_script(options) -> dict[str, torch.Tensor]:
    model, tokenizer = script.load(MODEL)
    script.train(model, tokenizer, script.sums(), script.reward, options)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def train_litgrpo(options) -> dict[str, torch.Tensor]:
    module = GRPO(
        MODEL,
        {"correct": script.reward},
        objective=Objective(kl_coef=options.kl_coef),
        update=UpdateConfig(epochs_per_rollout=options.epochs_per_rollout),
        group_size=options.group_size,
        max_completion_length=options.max_completion_length,
        optimizer=lambda p: torch.optim.AdamW(p, lr=options.lr, betas=(0.9, 0.99)),
        max_iterations=options.max_iterations,
        check_invariants=False,
        seed=options.seed,
    )
    data = PromptData(script.sums(), batch_size=options.batch_size, seed=options.seed)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    Trainer(max_epochs=-1, accelerator="cpu", **quiet).fit(module, data)
    weights = module.policy.bare_model.named_parameters()
    return {name: weight.detach() for name, weight in weights}


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Length of the difference of all weights."""
    return float(sum((some[name] - others[name]).square().sum() for name in some) ** 0.5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"epochs_per_rollout": 2, "kl_coef": 0.1, "max_iterations": 4}],
    ids=["default", "clip and KL"],
)
def test_the_script_of_300_lines_ends_with_the_weights_of_litgrpo(changes):
    options = replace(script.Options(max_iterations=5, batch_size=4), **changes)
    initial = script.load(MODEL)[0].state_dict()
    found, expected = train_script(options), train_litgrpo(options)
    assert found.keys() == expected.keys()
    # Rounding differs: the two sum in another order, and AdamW divides by the size of a gradient.
    assert distance(found, expected) < 1e-4 * distance(expected, initial)


def test_the_script_has_300_lines_and_does_not_import_litgrpo():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 300
    nodes = ast.walk(ast.parse(text))
    imported = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    nodes = ast.walk(ast.parse(text))
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not {name for name in imported if name.split(".")[0] == "litgrpo"}
