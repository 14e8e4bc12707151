"""Seconds by hand, and what rules where."""

from dataclasses import replace
from pathlib import Path

import pytest

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.devices import Span, devices
from litgrpo.tools.plan.division import FullShard
from litgrpo.tools.plan.schedule import Schedule
from litgrpo.tools.plan.seconds import ARITHMETIC, CACHE, CALLS, READING, Estimate, Phase, total
from litgrpo.tools.plan.training import read

CONFIGS = Path(__file__).parents[3] / "configs"
TABLE = devices()
EVEN = replace(
    TABLE.assumed,
    arithmetic={kind: {float("inf"): Span(0.5, 0.5)} for kind in ("cuda", "tpu", "cpu")},
    bandwidth=Span(0.5, 0.5),
    links=Span(1.0, 1.0),
)


@pytest.fixture(scope="module")
def gemma():
    words = ["-c", str(CONFIGS / "reasoning_gemma2_2b.yaml"), "--model.precision.dtype", "bfloat16"]
    return read(PlanCLI([*words, "--model.precision.gradient_checkpointing", "false"]).config)


def of(training, chip="h100", number=1, **settings):
    return Estimate(training, TABLE.device(chip), number, EVEN, **settings)


def phases(estimate):
    return {phase.name: phase for phase in estimate.phases()}


def test_a_phase_overlaps_memory_with_arithmetic_and_adds_the_rest():
    terms = {READING: Span(2, 2), CACHE: Span(1, 1), ARITHMETIC: Span(2, 5), CALLS: Span(1, 1)}
    assert Phase("decoding", terms, 3).once == Span(4, 6)
    assert Phase("decoding", terms, 3).whole == Span(12, 18)
    assert Phase("decoding", terms, 3).mostly == ARITHMETIC
    assert "max_completion_length" in Phase("decoding", terms, 3).key


def test_gemma_2_2b_by_hand(gemma):
    # All weights but those of the embedding, 26 x 4 norms and the last one multiply; 8 prompts of
    # 512 tokens, 32 rows of 256; half of each peak.
    estimate = of(gemma, lengths=Span(1.0, 1.0))
    linear = 2_614_341_888 - 256_000 * 2_304 - 26 * 4 * 2_304 - 2_304
    assert estimate.linear == linear
    found = phases(estimate)
    step = 2 * 2_614_341_888 / (0.5 * 3350e9)
    assert found["decoding"].terms[READING].high == pytest.approx(256 * step)
    tokens = 32 * 256 + 8 * 512
    forward = tokens * (2 * (linear + 256_000 * 2_304) + 4 * 26 * 2_304 * 768 / 2)
    assert found["learning"].terms[ARITHMETIC].high == pytest.approx(3 * forward / (0.5 * 989e12))
    assert found["scoring"].terms[ARITHMETIC].high == pytest.approx(forward / (0.5 * 989e12))
    assert found["learning"].times == gemma.schedule.iterations == 500


def test_small_batches_wait_for_calls_and_weights_and_large_ones_for_arithmetic(gemma):
    assert phases(of(gemma))["decoding"].mostly == CALLS
    recorded = replace(gemma.schedule, recorded=True)
    assert phases(of(gemma.changed(schedule=recorded)))["decoding"].mostly == READING
    work = replace(gemma.work, rollouts=((4096, 16), (4096, 4)), prompt_len=32)
    crowded = gemma.changed(schedule=recorded, work=work)
    assert phases(of(crowded))["decoding"].mostly in (ARITHMETIC, CACHE)


def test_checkpointing_costs_a_forward_pass_and_adapters_save_half_of_the_backward_one(gemma):
    plain, again = (
        phases(of(gemma.changed(checkpointing=on)))["learning"].terms[ARITHMETIC].high
        for on in (False, True)
    )
    assert again == pytest.approx(plain * 4 / 3)


def test_more_devices_share_tokens_and_pay_for_gathering(gemma):
    sharded = gemma.changed(division=FullShard())
    one, eight = (phases(of(sharded, number=n))["learning"] for n in (1, 8))
    ratio = one.terms[ARITHMETIC].high / eight.terms[ARITHMETIC].high
    assert ratio == pytest.approx(8)
    assert "gathering" in eight.terms
    assert "gathering" not in one.terms
    alone = phases(of(sharded, number=6, samplers=2))["decoding"].terms[ARITHMETIC].high
    shared = phases(of(sharded, number=8))["decoding"].terms[ARITHMETIC].high
    assert alone == pytest.approx(4 * shared)


def test_evaluations_and_saves_are_counted():
    plan = Schedule(iterations=250, validate_every=125, save_every=50)
    assert (plan.evaluations, plan.saves) == (3, 5)
    plan = Schedule(iterations=10, validate_every=0, save_every=0)
    assert (plan.evaluations, plan.saves) == (0, 1)


def test_the_total_is_that_of_all_phases(gemma):
    found = of(gemma).phases()
    assert total(found).high == pytest.approx(sum(phase.whole.high for phase in found))
    assert [p.name for p in found] == [
        *("start", "reading", "decoding", "scoring", "learning", "validations", "saves")
    ]
