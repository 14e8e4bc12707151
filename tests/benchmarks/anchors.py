"""Step times and memory that others published, beside what `plan` counts: how far off is it?

    python -m tests.benchmarks.anchors

Writes a table of docs/dev/plan.md. Nothing is run; models are built on the meta device, in
the sizes of their public cards. Where a source does not name its
device, A100, H20 and H100 are tried.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.devices import Bounds, load_devices
from litgrpo.tools.plan.plan import Plan, make_plan
from tests.benchmarks.plan import write

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PAGE = ROOT / "docs" / "dev" / "plan.md"
QWEN_05B = {
    **{"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864},
    **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    **{"tie_word_embeddings": True, "max_position_embeddings": 32768},
}
LLAMA_1B = {
    **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192},
    **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 131072},
}


@dataclass(frozen=True)
class Anchor:
    """A published measurement.

    Args:
        name: model, devices, rollout.
        source: who, and what is not known.
        model: hub id, or its config.
        devices: number of GPUs.
        prompts, group: of a rollout.
        prompt_len, completion_len: tokens; of completions the mean.
        limit: maximum tokens of a completion.
        seconds: {phase: measured}.
        words: more of the command line.
        chips: devices that it may have been.
    """

    name: str
    source: str
    model: str | dict[str, object]
    devices: int
    prompts: int
    group: int
    prompt_len: int
    completion_len: int
    limit: int
    seconds: dict[str, float]
    words: tuple[str, ...] = ()
    chips: tuple[str, ...] = ("a100-80", "h20", "h100")


LOG = "a published log of verl; device not named"
# 0.78 of the peak, says the log, and 6 x 7.62e9 x 1.27e6 operations in 65 s on 8: 143e12 of it.
H20 = "a published log of verl; an H20 by its mfu"
ANCHORS = [
    Anchor(
        *("Qwen2 7B, 8 GPUs, 1024 x 5", H20, "Qwen/Qwen2.5-7B", 8, 1024, 5, 93, 154, 1024),
        {"decoding": 38, "scoring": 22, "learning": 65},
        chips=("h20",),
    ),
    Anchor(
        *("Qwen2.5 7B with LoRA, 8 GPUs, 64 x 5", LOG, "Qwen/Qwen2.5-7B", 8, 64, 5, 93, 253, 536),
        {"decoding": 24, "scoring": 1.6, "learning": 7.2},
        ("--model.lora.rank", "32"),
    ),
    Anchor(
        *("Qwen2.5 0.5B, 1 GPU, 256 rows (PPO)", LOG, QWEN_05B, 1, 256, 1, 93, 277, 512),
        {"decoding": 17.6, "scoring": 5.4, "learning": 20.4},
    ),
    Anchor(
        *("Gemma 2 2B, 1 GPU, 512 rows (PPO)", LOG, "google/gemma-2-2b-it", 1, 512, 1, 93, 140),
        *(512, {"decoding": 45, "scoring": 11, "learning": 38}),
    ),
    Anchor(
        *("Llama 3.2 1B, 8 H100, 32 x 16", "NeMo-RL's CI: at most so long", LLAMA_1B, 8, 32, 16),
        *(128, 256, 512, {"step": 10}),
        chips=("h100",),
    ),
]


def plan_anchor(anchor: Anchor, chip: str, folder: Path) -> Plan:
    """The plan of what was measured."""
    words = ["-c", str(CONFIGS / "gsm8k_qwen2.5_1.5b.yaml")]
    sharing = ["-c", str(CONFIGS / "hardware" / "fsdp2.yaml"), "--chips", str(anchor.devices)]
    words += sharing if anchor.devices > 1 else []
    words += ["--chip", chip, "--model.precision.autocast_dtype", "bfloat16"]
    words += ["--model.engine", "litgrpo.rollout.engines.vllm.ColocatedEngine"]
    words += ["--data.batch_size", str(anchor.prompts), "--model.group_size", str(anchor.group)]
    words += ["--data.max_prompt_length", str(anchor.prompt_len)]
    words += ["--model.max_completion_length", str(anchor.limit), *anchor.words]
    model = anchor.model
    if isinstance(model, dict):
        path = folder / "config.json"
        path.write_text(json.dumps(model))
        words += ["--model_config", str(path)]
    else:
        words += ["--model.pretrained", model]
    return make_plan(PlanCLI(words).config)


def spans_on(anchor: Anchor, chip: str) -> dict[str, Bounds]:
    """Seconds of each phase, by the plan for a device."""
    with TemporaryDirectory() as name:
        plan = plan_anchor(anchor, chip, Path(name))
    share = anchor.completion_len / anchor.limit
    # verl's default is vLLM without recorded steps.
    recipe = plan.recipe
    eager = recipe.with_settings(schedule=replace(recipe.schedule, recorded=False))
    estimate = replace(plan.estimate, recipe=eager, lengths=Bounds(share, share))
    found = {phase.name: phase.once for phase in estimate.phases()}
    step = found["prefill"] + found["decoding"] + found["scoring"] * 2 + found["learning"]
    return found | {"step": step}


def spans(anchor: Anchor) -> dict[str, Bounds]:
    """Seconds of each phase, from the least to the most of all devices that it may have been."""
    found = [spans_on(anchor, chip) for chip in anchor.chips]
    return {
        name: Bounds(min(each[name].low for each in found), max(each[name].high for each in found))
        for name in found[0]
    }


def rows() -> list[str]:
    """Lines of the table."""
    lines = [
        "| what was measured | phase | measured | `plan` | middle off by | inside |",
        "|---|---|---|---|---|---|",
    ]
    for anchor in ANCHORS:
        found = spans(anchor)
        for phase, measure_recipe in anchor.seconds.items():
            span = found[phase]
            inside = "yes" if span.low <= measure_recipe <= span.high else "no"
            factor = span.middle / measure_recipe
            lines.append(
                f"| {anchor.name} ({anchor.source}) | {phase} | {measure_recipe:g} s | "
                f"{span.low:.2g} - {span.high:.2g} s | x {factor:.2g} | {inside} |"
            )
    return lines


if __name__ == "__main__":
    print(f"devices of {load_devices().date}")
    write(PAGE, "anchors", rows())
