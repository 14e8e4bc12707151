"""Learning in static shapes, on the processor: the same gradient, padding and all."""

import pytest
import torch

from litgrpo.algorithms.aggregation import MicroBatchTokenMean
from litgrpo.algorithms.objective import Objective
from litgrpo.distributed.device import Backend, backend
from litgrpo.learning.micro_batches import BatchLimits
from litgrpo.learning.static_batches import StaticBatches, StaticSums, check_static_shapes
from litgrpo.metrics import StepSums
from litgrpo.models.loading.load import Precision
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.sources.base import OnPolicy
from litgrpo.rollout.sources.data_completions import DataCompletions
from litgrpo.rollout.sources.stored import StoredRollouts
from litgrpo.types import LossOutput, TokenRows, TrainingBatch
from tests.learning.parts import learner_of
from tests.support.models import prompt_batch, tiny_policy
from tests.support.raises import raises_for
from tests.xla.fitting import SMALL, distance, fit, same_tokens

STATIC = StaticBatches(backend(torch.device("cpu")))


def training_batch(rows: int = 5) -> TrainingBatch:
    """Rows of two prompts, with completions of 1 to 4 tokens."""
    prompts = prompt_batch("hello", "a longer one")
    mask = torch.arange(6) < torch.arange(1, rows + 1)[:, None].clamp(max=4)
    ones = mask.float()
    return TrainingBatch(
        TokenRows(
            prompts.prompt_ids,
            prompts.prompt_mask,
            torch.arange(rows) % 2,
            torch.randint(3, 259, mask.shape),
            mask,
        ),
        mask,
        -ones,
        ones,
        ones / mask.sum(),
    )


def test_every_micro_batch_has_one_shape_and_filling_counts_nothing():
    split = list(STATIC.split(training_batch(), None, BatchLimits(max_rows=3)))
    parts = [micro.rows for micro in split]
    assert [micro.is_last for micro in split] == [False, True]
    assert [part.tokens.completion_ids.shape for part in parts] == [(3, 6), (3, 6)]
    prompts = [part.tokens.prompt_ids for part in parts]
    assert prompts[0].shape == prompts[1].shape
    assert parts[1].loss_weights.sum(1).tolist()[2] == 0
    assert not parts[1].tokens.completion_mask[2].any()
    assert not parts[1].loss_mask[2].any()
    assert torch.cat([part.loss_weights for part in parts]).sum() == pytest.approx(1.0)


def test_tokens_limit_the_rows_with_padding_counted():
    data = training_batch().tokens
    width = data.prompt_ids.shape[1] + 6
    assert STATIC.rows_at_once(data, BatchLimits(max_tokens=2 * width)) == 2


@pytest.mark.parametrize(("max_rows", "rows"), [(None, 8), (1, 4), (4, 4), (5, 8)])
def test_rows_are_a_multiple_of_the_chips_they_are_divided_among(max_rows, rows):
    class FourChips(Backend):
        num_chips = 4

    batching = StaticBatches(FourChips(torch.device("cpu")))
    assert batching.rows_at_once(training_batch().tokens, BatchLimits(max_rows=max_rows)) == rows


def test_sums_that_stay_on_the_device_are_those_of_every_micro_batch():
    outputs = [
        LossOutput(torch.tensor(loss), {"policy/kl": torch.tensor([loss * 8, 2.0])})
        for loss in (0.5, 0.25, -2.0)
    ]
    found = []
    for sums in (StepSums(), StaticSums(STATIC.device)):
        for output in outputs:
            sums.add(output)
        found.append(sums.read(torch.tensor(3.0)))
    for stats, loss, norm in found:
        assert {name: value.tolist() for name, value in stats.items()} == {"policy/kl": [-10, 6]}
        assert (float(loss), float(norm)) == (-1.25, 3.0)


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2", "llama", "gpt2", "t5"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_log_probabilities_and_gradient_do_not_depend_on_the_path(architecture, chunk):
    policy, data, found = tiny_policy(architecture), training_batch(), []
    if chunk is not None:
        policy.few_logits = 2 * chunk * policy.vocab_size
        assert policy.chunk_size(100) == chunk
    for policy.static_shapes in (False, True):
        policy.zero_grad()
        out = learner_of(policy, sampling=Sampling(temperature=0.8)).logprobs(data.tokens)
        (out.logprobs * torch.linspace(0, 1, 30).view(5, 6)).sum().backward()
        grad = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        found.append((out.logprobs.detach(), out.entropy, grad / grad.norm()))
    for ragged, static in zip(*found, strict=True):
        torch.testing.assert_close(ragged, static, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_run_with_the_static_engine_is_the_run_with_the_local_one():
    engine = {"class_path": "litgrpo.rollout.engines.static.StaticEngine"}
    static = {"model": {"init_args": {"engine": engine}}}
    one, other = fit("cpu", 2, SMALL), fit("cpu", 2, SMALL, static)
    assert same_tokens(one.rollouts[0], other.rollouts[0]) >= 0.999
    assert distance(one.gradients, other.gradients) < 1e-5
    assert one.column("policy/loss") == pytest.approx(other.column("policy/loss"), abs=1e-5)


def test_a_device_with_static_shapes_rejects_what_it_cannot_compute():
    check_static_shapes(StaticEngine(), Objective(), Precision(), OnPolicy())
    check_static_shapes(StaticEngine(), Objective(), Precision(disable_dropout=False), OnPolicy())
    with raises_for("engine", "LocalEngine"):
        check_static_shapes(LocalEngine(), Objective(), Precision(), OnPolicy())
    by_micro_batch = Objective(loss_aggregation=MicroBatchTokenMean())
    with raises_for("objective.loss_aggregation"):
        check_static_shapes(StaticEngine(), by_micro_batch, Precision(), OnPolicy())
    both = Precision(disable_dropout=False, gradient_checkpointing=True)
    with raises_for("precision.disable_dropout", "precision.gradient_checkpointing"):
        check_static_shapes(StaticEngine(), Objective(), both, OnPolicy())
    for source in (StoredRollouts("runs/demo"), DataCompletions("solution")):
        with raises_for("model.source", type(source).__name__):
            check_static_shapes(StaticEngine(), Objective(), Precision(), source)
