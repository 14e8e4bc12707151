"""Changes that need less memory, in the order to try them."""

from pathlib import Path

import pytest

from litgrpo.cli.parser import RecipeCLI
from litgrpo.plan.advice import suggest_changes
from litgrpo.plan.command import plan
from litgrpo.plan.devices import Device
from litgrpo.plan.memory import peak_bytes
from litgrpo.plan.plan import Plan
from litgrpo.plan.render import advice_lines
from litgrpo.plan.sizes import read_sizes

CONFIGS = Path(__file__).parents[2] / "configs"
WORDS = ["-c", str(CONFIGS / "quickstart.yaml"), "--model.objective.kl_coef", "0.1"]
WORDS += ["--data.max_prompt_length", "32", "--data.eval_batch_size", "16"]


@pytest.fixture(scope="module")
def recipe():
    return read_sizes(RecipeCLI(WORDS, "plan", plan).config, static_shapes=False)


def advice(recipe, memory, kind="cuda"):
    return list(advice_lines(Plan(recipe, Device("mine", kind, memory), 1)))


def test_changes_add_up_and_lora_which_changes_what_is_trained_comes_last(recipe):
    changes = list(suggest_changes(recipe, 1))
    options = list(dict.fromkeys(words.split()[0] for words, _ in changes))
    assert options == [
        "--model.precision.gradient_checkpointing",
        "--model.update.micro_batch_size",
        "--model.engine.max_rows",
        "--model.lora.rank",
    ]
    *_, (_, last) = changes
    assert last.checkpointing
    assert (last.work.micro_rows, last.work.max_rows) == (1, 4)
    assert last.models.reference is None
    assert len(last.models.policy.trained) < len(last.models.policy.weights)


def test_only_changes_that_help_are_listed_until_one_fits(recipe):
    peak = peak_bytes(recipe.count_memory(1))
    *_, last = advice(recipe, memory=0.9 * peak)
    assert last.endswith(" GB, fits")
    sizes = [float(line.split()[2]) for line in advice(recipe, memory=1.0)[1:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) >= 3


def test_if_no_change_suffices_several_chips_are_named(recipe):
    assert (
        advice(recipe, memory=1.0)[-1] == "  or use several chips: -c configs/hardware/fsdp2.yaml"
    )
    assert "tpu_spmd" in advice(recipe, memory=1.0, kind="tpu")[-1]


def test_a_supervised_recipe_gets_its_own_option():
    words = ["-c", str(CONFIGS / "quickstart_sft.yaml")]
    recipe = read_sizes(RecipeCLI(words, "plan", plan).config)
    options = {line.split()[0] for line, _ in suggest_changes(recipe, 1)}
    assert options == {
        "--model.precision.gradient_checkpointing",
        "--model.micro_batch_size",
    }
    smaller = read_sizes(RecipeCLI([*words, "--model.micro_batch_size", "2"], "plan", plan).config)
    assert smaller.work.micro_rows == 2


def test_the_program_takes_memory_of_a_cpu(recipe):
    device = Device("mine", "cpu", 1e12)
    items = Plan(recipe, device, 1).items()
    assert items[0].name == "program"
    assert sum(item.size for item in items[1:]) == sum(i.size for i in recipe.count_memory(1))
