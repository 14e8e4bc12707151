"""What of a recipe the plan reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from litgrpo.models.loading import LoRA
from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.training import bucket, read

CONFIGS = Path(__file__).parents[3] / "configs"
GEMMA = str(CONFIGS / "reasoning_gemma2_2b.yaml")


def test_prompts_are_padded_to_a_bucket():
    assert [bucket(64, 512), bucket(64, 513), bucket((128, 600), 130)] == [512, 576, 600]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        # 8 prompts x 4 completions of 512 + 256 tokens; 32,768 tokens hold 42 of them.
        ([], 32),
        (["--model.update.micro_batch_tokens", "2400"], 3),
        (["--model.update.num_mini_batches", "2"], 16),
        (["--model.update.micro_batch_size", "5"], 5),
        (["--model.update.micro_batch_tokens", "null", "--data.batch_size", "20"], 80),
    ],
)
def test_rows_of_a_micro_batch_are_those_of_the_update(words, rows):
    work = read(PlanCLI(["-c", GEMMA, *words]).config).work
    assert (work.length, work.micro_rows) == (768, rows)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ([], True),
        (["--model.lora.rank", "4"], False),
        (["--model.objective.kl_coef", "0"], False),
        (["--model.lora.rank", "4", "--model.reference", "google/gemma-2-2b"], True),
    ],
)
def test_the_reference_is_a_model_of_its_own_where_it_must_be(words, own):
    training = read(PlanCLI(["-c", GEMMA, *words]).config)
    assert (training.reference is not None) == own


def test_a_changed_recipe_keeps_its_models_unless_the_adapters_are_others():
    training = read(PlanCLI(["-c", str(CONFIGS / "quickstart.yaml")]).config)
    smaller = training.changed(work=replace(training.work, micro_rows=2))
    assert smaller.models is training.models
    sizes = [sum(item.size for item in each.account(1)) for each in (smaller, training)]
    assert sizes[0] < sizes[1]
    adapted = training.changed(lora=LoRA(rank=2), reference=None)
    assert adapted.models["blueprint"].trained != training.models["blueprint"].trained
