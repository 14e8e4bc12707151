"""Guarantees of static shapes beyond those of every engine (test_engines.py)."""

from dataclasses import replace

import pytest
import torch
from jsonargparse import ArgumentParser
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.distributed.device import Backend
from litgrpo.models.architectures import DECODER_ONLY
from litgrpo.models.loading.load import LoRA, build_policy
from litgrpo.rollout.engines import fixed
from litgrpo.rollout.engines import static as static_engine
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from tests.support.engines import GROUP, TEXTS, assert_same, spread_lengths, uniforms_for
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.packing import SPECIAL, model_of_type
from tests.support.reference_engine import ReferenceEngine
from tests.support.static import ENGINE, said
from tests.support.t5 import VARIANTS, variant


class Tracing(Backend):
    """The CPU, as if it compiled a program for each set of shapes; counts the graphs."""

    static_shapes = True

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.counter, self.compiled = CompileCounter(), {}

    def compile(self, function):
        if function not in self.compiled:
            self.compiled[function] = torch.compile(
                function, backend=self.counter, dynamic=False, fullgraph=True
            )
        return self.compiled[function]


@pytest.fixture
def graphs(monkeypatch):
    """Trace as for a device that compiles; counts the graphs."""
    tracing = Tracing()
    torch._dynamo.reset()
    monkeypatch.setattr(static_engine, "backend", lambda device: tracing)
    yield tracing.counter
    torch._dynamo.reset()


@pytest.fixture
def on_static_shapes(monkeypatch):
    """The CPU, as a device whose rollouts keep their shapes; nothing is traced."""
    device = Backend(torch.device("cpu"))
    monkeypatch.setattr(device, "static_shapes", True)
    monkeypatch.setattr(static_engine, "backend", lambda _: device)


@pytest.mark.parametrize("model_type", DECODER_ONLY)
def test_every_known_model_type_says_what_the_reference_engine_says(model_type):
    policy = spread_lengths(build_policy(model_of_type(model_type), byte_tokenizer()).eval())
    assert_same(said(policy, ENGINE), said(policy, ReferenceEngine()))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_whole_family_of_t5_says_what_the_reference_engine_says(name):
    policy = spread_lengths(variant(name))
    assert_same(said(policy, ENGINE), said(policy, ReferenceEngine()))


def test_parts_of_different_lengths_have_no_candidates_on_padding():
    policy = spread_lengths(tiny_policy("qwen2"))
    prompts = prompt_batch(*TEXTS)
    uniforms = uniforms_for(prompts, length=20)
    request = RolloutRequest(policy, prompts, GROUP, uniforms, Sampling(top_k=5), max_rows=GROUP)
    rollout = StaticEngine(prompt_buckets=8).generate(request)
    assert rollout.lengths.view(-1, GROUP).amax(1).unique().numel() > 1
    assert ((rollout.candidate_ids >= 0).any(-1) == rollout.completion_mask).all()


def test_one_graph_reads_prompts_and_one_serves_every_step_of_every_rollout(architecture, graphs):
    policy = spread_lengths(tiny_policy(architecture))
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9)
    for texts in (TEXTS, TEXTS[::-1], ("b", "ab", "abc", "abcdefghi")):
        rollout = said(policy, ENGINE, sampling, texts)
        assert_same(rollout, said(policy, LocalEngine(), sampling, texts))
    assert graphs.frame_count == 2
    with torch.no_grad():  # weights are inputs of the graphs
        for parameter in policy.parameters():
            parameter.mul_(0.9)
    assert_same(said(policy, ENGINE, sampling), said(policy, LocalEngine(), sampling))
    with torch.inference_mode():  # as in validation
        assert_same(said(policy, ENGINE, sampling), said(policy, LocalEngine(), sampling))
    assert graphs.frame_count == 2


@pytest.mark.slow
def test_another_bucket_or_sampling_is_another_pair_of_graphs(graphs):
    policy = spread_lengths(tiny_policy("llama"))
    said(policy, ENGINE)
    said(policy, ENGINE, texts=("a", "b", "c", "twelve bytes"))  # 13 tokens: the same bucket
    assert graphs.frame_count == 2
    said(policy, ENGINE, texts=("a", "b", "c", "d"))
    assert graphs.frame_count == 4
    said(policy, ENGINE, Sampling(temperature=0))
    assert graphs.frame_count == 6


@pytest.mark.filterwarnings("ignore:.*target_modules.*")
def test_adapters_are_traced_too(graphs):
    policy = spread_lengths(
        build_policy(tiny_model("qwen2"), byte_tokenizer(), lora=LoRA(rank=4)).eval()
    )
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    assert_same(said(policy, ENGINE), said(policy, ReferenceEngine()))
    assert graphs.frame_count == 2


def test_a_window_below_the_length_is_kept_without_soft_caps():
    sliding = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    policy = spread_lengths(tiny_policy("qwen2", **sliding))
    assert_same(said(policy, ENGINE), said(policy, ReferenceEngine()))


SAMPLINGS = [(Sampling(), None), (Sampling(top_k=7), 7), (Sampling(top_p=0.5), 259)]


@pytest.mark.usefixtures("on_static_shapes")
@pytest.mark.parametrize(("sampling", "width"), SAMPLINGS)
def test_static_shapes_are_those_of_the_uniforms_however_early_all_rows_end(sampling, width):
    policy = tiny_policy("qwen2")
    policy.eos_ids = tuple(range(2, 250))
    rollout = said(policy, ENGINE, sampling)
    assert rollout.lengths.max() < 8
    assert rollout.completion_ids.shape == (12, 12)
    assert rollout.prompts.prompt_ids.shape == (4, 16)  # the bucket
    assert not rollout.completion_ids[~rollout.completion_mask].any()
    assert not rollout.sampler_logprobs[~rollout.completion_mask].any()
    if width is not None:
        assert rollout.candidate_ids.shape == (12, 12, width)
        assert bool((rollout.candidate_ids[~rollout.completion_mask] == -1).all())


@pytest.mark.parametrize(("sampling", "width"), SAMPLINGS)
def test_elsewhere_prompts_and_unused_columns_are_as_the_local_engine_has_them(sampling, width):
    policy = tiny_policy("qwen2")
    policy.eos_ids = tuple(range(2, 250))
    found, expected = said(policy, ENGINE, sampling), said(policy, LocalEngine(), sampling)
    assert found.completion_ids.shape == expected.completion_ids.shape
    assert found.completion_ids.shape[1] == found.lengths.max() < 8
    assert torch.equal(found.prompts.prompt_ids, expected.prompts.prompt_ids)
    assert found.completion_ids.is_contiguous()
    if width is not None:
        assert found.candidate_ids.shape == (12, int(found.lengths.max()), width)


@pytest.mark.parametrize("ends", [150, 250])
def test_no_more_steps_are_taken_once_all_rows_have_ended(ends):
    policy = tiny_policy("qwen2")
    policy.eos_ids = tuple(range(2, ends))
    steps = []

    class Counted(policy.static_decoder_class):
        def decode_step(self, tokens, state):
            steps.append(1)
            return super().decode_step(tokens, state)

    policy.static_decoder_class = Counted
    lengths = said(policy, StaticEngine(sync_every_tokens=3)).lengths
    assert len(steps) == -(-int(lengths.max()) // 3) * 3 - 1 < 11


def test_prompts_are_padded_to_the_smallest_bucket():
    prompts = prompt_batch("a", "four", "sixteen")  # 2, 5 and 8 tokens
    for buckets, width in ((8, 8), (6, 12), (64, 64), ((32, 10), 10), ((8, 16), 8)):
        engine = StaticEngine(prompt_buckets=buckets)
        padded = engine.pad_prompts(prompts)
        assert padded.prompt_ids.shape == (3, width)
        assert torch.equal(padded.prompt_mask.sum(1), prompts.prompt_mask.sum(1))
        assert torch.equal(padded.prompt_ids[:, -8:], prompts.prompt_ids)
        assert padded.prompts is prompts.prompts
        assert torch.equal(engine.pad_prompts(padded).prompt_ids, padded.prompt_ids)


def test_what_cannot_be_decoded_in_static_shapes_is_refused():
    with pytest.raises(ValueError, match=r"A prompt has 13 tokens, but the largest .* is 12\."):
        said(tiny_policy("llama"), StaticEngine(prompt_buckets=(8, 12)))
    for buckets in (0, (), (8, -1)):
        with pytest.raises(ValueError, match=r"engine.prompt_buckets is .*; it must be"):
            StaticEngine(prompt_buckets=buckets)
    with pytest.raises(ValueError, match=r"engine.sync_every_tokens is 0; it must be at least 1"):
        StaticEngine(sync_every_tokens=0)
    scaled = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    with pytest.raises(ValueError, match=r"\['dynamic'\] depend on the length.*LocalEngine"):
        said(tiny_policy("llama", rope_parameters=scaled), ENGINE)
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **SPECIAL))
    with pytest.raises(ValueError, match=r"bloom.*static shapes"):
        said(build_policy(bloom, byte_tokenizer()).eval(), ENGINE)


def test_a_recipe_names_it_by_its_class_path():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(RolloutEngine, "engine")
    name = "litgrpo.rollout.engines.static.StaticEngine"
    for given, buckets in (([64, 128], (64, 128)), (32, 32)):
        engine = {"class_path": name, "init_args": {"prompt_buckets": given}}
        made = parser.instantiate(parser.parse_object({"engine": engine})).engine
        assert made == StaticEngine(prompt_buckets=buckets)


def test_under_autocast_it_is_near_to_the_policy(architecture):
    policy = tiny_policy(architecture)
    with torch.autocast("cpu", torch.bfloat16):
        rollout = said(policy, ENGINE)
    exact = policy.logprobs(rollout.tokens).logprobs
    assert 1e-4 < (rollout.sampler_logprobs - exact).abs().mean() < 0.1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5)])
@pytest.mark.parametrize("keeps_shapes", [False, True])
def test_where_memory_is_short_groups_decode_one_after_another(sampling, keeps_shapes, request):
    if keeps_shapes:
        request.getfixturevalue("on_static_shapes")
    policy, prompts = spread_lengths(tiny_policy("gemma2").eval()), prompt_batch(*TEXTS)
    whole = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), sampling)
    expected = ENGINE.generate(whole)
    for max_rows in (1, 2 * GROUP, 100 * GROUP):
        got = ENGINE.generate(replace(whole, max_rows=max_rows))
        assert_same(got, expected)
        assert torch.equal(got.prompts.prompt_mask, expected.prompts.prompt_mask)
        assert got.prompts.prompts == prompts.prompts


def test_a_limit_on_rows_halves_what_decodes_at_once(monkeypatch):
    seen = []
    prefill = fixed._prefill
    monkeypatch.setattr(
        fixed, "_prefill", lambda *args: seen.append(len(args[1])) or prefill(*args)
    )
    prompts = prompt_batch(*TEXTS)
    asked = RolloutRequest(tiny_policy("qwen2"), prompts, GROUP, uniforms_for(prompts), Sampling())
    ENGINE.generate(replace(asked, max_rows=2 * GROUP))
    assert max(seen) == 2
    assert sum(seen) == len(TEXTS)
