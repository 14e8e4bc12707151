"""`ServerEngine` with a real vLLM server on a CPU."""

import json
import os
import subprocess

import pytest
import torch

from litgrpo.models.export import export
from litgrpo.models.loading import load_policy
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.vllm import ServerEngine
from litgrpo.rollout.engines.vllm_client import ServerFailure
from litgrpo.rollout.engines.weight_transfer import FolderSender
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.turn_format import InlineFormat
from litgrpo.training.grpo import GRPO
from litgrpo.types import PromptBatch, pad_left
from tests.support.gloo import run_by
from tests.support.playing import Echo, episodes_of
from tests.support.raises import raises_for
from tests.support.training import loader, train
from tests.support.turns_support import KEY
from tests.support.turns_support import assert_same as assert_same_turns
from tests.vllm import divided
from tests.vllm.serving import CPU, PROCESSED, PYTHON, ROOT, UNIFORMS, served

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="LITGRPO_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(600),
]
MODEL = "builtin:tiny-gemma2"
TEXTS, GROUP, LENGTH = ("12+5=", "3+4=", "What is 7+88?", "6+6="), 8, 40


def perturb(policy, size=0.003):
    """Other weights, as training makes them."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(size * torch.randn_like(weight))
    return policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of the same kind whose weights are not the policy's."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    export(perturb(load_policy(MODEL), 0.05), path)
    return path


@pytest.fixture(scope="module")
def uniforms(folder, tmp_path_factory):
    with served(folder, tmp_path_factory.mktemp("uniforms"), UNIFORMS) as url:
        yield url


def prompts_of(policy):
    ids = [policy.tokenizer(text).input_ids for text in TEXTS]
    rows = torch.arange(len(TEXTS))
    return PromptBatch(*pad_left(ids, policy.pad_id), list(TEXTS), {}, rows)


def requests_for(policy, sampling=None):
    prompts = prompts_of(policy)
    numbers = draw_uniforms(0, "train", 0, prompts.index, GROUP, LENGTH)
    return RolloutRequest(policy, prompts, GROUP, numbers, sampling or Sampling())


@torch.no_grad()
def gap(policy, rollout, temperature=1.0):
    found = policy.logprobs(rollout.tokens, temperature=temperature).logprobs
    return float((found - rollout.sampler_logprobs).abs().masked_fill(~rollout.loss_mask, 0).max())


def digits(prompts, completions):
    return [sum(letter.isdigit() for letter in text) / LENGTH for text in completions]


def train_weights(engine):
    """Weights after four iterations; the invariants are measured before the first."""
    sizes = {"group_size": GROUP, "max_completion_length": LENGTH, "max_iterations": 4}
    grpo = GRPO(MODEL, {"digits": Reward(digits)}, engine=engine, **sizes)
    grpo.configure_model()
    train(grpo, loader(prompts_of(grpo.policy)))
    return grpo.policy.state_dict()


def test_four_iterations_end_in_the_weights_of_the_local_engine_bit_for_bit(uniforms):
    found = train_weights(ServerEngine([uniforms], send_uniforms=True))
    expected = train_weights(LocalEngine())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    start = load_policy(MODEL).state_dict()
    assert not all(torch.equal(found[name], start[name]) for name in expected)


def test_two_processes_with_divided_weights_learn_what_one_does_without_a_server(
    uniforms, tmp_path
):
    for processes in (1, 2):
        run_by(processes, divided.learn, uniforms, tmp_path)
    one, two = (torch.load(tmp_path / f"{processes}.pt") for processes in (1, 2))
    start = load_policy(MODEL).state_dict()
    off, moved = (
        sum(float((one[n] - other[f"{before}{n}"]).square().sum()) for n in one) ** 0.5
        for other, before in ((two, ""), (start, "model."))
    )
    print(f"\noff {off / moved:.1e} of how far the weights moved")
    assert off < 1e-4 * moved


def test_new_weights_are_followed(uniforms):
    policy, engine = load_policy(MODEL).eval(), ServerEngine([uniforms], send_uniforms=True)
    engine.sync_weights(policy, 0)
    assert gap(policy, engine.generate(requests_for(policy))) < 1e-4
    perturb(policy, 0.02)
    assert gap(policy, engine.generate(requests_for(policy))) > 0.1
    engine.sync_weights(policy, 1)
    found = engine.generate(requests_for(policy))
    assert gap(policy, found) < 1e-4
    assert found.token_lists() == LocalEngine().generate(requests_for(policy)).token_lists()


class Forgets(FolderSender):
    """Says that it sent, and did not."""

    def send(self, server):
        """Nothing."""


def test_other_weights_are_refused_by_the_invariants(uniforms, folder):
    engine = ServerEngine([uniforms], send_uniforms=True)
    engine.sync_weights(load_policy(str(folder)), 0)  # back to those of another model
    engine.pool.sender.__class__ = Forgets
    with pytest.raises(ValueError, match="1 cached decoding equals the full forward"):
        train_weights(engine)


def test_a_skipped_publish_is_refused_by_its_version(uniforms):
    policy = load_policy(MODEL).eval()
    mine, other = (ServerEngine([uniforms], send_uniforms=True, retries=n) for n in (0, 1))
    mine.sync_weights(policy, 0)
    other.sync_weights(policy, 0)
    with raises_for(other.pool.version, error=ServerFailure):
        mine.generate(requests_for(policy))


def test_an_episode_is_that_of_the_local_engine(uniforms):
    policy, engine = load_policy(MODEL).eval(), ServerEngine([uniforms], send_uniforms=True)
    engine.sync_weights(policy, 0)

    def play(engine):
        given = episodes_of(Echo(lengths=(3, 1, 5)), max_turn_tokens=12)
        given.turn_format = InlineFormat(policy.tokenizer)
        return given.play(engine, requests_for(policy), KEY)

    found = play(engine)
    assert_same_turns(found, play(LocalEngine()))
    assert int(found.turns.max()) > 0
    assert gap(policy, found) < 1e-4


def test_seeds_repeat_a_rollout_whose_log_probabilities_are_the_policys(folder, tmp_path):
    policy = load_policy(MODEL).eval()
    asked = requests_for(policy, Sampling(temperature=0.7))
    with served(folder, tmp_path, PROCESSED) as url:
        engine = ServerEngine([url])
        engine.sync_weights(policy, 0)
        one, two = (engine.generate(asked) for _ in range(2))
    assert one.token_lists() == two.token_lists()
    assert gap(policy, one, temperature=0.7) < 1e-4


def test_what_native_transfer_takes_from_vllm_is_there():
    """NCCL itself needs GPUs."""
    code = """
import inspect
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo as Info, NCCLTrainerWeightTransferEngine as Engine)
Info("127.0.0.1", 1, 2, rank=0); HTTPVLLMWeightSyncClient("http://127.0.0.1:1", 1.0)
assert {"client", "source"} <= {*inspect.signature(Engine.trainer_init).parameters}
Engine.send_weights; ParamMeta("a", None, (1,)); WeightSource.metadata
"""
    subprocess.run([PYTHON, "-c", code], check=True, timeout=300)


def test_a_vllm_in_the_same_process_follows_the_weights():
    command = [PYTHON, "-m", "tests.vllm.colocated"]
    done = subprocess.run(
        command, env=os.environ | CPU, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["repeated"]
    assert found["from_memory"]
    assert max(found["first"], found["after"]) < 1e-4
    assert found["before"] > 0.1
