"""Recorded steps, here with a recorder that needs no device, sample what eager steps do."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from litgrpo.distributed.device import Backend
from litgrpo.models import causal
from litgrpo.models.loading.load import build_policy
from litgrpo.rollout.engines import fixed, local
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.stop_sequences import StopStrings
from tests.support.engines import GROUP, TEXTS, assert_same, spread_lengths, uniforms_for
from tests.support.fused_decode import VARIANTS, model_of
from tests.support.models import byte_tokenizer, prompt_batch, tiny_policy
from tests.support.static import said

ENGINE = LocalEngine(sync_every_tokens=3)
SAMPLINGS = {
    "temperature": Sampling(temperature=0.7),
    "greedy": Sampling(temperature=0),
    "top-k": Sampling(top_k=5),
    "top-p": Sampling(top_k=20, top_p=0.8),
    "min-p": Sampling(top_k=20, min_p=0.1),
}


class Recorder(Backend):
    """The CPU, as if it recorded: it notes the shapes of the tensors that each step reads."""

    records_steps = True

    def __init__(self, device):
        super().__init__(device)
        self.recorded, self.replays, self.alive = [], 0, []

    def record(self, run):
        assert not any(each() is not None for each in self.alive), "two recordings at once"
        (rows,) = (c.cell_contents for c in run.__closure__ if is_rows(c.cell_contents))
        state = rows.state
        self.recorded.append((len(state.prompt_mask), state.group_size, state.columns))

        def replay():
            self.replays += 1
            run()

        self.alive.append(weakref.ref(replay))
        return replay


def is_rows(value):
    return isinstance(value, fixed.FixedRows)


@pytest.fixture
def recorder(monkeypatch):
    """Record on the CPU, with few columns in a bucket."""
    device = Recorder(torch.device("cpu"))
    monkeypatch.setattr(local, "backend", lambda _: device)
    monkeypatch.setattr(fixed, "COLUMNS", 4)
    return device


def eager(policy, *args):
    """Sample without recording."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "backend", Backend)
        return said(policy, LocalEngine(), *args)


def policy_of(variant):
    return spread_lengths(build_policy(model_of(variant), byte_tokenizer()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_steps_sample_what_eager_steps_do(variant, recorder):
    policy = policy_of(variant)
    for _ in range(2):
        before = recorder.replays
        assert_same(said(policy, ENGINE), eager(policy), 3e-5)
        assert recorder.replays > before
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.01)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_filters_leave_the_same_candidates(architecture, sampling, recorder):
    policy = spread_lengths(tiny_policy(architecture))
    found, expected = said(policy, ENGINE, sampling), eager(policy, sampling)
    assert recorder.replays
    assert_same(found, expected, 3e-5)
    assert (found.candidate_ids is None) == (expected.candidate_ids is None)
    if found.candidate_ids is not None:
        assert torch.equal(found.candidate_ids, expected.candidate_ids)


def test_top_p_without_top_k_is_not_recorded(recorder):
    policy, sampling = spread_lengths(tiny_policy("qwen2")), Sampling(top_p=0.8)
    assert_same(said(policy, ENGINE, sampling), eager(policy, sampling))
    assert not recorder.recorded


def test_models_without_a_fused_layout_are_not_recorded(recorder):
    policy = spread_lengths(tiny_policy("gpt2"))
    assert_same(said(policy, ENGINE), eager(policy))
    assert not recorder.recorded


def test_merged_adapters_are_recorded(recorder):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    policy = spread_lengths(
        build_policy(peft.get_peft_model(model_of("biases"), config), byte_tokenizer())
    )
    assert_same(said(policy, ENGINE), eager(policy), 3e-5)
    assert recorder.replays


def test_rows_leave_and_columns_are_added_with_few_recordings(recorder):
    policy = tiny_policy("qwen2")
    policy.eos_ids = tuple(range(2, 90))
    assert_same(said(policy, ENGINE), eager(policy), 3e-5)
    cells = [prompts * width for prompts, width, _ in recorder.recorded]
    assert cells[0] == len(TEXTS) * GROUP
    assert cells == sorted(cells, reverse=True)
    assert cells[-1] < cells[0] / 2
    columns = [columns for *_, columns in recorder.recorded]
    assert columns == sorted(columns)
    assert len(columns) <= 4
    assert recorder.replays > len(columns)


def test_all_rows_that_end_early_end_the_rollout(recorder):
    policy = tiny_policy("qwen2")
    policy.eos_ids = tuple(range(300))
    assert said(policy, ENGINE).lengths.tolist() == [1] * (GROUP * len(TEXTS))
    assert recorder.replays <= 2


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_fewer_rows_at_once_sample_the_same(rows, recorder):
    policy, prompts = spread_lengths(tiny_policy("gemma2")), prompt_batch(*TEXTS)
    expected = eager(policy)
    assert_same(said(policy, replace(ENGINE, max_rows=rows)), expected, 3e-5)
    # As after an out-of-memory error.
    request = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling(), rows)
    assert_same(ENGINE.generate(request), expected, 3e-5)
    assert max(prompts * width for prompts, width, _ in recorder.recorded) <= max(rows, GROUP)


def test_stop_strings_end_rows_at_the_next_check(recorder):
    policy, prompts = tiny_policy("qwen2"), prompt_batch("xy")
    policy.eos_ids, uniforms = (2,), uniforms_for(prompts, 1)
    request = RolloutRequest(policy, prompts, 1, uniforms, Sampling())
    whole = ENGINE.generate(request).token_lists()[0]
    stop = byte_tokenizer().decode(whole[3:5])
    stops = StopStrings((stop,), byte_tokenizer(), policy.vocab_size)
    end = stops.length(whole)
    assert end <= 5
    found = ENGINE.generate(replace(request, stops=stops)).token_lists()[0]
    assert found == whole[: -(-end // 3) * 3]
    unused = StopStrings(("never",), byte_tokenizer(), policy.vocab_size)
    assert ENGINE.generate(replace(request, stops=unused)).token_lists()[0] == whole


def test_lower_precision_stays_close(recorder):
    policy = tiny_policy("qwen2")
    policy.eos_ids, exact = (2,), eager(policy)
    with torch.autocast("cpu", torch.bfloat16):
        found, other = said(policy, ENGINE), eager(policy)
    # Up to where rounding, which depends on the processor, led to another token.
    same = (found.completion_ids == exact.completion_ids).cumprod(1).bool()
    assert same.any()
    gap = (found.sampler_logprobs - exact.sampler_logprobs)[same].abs().mean()
    other_same = (other.completion_ids == exact.completion_ids).cumprod(1).bool()
    eager_gap = (other.sampler_logprobs - exact.sampler_logprobs)[other_same].abs().mean()
    assert gap < 3 * eager_gap
    assert found.sampler_logprobs.dtype == torch.float32


def test_nothing_is_kept_after_a_rollout_or_an_error(recorder, monkeypatch):
    policy = spread_lengths(tiny_policy("qwen2"))
    said(policy, ENGINE)
    gc.collect()
    assert recorder.alive
    assert not any(each() for each in recorder.alive)
    assert not policy.can_record

    def fail(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recorder, "record", fail)
    caches = []
    allocate = causal.FusedDecoder.make_fixed_state

    def note(*args):
        state = allocate(*args)
        caches.extend(map(weakref.ref, state.completions))
        return state

    monkeypatch.setattr(causal.FusedDecoder, "make_fixed_state", note)
    with pytest.raises(torch.OutOfMemoryError):
        said(policy, ENGINE)
    gc.collect()
    assert caches
    assert all(each() is None for each in caches)
