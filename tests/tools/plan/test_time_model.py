"""Times computed by hand, and the largest term of each phase."""

from dataclasses import replace
from pathlib import Path

import pytest

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.devices import Bounds, load_devices
from litgrpo.tools.plan.schedule import Schedule
from litgrpo.tools.plan.sharding import FSDPSharding
from litgrpo.tools.plan.sizes import read_sizes
from litgrpo.tools.plan.time_model import (
    ARITHMETIC,
    CACHE,
    CALLS,
    GATHERING,
    READING,
    RunPhase,
    TimeEstimate,
    total_seconds,
)

CONFIGS = Path(__file__).parents[3] / "configs"
TABLE = load_devices()
EVEN = replace(
    TABLE.assumptions,
    arithmetic={kind: {float("inf"): Bounds(0.5, 0.5)} for kind in ("cuda", "tpu", "cpu")},
    bandwidth=Bounds(0.5, 0.5),
    links=Bounds(1.0, 1.0),
)


@pytest.fixture(scope="module")
def gemma():
    words = ["-c", str(CONFIGS / "reasoning_gemma2_2b.yaml"), "--model.precision.dtype", "bfloat16"]
    return read_sizes(PlanCLI([*words, "--model.precision.gradient_checkpointing", "false"]).config)


def of(recipe, chip="h100", number=1, **settings):
    return TimeEstimate(recipe, TABLE.device(chip), number, EVEN, **settings)


def phases(estimate):
    return {phase.name: phase for phase in estimate.phases()}


def test_a_phase_overlaps_memory_with_arithmetic_and_adds_the_rest():
    terms = {
        READING: Bounds(2, 2),
        CACHE: Bounds(1, 1),
        ARITHMETIC: Bounds(2, 5),
        CALLS: Bounds(1, 1),
    }
    assert RunPhase("decoding", terms, 3).once == Bounds(4, 6)
    assert RunPhase("decoding", terms, 3).whole == Bounds(12, 18)
    assert RunPhase("decoding", terms, 3).largest_term == ARITHMETIC
    assert "max_completion_length" in RunPhase("decoding", terms, 3).setting


def test_gemma_2_2b_by_hand(gemma):
    # All weights but those of the embedding, 26 x 4 norms and the last one multiply; 8 prompts of
    # 512 tokens, 32 rows of 256; half of each peak.
    estimate = of(gemma, lengths=Bounds(1.0, 1.0))
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
    eager = replace(gemma.schedule, records_on_cuda=False)
    assert phases(of(gemma.with_settings(schedule=eager)))["decoding"].largest_term == CALLS
    recorded = replace(gemma.schedule, replays_graph=True)
    assert phases(of(gemma.with_settings(schedule=recorded)))["decoding"].largest_term == READING
    # LocalEngine records the step of Gemma 2 on CUDA.
    assert phases(of(gemma))["decoding"].largest_term == READING
    work = replace(gemma.work, rollouts=((4096, 16), (4096, 4)), prompt_len=32)
    crowded = gemma.with_settings(schedule=recorded, work=work)
    assert phases(of(crowded))["decoding"].largest_term in (ARITHMETIC, CACHE)


def test_checkpointing_costs_a_forward_pass_and_adapters_save_half_of_the_backward_one(gemma):
    plain, again = (
        phases(of(gemma.with_settings(checkpointing=on)))["learning"].terms[ARITHMETIC].high
        for on in (False, True)
    )
    assert again == pytest.approx(plain * 4 / 3)


def test_more_devices_share_tokens_and_pay_for_gathering(gemma):
    sharded = gemma.with_settings(sharding=FSDPSharding())
    one, eight = (phases(of(sharded, number=n))["learning"] for n in (1, 8))
    ratio = one.terms[ARITHMETIC].high / eight.terms[ARITHMETIC].high
    assert ratio == pytest.approx(8)
    assert GATHERING in eight.terms
    assert GATHERING not in one.terms
    alone = phases(of(sharded, number=6, samplers=2))["decoding"].terms[ARITHMETIC].high
    shared = phases(of(sharded, number=8))["decoding"].terms[ARITHMETIC].high
    assert alone == pytest.approx(4 * shared)


def test_evaluations_and_saves_are_counted():
    plan = Schedule(iterations=250, validate_every=125, save_every=50)
    assert (plan.evaluations, plan.saves) == (3, 5)
    plan = Schedule(iterations=10, validate_every=0, save_every=0)
    assert (plan.evaluations, plan.saves) == (0, 1)


def test_greedy_completions_are_a_rollout_of_one_per_prompt(gemma):
    with_greedy = gemma.with_settings(schedule=replace(gemma.schedule, greedy=True))
    prompts, _ = gemma.work.rollouts[0]
    alone = replace(gemma.work, rollouts=((prompts, 1),))
    expected = phases(of(gemma.with_settings(work=alone)))
    found = phases(of(with_greedy))["greedy"]
    both = expected["prefill"].once.high + expected["decoding"].once.high
    assert found.once.high == pytest.approx(both)
    assert found.times == gemma.schedule.iterations


def test_the_total_is_that_of_all_phases(gemma):
    found = of(gemma).phases()
    assert total_seconds(found).high == pytest.approx(sum(phase.whole.high for phase in found))
    assert [p.name for p in found] == [
        *("start", "prefill", "decoding", "scoring", "learning", "validations", "saves")
    ]
