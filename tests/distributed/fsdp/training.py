"""Small training runs, for one process and for several ranks with sharded weights."""

import os
from functools import partial

import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.resume import OptimizerOptions, RngState
from litgrpo.data.modules import PairData, PromptData
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import LoRA, Precision
from litgrpo.models.loading.sharded_weights import gather_weights
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.sft import SFT
from litgrpo.rewards import Scoring
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.servers.vllm import ServerEngine
from tests.support.algorithms import DISTILLING, PUBLISHED
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.playing import Echo
from tests.support.processes import TEXTS, Gradients, letters
from tests.support.processes import trainer as build_trainer

PAIRS = [{"prompt": f"What is {n}?", "completion": f"it is {n * n}"} for n in range(8)]


def letters_of_one(prompts, completions):
    """Rewards of which one group in four has variance: only one rank has rows in the loss."""
    scored = zip(prompts, letters(prompts, completions), strict=True)
    return [score if "hello" in prompt else 0.0 for prompt, score in scored]


def trainer(processes, replicas=1, **settings):
    """Build a silent trainer that shards the weights over this number of processes."""
    divided = {"strategy": FSDP2Strategy(replicas=replicas)} if processes > 1 else {}
    return build_trainer(processes, **divided | settings)


def save_models(folder):
    """A tied and an untied model, to start from."""
    for kind in ("gemma2", "qwen2", "t5"):
        model = tiny_model(kind)
        model.generation_config.eos_token_id = list(range(2, 140))  # some completions end
        model.save_pretrained(folder / kind)
        byte_tokenizer().save_pretrained(folder / kind)


def grpo(folder, kind="gemma2", module=GRPO, reward=letters, **settings):
    """Build the module of a model in the folder."""
    given = {
        "group_size": 4,
        "max_completion_length": 6,
        "max_iterations": 2,
        "update": UpdateConfig(micro_batch_size=3),
        "optimizer": partial(torch.optim.SGD, lr=0.5),
        "scoring": Scoring(num_workers=0),
        # The step that one process fuses rounds otherwise.
        "engine": LocalEngine(fused_decode=False),
        "check_invariants": False,
    }
    return module(str(folder / kind), {"letters": Reward(reward)}, **given | settings)


INLINE = EpisodeSettings(
    turn_format="inline", num_workers=0, max_turns=3, max_turn_tokens=4, close_truncated_turns=True
)
VARIANTS = {
    "plain": {"check_invariants": True},
    "untied": {"kind": "qwen2", "precision": Precision(gradient_checkpointing=True)},
    "uneven": {
        "reward": letters_of_one,
        "objective": PUBLISHED["otb"],  # its baseline reads the weights of the head
        "update": UpdateConfig(micro_batch_size=1),
    },
    "kl": {"objective": Objective(kl_coef=0.1), "check_invariants": True},
    "distilled": {
        "objective": DISTILLING["gkd"],
        "update": UpdateConfig(micro_batch_size=2, epochs_per_rollout=2),
    },
    "lora": {
        "objective": Objective(kl_coef=0.1),
        "lora": LoRA(rank=4),
        "kind": "qwen2",
        "check_invariants": True,
    },
    "epochs": {"update": UpdateConfig(epochs_per_rollout=2, micro_batch_size=3)},
    "entropy": {"objective": Objective(entropy_coef=0.01)},
    "resampled": {"dynamic_sampling_attempts": 3},
    "bf16": {"precision": Precision(autocast_dtype="bfloat16"), "check_invariants": True},
    "t5": {"kind": "t5"},
    "served": {"check_invariants": True},
    "served lora": {
        "objective": DISTILLING["jsd"],
        "kind": "qwen2",
        "lora": LoRA(rank=4),
        "check_invariants": True,
    },
    "turns": {"environment": Echo((2, 40)), "episode": INLINE, "max_completion_length": 70},
}


def learn(processes, folder, replicas=1, names=(*VARIANTS, "sft"), url=None):
    """These variants, or a supervised training; leaves whole weights and what was reported.

    A server at the address, if any, samples for those that are named after it.
    """
    asked = {"engine": ServerEngine([url], send_uniforms=True, timeout_s=20.0)} if url else {}
    for name in names:
        # A validation publishes, too, while the whole weights are there; shared unevenly.
        val = TEXTS[4:7] if "served" in name else None
        data = PromptData(TEXTS[:4], val=val, batch_size=4)
        module = grpo(folder, **VARIANTS.get(name, {}), **asked if "served" in name else {})
        if name == "distilled":
            module.reference_path = str(folder / "qwen2")
        if name == "sft":
            data = PairData(PAIRS, val=PAIRS[:3], batch_size=4)
            optimizer = partial(torch.optim.SGD, lr=0.5)
            module = SFT(str(folder / "gemma2"), max_iterations=3, optimizer=optimizer)
            # Limits differ after out-of-memory errors in evaluations, so one rank needs a filler.
            module.row_limit.max_rows = 2 - int(os.environ.get("RANK", "0"))
        torch.manual_seed(0)
        runner = trainer(processes, replicas)
        runner.fit(module, data)
        weights = {
            name: each.detach().clone() for name, each in gather_weights(module.policy.model)
        }
        path = folder / f"{name} {processes}"
        export(module.policy, path)
        if runner.is_global_zero:
            numbers = {name: float(value) for name, value in runner.callback_metrics.items()}
            torch.save({"weights": weights, "numbers": numbers}, folder / f"{path.name}.pt")


def take_gradients(processes, folder, replicas=1):
    """Leaves the gradients of all algorithms, with all rows and with few rows in the loss."""
    for name, reward in {"even": letters, "uneven": letters_of_one}.items():
        module = grpo(
            folder,
            module=Gradients,
            reward=reward,
            max_iterations=1,
            objective=Objective(kl_coef=0.1),
            reference=str(folder / "qwen2"),
            update=UpdateConfig(micro_batch_size=2, max_grad_norm=None),
            optimizer=partial(torch.optim.SGD, lr=0.0),
        )
        module.file = folder / f"{name} gradients {processes}.pt"
        trainer(processes, replicas).fit(module, PromptData(TEXTS[:4], batch_size=4))


def train(processes, folder, name, source=None, replicas=1, fallback=False):
    """Three iterations with a checkpoint after each one, or the rest of them from one.

    Args:
        name: of the run's folder.
        source: checkpoint to resume from, in the folder.
        fallback: pass over damaged ones.
    """
    module = grpo(
        folder,
        max_iterations=3,
        objective=Objective(kl_coef=0.1),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )
    keeper = IterationCheckpoint(1, keep_last=9, keep_best=0)
    keeper.falls_back = fallback
    runner = trainer(
        processes,
        replicas,
        enable_checkpointing=True,
        callbacks=[OptimizerOptions(), RngState(), keeper],
        default_root_dir=folder / name,
    )
    torch.manual_seed(0)
    path = None if source is None else folder / source
    runner.fit(module, PromptData(TEXTS, batch_size=4), ckpt_path=path)
    weights = {name: each.detach().clone() for name, each in gather_weights(module.policy.model)}
    if runner.is_global_zero:
        torch.save(weights, folder / f"{name}.pt")
