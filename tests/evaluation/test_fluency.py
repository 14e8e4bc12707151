import math
from dataclasses import replace

import pytest
import torch

from litgrpo.evaluation.fluency import Fluency, StartFluency, distinct_ngrams
from litgrpo.types import Rollout
from tests.support.models import prompt_batch


def rollout() -> Rollout:
    """Two prompts, two samples each: loops, and texts without a repetition; the last is cut off."""
    ids = torch.tensor([[7, 7, 7], [7, 7, 7], [1, 2, 3], [4, 5, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    cut = torch.tensor([False, False, False, True])
    return Rollout(prompt_batch("a", "b"), 2, ids, mask, -0.5 * mask, cut)


def test_fluency_by_hand():
    metric = Fluency()
    metric.update(torch.arange(2), rollout())
    found = {name: float(value) for name, value in metric.compute().items()}
    assert found == pytest.approx(
        {
            "ended_frac": 0.75,
            "len_mean": 2.75,
            "distinct_1": (1 / 6 + 1) / 2,  # one token of six, five of five
            "distinct_2": (1 / 4 + 1) / 2,
        }
    )


def test_a_prompt_that_comes_again_is_not_counted_again():
    metric = Fluency()
    metric.update(torch.arange(2), rollout())
    once = metric.compute()
    metric.update(torch.tensor([0]), replace_prompts(rollout()))
    assert metric.compute() == once


def replace_prompts(given: Rollout) -> Rollout:
    fields = {n: getattr(given, n)[:2] for n in ("completion_ids", "completion_mask", "truncated")}
    fields["sampler_logprobs"], fields["loss_mask"] = given.sampler_logprobs[:2], None
    return replace(given, prompts=prompt_batch("a"), **fields)


def test_perplexity_and_kl_to_the_start_by_hand():
    metric = StartFluency()
    start = torch.full((4, 3), -2.0)
    start[3, 2] = torch.nan  # no token of the policy
    metric.update(torch.arange(2), rollout(), start)
    found = metric.compute()
    assert float(found["start_perplexity"]) == pytest.approx(math.exp(2.0))
    assert float(found["start_kl"]) == pytest.approx(1.5)  # -0.5 - -2


def test_a_text_of_one_token_has_no_pair_that_repeats():
    assert distinct_ngrams([[5], []]) == [1.0, 1.0]
