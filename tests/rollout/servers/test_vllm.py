"""vLLM engines, against a stand-in server and a stand-in vLLM in this process."""

import json
import sys
import threading
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from litgrpo.arguments import require
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import LoRA, build_policy, load_policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers import vllm as vllm_engine
from litgrpo.rollout.servers.client import (
    SampleRequest,
    ServerFailure,
    ServersUnavailable,
    ServerUnavailable,
    StaleWeights,
    Weights,
)
from litgrpo.rollout.servers.pool import sample_turn
from litgrpo.rollout.servers.vllm import ColocatedEngine, ServerEngine
from litgrpo.rollout.servers.vllm_client import VllmServer
from litgrpo.rollout.servers.vllm_head import HEAD_FILE, write_head
from litgrpo.rollout.servers.weight_transfer import FolderTransfer, NcclTransfer, find_tied_head
from litgrpo.rollout.stop_sequences import StopStrings
from tests.rollout.servers.two_processes import one_of_two
from tests.support.engines import GROUP, LENGTH, TEXTS, assert_same, spread_lengths, uniforms_for
from tests.support.hostile_server import NOT_JSON, RESPONSES, HostileServer
from tests.support.hostile_server import reply as send_reply
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.playing import Echo
from tests.support.raises import raises_for
from tests.support.training import loader, module, train
from tests.support.turns_support import TEXTS as EPISODES
from tests.support.turns_support import assert_same as assert_same_turns
from tests.support.turns_support import ending, play_turns, requests_of
from tests.support.vllm_stand_in import LLM, StandIn

GENERATE = "/inference/v1/generate"
SEPARATE_HEAD = "LlamaForCausalLM()((lm_head): ParallelLMHead(num_embeddings=265))"
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that is not the policy."""
    path = tmp_path_factory.mktemp("served")
    export(build_policy(tiny_model("qwen2", seed=5), byte_tokenizer()), path)
    return path


def requests_for(policy, sampling=None, **settings):
    prompts = prompt_batch(*TEXTS)
    asked = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), sampling or Sampling())
    return replace(asked, **settings)


def engine_of(*servers, **settings):
    given = {"send_uniforms": True, "timeout_s": 20.0, "wait_s": 5.0} | settings
    return ServerEngine([each.url for each in servers], **given)


def sync(engine, policy, number=0):
    engine.sync_weights(policy, number)
    return engine


def test_a_server_says_with_our_numbers_what_the_local_engine_says(server):
    policy = spread_lengths(tiny_policy("qwen2"))
    found = sync(engine_of(server), policy).generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))
    assert len(set(found.lengths.tolist())) > 1
    assert {len(each["token_ids"]) for each in server.asked} == {len(t) + 1 for t in TEXTS}


def test_rows_end_at_separate_limits(server):
    policy = tiny_policy("qwen2")
    policy.eos_ids = ()
    limits = [1 + row % LENGTH for row in range(len(TEXTS) * GROUP)]
    whole, limited = requests_for(policy), requests_for(policy, row_limits=limits)
    expected = LocalEngine().generate(whole).token_lists()
    for engine in (LocalEngine(), sync(engine_of(server), policy)):
        found = engine.generate(limited).token_lists()
        assert found == [ids[:limit] for ids, limit in zip(expected, limits, strict=True)]


def test_two_servers_share_the_prompts_and_say_the_same(server, folder):
    policy = spread_lengths(tiny_policy("qwen2"))
    with StandIn(folder) as other:
        found = sync(engine_of(server, other), policy).generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))
    # Rows of one prompt go to one server, where they share its prefix.
    asked = [{len(each["token_ids"]) for each in one.asked} for one in (server, other)]
    assert sorted(map(len, asked)) == [2, 2]
    assert not asked[0] & asked[1]


def test_seeds_repeat_a_rollout_and_its_log_probabilities_are_the_policys(server):
    policy = spread_lengths(tiny_policy("qwen2"))
    server.mode = "processed_logprobs"
    engine, asked = engine_of(server, send_uniforms=False), requests_for(policy, Sampling(0.7))
    assert not engine.exact_logprobs
    one, two = (sync(engine, policy, n).generate(asked) for n in range(2))
    assert_same(one, two)
    other = engine.generate(replace(asked, uniforms=asked.uniforms.flip(0)))
    assert other.token_lists() != one.token_lists()
    gap = policy.logprobs(one.tokens, temperature=0.7).logprobs - one.sampler_logprobs
    assert gap.abs().masked_fill(~one.loss_mask, 0).max() < 1e-5


def test_new_weights_are_followed_and_only_the_last_folder_is_left(server, tmp_path):
    policy = spread_lengths(tiny_policy("qwen2"))
    engine = engine_of(server, weight_transfer=FolderTransfer(str(tmp_path / "versions")))
    sync(engine, policy)
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    found = sync(engine, policy, 1).generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))
    (last,) = (tmp_path / "versions").iterdir()
    assert last.name == engine.servers.weights.version == server.version
    asides = ("/server_info", "/weight_info", GENERATE)
    order = [path for path in server.seen if path not in asides]
    one = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert order == one * 2


@pytest.mark.parametrize(
    ("device", "inspection", "written"),
    [("cpu", SEPARATE_HEAD, True), ("cpu", "(norm): RMSNorm()", False), ("cuda", "", False)],
)
def test_a_cpu_server_gets_a_tied_head_under_its_own_name(tmp_path, device, inspection, written):
    policy = build_policy(tiny_model("llama", tie_word_embeddings=True), byte_tokenizer())
    export(policy, tmp_path / "served")
    with StandIn(tmp_path / "served") as server:
        server.device, server.inspection = device, inspection
        transfer = FolderTransfer(str(tmp_path / "weights"))
        sync(engine_of(server, weight_transfer=transfer), policy)
        (folder,) = (tmp_path / "weights").iterdir()
    assert (folder / HEAD_FILE).exists() is written


def test_a_tied_head_is_named_in_the_index_of_several_files(tmp_path):
    policy = build_policy(tiny_model("llama", tie_word_embeddings=True), byte_tokenizer())
    policy.model.save_pretrained(tmp_path, max_shard_size="20KB")
    for _ in range(2):  # the second server finds the file
        write_head(tmp_path, find_tied_head(policy))
    weight = load_file(tmp_path / HEAD_FILE)["lm_head.weight"]
    assert torch.equal(weight, policy.model.get_input_embeddings().weight)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["lm_head.weight"] == HEAD_FILE
    assert not list(tmp_path.glob("*.partial*"))


def test_adapters_are_merged_before_they_are_published(server):
    pytest.importorskip("peft")
    policy = spread_lengths(
        build_policy(tiny_model("qwen2"), byte_tokenizer(), lora=LoRA(rank=2)).eval()
    )
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.add_(0.3 * ("lora_B" in name))
    found = sync(engine_of(server), policy).generate(requests_for(policy))
    # Merged weights round differently.
    assert_same(found, LocalEngine().generate(requests_for(policy)), tolerance=1e-4)


def test_a_server_that_was_started_anew_gets_the_weights_again_and_is_asked_again(server, folder):
    policy = spread_lengths(tiny_policy("qwen2"))
    engine = sync(engine_of(server), policy)
    server.policy, server.version = load_policy(str(folder)).eval(), "default"
    found = engine.generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))
    assert server.seen.count("/collective_rpc") == 2


def test_a_server_that_keeps_its_weights_is_refused_by_their_version(folder):
    policy = tiny_policy("qwen2")
    with StandIn(folder, keeps=True) as server:
        engine = sync(engine_of(server), policy)
        with raises_for("version default", "0-", error=ServerFailure):
            engine.generate(requests_for(policy))


def test_https_for_a_server_without_tls_is_not_retried(server):
    address = server.url.replace("http://", "https://")
    with raises_for(address, "Use http://", error=ServerFailure):
        VllmServer(address).post("/pause")


def test_what_breaks_off_is_asked_again(server):
    policy = spread_lengths(tiny_policy("qwen2"))
    server.faults = {GENERATE: [500, 503], "/collective_rpc": [503]}
    found = sync(engine_of(server), policy).generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))


def test_rows_of_an_unavailable_server_go_to_the_other_one(server, folder, caplog):
    policy = spread_lengths(tiny_policy("qwen2"))
    with StandIn(folder) as other:
        engine = sync(engine_of(server, other), policy)
    found = engine.generate(requests_for(policy))
    assert_same(found, LocalEngine().generate(requests_for(policy)))
    assert f"server is unavailable: {other.url}" in caplog.text
    sync(engine, policy, 1)  # a publish does without it, too
    assert server.version == engine.servers.weights.version


def test_where_no_server_answers_the_run_stops_after_a_while_with_their_addresses(folder):
    policy = tiny_policy("qwen2")
    with StandIn(folder) as server:
        engine = sync(engine_of(server, wait_s=0.3), policy)
    for call in (lambda: engine.generate(requests_for(policy)), lambda: sync(engine, policy, 1)):
        with pytest.raises(ServersUnavailable, match=server.url):
            call()


def test_servers_that_only_drip_are_unavailable(quick):
    with HostileServer(RESPONSES["slow body"]) as one, HostileServer(RESPONSES["silence"]) as two:
        engine = engine_of(one, two, timeout_s=0.3, wait_s=0.3)
        with pytest.raises(ServersUnavailable, match=one.url):
            sync(engine, tiny_policy("qwen2"))


def test_a_server_that_comes_back_is_waited_for(folder):
    policy = spread_lengths(tiny_policy("qwen2"))
    with StandIn(folder) as server:
        engine = sync(engine_of(server), policy)
        port = server.server_port
    found = []
    asking = threading.Thread(target=lambda: found.append(engine.generate(requests_for(policy))))
    asking.start()
    with StandIn(folder, port) as again:
        asking.join()
        assert again.seen.count("/collective_rpc") == 1
    assert_same(found[0], LocalEngine().generate(requests_for(policy)))


def test_a_server_that_fails_to_load_the_weights_is_given_up_after_retries(server):
    policy = spread_lengths(tiny_policy("qwen2"))
    server.faults = {"/collective_rpc": [500] * 2}
    engine = sync(engine_of(server), policy)  # the third attempt succeeds
    server.faults = {"/collective_rpc": [500] * 2}
    sync(engine, policy, 1)  # counted from 0 again
    server.faults = {"/collective_rpc": [500] * 3}
    with raises_for(
        server.url, "3 times", "model.pretrained", "weight_transfer.path", error=ServerFailure
    ):
        sync(engine, policy, 2)


@pytest.mark.parametrize(
    ("status", "named"), [(400, "status 400"), (404, "VLLM_SERVER_DEV_MODE=1")]
)
def test_rejected_requests_are_not_repeated(server, status, named):
    policy = tiny_policy("qwen2")
    server.faults = {"/collective_rpc": [status]}
    with raises_for(named, error=ServerFailure):
        sync(engine_of(server), policy)
    assert server.seen[-1] == "/resume"  # the server resumes for other clients


def cut_short(found):
    found["choices"][0]["token_ids"].pop()
    found["choices"][0]["logprobs"]["content"].pop()
    return found | {"choices": [found["choices"][0] | {"finish_reason": "length"}]}


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (lambda found: found | {"usage": {"prompt_tokens": 99}}, "another prompt"),
        (cut_short, "--max-model-len"),
    ],
)
def test_responses_that_do_not_match_the_request_are_rejected(server, alter, named):
    policy = tiny_policy("qwen2")
    policy.eos_ids = ()
    engine = sync(engine_of(server), policy)
    server.alter = alter
    with raises_for(named, error=ServerFailure):
        engine.generate(requests_for(policy))


ENDS = (2,)
REQUEST = SampleRequest(0, 0, [5, 6], max_tokens=4, end_ids=ENDS, vocab_size=100)


def completion(ids=(7, 8, 2), logprobs=(-0.5, -0.25, -0.125), reason="stop", **changes):
    """A response to `REQUEST`, with one difference from a valid one."""
    content = [{"token_id": i, "logprob": x} for i, x in zip(ids, logprobs, strict=False)]
    choice = {
        "token_ids": list(ids),
        "finish_reason": reason,
        "weight_versions": [{"version": "v", "start": 0, "end": len(ids)}],
        "logprobs": {"content": content},
    }
    found = {"choices": [choice | changes.pop("choice", {})], "usage": {"prompt_tokens": 2}}
    return found | changes


def complete(response, timeout_s=20.0):
    answer = response if callable(response) else lambda: send_reply(response)
    with HostileServer(answer) as server:
        return sample_turn(VllmServer(server.url, timeout_s), REQUEST, Weights("v"))


def test_a_valid_response_gives_its_tokens_and_log_probabilities():
    found = complete(completion())
    assert (found.ids, found.logprobs) == ([7, 8, 2], [-0.5, -0.25, -0.125])
    assert complete(completion((7, 8, 9, 10), (0.0, -1, -2.0, -9999.0), "length")).ids[-1] == 10


RUN = "5f0c9a1be2d4"


@pytest.mark.parametrize(
    "found", ["x-8-", "-8-", f"7-{'9' * 5000}-", f"{'9' * 30}-8-", "5-8-", "7-\u0668-"]
)
def test_a_version_that_this_run_cannot_have_set_is_another_version(found):
    spans = [{"version": f"6-7-{RUN}", "start": 0}, {"version": f"{found}{RUN}", "start": 1}]
    response = completion(choice={"weight_versions": spans})
    with HostileServer(lambda: send_reply(response)) as server, pytest.raises(StaleWeights):
        sample_turn(VllmServer(server.url), REQUEST, Weights(f"6-7-{RUN}", in_flight=True))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", RESPONSES)
def test_no_response_hangs_the_client_or_ends_in_an_error_of_python(name):
    with pytest.raises((ServerFailure, ServerUnavailable)) as caught:
        complete(RESPONSES[name], timeout_s=0.5)
    assert isinstance(caught.value, ServerFailure) or name not in NOT_JSON
    assert "\n" not in str(caught.value)


LOGPROBS = {"logprobs": {"content": [{"token_id": 7, "logprob": -1.0}]}}
INVALID = {
    "no choices": completion(choices=[]),
    "two choices": completion(choices=completion()["choices"] * 2),
    "choices are null": completion(choices=None),
    "choices are an object": completion(choices=completion()["choices"][0]),
    "a choice is null": completion(choices=[None]),
    "a choice is a text": completion(choices=["7 8 2"]),
    "an id beyond the vocabulary": completion((7, 100, 2)),
    "an id that is huge": completion((7, 10**300, 2)),
    "a negative id": completion((7, -5, 2)),
    "a float": completion((7, 7.9, 2)),
    "a whole float": completion((7.0, 8, 2)),
    "a bool": completion((True, 8, 2)),
    "a text": completion(("7", 8, 2)),
    "a null": completion((None, 8, 2)),
    "ids are null": completion(choice={"token_ids": None}),
    "ids are a text": completion(choice={"token_ids": "7 8 2"}),
    "no tokens": completion((), ()),
    "a log-probability above 0": completion(logprobs=(-0.5, 5.0, -0.1)),
    "a log-probability of 1e300": completion(logprobs=(-0.5, 1e300, -0.1)),
    "a log-probability of -1e300": completion(logprobs=(-0.5, -1e300, -0.1)),
    "a log-probability that is a huge int": completion(logprobs=(-0.5, -(10**400), -0.1)),
    "a log-probability that is null": completion(logprobs=(-0.5, None, -0.1)),
    "a log-probability that is a text": completion(logprobs=(-0.5, "-0.1", -0.1)),
    "a log-probability that is a bool": completion(logprobs=(-0.5, False, -0.1)),
    "a log-probability that is NaN": b'{"choices": [NaN]}',
    "fewer log-probabilities": completion(logprobs=(-0.5, -0.1)),
    "log-probabilities of other tokens": completion((7,), choice={"token_ids": [8]}),
    "no log-probabilities": completion(choice={"logprobs": None}),
    "log-probabilities are a list": completion(choice={"logprobs": [-0.5]}),
    "more tokens than requested": completion(range(10, 26), [-1.0] * 16, "length"),
    "fewer tokens than requested": completion((7, 8), (-1.0, -1.0), "length"),
    "stop without an end token": completion((7, 8, 9)),
    "tokens after an end token": completion((7, 2, 8, 9), [-1.0] * 4, "length"),
    "a finish reason that is a list": completion(reason=["stop"]),
    "no finish reason": completion(choices=[{"token_ids": [7]}]),
    "versions are a text": completion(choice={"weight_versions": "v"}),
    "a version is an object": completion(choice={"weight_versions": [{"version": {}}]}),
    "a version has no name": completion(choice={"weight_versions": [{}]}),
    "no usage": completion(usage=None),
    "prompt tokens are a text": completion(usage={"prompt_tokens": "2"}),
    "prompt tokens are a bool": completion(usage={"prompt_tokens": True}),
    "another prompt": completion(usage={"prompt_tokens": 99}),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_a_server_says_is_checked_before_it_is_used(name):
    with pytest.raises(ServerFailure):
        complete(INVALID[name])


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (completion(reason="abort"), ServerUnavailable),
        (completion(reason=None), ServerUnavailable),
        (completion(choice={"weight_versions": [{"version": "w", "start": 0}]}), StaleWeights),
        (
            completion(choice={"weight_versions": [{"version": n, "start": 0} for n in "vw"]}),
            StaleWeights,
        ),
        (completion(choice={"weight_versions": None}), StaleWeights),
    ],
)
def test_what_a_retry_may_mend_is_no_failure(found, error):
    with pytest.raises(error):
        complete(found)


@pytest.mark.parametrize("found", [{}, {"weight_version": None}, {"weight_version": [1]}, [], "v"])
def test_settings_of_a_server_are_checked(found):
    with HostileServer(lambda: send_reply(found)) as server:
        client = VllmServer(server.url)
        with pytest.raises(ServerFailure):
            _ = client.version
        with pytest.raises(ServerFailure):
            client.check()


def test_control_characters_of_a_server_are_shown_as_numbers():
    said = b"\x1b[2J\nerror: \xe2\x80\xaeyour disk is full"
    answer = HostileServer(lambda: send_reply(said, b"400 Bad Request"))
    with answer as server, pytest.raises(ServerFailure) as caught:
        VllmServer(server.url, 20.0).post("/pause")
    assert "[U+001B]" in str(caught.value)
    assert not {"\x1b", "\n", "\u202e"}.intersection(str(caught.value))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"urls": []}, "model.engine.urls"),
        ({"urls": ["localhost:8000"]}, "localhost:8000"),
        ({"urls": ["http://8.8.8.8:8000"]}, "model.engine.allow_public"),
        ({"urls": ["http://me:secret@10.0.0.1:8000"]}, "model.engine.urls"),
        ({"urls": ["http://10.0.0.1:8000/?key=secret"]}, "model.engine.urls"),
        ({"max_concurrent_requests": 0}, "engine.max_concurrent_requests"),
        ({"wait_s": -1}, "engine.wait_s"),
    ],
)
def test_invalid_settings_are_rejected(settings, named):
    with raises_for(named) as caught:
        ServerEngine(**({"urls": ["http://10.0.0.1:8000"]} | settings))
    assert "secret" not in str(caught.value)


def test_public_addresses_and_names_that_resolve_to_them_need_allow_public(monkeypatch):
    assert ServerEngine(["http://8.8.8.8:8000"], allow_public=True).servers.clients
    where = [(0, 0, 0, "", ("8.8.4.4", 80))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: where)
    with raises_for("model.engine.allow_public"):
        VllmServer("http://somewhere.example:80").post("/pause")
    monkeypatch.undo()
    with pytest.raises(ServerUnavailable, match="nowhere"):
        VllmServer("http://nowhere.invalid:80").post("/pause")


@pytest.mark.parametrize(
    ("sampling", "send_uniforms", "named"),
    [
        (Sampling(top_k=5), False, "top_k 5"),
        (Sampling(temperature=0.7), True, "model.sampling.temperature is 0.7"),
    ],
)
def test_sampling_that_a_server_cannot_report_is_rejected(server, sampling, send_uniforms, named):
    policy = tiny_policy("qwen2")
    with raises_for(named):
        engine_of(server, send_uniforms=send_uniforms).generate(requests_for(policy, sampling))


def test_encoder_decoders_are_rejected(server):
    with raises_for("encoder-decoder"):
        engine_of(server).generate(requests_for(tiny_policy("t5")))


def test_stop_strings_end_completions_as_with_the_local_engine(server):
    policy = tiny_policy("qwen2")
    stops = StopStrings(("e", "7"), policy.tokenizer, policy.vocab_size)
    asked = requests_for(policy, stops=stops)
    engine = sync(engine_of(server), policy)
    found, expected = (
        stops.cut_tokens(each.generate(asked), policy.pad_id, static_shapes=False)
        for each in (engine, LocalEngine())
    )
    assert_same(found, expected)
    assert server.asked[0]["sampling_params"]["stop"] == ["e", "7"]


def test_turns_equal_the_local_engine_and_requests_contain_the_whole_row(server):
    policy = ending(tiny_policy("qwen2"))
    asked = requests_of(policy)
    found = play_turns(sync(engine_of(server), policy), asked, Echo())
    assert_same_turns(found, play_turns(LocalEngine(), asked, Echo()))
    lengths = {len(each["token_ids"]) for each in server.asked}
    assert len(lengths) > len(EPISODES)
    row = [*found.prompts.prompt_ids[0][found.prompts.prompt_mask[0]].tolist()]
    last = max(
        (each["token_ids"] for each in server.asked if each["token_ids"][: len(row)] == row),
        key=len,
    )
    said = found.completion_ids[:3].tolist()
    assert any(last[len(row) :] == ids[: len(last) - len(row)] for ids in said)


def train_weights(engine, **settings):
    grpo = module(max_iterations=4, engine=engine, **settings)
    train(grpo, loader(prompt_batch("a", "hello there")))
    return grpo.policy.state_dict()


def test_four_iterations_end_in_the_weights_of_the_local_engine(server):
    found, expected = train_weights(engine_of(server)), train_weights(LocalEngine())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # The start-up checks publish weights once more.
    assert server.seen.count("/collective_rpc") == 5


def test_with_seeds_old_log_probabilities_and_importance_correction_are_automatic(server, caplog):
    server.mode = "processed_logprobs"
    grpo = module(engine=engine_of(server, send_uniforms=False))
    assert grpo.objective.importance_correction is not None
    assert "objective.importance_correction is on" in caplog.text
    train(grpo, loader(prompt_batch("a", "hello there")))
    assert not grpo.learner.reuse_sampler_logprobs
    assert grpo.trainer.callback_metrics["policy/sampler_mismatch"] < 1e-4


@pytest.mark.parametrize(
    ("send_uniforms", "mode", "other"),
    [(False, "raw_logprobs", "processed"), (True, "processed_logprobs", "raw")],
)
def test_another_logprobs_mode_is_rejected(server, send_uniforms, mode, other):
    server.mode = mode
    with raises_for(mode, other, error=ServerFailure):
        sync(engine_of(server, send_uniforms=send_uniforms), tiny_policy("qwen2"))


def test_nccl_transfer_needs_a_gpu():
    require(not torch.cuda.is_available(), "this test is of a machine without one")
    with raises_for("model.engine.weight_transfer"):
        _ = ServerEngine(["http://127.0.0.1:1"], NcclTransfer()).servers


@pytest.mark.timeout(900)
def test_rank_0_publishes_and_each_rank_requests_its_own_prompts(server, tmp_path):
    given = (server.url, str(tmp_path / "meet"), str(tmp_path))
    torch.multiprocessing.spawn(one_of_two, given, nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0][:3] == found[1][:3] == (True, server.version, found[0][2])
    assert server.seen.count("/collective_rpc") == 1
    policy = spread_lengths(tiny_policy("qwen2"))
    for rank in range(2):
        prompts = prompt_batch(TEXTS[rank])
        asked = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling())
        assert found[rank][3] == LocalEngine().generate(asked).token_lists()


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")


def gap(policy, rollout):
    off = policy.logprobs(rollout.tokens).logprobs - rollout.sampler_logprobs
    return float(off.detach().abs().masked_fill(~rollout.loss_mask, 0).max())


def test_vllm_wakes_and_sleeps_once_per_rollout_and_loads_the_weights_from_memory(
    vllm, monkeypatch
):
    policy, engine = spread_lengths(tiny_policy("qwen2")), ColocatedEngine()
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(engine.llm.did)))
    engine.sync_weights(policy, 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert gap(policy, engine.generate(requests_for(policy))) < 1e-5
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(engine.llm.did[-1]))
    folder = engine.exported_folder
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    engine.sync_weights(policy, 1)
    assert engine.exported_folder == folder  # nothing was written
    assert gap(policy, engine.generate(requests_for(policy))) < 1e-5
    engine.generate(requests_for(policy))  # of an evaluation, with the same weights
    again = ["wake", "reload_weights", "reset", "generate", "sleep"]
    assert engine.llm.did == ["generate", "sleep", *again, *again]
    assert emptied == ["sleep", "sleep"]  # before each time that it wakes
    assert engine.llm.given["logprobs_mode"] == "processed_logprobs"
    assert not engine.exact_logprobs


def test_vllm_that_does_not_sleep_loads_the_weights_when_they_change(vllm):
    policy = spread_lengths(tiny_policy("qwen2"))
    engine = ColocatedEngine(enable_sleep_mode=False)
    engine.sync_weights(policy, 0)
    engine.generate(requests_for(policy))
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    assert gap(policy, engine.generate(requests_for(policy))) > 1e-2
    engine.sync_weights(policy, 1)
    for _ in range(2):
        assert gap(policy, engine.generate(requests_for(policy))) < 1e-5
    assert engine.llm.did == [*["generate"] * 2, "reload_weights", "reset", *["generate"] * 2]


@pytest.mark.parametrize("inspection", ["", SEPARATE_HEAD])
def test_a_vllm_on_a_cpu_gets_a_tied_head_under_its_own_name(vllm, monkeypatch, inspection):
    monkeypatch.setattr(LLM, "inspection", inspection)
    model = tiny_model("llama", tie_word_embeddings=True)
    policy = spread_lengths(build_policy(model, byte_tokenizer()))
    engine = ColocatedEngine(enable_sleep_mode=False)
    for version in range(2):
        engine.sync_weights(policy, version)
        engine.generate(requests_for(policy))
    assert ("lm_head.weight" in engine.llm.received) is bool(inspection)


def test_adapters_are_merged_for_vllm_one_tensor_at_a_time(vllm, folder):
    policy, engine = load_policy(str(folder), lora=LoRA(rank=2)).eval(), ColocatedEngine()
    engine.sync_weights(policy, 0)
    engine.generate(requests_for(policy))
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn_like(weight))
    before = engine.llm.loaded.model.get_parameter("model.layers.0.self_attn.q_proj.weight").clone()
    engine.sync_weights(policy, 1)
    assert gap(policy, engine.generate(requests_for(policy))) < 1e-3
    after = engine.llm.loaded.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert (after - before).abs().max() > 0.01
    assert "reload_weights" in engine.llm.did


def test_weights_with_other_names_in_files_reach_vllm_by_files(vllm, monkeypatch):
    named = vllm_engine.iterate_weights
    monkeypatch.setattr(
        vllm_engine, "iterate_weights", lambda model: ((f"x.{n}", w) for n, w in named(model))
    )
    policy, engine = spread_lengths(tiny_policy("qwen2")), ColocatedEngine()
    engine.sync_weights(policy, 0)
    engine.generate(requests_for(policy))
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    engine.sync_weights(policy, 1)
    assert gap(policy, engine.generate(requests_for(policy))) < 1e-5
    assert "reload_weights from files" in engine.llm.did


def test_a_rollout_of_vllm_is_seeded_by_its_random_numbers_and_leaves_the_generator(vllm):
    policy, engine = spread_lengths(tiny_policy("qwen2")), ColocatedEngine()
    engine.sync_weights(policy, 0)
    before = torch.get_rng_state()
    asked = requests_for(policy)
    for request in (asked, asked, replace(asked, uniforms=1 - asked.uniforms)):
        engine.generate(request)
    assert before.equal(torch.get_rng_state())
    one, two, other = engine.llm.seeds
    assert one == two != other


def test_rows_with_an_observation_are_sampled_together(vllm):
    policy, engine = ending(tiny_policy("qwen2")), ColocatedEngine(enable_sleep_mode=False)
    engine.sync_weights(policy, 0)
    asked = requests_of(policy)
    found = play_turns(engine, asked)
    assert int(found.turns.max()) == int(play_turns(LocalEngine(), asked).turns.max())
    assert gap(policy, found) < 1e-5
    assert engine.llm.did == ["generate"] * (int(found.turns.max()) + 1)


def test_a_missing_vllm_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    policy, engine = tiny_policy("qwen2"), ColocatedEngine()
    engine.sync_weights(policy, 0)
    with raises_for("ColocatedEngine", "pip install vllm"):
        engine.generate(requests_for(policy))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"max_model_len": 0}, "is 0"),
    ],
)
def test_colocated_settings_out_of_range_are_rejected(settings, named):
    with raises_for(named):
        ColocatedEngine(**settings)
