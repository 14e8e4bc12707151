import pytest
import torch

from litgrpo.checks.reference_forward import kept_mass, reference_forward
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from tests.support.filter_reference import filter_logits
from tests.support.models import prompt_batch, tiny_policy


def test_what_the_filters_keep_of_four_tokens():
    scores = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    for sampling, share, least in [
        (Sampling(), 1.0, 0.0),
        (Sampling(top_k=2), 0.8, 0.3),
        (Sampling(top_p=0.7), 0.8, 0.3),
        (Sampling(min_p=0.5), 0.8, 0.3),
        (Sampling(top_k=2, top_p=0.6), 0.5, 0.5),  # 0.5 is 0.625 of the two
        (Sampling(temperature=0), 1.0, 0.5),
    ]:
        mass, edge = kept_mass(scores, sampling, 0.0)
        torch.testing.assert_close(mass.exp(), torch.tensor([share]))
        torch.testing.assert_close(edge.exp(), torch.tensor([least]))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_k=7), Sampling(top_p=0.9), Sampling(min_p=0.1), Sampling(1.0, 30, 0.8, 0.02)],
)
def test_the_filters_written_down_twice_agree(sampling):
    scores = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    left = ~filter_logits(scores, sampling).isneginf()
    for slack, within in [(1e-4, torch.le), (-1e-4, torch.ge)]:
        mass, _ = kept_mass(scores, sampling, slack)
        expected = scores.masked_fill(~left, -torch.inf).logsumexp(-1)
        assert bool(within(expected, mass + 1e-6 * (1 if slack > 0 else -1)).all())
        torch.testing.assert_close(mass, expected, atol=5e-2, rtol=0)


def test_another_prompt_does_not_explain_a_completion(architecture):
    policy, prompts = tiny_policy(architecture), prompt_batch("a", "hello")
    uniforms = draw_uniforms(0, "train", 0, prompts.index, 2, 5)
    rollout = LocalEngine().generate(RolloutRequest(policy, prompts, 2, uniforms, Sampling()))
    assert reference_forward(policy, rollout, Sampling(), 1e-4).sampler_error(rollout) < 1e-5
    swapped = torch.tensor([1, 1, 0, 0])
    gaps = reference_forward(policy, rollout, Sampling(), 1e-4, swapped).sampler_gaps(rollout)
    assert bool((gaps > 0.1).all())
