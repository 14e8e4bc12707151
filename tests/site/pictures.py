"""Draws the pictures of docs/explanation/iteration.md from the code that they show.

`python -m tests.site.pictures [--folder FOLDER]`.
"""

import argparse
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.losses import Clipped, SurrogateInputs
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.models.packing import Packing
from litgrpo.types import RewardTable, TokenRows

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "explanation" / "pictures"
RUNS = ROOT / "tests" / "tools" / "doctor" / "labelled" / "dev.jsonl.gz"
BLUE, ORANGE, GREEN, RED, GREY = "#2166ac", "#e08214", "#1b7837", "#b2182b", "#bbbbbb"
STYLE = {
    "svg.hashsalt": "litgrpo",
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def walk() -> None:
    """One iteration: what is handed from where to where."""
    _, axes = plt.subplots(figsize=(8.5, 4.4))
    boxes = [
        (0.0, 1.0, "B prompts", "data"),
        (1.0, 1.0, "G completions\nof each", "rollout"),
        (2.0, 1.0, "a reward\nfor each", "rewards"),
        (2.0, 0.0, "advantage: better or\nworse than its group", "algorithms"),
        (1.0, 0.0, "loss, gradient,\nan optimizer step", "training"),
        (0.0, 0.0, "new weights", "models"),
    ]
    for x, y, text, package in boxes:
        corner = (x - 0.32, y - 0.26)
        style = dict(boxstyle="round,pad=0.03", fc="#eef3f9", ec=BLUE)
        axes.add_patch(FancyBboxPatch(corner, 0.64, 0.52, **style))
        axes.text(x, y + 0.03, text, ha="center", va="center")
        axes.text(x, y - 0.21, f"{package}/", ha="center", va="center", size=8, family="monospace")
    arrows = [
        *(((0.35, 1), (0.65, 1)), ((1.35, 1), (1.65, 1)), ((2, 0.71), (2, 0.29))),
        *(((1.65, 0), (1.35, 0)), ((0.65, 0), (0.35, 0)), ((0.2, 0.29), (0.75, 0.71))),
    ]
    for begin, end in arrows:
        style = dict(arrowstyle="-|>", mutation_scale=14, color="#333333")
        axes.add_patch(FancyArrowPatch(begin, end, **style))
    # Needed with several optimizer steps, and for a KL term.
    style = dict(boxstyle="round,pad=0.03", fc="white", ec=GREY, ls="--")
    axes.add_patch(FancyBboxPatch((0.44, -0.72), 1.12, 0.18, **style))
    text = "log-probs of old policy and reference, if needed"
    axes.text(1, -0.63, text, ha="center", va="center", size=8)
    style = dict(arrowstyle="-|>", mutation_scale=10, color=GREY)
    axes.add_patch(FancyArrowPatch((1, -0.52), (1, -0.28), **style))
    axes.set(xlim=(-0.45, 2.45), ylim=(-0.8, 1.4))
    axes.axis("off")


def advantages() -> None:
    """Rewards of three groups, and what `Normalized` makes of them."""
    rewards = torch.tensor([[1.0, 0.2, 0.2, 1.0, 0.2, 0.2, 0.2, 0.2], [1.0] * 7 + [0.0], [0.2] * 8])
    everything = torch.ones_like(rewards)
    table = RewardTable({}, {}, rewards.double(), everything.bool(), torch.finfo().eps)
    found = Normalized()(table, everything.long(), SingleProcess()).numpy()
    height = rewards.numpy()
    _, rows = plt.subplots(2, 3, figsize=(8.5, 3.6), sharey="row")
    titles = ["two of eight are correct", "one of eight is incorrect", "all equal: no gradient"]
    for column, name in enumerate(titles):
        rows[0, column].bar(range(8), height[column], color=GREY)
        rows[0, column].axhline(height[column].mean(), color="black", lw=1, ls="--")
        rows[0, column].set_title(name, size=10)
        signs = [GREEN if a > 0 else RED for a in found[column].tolist()]
        rows[1, column].bar(range(8), found[column], color=signs)
        rows[1, column].axhline(0, color="black", lw=1)
        for each in rows[:, column]:
            each.set_xticks([])
    rows[0, 0].set_ylabel("reward\n(- - mean)")
    rows[1, 0].set_ylabel("advantage")
    rows[1, 1].set_xlabel("completions of a prompt")


def masks() -> None:
    """Draw rows of tokens: prompt, generated, observation, padding."""
    rows = [
        ("one turn", "....PPPPPP", "CCCCCE......"),
        ("cut off by the limit", "..PPPPPPPP", "CCCCCCCCCCCC"),
        ("a tool answers", "PPPPPPPPPP", "CCCHHHHCCE.."),
    ]
    kinds = {
        "P": (GREY, "prompt"),
        "C": (BLUE, "generated: trained on"),
        "E": (GREEN, "end token: trained on"),
        "H": (ORANGE, "observation: attended to, not trained on"),
        ".": ("white", "padding"),
    }
    edge = "#888888"
    _, axes = plt.subplots(figsize=(8.5, 2.4))
    for number, (name, prompt, completion) in enumerate(rows):
        for place, kind in enumerate(prompt + completion):
            x = place + 0.6 * (place >= len(prompt))
            axes.add_patch(
                plt.Rectangle((x, -number), 0.9, 0.7, fc=kinds[kind][0], ec="#888888", lw=0.6)
            )
        axes.text(-0.4, -number + 0.35, name, ha="right", va="center")
    for color, name in kinds.values():
        axes.plot([], [], "s", color=color, mec=edge, ms=9, label=name)
    place = dict(loc="lower center", bbox_to_anchor=(0.35, -0.35))
    axes.legend(**place, ncol=5, frameon=False, fontsize=8, handletextpad=0.2)
    axes.set(xlim=(-7, 23), ylim=(-2.2, 1))
    axes.axis("off")


def clipping() -> None:
    """The loss of `Clipped` against the ratio, for both signs of the advantage."""
    ratio = torch.linspace(0.4, 1.8, 200)
    _, both = plt.subplots(1, 2, figsize=(8.5, 2.9))
    sides = {"better than its group": 1.0, "worse than its group": -1.0}
    losses = {
        "clip 0.2, 0.2 (GRPO)": (Clipped(), dict(color=BLUE)),
        "clip 0.2, 0.28 (DAPO)": (Clipped(clip_high=0.28), dict(color=ORANGE, ls="--")),
    }
    for axes, (name, sign) in zip(both, sides.items(), strict=True):
        for label, (surrogate, style) in losses.items():
            axes.plot(ratio, surrogate(tokens_with(ratio, sign)), label=label, **style)
        axes.axvline(1, color=GREY, lw=1)
        axes.set(title=name, xlabel="probability now / before", ylabel="loss of the token")
    both[0].legend(frameon=False, fontsize=8)


def tokens_with(ratio: torch.Tensor, advantage: float) -> SurrogateInputs:
    """Inputs with these ratios, all with one advantage."""
    ones = torch.ones_like(ratio)
    return SurrogateInputs(ratio.log(), ratio.log(), ratio, advantage * ones, ones.bool(), ones)


def packing() -> None:
    """Which token sees which, in the packed sequence of two prompts with two completions each."""
    packed = Packing.of_groups(example_rows())
    size = packed.groups[-1][-1]  # without the padding at the end
    sees = torch.zeros(size, size)
    for start, middle, end in packed.groups:
        sees[start:end, start:middle] = 1
    for bucket in packed.suffixes:
        for row in range(bucket.shape[0]):
            inside = bucket.places // bucket.shape[1] == row
            own = bucket.tokens[inside]
            sees[own[:, None], own[None, :]] = 2
    sees = sees.tril()
    _, axes = plt.subplots(figsize=(4.4, 4.2))
    axes.imshow(sees.numpy(), cmap=mpl.colors.ListedColormap(["white", GREY, BLUE]), vmin=0, vmax=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(torch.arange(-0.5, size).tolist(), minor=True)
        axis.set_tick_params(which="both", length=0)
    axes.grid(which="minor", color="#dddddd", lw=0.5)
    middles, start = [], 0
    for length in PARTS.values():
        middles.append(start + (length - 1) / 2)
        start += length
    axes.set_xticks(middles, list(PARTS), size=8, rotation=45, ha="right")
    axes.set_yticks(middles, list(PARTS), size=8)
    axes.set(xlabel="attends to these tokens")
    for color, name in ((GREY, "of the prompt"), (BLUE, "of the completion")):
        axes.plot([], [], "s", color=color, ms=9, label=name)
    axes.legend(loc="upper right", frameon=False, fontsize=8)


# {part of the packed sequence of `example_rows`: its tokens}
PARTS = {
    "prompt A": 4,
    "completion A1": 3,
    "completion A2": 5,
    "prompt B": 3,
    "completion B1": 4,
    "completion B2": 2,
}


def example_rows() -> TokenRows:
    """Two prompts of 4 and 3 tokens, with completions of 3, 5, 4 and 2."""
    prompts = torch.tensor([[True] * 4, [False] + [True] * 3])
    lengths = torch.tensor([4, 6, 5, 3])  # the last token of each is not fed
    mask = torch.arange(6) < lengths[:, None]
    ids = torch.ones(4, 6, dtype=torch.long)
    return TokenRows(
        prompt_ids=torch.ones(2, 4, dtype=torch.long),
        prompt_mask=prompts,
        completion_ids=ids,
        completion_mask=mask,
        prompt_of=torch.tensor([0, 0, 1, 1]),
    )


def runs() -> None:
    """Real runs: one that learned, one whose groups are all equal, one that was paid for length."""
    with gzip.open(RUNS, "rt", encoding="utf-8") as file:
        known = {run["name"]: run["table"] for run in map(json.loads, file)}
    shown = {
        "plain-copy-0": "healthy",
        "too_hard-copy-2": "too hard: no reward in training",
        "paid_length-reverse-1": "gamed: paid for length",
    }
    _, row = plt.subplots(1, 3, figsize=(8.5, 2.7), sharey=True)
    for axes, (name, title) in zip(row, shown.items(), strict=True):
        for number, color, label in (
            ("reward/mean", BLUE, "reward"),
            ("reward/zero_variance_groups_frac", GREY, "zero-variance groups"),
            ("val/avg@2", GREEN, "held-out accuracy"),
        ):
            pairs = zip(known[name]["step"], known[name][number], strict=True)
            points = [(step, value) for step, value in pairs if value is not None]
            marker = "o" if "val" in number else ""
            axes.plot(*zip(*points, strict=True), color=color, label=label, marker=marker, ms=4)
        axes.set(title=title, xlabel="iteration")
        axes.title.set_size(10)
    row[0].set_ylabel("reward, or fraction")
    row[1].annotate("held-out problems\nare shorter", (30, 0.43), ha="center", va="top", size=8)
    row[1].legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.7))


PICTURES: dict[str, Callable[[], None]] = {
    draw.__name__: draw for draw in (walk, advantages, masks, clipping, packing, runs)
}


def main() -> None:
    """Draw all pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        with plt.rc_context(STYLE):
            draw()
            plt.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
            plt.close()


if __name__ == "__main__":
    main()
