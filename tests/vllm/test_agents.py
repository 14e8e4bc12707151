"""Training inside agents, and with tools, whose replies a real vLLM server samples."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from litgrpo.data.examples import calculator
from litgrpo.data.modules import PromptData
from litgrpo.environments.agent import Agent
from litgrpo.environments.tools import Tools
from litgrpo.models.loading.load import load_policy, resolve_pretrained
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.servers.vllm import ServerEngine
from litgrpo.rollout.turn_format import InlineFormat
from litgrpo.types import PromptBatch, pad_left
from tests.support.agent_rollouts import KEY, agent_episodes
from tests.support.training import train
from tests.vllm.serving import PYTHON, UNIFORMS, served

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="LITGRPO_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(600),
]
MODEL = "builtin:tiny-calculator"  # its tied head is a separate module in vLLM
AGENTS, GROUP, LENGTH = ("calculate", "talk", "branch", "parallel"), 2, 60
ROWS = [row | {"agent": "calculate"} for row in calculator.train()[:8]]
# The same loop with the client of the API.
SOLVE = Agent("litgrpo.environments.agent_examples.solve", call_format="tags")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    flags = f"{UNIFORMS} --max-model-len 128"
    with served(resolve_pretrained(MODEL), tmp_path_factory.mktemp("agents"), flags) as url:
        yield url


@pytest.fixture(scope="module")
def engine(url):
    return ServerEngine([url], send_uniforms=True)


@pytest.fixture
def policy():
    return load_policy(MODEL).eval()


@pytest.fixture(scope="module")
def episodes():
    agent = Agent("tests.support.agents.play", call_format="tags")
    settings = {"max_turn_tokens": 16, "timeout_s": 300}
    episodes = agent_episodes(agent, InlineFormat(load_policy(MODEL).tokenizer), **settings)
    yield episodes
    episodes.close()


def request_for(policy):
    """A group for each agent."""
    texts = [row["prompt"] for row in ROWS[: len(AGENTS)]]
    ids = [policy.tokenizer(text).input_ids for text in texts]
    columns, index = {"agent": list(AGENTS)}, torch.arange(len(AGENTS))
    prompts = PromptBatch(*pad_left(ids, policy.pad_id), texts, columns, index)
    numbers = draw_uniforms(0, "train", 0, index, GROUP, LENGTH)
    return RolloutRequest(policy, prompts, GROUP, numbers, Sampling())


@torch.no_grad()
def gaps(policy, rollout):
    """[N, C] differences to recomputed log-probabilities; 0 where nothing was sampled."""
    found = policy.logprobs(rollout.tokens).logprobs
    return (found - rollout.sampler_logprobs).abs().masked_fill(~rollout.loss_mask, 0)


def test_replies_to_agents_are_those_of_the_local_engine(engine, policy, episodes):
    engine.sync_weights(policy, 0)
    served = episodes.play(engine, request_for(policy), KEY)
    local = episodes.play(LocalEngine(), request_for(policy), KEY)
    for name in ("completion_ids", "completion_mask", "loss_mask", "segments"):
        assert torch.equal(getattr(served, name), getattr(local, name)), name
    assert not any(each.failed for each in served.episodes)
    assert served.segments.max() >= 4
    assert not served.sampler_logprobs[~served.loss_mask].any()
    print(f"\noff by {gaps(policy, served).max():.1e}")
    assert gaps(policy, served).max() < 1e-4


def test_weights_change_between_and_within_the_replies_to_agents(engine, policy, episodes):
    """Each token has the log-probability of the weights that it names, after any older tokens."""
    policies = {0: policy, 1: load_policy(MODEL).eval()}
    with torch.no_grad():
        for weight in policies[1].parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    engine.update_in_flight(policies[0], 0)
    answered, generate = [], ServerEngine.generate

    class Updates(ServerEngine):
        """Updates the weights while the second round of calls is sampled."""

        def generate(self, request):
            answered.append(len(request.uniforms))
            if len(answered) != 2:
                return generate(engine, request)
            with ThreadPoolExecutor(1) as thread:
                running = thread.submit(generate, engine, request)
                engine.update_in_flight(policies[1], 1)
                return running.result()

    rollout = episodes.play(Updates(engine.urls), request_for(policy), KEY)
    versions = rollout.token_versions
    assert len(answered) >= 3
    assert torch.equal(versions >= 0, rollout.loss_mask)
    assert {*versions[rollout.loss_mask].tolist()} == {0, 1}
    for version, weights in policies.items():
        off = gaps(weights, rollout)[versions == version].max()
        print(f"\nversion {version}: {int((versions == version).sum())} tokens, off by {off:.1e}")
        assert off < 1e-3


def fit(engine, environment):
    """Weights after three iterations, and metrics; the invariants are measured before the first."""
    torch.manual_seed(0)
    grpo = GRPO(
        MODEL,
        {"correct": Reward("litgrpo.rewards.correctness"), "environment": Reward(weight=1.0)},
        engine=engine,
        environment=environment,
        episode=EpisodeSettings(
            turn_format="inline", max_turns=3, max_turn_tokens=24, timeout_s=300
        ),
        sampling=Sampling(stop=("</call>",)),
        group_size=4,
        max_completion_length=44,
        max_iterations=3,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
    runner = train(grpo, PromptData(ROWS, batch_size=len(ROWS), shuffle=False))
    weights = torch.cat([each.detach().flatten() for each in grpo.policy.parameters()])
    return weights, runner.callback_metrics


@pytest.mark.filterwarnings("ignore:prompts are plain texts")  # the model knows its tool
@pytest.mark.parametrize(
    "environment",
    [SOLVE, Tools(["litgrpo.environments.examples.calculate"], call_format="tags")],
    ids=["agent", "tools"],
)
def test_three_iterations_end_in_the_weights_of_the_local_engine(engine, environment):
    found, metrics = fit(engine, environment)
    expected, _ = fit(LocalEngine(), environment)
    start = torch.cat([each.detach().flatten() for each in load_policy(MODEL).parameters()])
    off, moved = (float((found - each).norm()) for each in (expected, start))
    mismatch = float(metrics["policy/sampler_mismatch"])
    print(f"\noff {off / moved:.1e} of how far the weights moved, mismatch {mismatch:.1e}")
    assert metrics["env/turns"] > 1
    assert metrics["env/failed_frac"] == 0
    assert off < 1e-3 * moved
    assert mismatch < 1e-5
