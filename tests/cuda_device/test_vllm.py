"""vLLM in the trainer's process, and weights for its servers, on the device; vLLM is a stand-in."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from litgrpo.models.adapters import LoRA
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import load_policy
from litgrpo.rewards import Scoring
from litgrpo.rollout.servers.client import ServerUnavailable
from litgrpo.rollout.servers.pool import Servers
from litgrpo.rollout.servers.vllm import RESERVED_FRAC, ColocatedEngine
from litgrpo.rollout.servers.vllm_client import VllmServer
from litgrpo.rollout.servers.weight_transfer import NcclTransfer
from tests.cuda_device.run import on_cuda
from tests.support.models import tiny_policy
from tests.support.training import batches, module, train
from tests.support.vllm_stand_in import LLM

MIB = 2**20
LIMIT_MB = 64


class DeviceLLM(LLM):
    """Holds its share of the device's memory while it is awake."""

    used: list[int] = []  # noqa: RUF012

    def __init__(self, model, **given):
        super().__init__(model, **given)
        self.take_memory()

    def take_memory(self):
        size = int(self.given["gpu_memory_utilization"] * LIMIT_MB * MIB)
        self.block = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.used.append(torch.cuda.memory_allocated())

    def collective_rpc(self, method, kwargs):
        given = ((name, weight.cpu()) for name, weight in kwargs["weights_iterator"])
        super().collective_rpc(method, {"weights_iterator": given})

    def wake_up(self):
        super().wake_up()
        self.take_memory()

    def sleep(self, level):
        super().sleep(level)
        del self.block


@on_cuda(CUDA_DEVICE_LIMIT_MB=LIMIT_MB)
def test_colocated_vllm_gets_the_memory_that_training_leaves():
    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = DeviceLLM, dict
    sys.modules["vllm"] = vllm
    grpo = module(
        max_iterations=3,
        engine=ColocatedEngine(max_model_len=64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        scoring=Scoring(num_workers=0),
        check_invariants=False,
    )
    grpo.policy = tiny_policy("llama", hidden_size=256, intermediate_size=512)
    weights = sum(each.nbytes for each in grpo.policy.parameters())
    train(grpo, batches("a", "hello"), accelerator="cuda", devices=1)
    assert grpo.iteration == 3
    # Awake, it fills the device up to the reserve. Until the first update it leaves the optimizer
    # state out; no rollout and no update had to be halved.
    most = LIMIT_MB * MIB * (1 - RESERVED_FRAC)
    first, *later = DeviceLLM.used
    assert first == pytest.approx(most - 2 * weights, rel=0.02)
    assert later == pytest.approx([most] * 2, rel=0.02)
    assert grpo.learning_limit.max_rows is grpo.rollout_limit.max_rows is None


@on_cuda()
def test_the_share_of_colocated_vllm_follows_what_is_trained():
    from tests.cuda_device.device import set_memory_limit

    policy = tiny_policy("qwen2").cuda()
    weights = sum(each.nbytes for each in policy.parameters())
    used = torch.cuda.memory_allocated()
    set_memory_limit(10 * used)
    choose = ColocatedEngine()._choose_memory
    assert choose(policy) == pytest.approx(0.9 - 0.2 * weights / used - RESERVED_FRAC)
    policy.requires_grad_(False)
    assert choose(policy) == pytest.approx(0.9 - RESERVED_FRAC)
    assert ColocatedEngine(0.3)._choose_memory(policy) == 0.3
    assert ColocatedEngine(enable_sleep_mode=False)._choose_memory(policy) == 0.4
    policy.requires_grad_(True)
    set_memory_limit(3 * used)
    with pytest.raises(ValueError, match=r"model\.lora"):
        choose(policy)


class Trainers:
    """vLLM's side of the trainer: keeps what it would send."""

    sent: list[dict] = []  # noqa: RUF012

    @classmethod
    def trainer_init(cls, info, *, client, source):
        found = cls()
        found.source = source
        return found

    def send_weights(self):
        names = [meta.name for meta in self.source.metadata()]
        weights = dict(self.source)
        assert list(weights) == names
        assert all(weight.is_cuda for weight in weights.values())
        self.sent.append(weights)


def install_weight_transfer():
    """Give the process vLLM's modules of weight transfer."""
    parts = {
        "base": {"ParamMeta": lambda *of: SimpleNamespace(name=of[0]), "WeightSource": object},
        "clients": {"HTTPVLLMWeightSyncClient": lambda url, timeout_s: None},
        "nccl_engine": {
            "NCCLTrainerInitInfo": lambda *_, rank: None,
            "NCCLTrainerWeightTransferEngine": Trainers,
        },
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[f"vllm.distributed.weight_transfer.{name}"] = module


class Server(VllmServer):
    """A server with one worker that holds the weights of a version."""

    version = "1"

    def read(self, model, *_):
        return model(world_size=1)


@on_cuda()
@pytest.mark.parametrize("lora", [False, True])
def test_nccl_sends_the_policys_tensors_while_they_are_published(lora, tmp_path):
    from tests.cuda_device.device import count_work

    install_weight_transfer()
    export(tiny_policy("qwen2", tie_word_embeddings=True), Path(tmp_path))
    policy = load_policy(tmp_path, lora=LoRA(rank=2) if lora else None)
    policy.model.cuda()
    if lora:
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.data.normal_()
    sender, server = NcclTransfer("localhost").sender(), Server("http://a")
    weights = sender.prepare(policy, "1")
    with count_work() as work:
        server._load_model(weights)
    own = {each.data_ptr() for each in policy.parameters()}
    (sent,) = Trainers.sent
    moved = [name for name, weight in sent.items() if weight.data_ptr() not in own]
    # Layers with an adapter are merged; all else is sent from where it is.
    assert all("proj" in name for name in moved)
    assert bool(moved) == lora
    assert lora or not work.launches
    assert "lm_head.weight" not in sent  # tied
    assert not any("lora" in name for name in sent)
    before = sent["model.norm.weight"].cpu()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(1.0)
    servers = Servers([server], 0.0, "model.engine")
    servers.unchecked.clear()
    servers.weights = replace(weights, version="2", tensors=None)
    with pytest.raises(ServerUnavailable, match="next weights"):  # restarted during the update
        servers.update(server)
    server._load_model(sender.prepare(policy, "2"))
    newer = Trainers.sent[-1]["model.norm.weight"].cpu()
    assert torch.equal(newer, before + 1)
