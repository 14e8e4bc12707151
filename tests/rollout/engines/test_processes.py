"""Rollouts by processes of their own: the digits of the local engine, whoever dies on the way."""

import logging
import os
import signal
from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.importance import ImportanceCorrection
from litgrpo.algorithms.losses import Objective
from litgrpo.rollout.engines.base import Requests, RolloutEngine
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.processes import (
    ProcessEngine,
    RolloutProcessLost,
    rows_of,
    together,
)
from litgrpo.rollout.engines.rollout_worker import arrays_of
from litgrpo.rollout.engines.stopped import Stopped
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.types import PromptBatch
from tests.rollout.playing import Echo
from tests.support.async_rollout import Sequential, all_batches, assert_same_weights, run
from tests.support.engines import GROUP, TEXTS, assert_same, ragged, uniforms_for
from tests.support.models import prompt_batch, tiny_policy
from tests.support.training import loader, module, train


@pytest.fixture(scope="module")
def engine():
    """To start processes takes seconds: one crew for all; equal digits need as few threads here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = ProcessEngine()
    yield engine
    engine.crew.pool.close()
    torch.set_num_threads(threads)


def requests_for(policy, sampling=None, **settings):
    prompts = prompt_batch(*TEXTS)
    asked = Requests(policy, prompts, GROUP, uniforms_for(prompts), sampling or Sampling())
    return replace(asked, **settings)


class InTurn(RolloutEngine):
    """The local engine, asked for one share after the other."""

    def generate(self, requests):
        numbers = torch.arange(len(requests.prompts))
        shares = [numbers[first::2] for first in range(min(2, len(numbers)))]
        answers = []
        for share in shares:
            prompts = requests.prompts
            part = PromptBatch(
                prompts.prompt_ids[share],
                prompts.prompt_mask[share],
                [prompts.prompts[number] for number in share],
                {},
                prompts.index[share],
            )
            uniforms = requests.uniforms[rows_of(share, requests.group_size)]
            asked = replace(requests, prompts=part, uniforms=uniforms)
            answers.append(arrays_of(LocalEngine().generate(asked)))
        return together(requests, shares, answers)


def pids(engine):
    return [worker.pid for worker in engine.crew.pool.workers]


SAMPLINGS = [Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(temperature=0.0)]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "t5"])
def test_it_says_what_the_local_engine_says(engine, kind):
    policy = ragged(tiny_policy(kind))
    engine.sync_weights(policy, 0)
    for sampling in SAMPLINGS:
        asked = requests_for(policy, sampling)
        found = engine.generate(asked)
        assert_same(found, LocalEngine().generate(asked))  # up to rounding
        expected = InTurn().generate(asked)  # which follows the rows at once
        assert torch.equal(found.completion_ids, expected.completion_ids)
        assert torch.equal(found.sampler_logprobs, expected.sampler_logprobs)
        assert (found.candidate_ids is None) == (sampling.top_k == 0)
        if found.candidate_ids is not None:
            assert torch.equal(found.candidate_ids, expected.candidate_ids)


def test_new_weights_are_followed_by_the_same_processes(engine):
    policy = ragged(tiny_policy("qwen2"))
    engine.sync_weights(policy, 0)
    before, old = pids(engine), engine.generate(requests_for(policy))
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    engine.sync_weights(policy, 1)
    found = engine.generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))
    assert found.token_lists() != old.token_lists()
    assert pids(engine) == before


def test_stop_strings_and_short_memory_change_no_token(engine):
    policy = ragged(tiny_policy("qwen2"))
    engine.sync_weights(policy, 0)
    stops = StopStrings(("a", "e"), policy.tokenizer, policy.vocab_size)
    asked = requests_for(policy, stops=stops, max_rows=GROUP)
    assert_same(
        Stopped(engine, stops).generate(asked), Stopped(LocalEngine(), stops).generate(asked)
    )


def test_four_iterations_end_in_the_weights_of_the_local_engine(engine):
    def trained(engine):
        grpo = module(max_iterations=4, engine=engine)
        train(grpo, loader(prompt_batch("a", "hello there")))
        return grpo

    assert_same_weights(trained(engine), trained(InTurn()))


def test_it_samples_the_next_rollout_while_this_one_is_learned_from(engine):
    Sequential.batches = all_batches()
    correction = Objective(importance_correction=ImportanceCorrection())
    expected = run(Sequential, staleness=0, objective=correction, engine=InTurn())
    found = run(engine=engine)
    assert_same_weights(found, expected)
    assert found.versions == [0, 0, 1, 2, 3]


def test_a_process_that_dies_is_named_and_another_samples_its_share(engine, caplog, monkeypatch):
    policy = ragged(tiny_policy("qwen2"))
    engine.sync_weights(policy, 0)
    gone, ask = pids(engine)[-1], engine.crew._ask

    def asked_and_killed(worker, share):
        if worker.pid == gone:  # earlier it would be replaced without a share being lost
            os.kill(gone, signal.SIGKILL)
        ask(worker, share)

    monkeypatch.setattr(engine.crew, "_ask", asked_and_killed)
    with caplog.at_level(logging.WARNING, logger="litgrpo"):
        found = engine.generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))
    assert f"Rollout process {gone}, which sampled" in caplog.text
    assert "SIGKILL" in caplog.text
    engine.sync_weights(policy, 1)
    assert len(pids(engine)) == 2
    assert gone not in pids(engine)


def test_a_process_that_dies_while_it_waits_is_named_and_replaced(engine, caplog):
    policy = ragged(tiny_policy("qwen2"))
    engine.sync_weights(policy, 0)
    gone = pids(engine)[0]
    os.kill(gone, signal.SIGKILL)
    with caplog.at_level(logging.WARNING, logger="litgrpo"):
        while gone in pids(engine):
            engine.sync_weights(policy, 1)
    assert f"Rollout process {gone} died while it waited" in caplog.text
    assert len(pids(engine)) == 2


def test_processes_that_keep_dying_end_the_run_in_one_line(engine):
    policy = ragged(tiny_policy("qwen2"))
    engine.sync_weights(policy, 0)
    engine.crew.retries, engine.crew.timeout_s = 0, 1e-3
    with pytest.raises(RolloutProcessLost, match="1 died during this rollout"):
        engine.generate(requests_for(policy))
    engine.crew.retries, engine.crew.timeout_s = 2, 600.0
    assert_same(engine.generate(requests_for(policy)), LocalEngine().generate(requests_for(policy)))


def test_what_goes_wrong_there_is_told_here(engine):
    policy = ragged(tiny_policy("qwen2"))
    engine.sync_weights(policy, 0)
    asked = requests_for(policy)
    unknown = replace(asked.prompts, prompt_ids=asked.prompts.prompt_ids + policy.vocab_size)
    with pytest.raises(RuntimeError, match="in a rollout process: IndexError"):
        engine.generate(replace(asked, prompts=unknown))


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"processes": 0}, "engine.processes"), ({"timeout_s": 0}, "engine.timeout_s")],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ProcessEngine(**settings)


def test_limits_and_precision_are_those_of_each_process():
    low = ProcessEngine(3, LocalEngine(max_rows=8, dtype="bfloat16"))
    assert (low.row_limit, low.exact, low.hears) == (24, False, False)
    assert ProcessEngine().row_limit is None


def test_episodes_are_refused():
    with pytest.raises(ValueError, match="ProcessEngine samples without turns"):
        module(engine=ProcessEngine(), environment=Echo())
