"""LoRA adapters sent to servers: versions by name, equal tokens, kinds that vLLM does not have."""

import pytest
import torch

from litgrpo.models.adapters import LoRA
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import Precision, load_policy, resolve_pretrained
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.servers.client import ServerFailure
from litgrpo.rollout.servers.vllm import ServerEngine
from litgrpo.rollout.servers.weight_transfer import AdapterTransfer, FolderTransfer
from litgrpo.types import PromptBatch, pad_left
from tests.support import vllm_stand_in
from tests.support.raises import raises_for
from tests.support.vllm_stand_in import StandIn

# The server has the model in a folder, and the adapter names it as the user did.
pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's .base_model_name_or_path.")
MODEL, LENGTH, GROUP, TEXTS = "builtin:tiny-gemma2", 12, 2, ("12+5=", "3+4=")
LINEARS = ["q_proj", "down_proj"]


def load_adapted(seed=0, **settings):
    """A policy whose adapter changes what it says."""
    policy = load_policy(MODEL, lora=LoRA(rank=4, target_modules=LINEARS, **settings)).eval()
    move(policy, seed)
    return policy


@torch.no_grad()
def move(policy, seed):
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn_like(parameter))


def request_for(policy):
    ids = [policy.tokenizer(text).input_ids for text in TEXTS]
    prompts = PromptBatch(*pad_left(ids, policy.pad_id), [*TEXTS], {}, torch.arange(len(TEXTS)))
    numbers = draw_uniforms(0, "train", 0, prompts.index, GROUP, LENGTH)
    return RolloutRequest(policy, prompts, GROUP, numbers, Sampling())


@pytest.fixture
def server():
    with StandIn(resolve_pretrained(MODEL)) as running:
        yield running


def engine_of(server, path=None, **settings):
    given = {"send_uniforms": True, "wait_s": 5.0} | settings
    return ServerEngine([server.url], weight_transfer=AdapterTransfer(path), **given)


def test_servers_sample_with_the_adapter_of_the_version(server, tmp_path):
    policy, engine = load_adapted(), engine_of(server, str(tmp_path / "adapters"))
    for version in range(3):
        engine.sync_weights(policy, version)
        found = engine.generate(request_for(policy))
        expected = LocalEngine().generate(request_for(policy))
        assert found.token_lists() == expected.token_lists()
        torch.testing.assert_close(
            found.sampler_logprobs, expected.sampler_logprobs, atol=1e-4, rtol=0
        )
        (name,) = server.adapters  # earlier ones are unloaded
        assert name.startswith(f"{version}-")
        move(policy, version + 1)
    assert "/pause" not in server.seen
    assert "/collective_rpc" not in server.seen  # the base model stays


def test_a_restarted_server_gets_the_adapter_again(server):
    policy, engine = load_adapted(), engine_of(server)
    engine.sync_weights(policy, 0)
    expected = engine.generate(request_for(policy)).token_lists()
    server.adapters.clear()
    assert engine.generate(request_for(policy)).token_lists() == expected


def test_a_server_that_does_not_keep_adapters_is_a_failure(server, monkeypatch):
    policy, engine = load_adapted(), engine_of(server, retries=1)
    engine.sync_weights(policy, 0)
    server.adapters.clear()
    monkeypatch.setitem(vllm_stand_in.ROUTES, "/v1/load_lora_adapter", lambda *_: (200, "Success"))
    with pytest.raises(ServerFailure, match=r"another adapter, although .* was sent 2 times"):
        engine.generate(request_for(policy))


def test_a_server_that_fails_to_load_the_adapter_is_given_up_after_retries(server):
    policy, engine = load_adapted(), engine_of(server, retries=1)
    server.faults = {"/v1/load_lora_adapter": [500]}
    engine.sync_weights(policy, 0)
    server.faults = {"/v1/load_lora_adapter": [500] * 2}
    with raises_for(server.url, "2 times", "model.pretrained", error=ServerFailure):
        engine.sync_weights(policy, 1)


def test_rows_that_run_during_an_update_keep_their_adapter(server):
    policy, engine = load_adapted(), engine_of(server)
    engine.update_in_flight(policy, 3)
    rollout = engine.generate(request_for(policy))
    assert rollout.token_versions[rollout.loss_mask].unique().tolist() == [3]


def test_an_adapter_has_fewer_bytes_than_the_merged_model(server, tmp_path):
    policy, sizes = load_adapted(), {}
    for name, transfer in {"adapter": AdapterTransfer, "merged": FolderTransfer}.items():
        sender = transfer(str(tmp_path / name)).sender()
        sender.prepare(policy, "0-1-run")
        files = (tmp_path / name).rglob("*.safetensors")
        sizes[name] = sum(file.stat().st_size for file in files)
    trained = sum(each.numel() for each in policy.parameters() if each.requires_grad)
    assert 4 * trained < sizes["adapter"] < 4 * trained + 10_000  # float32 and the header
    assert sizes["adapter"] < sizes["merged"] / 10


@pytest.mark.filterwarnings("ignore:.*renamed")  # the base model is where it was exported to
def test_qlora_is_sent_without_a_merge(tmp_path):
    pytest.importorskip("bitsandbytes")
    lora = LoRA(rank=4, target_modules=LINEARS)
    policy = load_policy(MODEL, lora=lora, precision=Precision(quantization="nf4")).eval()
    export(policy, tmp_path / "dequantized")  # what the server holds; the adapter is still 0
    move(policy, 1)
    with StandIn(tmp_path / "dequantized") as server:
        engine = engine_of(server)
        engine.sync_weights(policy, 0)
        found = engine.generate(request_for(policy))
        assert len(server.adapters) == 1
    expected = LocalEngine().generate(request_for(policy))
    assert found.token_lists() == expected.token_lists()
    off = (found.sampler_logprobs - expected.sampler_logprobs).abs().max()
    assert off < 1e-4


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize(
    ("settings", "words"),
    [({"use_dora": True}, ("use_dora",)), ({"modules_to_save": ["lm_head"]}, ("modules_to_save",))],
)
def test_adapters_that_vllm_cannot_load_are_rejected(server, settings, words):
    with raises_for("AdapterTransfer", *words):
        engine_of(server).sync_weights(load_adapted(**settings), 0)


def test_without_an_adapter_there_is_nothing_to_send(server):
    with raises_for("AdapterTransfer", "model.lora is not set"):
        engine_of(server).sync_weights(load_policy(MODEL), 0)
