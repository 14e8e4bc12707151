"""The layouts of docs/dev/scaling.md: models of 7B to 32B on GPUs of 80 GB, by `plan`.

    python -m tests.benchmarks.layouts

Nothing is run: the models are built on torch's meta device, in the sizes of their public cards.
"""

from __future__ import annotations

import sys
from pathlib import Path

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.plan import make_layout, make_plan
from tests.benchmarks.plan import write

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RECIPE = [
    *("-c", str(CONFIGS / "gsm8k_qwen2.5_1.5b.yaml"), "-c", str(CONFIGS / "hardware/fsdp2.yaml")),
    *("--model.precision.gradient_checkpointing", "true"),
    *("--model.precision.autocast_dtype", "bfloat16", "--model.objective.kl_coef", "0"),
    *("--model.max_completion_length", "3072", "--data.max_prompt_length", "1024"),
    *("--data.batch_size", "64", "--data.eval_batch_size", "64", "--model.group_size", "16"),
    *("--model.update.micro_batch_tokens", "8192", "--chip", "h100", "--read_data", "false"),
]
SERVER = ["-c", str(CONFIGS / "hardware/server.yaml")]
NATIVE = [
    "--model.engine.init_args.weight_transfer",
    "litgrpo.rollout.engines.weight_transfer.NcclTransfer",
]
# Fewer rows at once, others queue.
QUEUE = ["--model.engine", "litgrpo.rollout.engines.local.LocalEngine"]
QUEUE += ["--model.engine.init_args.max_rows", "16"]
HSDP = ["--trainer.strategy.init_args.replicas", "2"]
# {name: words}
LAYOUTS = {
    "8, sample themselves": [*QUEUE, "--chips", "8"],
    "6 + 2": [*SERVER, *NATIVE, "--chips", "6", "--samplers", "2"],
    "4 + 4": [*SERVER, *NATIVE, "--chips", "4", "--samplers", "4"],
    "2 machines, 12 + 4": [*SERVER, *NATIVE, "--chips", "12", "--samplers", "4"],
    "2 machines, 16, HSDP of 2": [*HSDP, *QUEUE, "--chips", "16"],
}
SIZES = ("7B", "14B", "32B")
COLUMNS = ("model, layout", "learn", "rollout", "sampler", "tokens", "rows at once", "publish")
COLUMNS += ("host: load, save", "disk", "verdict")
HEAD = (f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|")


def plan_size(size: str, words: list[str]):
    """The plan of a layout."""
    model = ["--model.pretrained", f"Qwen/Qwen2.5-{size}"]
    overlays = [word for word in words if word in SERVER]
    rest = [word for word in words if word not in SERVER]
    split = RECIPE.index("--model.precision.gradient_checkpointing")
    recipes, keys = RECIPE[:split], RECIPE[split:]
    asked = [*recipes, *overlays, *keys, *model, *rest]
    return make_plan(PlanCLI(asked).config)


def render_verdict(plan, found) -> str:
    """FITS, or the smallest change."""
    from litgrpo.tools.plan.fitting import propose_change

    if plan.fits and found.samples:
        return "FITS"
    if plan.fits:
        return "no row fits: use tensor parallelism for the server"
    change = propose_change(plan.budget, plan.recipe, plan.number)
    return "no change helps" if change is None else f"`{' '.join(change)}`"


def rows() -> list[str]:
    """Lines of the table."""
    lines = [*HEAD]
    for size in SIZES:
        for name, words in LAYOUTS.items():
            plan = plan_size(size, words)
            found = make_layout(plan, plan.recipe.publisher)
            low, high = found.publishing.low, found.publishing.high
            publish = f"{low:.1f} - {high:.1f} s" if found.published else "-"
            cells = (
                f"{size}, {name}",
                f"{found.learning / 1e9:.1f}",
                f"{found.rollout / 1e9:.1f}",
                f"{found.sampler / 1e9:.1f}" if plan.samplers else "-",
                f"{found.tokens / 1e3:,.0f} k",
                f"{found.rows} of {found.rows_per_rollout}",
                publish,
                f"{found.host_load / 1e9:.0f}, {found.host_save / 1e9:.0f}",
                f"{found.disk / 1e9:.0f}",
                render_verdict(plan, found),
            )
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr)
    return lines


if __name__ == "__main__":
    write(ROOT / "docs" / "dev" / "scaling.md", "layouts", rows())
