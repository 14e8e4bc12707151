"""Small runs of every feature, to compare a device with the CPU."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from litgrpo.cli.main import main
from litgrpo.models.loading.export import export
from tests.rewards.classifiers import write_classifier
from tests.support.models import tiny_policy
from tests.support.recipes import CHAT

ARCHITECTURES = ("qwen2", "llama", "gpt2", "gemma2", "t5")
Config = dict[str, Any]


def spread(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """A reward that differs within each group.

    It depends on the row and not on its text: rounding that changes a sampled token then changes
    the gradient of its row only, not the rewards of all.
    """
    return [row * 5 % 7 / 7 for row in range(len(completions))]


def rare(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """A reward for a single row: the other groups have zero variance."""
    return [float(row == 0) for row in range(len(completions))]


def write_inputs(folder: Path) -> Path:
    """Write models, prompts and a judge, which the features read; return the folder."""
    for architecture in ARCHITECTURES:
        # Large enough for a CPU to select its own linear kernels in one of them.
        large = {"hidden_size": 512, "intermediate_size": 1024, "initializer_range": 0.05}
        export(
            tiny_policy(architecture, **(large if architecture == "llama" else {})),
            folder / architecture,
        )
    chat = tiny_policy("qwen2")
    chat.tokenizer.chat_template = CHAT
    export(chat, folder / "chat")
    write_classifier(folder / "judge", "qwen2", chat=CHAT)
    draw = random.Random(1)
    for name, count in (("train", 64), ("val", 16)):
        texts = {
            name + " " + "".join(draw.choices("abc def", k=3 + n % 12)) + str(n)
            for n in range(count)
        }
        rows = [json.dumps({"prompt": text}) + "\n" for text in sorted(texts)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def of_class(path: str, **init_args: Any) -> Config:
    """Config of an object."""
    return {"class_path": path, "init_args": init_args}


def local(**options: Any) -> Config:
    """Config of the local engine."""
    return of_class("litgrpo.rollout.engines.local.LocalEngine", **options)


def static(**options: Any) -> Config:
    """Config of the static engine."""
    path = "litgrpo.rollout.engines.static.StaticEngine"
    return of_class(path, prompt_buckets=8, **options)


GAMES = "litgrpo.environments.examples.NumberGame"
SPREAD = {"function": "tests.cuda_device.features.spread", "weight": 1.0}
IN_GAMES = {
    "environment": GAMES,
    "rewards": {"spread": SPREAD, "environment": {"weight": 1.0}},
}
TWO_EPOCHS = {"epochs_per_rollout": 2, "num_mini_batches": 2, "micro_batch_size": 3}
ADAPTIVE = [
    of_class("EntropyTarget", target=0.3),
    of_class("KLTarget", target=0.1),
    of_class("ReferenceSync", every=1, mixup_alpha=0.5),
]
# {name: arguments of GRPO; `model` is a folder of `write_inputs`, `data` goes to PromptData,
# `callbacks` to the trainer}
FEATURES: dict[str, Config] = {
    **{name: {"model": name, "check_invariants": True} for name in ARCHITECTURES},
    "kl": {"objective": {"kl_coef": 0.05}},
    "kl_t5": {"model": "t5", "objective": {"kl_coef": 0.05}},
    "lora": {"lora": {"rank": 4}, "objective": {"kl_coef": 0.05}, "check_invariants": True},
    "lora_t5": {"model": "t5", "lora": {"rank": 4}},
    "lora_dropout": {"lora": {"rank": 4, "dropout": 0.1}},
    "dora": {"lora": {"rank": 4, "use_dora": True}},
    "epochs": {"update": TWO_EPOCHS},
    # Eight steps at the usual rate would multiply rounding a thousand times.
    "epochs_t5": {
        "model": "t5",
        "update": TWO_EPOCHS,
        "optimizer": of_class("torch.optim.SGD", lr=0.01),
    },
    "micro_batch_tokens": {"update": {"micro_batch_tokens": 64}},
    "dynamic_sampling": {
        "dynamic_sampling_attempts": 3,
        "rewards": {"rare": {"function": "tests.cuda_device.features.rare", "weight": 1.0}},
    },
    "filters": {
        "sampling": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
        "check_invariants": True,
    },
    "filters_t5": {"model": "t5", "sampling": {"top_k": 20, "top_p": 0.9}},
    "greedy": {
        "group_size": 1,
        "sampling": {"temperature": 0.0},
        "objective": {"advantages": of_class("Normalized", baseline="batch", scale="batch")},
    },
    "stop": {"sampling": {"stop": ["a", "be"]}},
    "max_rows": {"engine": local(max_rows=8, sync_every_tokens=3)},
    "fused_decode_off": {"engine": local(fused_decode=False)},
    "engine_bf16": {"engine": local(dtype="bfloat16")},
    "engine_bf16_t5": {"model": "t5", "engine": local(dtype="bfloat16")},
    "static": {"engine": static()},
    "static_gemma2": {"model": "gemma2", "engine": static()},
    "static_t5": {"model": "t5", "engine": static()},
    "static_stop": {
        "sampling": {"top_k": 20, "stop": ["a"]},
        "engine": static(sync_every_tokens=4),
    },
    "adaptive": {
        "objective": {"kl_coef": 0.05, "entropy_coef": 0.01},
        "callbacks": ADAPTIVE,
    },
    "checkpointing": {"precision": {"gradient_checkpointing": True}},
    "checkpointing_t5": {"model": "t5", "precision": {"gradient_checkpointing": True}},
    "dropout": {"precision": {"disable_dropout": False}},
    "prompts_not_shared": {"precision": {"share_prompts": False}},
    "autocast_bf16": {"precision": {"autocast_dtype": "bfloat16"}},
    "autocast_bf16_gemma2": {"model": "gemma2", "precision": {"autocast_dtype": "bfloat16"}},
    "autocast_bf16_t5": {"model": "t5", "precision": {"autocast_dtype": "bfloat16"}},
    "weights_bf16": {"precision": {"dtype": "bfloat16"}},
    "weights_bf16_t5": {"model": "t5", "precision": {"dtype": "bfloat16"}},
    "weights_f64": {"precision": {"dtype": "float64"}},
    "gspo": {
        "objective": {
            "importance_sampling_level": "sequence",
            "top_entropy_quantile": 0.5,
            "off_policy_mask_threshold": 0.5,
            "gamma": 0.9,
            "mask_truncated_completions": True,
        },
        "update": {"epochs_per_rollout": 2},
    },
    "dapo": {
        "scoring": {"overlong_buffer_frac": 0.5},
        "objective": {"surrogate": of_class("Clipped", clip_high=0.28)},
    },
    "kl_cov": {
        "objective": {
            "surrogate": of_class("KLCov", frac=0.2),
            "positive_nll": {"coef": 0.1, "min_reward": 0.3},
            "kl_in_reward": {"coef": 0.1},
        },
        "update": {"epochs_per_rollout": 2},
    },
    "remax": {"objective": {"advantages": of_class("ReMax")}},
    "staleness": {"source": of_class("Ahead", staleness=1)},
    "tools": {
        "model": "builtin:tiny-calculator",
        "rewards": {
            "correct": {"function": "litgrpo.rewards.correctness"},
            "environment": {"weight": 1.0},
        },
        "max_completion_length": 44,
        "sampling": {"stop": ["</call>"]},
        "environment": of_class(
            "litgrpo.environments.Tools",
            functions=["litgrpo.environments.examples.calculate"],
            call_format="tags",
        ),
        "episode": {
            "max_turns": 3,
            "max_turn_tokens": 24,
            "turn_format": "inline",
            "num_workers": 0,
        },
        "data": {
            "train": "python:litgrpo.data.examples.calculator.train",
            "val": "python:litgrpo.data.examples.calculator.products",
        },
    },
    "turns_chat": {
        **IN_GAMES,
        "model": "chat",
        "max_completion_length": 40,
        "episode": {"max_turns": 3, "max_turn_tokens": 6, "num_workers": 0},
        "data": {"chat": True, "max_prompt_length": 200},
    },
    "turns_t5": {
        **IN_GAMES,
        "model": "t5",
        "max_completion_length": 24,
        "episode": {
            "max_turns": 3,
            "max_turn_tokens": 6,
            "turn_format": "inline",
            "num_workers": 0,
        },
    },
    "reward_model": {
        "rewards": {
            "judge": {
                "function": of_class("litgrpo.rewards.RewardModel", pretrained="{folder}/judge"),
                "weight": 1.0,
            }
        }
    },
    "sft": {"sft": True},
    "sft_t5": {"sft": True, "model": "t5"},
}


def config_of(name: str, folder: Path) -> Config:
    """Build the recipe of a feature: two iterations of 4 x 4 completions, without momentum.

    SGD changes weights in proportion to gradients; Adam would make rounding as large as a step.
    """
    feature = json.loads(json.dumps(FEATURES[name]).replace("{folder}", str(folder)))
    model, sft = feature.pop("model", "qwen2"), feature.pop("sft", False)
    options: Config = {
        "pretrained": model if ":" in model else str(folder / model),
        "max_iterations": 2,
        "optimizer": of_class("torch.optim.SGD", lr=0.1),
    }
    rows: Config = {"train": str(folder / "train.jsonl"), "val": str(folder / "val.jsonl")}
    rows |= {"batch_size": 4, "eval_batch_size": 8}
    if sft:
        rows = {"train": "python:litgrpo.data.examples.problems.demonstrations?size=60"}
        rows |= {"batch_size": 8}
    else:
        options |= {
            "rewards": {"spread": SPREAD},
            "scoring": {"num_workers": 0},
            "group_size": 4,
            "max_completion_length": 12,
            "check_invariants": False,
        }
    rows |= feature.pop("data", {})
    trainer: Config = {"limit_val_batches": 1, "enable_progress_bar": False}
    trainer["callbacks"] = feature.pop("callbacks", [])
    return {
        "model": of_class("litgrpo.SFT" if sft else "litgrpo.GRPO", **(options | feature)),
        "data": of_class("litgrpo.PairData" if sft else "litgrpo.PromptData", **rows),
        "trainer": trainer,
    }


def fit(config: Config, folder: Path, *words: str) -> Path:
    """Run `litgrpo fit` in this process; return the folder of the run.

    Messages are in `messages.txt` beside it.

    Raises:
        AssertionError: with the messages of the program, if it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe, run = folder / "recipe.yaml", folder / "run"
    recipe.write_text(yaml.safe_dump(config))
    before, sys.argv = sys.argv, ["litgrpo", "fit", "-c", str(recipe), "--run_dir", str(run)]
    sys.argv += words
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
            try:
                code = main()
            except SystemExit as stop:
                code = stop.code
    finally:
        sys.argv = before
        (folder / "messages.txt").write_text(messages.getvalue())
    assert code == 0, messages.getvalue()[-4000:]
    return run


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    """Weights of the final model of a run, on the CPU in float64."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted((run / "final_model").glob("*.safetensors")):
        found |= {name: tensor.double() for name, tensor in load_file(file).items()}
    assert found, f"no weights in {run / 'final_model'}"
    return found


def distance(run: Path, other: Path, start: Path | None = None) -> float:
    """Distance of the final weights of two runs, as a fraction of how far the second one moved.

    Args:
        run: folder of a run.
        other: folder of the run to compare with.
        start: folder of the initial weights; None, and for adapters: zero.
    """
    first, second = final_weights(run), final_weights(other)
    assert first.keys() == second.keys()
    files = [] if start is None else sorted(start.glob("*.safetensors"))
    initial = {name: value for file in files for name, value in load_file(file).items()}
    gap = sum(float((first[name] - second[name]).square().sum()) for name in first)
    moved = sum(
        float((value - initial.get(name, torch.zeros(()))).square().sum())
        for name, value in second.items()
    )
    assert moved > 0, "the weights did not move"
    return (gap / moved) ** 0.5
