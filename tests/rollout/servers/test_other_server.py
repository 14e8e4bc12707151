"""A server that is not vLLM's is one file: it trains the quickstart as the local engine does."""

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from litgrpo.algorithms.objective import Objective
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import build_policy, load_policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.servers.client import ServerFailure
from litgrpo.rollout.servers.reference import ReferenceServers
from litgrpo.types import PromptBatch, pad_left
from tests.support.command_line import QUICK
from tests.support.models import byte_tokenizer, tiny_model, tiny_policy
from tests.support.other_server import OtherEngine, OtherServer, Running
from tests.support.training import batches, module, train

MODEL = "builtin:tiny-gemma2"
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def other():
    with Running(MODEL) as running:
        yield running


def request_for(policy, *texts):
    ids = [policy.tokenizer(text).input_ids for text in texts]
    prompts = PromptBatch(*pad_left(ids, policy.pad_id), [*texts], {}, torch.arange(len(texts)))
    uniforms = draw_uniforms(0, "train", 0, prompts.index, 2, 12)
    return RolloutRequest(policy, prompts, 2, uniforms, Sampling())


COMPARED = ("policy/loss", "reward/correct", "reward/format")


def test_the_quickstart_is_trained_as_with_the_local_engine(other, cli):
    words = [*QUICK.split(), "--model.max_iterations", "3", "--trainer.val_check_interval", "null"]
    words += ["--model.max_completion_length", "40", "--data.batch_size", "4"]
    path = "tests.support.other_server.OtherEngine"
    engine = ["--model.engine", path, "--model.engine.urls", f"[{other.url}]"]
    rows, weights = [], []
    for name, choice in (("local", []), ("other", engine)):
        code, _, error = cli(*words, *choice, "--run_dir", name)
        assert code == 0, error
        with Path(name, "metrics.csv").open() as file:
            read = csv.DictReader(file)
            rows.append([float(row[m]) for row in read if row["policy/loss"] for m in COMPARED])
        weights.append(load_file(Path(name, "final_model", "model.safetensors")))
    assert len(rows[0]) == 3 * len(COMPARED)
    assert rows[1] == pytest.approx(rows[0], rel=1e-4, abs=1e-6)
    start = load_policy(MODEL).model.state_dict()
    off, moved = (
        sum(float((weights[0][n] - each[n]).square().sum()) for n in weights[0]) ** 0.5
        for each in (weights[1], start)
    )
    assert off < 1e-3 * moved
    assert other.seen.count("/weights") >= 3


def test_a_restarted_server_gets_the_weights_again(other):
    policy, engine = load_policy(MODEL).eval(), OtherEngine([other.url])
    engine.sync_weights(policy, 0)
    other.version = "none"
    rollout = engine.generate(request_for(policy, "12+5=", "3+4="))
    expected = LocalEngine().generate(request_for(policy, "12+5=", "3+4="))
    assert rollout.token_lists() == expected.token_lists()
    assert other.seen.count("/weights") == 2


@pytest.mark.parametrize(
    "lie",
    [
        {"tokens": [1, 2.5], "scores": [-1.0, -1.0]},
        {"tokens": [10**6], "scores": [-1.0]},
        {"tokens": [5], "scores": [-1.0], "ended": True},
        {"tokens": [5], "scores": [1.0]},
        {"tokens": [], "scores": []},
    ],
)
def test_replies_are_checked_for_every_kind_of_server(other, lie):
    policy, engine = load_policy(MODEL).eval(), OtherEngine([other.url])
    engine.sync_weights(policy, 0)
    other.draw = lambda **_: {"weights": other.version, "ended": False} | lie
    with pytest.raises(ServerFailure):
        engine.generate(request_for(policy, "12+5="))


class OtherReference(ReferenceServers):
    """A teacher behind servers of the invented interface."""

    def connect(self, url):
        return OtherServer(url)


def test_a_teacher_behind_another_server_is_the_one_in_memory(tmp_path):
    export(build_policy(tiny_model("qwen2", seed=1), byte_tokenizer()), tmp_path)
    weights = []
    with Running(str(tmp_path)) as other:
        for reference in (str(tmp_path), OtherReference([other.url])):
            objective = Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator="k3")
            grpo = module(objective=objective, reference=reference, max_iterations=1)
            train(grpo, batches("hello"))
            weights.append(torch.cat([p.detach().flatten() for p in grpo.policy.parameters()]))
    start = torch.cat([p.detach().flatten() for p in tiny_policy("qwen2").parameters()])
    moved = (weights[0] - start).norm()
    assert (weights[1] - weights[0]).norm() < 1e-4 * moved
