"""A reference behind a vLLM server, against the same model in this process."""

import math
from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.divergences import DIVERGENCES, JSD, TopK
from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.adaptive import ReferenceSync
from litgrpo.data.modules import PromptData
from litgrpo.distributed.device import backend
from litgrpo.learning.static_batches import StaticBatches
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import build_policy, load_policy
from litgrpo.models.reference import FrozenReference
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers.client import ServerFailure, ServersUnavailable
from litgrpo.rollout.servers.reference import ReferenceServers, ServedReference, probe_text
from litgrpo.rollout.servers.vllm import ServerEngine
from litgrpo.rollout.servers.vllm_client import VllmServer
from tests.learning.parts import build_training_batch, gradient_of, learner_of
from tests.support.hostile_server import RESPONSES, HostileServer
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.raises import raises_for
from tests.support.training import batches, module, train
from tests.support.vllm_stand_in import StandIn

BATCH = ("a", "hello there", "xyz")
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The teacher, whose weights are not the policy's."""
    path = tmp_path_factory.mktemp("teacher")
    export(build_policy(tiny_model("qwen2", seed=1), byte_tokenizer()), path)
    return path


def reference_at(*servers, policy=None, divergence=None, **settings):
    settings = {"timeout_s": 20.0, "wait_s": 5.0} | settings
    urls = [server.url for server in servers]
    policy = policy or tiny_policy("qwen2")
    return ServedReference(ReferenceServers(urls, **settings), policy, divergence)


def distilling(kind="k3", **settings):
    return Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator=kind, **settings)


# --- the numbers of the model in memory ---


def test_the_gradient_is_that_of_the_same_teacher_in_memory(server, folder):
    policy, local = tiny_policy("qwen2"), FrozenReference(load_policy(str(folder)))
    expected = learner_of(policy, distilling(), reference=local)
    training_batch = build_training_batch(expected, prompt_batch(*BATCH))
    gradient = gradient_of(expected, training_batch)
    split = UpdateConfig(micro_batch_size=2, micro_batch_tokens=None, max_grad_norm=None)
    static = StaticBatches(backend(torch.device("cpu")))
    for config, settings, length in (
        (split, {}, 0),
        (split, {"micro_batching": static}, 0),
        (split, {}, 20),  # padding
    ):
        learner = learner_of(
            policy, distilling(), config, reference=reference_at(server), **settings
        )
        again = build_training_batch(learner, prompt_batch(*BATCH, length=length))
        torch.testing.assert_close(again.ref_logprobs, training_batch.ref_logprobs)
        got = gradient_of(learner, again)
        assert (got - gradient).norm() < 1e-5 * gradient.norm()
    assert all(body["prompt"][0] == 1 for body in server.asked)  # no padding is sent
    assert "temperature" in server.asked[0]


@pytest.mark.parametrize("divergence", [*DIVERGENCES, JSD(0.1)])
def test_the_most_likely_tokens_of_a_server_are_those_of_the_teacher_in_memory(
    server, folder, divergence
):
    policy, local = tiny_policy("qwen2"), FrozenReference(load_policy(str(folder)))
    top = TopK(7, divergence)
    expected = learner_of(policy, distilling(top), reference=local)
    prompts = prompt_batch(*BATCH)
    gradient = gradient_of(expected, build_training_batch(expected, prompts))
    split = UpdateConfig(micro_batch_size=2, micro_batch_tokens=None, max_grad_norm=None)
    static = StaticBatches(backend(torch.device("cpu")))
    for settings in ({}, {"micro_batching": static}):
        served = reference_at(server, divergence=top)
        learner = learner_of(policy, distilling(top), split, reference=served, **settings)
        got = gradient_of(learner, build_training_batch(learner, prompts))
        assert (got - gradient).norm() < 1e-4 * gradient.norm()


def test_all_tokens_of_a_server_are_the_divergence_over_the_vocabulary(server, folder):
    policy, local = tiny_policy("qwen2"), FrozenReference(load_policy(str(folder)))
    server.max_logprobs = policy.vocab_size
    top = TopK(policy.vocab_size, "forward_kl")
    gradients = []
    for kind, reference in (
        ("forward_kl", local),
        (top, reference_at(server, divergence=top)),
    ):
        learner = learner_of(policy, distilling(kind), reference=reference)
        gradients.append(gradient_of(learner, build_training_batch(learner, prompt_batch(*BATCH))))
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()


def test_what_a_server_did_not_list_has_the_rest_of_the_probability(server):
    reference = reference_at(server, divergence=TopK(3))
    states = reference._most_likely({5: math.log(0.5), 2: math.log(0.1), 9: math.log(0.2), 7: -9.0})
    assert states[:3] == [5, 9, 2]
    probs = reference.head(torch.tensor([states])).exp()
    assert float(probs.sum()) == pytest.approx(1)
    assert probs[0, [5, 9, 2]].tolist() == pytest.approx([0.5, 0.2, 0.1])
    assert float(probs[0, 0]) == pytest.approx(0.2 / (reference.vocab_size - 3))
    # Tokens that only the server's padded vocabulary has are of the rest.
    padded = reference._most_likely({5: math.log(0.5), 10**6: math.log(0.3), 9: math.log(0.1)})
    probs = reference.head(torch.tensor([padded])).exp()
    assert float(probs[0, 0]) == pytest.approx(0.4 / (reference.vocab_size - 2))


def test_a_server_that_lists_fewer_tokens_is_rejected_before_training(server):
    grpo = module(objective=distilling(TopK(30)), reference=server.url)
    with raises_for("model.objective.kl_estimator", "--max-logprobs 30", error=ServerFailure):
        train(grpo, batches("a"))


def test_a_training_follows_the_most_likely_tokens_of_a_server(server, folder):
    weights = []
    for reference in (str(folder), server.url):
        grpo = module(objective=distilling(TopK(5)), reference=reference, max_iterations=2)
        train(grpo, PromptData([{"prompt": text} for text in BATCH], batch_size=3))
        weights.append(torch.cat([p.flatten() for p in grpo.policy.parameters()]).detach())
    start = torch.cat([p.flatten() for p in tiny_policy("qwen2").parameters()])
    assert (weights[1] - weights[0]).norm() < 1e-3 * (weights[0] - start).norm()


def test_tokens_that_the_policy_did_not_generate_have_no_log_probability(server, folder):
    local = FrozenReference(load_policy(str(folder)))
    learner = learner_of(tiny_policy("qwen2"), distilling(), reference=local)
    rows = build_training_batch(learner, prompt_batch(*BATCH)).tokens
    rows = replace(rows, predicted=rows.completion_mask & (rows.completion_ids % 2 == 0))
    expected = local.logprobs(rows).logprobs
    found = reference_at(server).logprobs(rows).logprobs
    assert (found != 0).sum() == rows.predicted.sum()
    torch.testing.assert_close(found, expected)


def test_a_training_ends_in_the_weights_of_a_teacher_in_memory(server, folder):
    weights = []
    for reference in (str(folder), server.url, ReferenceServers([server.url])):
        grpo = module(objective=distilling(), reference=reference, max_iterations=2)
        train(grpo, PromptData([{"prompt": text} for text in BATCH], batch_size=3))
        weights.append(torch.cat([p.flatten() for p in grpo.policy.parameters()]).detach())
    start = torch.cat([p.flatten() for p in tiny_policy("qwen2").parameters()])
    moved = (weights[0] - start).norm()
    assert all((each - weights[0]).norm() < 1e-4 * moved for each in weights[1:])


# --- what does not fit ---


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(
            ({"objective": distilling(kind)}, "model.objective.kl_estimator")
            for kind in DIVERGENCES
        ),
        ({"sampling": Sampling(temperature=0.7)}, "model.sampling.temperature is 0.7"),
        ({"sampling": Sampling(top_k=5)}, "top_k 5"),
        ({"engine": ServerEngine(["http://127.0.0.1:1/"])}, "model.engine.urls has the same"),
    ],
)
def test_what_a_server_cannot_return_is_rejected(settings, named):
    given = {"objective": distilling(), "reference": "http://127.0.0.1:1"} | settings
    with raises_for("http://127.0.0.1:1", named):
        module(**given)


def test_the_weights_of_a_server_do_not_move():
    grpo = module(objective=Objective(kl_coef=0.1), reference="http://127.0.0.1:1")
    with raises_for("ReferenceSync", "model.reference is a vLLM server"):
        ReferenceSync(every=1).setup(None, grpo, "fit")


def test_encoder_decoders_are_rejected():
    with raises_for("model.reference", "encoder-decoder"):
        module("t5", objective=distilling(), reference="http://127.0.0.1:1").configure_model()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"urls": []}, "model.reference.urls"),
        ({"urls": ["localhost:8000"]}, "model.reference.urls"),
        ({"urls": ["http://me:secret@10.0.0.1:8000"]}, "model.reference.urls"),
        ({"timeout_s": 0}, "model.reference.timeout_s"),
        ({"wait_s": -1}, "model.reference.wait_s"),
        ({"max_concurrent_requests": 0}, "model.reference.max_concurrent_requests"),
    ],
)
def test_invalid_settings_are_rejected(settings, named):
    with raises_for(named) as caught:
        ReferenceServers(**({"urls": ["http://10.0.0.1:8000"]} | settings))
    assert "secret" not in str(caught.value)


def test_a_server_with_another_tokenizer_is_rejected_before_training(folder, tmp_path):
    other = byte_tokenizer()
    vocabulary, text = other.get_vocab(), other.backend_tokenizer.to_str()
    a, b = vocabulary["a"], vocabulary["b"]
    swapped = text.replace(f'"a":{a}', f'"a":{b}').replace(f'"b":{b}', f'"b":{a}')
    export(load_policy(str(folder)), tmp_path)
    (tmp_path / "tokenizer.json").write_text(swapped)
    with StandIn(tmp_path) as server:
        grpo = module(objective=distilling(), reference=server.url)
        with raises_for(server.url, "another tokenizer", error=ServerFailure):
            train(grpo, batches("a"))
        assert not server.asked


def test_the_probe_has_tokens_from_all_over_the_vocabulary():
    tokenizer = byte_tokenizer()
    found = tokenizer(probe_text(tokenizer), add_special_tokens=False).input_ids
    assert len(set(found)) > 0.4 * len(tokenizer.get_vocab())  # bytes above 127 are no text
    assert found[-1] == tokenizer.eos_token_id


def test_rows_that_a_server_cannot_read_are_rejected_before_training(server):
    server.max_model_len = 20  # a prompt of 14 tokens and 6 of the completion, and one more
    rows = [{"prompt": "a"}, {"prompt": "0123456789abc"}]
    with raises_for("has 20", "--max-model-len 21", error=ServerFailure):
        train(module(objective=distilling(), reference=server.url), PromptData(rows, batch_size=2))
    server.max_model_len = 21
    train(module(objective=distilling(), reference=server.url), PromptData(rows, batch_size=2))


# --- failures ---


def rows_of(policy, *texts):
    learner = learner_of(policy)
    return build_training_batch(learner, prompt_batch(*texts)).tokens


def test_rows_of_an_unavailable_server_go_to_the_other_one(server, folder, caplog):
    rows = rows_of(tiny_policy("qwen2"), *BATCH)
    expected = reference_at(server).logprobs(rows).logprobs
    with StandIn(folder) as other:
        reference = reference_at(server, other)
        reference.check(0)
        assert torch.equal(reference.logprobs(rows).logprobs, expected)
        assert other.asked
    assert torch.equal(reference.logprobs(rows).logprobs, expected)
    assert f"server is unavailable: {other.url}" in caplog.text


def test_without_a_server_the_run_stops_after_a_while_with_the_setting(folder):
    with StandIn(folder) as server:
        reference = reference_at(server, wait_s=0.3)
    rows = rows_of(tiny_policy("qwen2"), *BATCH)
    for call in (lambda: reference.check(0), lambda: reference.logprobs(rows)):
        with raises_for(server.url, "model.reference.wait_s", error=ServersUnavailable) as caught:
            call()
        assert caught.value.exit_code == 75


def test_a_request_that_is_rejected_is_not_repeated(server):
    rows, reference = (
        rows_of(tiny_policy("qwen2"), "a"),
        reference_at(server, max_concurrent_requests=1),
    )
    server.max_model_len = 3
    with raises_for("status 400", "maximum context length", error=ServerFailure):
        reference.logprobs(rows)
    asked = [tuple(request["prompt"]) for request in server.asked]
    assert len(asked) == len({*asked})


def alter_entries(change):
    """A response whose entries have been changed in place."""

    def alter(found):
        entries = found["choices"][0]["prompt_logprobs"]
        change(entries)
        return found

    return alter


@pytest.mark.parametrize(
    "alter",
    [
        alter_entries(lambda entries: entries.pop()),
        alter_entries(lambda entries: entries.append(entries[-1])),
        alter_entries(lambda entries: entries.__setitem__(-1, None)),
        alter_entries(lambda entries: entries.__setitem__(-1, {"258": {"logprob": -1.0}})),
        alter_entries(lambda entries: next(iter(entries[-1].values())).update(logprob=17.5)),
        alter_entries(lambda entries: next(iter(entries[-1].values())).update(logprob=None)),
        alter_entries(lambda entries: next(iter(entries[-1].values())).update(logprob=True)),
        alter_entries(lambda entries: next(iter(entries[-1].values())).update(logprob=-(10**400))),
        alter_entries(
            lambda entries: entries.__setitem__(-1, {key: {"logprob": -0.69} for key in "56"})
        ),
        lambda found: found | {"choices": []},
        lambda found: {},
    ],
)
def test_what_a_server_returns_is_checked_before_it_is_used(server, alter):
    server.alter = alter
    with raises_for(server.url, error=ServerFailure):
        VllmServer(server.url, 20.0).prompt_logprobs([1, 5, 6], 1)


def test_the_least_log_probability_of_vllm_is_accepted(server):
    server.alter = alter_entries(
        lambda entries: next(iter(entries[-1].values())).update(logprob=-9999.0)
    )
    assert VllmServer(server.url, 20.0).prompt_logprobs([1, 5, 6], 2) == [{6: -9999.0}]


@pytest.mark.parametrize("name", ["HTML", "silence"])
def test_hostile_servers_end_in_one_error(name):
    with HostileServer(RESPONSES[name]) as server:
        reference = reference_at(server, timeout_s=0.3, wait_s=0.3)
        with pytest.raises(ServerFailure) as caught:
            reference.check(0)
    assert "\n" not in str(caught.value)
