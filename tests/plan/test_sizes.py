"""Sizes that are read from a recipe."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from litgrpo.algorithms.masks import TokenMask
from litgrpo.cli.parser import RecipeCLI
from litgrpo.plan.command import plan
from litgrpo.plan.sizes import pad_length, read_sizes

CONFIGS = Path(__file__).parents[2] / "configs"
GEMMA = str(CONFIGS / "reasoning_gemma2_2b.yaml")


def sizes(*words):
    return read_sizes(RecipeCLI(words, "plan", plan).config)


def test_prompts_are_padded():
    assert [pad_length(64, 512), pad_length(64, 513), pad_length((128, 600), 130)] == [
        512,
        576,
        600,
    ]


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
    work = sizes("-c", GEMMA, *words).work
    assert (work.length, work.micro_rows) == (768, rows)


def test_autocast_computes_in_half_the_bytes_and_keeps_the_weights():
    full = sizes("-c", GEMMA, "--model.precision.dtype", "float32")
    words = ["--model.precision.dtype", "float32", "--model.precision.autocast_dtype", "bfloat16"]
    mixed = sizes("-c", GEMMA, *words)
    assert (full.models.compute, full.work.cache_bytes) == (None, 4)
    assert {weight.dtype for weight in mixed.models.compute.weights} == {torch.bfloat16}
    assert {weight.dtype for weight in mixed.models.policy.weights} == {torch.float32}
    assert mixed.work.cache_bytes == 2


def test_the_linear_layers_of_a_reference_take_half_the_bytes_under_autocast():
    def count(*words):
        recipe = sizes("-c", GEMMA, "--model.precision.dtype", "float32", *words)
        (item,) = [item for item in recipe.count_memory(2) if item.name == "reference"]
        return item.size, recipe.models.policy

    mixed = ("--model.precision.autocast_dtype", "bfloat16")
    (full, policy), (half, _) = count(), count(*mixed)
    kept = [weight for weight in policy.weights if weight.dim() == 1] + [
        policy.bare_model.get_input_embeddings().weight
    ]
    assert half == (full + sum(each.nbytes for each in kept)) / 2
    # Sharded weights, and those that the policy's are mixed into, stay as they are.
    sharded = ("-c", str(CONFIGS / "hardware" / "fsdp2.yaml"))
    assert count(*mixed, *sharded)[0] == count(*sharded)[0]
    moving = ("--trainer.callbacks+", "ReferenceSync")
    assert count(*mixed, *moving)[0] == full


# A mask of the recipe that compares with the reference.
MASK = "[{class_path: tests.plan.test_sizes.NearReference}]"


@dataclass(frozen=True)
class NearReference(TokenMask):
    """Keeps tokens whose log-probability is near the reference's."""

    needs = frozenset({"ref_logprobs"})

    def __call__(self, inputs):
        return (inputs.logprobs - inputs.batch.ref_logprobs).abs() < 1


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ([], True),
        (["--model.lora.rank", "4"], False),
        (["--model.objective.kl_coef", "0"], False),
        (["--model.objective.kl_coef", "0", "--model.objective.masks", MASK], True),
        (["--model.lora.rank", "4", "--model.reference", "google/gemma-2-2b"], True),
        (["--model.reference", "http://10.0.0.4:8000"], False),
        (["--model.reference.urls", "[http://10.0.0.4:8000]"], False),
    ],
)
def test_the_reference_is_a_separate_model_if_necessary(words, own):
    recipe = sizes("-c", GEMMA, *words)
    assert (recipe.models.reference is not None) == own


@pytest.mark.parametrize(
    ("words", "dtype", "cache_bytes"),
    [
        ([], None, 4),
        (["-c", str(CONFIGS / "hardware" / "cuda.yaml")], "bfloat16", 2),
        (["--trainer.precision", "16-mixed"], "float16", 2),
        (["--model.precision.autocast_dtype", "bfloat16"], "bfloat16", 2),
        (["--trainer.precision", "32-true"], None, 4),
    ],
)
def test_products_have_the_dtype_of_the_trainer_or_of_the_model(words, dtype, cache_bytes):
    recipe = sizes("-c", str(CONFIGS / "quickstart.yaml"), *words)
    assert recipe.work.cache_bytes == cache_bytes
    compute = recipe.models.compute
    assert (None if compute is None else str(compute.dtype)) == (dtype and f"torch.{dtype}")


@pytest.mark.parametrize(
    ("words", "sampling", "queues"),
    [
        ([], "trainer", True),
        (["--model.engine", "StaticEngine"], "trainer", False),
        (["--model.engine", "ColocatedEngine"], "colocated", False),
        (["--model.engine", "ServerEngine"], "servers", False),
        # An engine that is not litgrpo's.
        (["--model.engine", "tests.support.other_server.OtherEngine"], "servers", False),
    ],
)
def test_the_engine_says_where_it_samples(words, sampling, queues):
    if sampling == "servers":
        words = [*words, "--model.engine.urls", "[http://127.0.0.1:8000]"]
    recipe = sizes("-c", str(CONFIGS / "quickstart.yaml"), *words)
    assert (recipe.work.sampling, recipe.can_queue) == (sampling, queues)
