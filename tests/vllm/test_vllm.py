"""`ServerEngine` with a real vLLM server on a CPU."""

import copy
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from litgrpo.algorithms.divergences import TopK
from litgrpo.models.adapters import LoRA
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import load_policy, resolve_pretrained
from litgrpo.models.reference import FrozenReference
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.servers.client import ServerFailure
from litgrpo.rollout.servers.reference import ReferenceServers, ServedReference
from litgrpo.rollout.servers.vllm import ServerEngine
from litgrpo.rollout.servers.vllm_client import VllmServer
from litgrpo.rollout.servers.weight_transfer import AdapterTransfer
from litgrpo.rollout.turn_format import InlineFormat
from litgrpo.types import PromptBatch, pad_left
from tests.faults.running import Run, weights_of
from tests.hosts.launching import LIMIT_S, Launch, recipe_of
from tests.hosts.network import connect_hosts
from tests.support.agent_rollouts import agent_episodes, play_agents
from tests.support.gloo import run_by
from tests.support.models import tiny_policy
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


def test_a_run_on_another_host_ends_in_the_weights_of_the_local_engine_bit_for_bit(
    folder, tmp_path
):
    with connect_hosts(2) as network, ExitStack() as stack:
        local = Run(tmp_path / "local", recipe_of("auto"), new_process=True)
        assert local.go(timeout_s=LIMIT_S) == 0, local.said[-3000:]
        first, second = network.hosts
        server = served(folder, tmp_path, UNIFORMS, second.address)
        url = second.run(lambda: stack.enter_context(server))
        launch = Launch(Run(tmp_path / "run", recipe_of("auto", servers=[url])), [first])
        launch.start()
        assert launch.wait() == [0], launch.said[-3000:]
    assert network.packets > 1000
    assert weights_of(launch.run) == weights_of(local)


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


def test_weights_change_while_rows_are_sampled_and_each_token_names_its_own(uniforms):
    engine = ServerEngine([uniforms], send_uniforms=True)
    policies = {version: load_policy(MODEL).eval() for version in (0, 1)}
    perturb(policies[1], 0.02)
    engine.update_in_flight(policies[0], 0)
    prompts = prompts_of(policies[0])
    numbers = draw_uniforms(0, "train", 0, prompts.index, GROUP, 200)
    # Without end tokens, so that rows are long enough to be met by the update.
    policies[0].eos_ids = ()
    request = RolloutRequest(policies[0], prompts, GROUP, numbers, Sampling())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(engine.generate, request)
        while not running_requests(uniforms):
            time.sleep(0.01)
        engine.update_in_flight(policies[1], 1)
        rollout = running.result()
    versions = rollout.token_versions
    assert versions.diff(dim=1).ge(0).all()
    assert (versions.amin(1) < versions.amax(1)).sum() > len(versions) // 2
    for version, policy in policies.items():
        with torch.no_grad():
            known = policy.logprobs(rollout.tokens).logprobs
        off = (known - rollout.sampler_logprobs).abs()[versions == version].max()
        print(f"\nversion {version}: {int((versions == version).sum())} tokens, off by {off:.1e}")
        assert off < 1e-3


def running_requests(url):
    """Return the number of rows that a server is sampling."""
    for line in httpx2.get(f"{url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("vllm:num_requests_running"):
            return float(line.split()[-1])
    raise AssertionError("no metric of running requests")


def play_agents_of(policy, engine):
    """A rollout of agents with several calls each."""
    episodes = agent_episodes(encoder=InlineFormat(policy.tokenizer), timeout_s=300)
    try:
        return play_agents(episodes, "talk", "branch", policy=policy, engine=engine)
    finally:
        episodes.close()


def test_an_adapter_is_sampled_beside_the_base_model(tmp_path, monkeypatch):
    """The weights of the base model are sent never, and those of the adapter as they are."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    flags = f"{UNIFORMS} --enable-lora --max-lora-rank 16 --max-loras 1 --max-cpu-loras 2"
    lora = LoRA(rank=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    policy = load_policy(MODEL, lora=lora).eval()
    with served(resolve_pretrained(MODEL), tmp_path, flags) as url:
        engine = ServerEngine([url], weight_transfer=AdapterTransfer(), send_uniforms=True)
        for version in range(3):
            engine.sync_weights(policy, version)
            found = engine.generate(requests_for(policy))
            expected = LocalEngine().generate(requests_for(policy))
            print(f"\nversion {version}: off by {gap(policy, found):.1e}")
            assert gap(policy, found) < 1e-3
            assert found.token_lists() == expected.token_lists()
            # Agents call the policy through the same requests, each with a separate limit.
            played = play_agents_of(policy, engine)
            print(f"agents off by {gap(policy, played):.1e}")
            assert gap(policy, played) < 1e-3
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.05 * torch.randn_like(parameter))
            assert gap(policy, found) > 0.01
        names = engine.servers.clients[0].list_models()
        assert len(names) == 2  # the base model and the last adapter


class Forgets(VllmServer):
    """Says that it sent, and did not."""

    def _load_model(self, weights):
        """Nothing."""


def test_other_weights_are_refused_by_the_invariants(uniforms, folder):
    engine = ServerEngine([uniforms], send_uniforms=True)
    engine.sync_weights(load_policy(str(folder)), 0)  # back to those of another model
    engine.servers.clients[0].__class__ = Forgets
    with pytest.raises(ValueError, match="1 cached decoding equals the full forward"):
        train_weights(engine)


def test_a_server_of_a_model_of_another_width_is_refused(folder, tmp_path):
    policy = load_policy(str(folder))
    config = copy.deepcopy(policy.model.config)
    config.hidden_size *= 2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    with (
        served(tmp_path, tmp_path, UNIFORMS) as url,
        raises_for(url, "another model", "model.pretrained", error=ServerFailure),
    ):
        train_weights(ServerEngine([url], send_uniforms=True))


def test_a_skipped_publish_is_refused_by_its_version(uniforms):
    policy = load_policy(MODEL).eval()
    mine, other = (ServerEngine([uniforms], send_uniforms=True, retries=n) for n in (0, 1))
    mine.sync_weights(policy, 0)
    other.sync_weights(policy, 0)
    with raises_for(other.servers.weights.version, error=ServerFailure):
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


def test_a_teacher_behind_a_server_is_that_in_memory(folder, tmp_path):
    policy, local = load_policy(MODEL).eval(), FrozenReference(load_policy(str(folder)))
    rows = LocalEngine().generate(requests_for(policy)).tokens
    # No option of the engine's servers is needed, and processed log-probabilities are the same.
    with served(folder, tmp_path, PROCESSED) as url:
        reference = ServedReference(ReferenceServers([url]), policy)
        reference.check(max_tokens=255)
        with raises_for("--max-model-len 257", error=ServerFailure):
            reference.check(max_tokens=256)
        found = reference.logprobs(rows).logprobs
        top = ServedReference(ReferenceServers([url]), policy, TopK(5))
        top.check(max_tokens=255)
        listed = top.head(top.hidden_states(rows)[rows.completion_mask]).topk(5).values
        with raises_for("--max-logprobs 30", error=ServerFailure):
            ServedReference(ReferenceServers([url]), policy, TopK(30)).check(0)
        other = ServedReference(ReferenceServers([url]), tiny_policy("qwen2"))
        with raises_for("another tokenizer", error=ServerFailure):
            other.check(0)
    gap = float((found - local.logprobs(rows).logprobs).abs().max())
    print(f"\nlargest difference of log-probabilities: {gap:.1e}")
    assert gap < 1e-4
    logits = local.head(local.hidden_states(rows)[rows.completion_mask])
    torch.testing.assert_close(listed, logits.log_softmax(-1).topk(5).values, atol=1e-4, rtol=0.0)
    assert (found != 0).sum() == rows.completion_mask.sum()
