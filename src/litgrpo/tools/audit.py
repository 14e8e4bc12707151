"""`audit`: would these rewards be fair, and could they be gamed? Asked before money is spent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule

from litgrpo.data.prompts import PromptData
from litgrpo.data.sources import SourceLike, read
from litgrpo.rewards.audit.cases import Form, Problem
from litgrpo.rewards.audit.report import Line, Report
from litgrpo.rewards.audit.run import audit as audit_rewards
from litgrpo.rewards.scorer import Reward, Scorer
from litgrpo.text import extract_reasoning

FAILED = 1  # exit code
SHOWN = 44  # characters of an example


def audit(
    recipes: list[str] = [],  # noqa: B006 (read only)
    gold: str | None = None,
    limit: int = 500,
    success: str | None = None,
    threshold: float | None = None,
    form: str | None = None,
    report: str | None = None,
) -> None:
    """Test the rewards of a recipe; exit code 1 if they are unfit.

    Right answers in fifteen renderings must be judged right, and wrong, empty, repeated, stuffed or
    copied ones must earn less. Also found: rewards that are slow, constant, failing, dominant or in
    conflict.

    Args:
        recipes: the recipe and its overlays (-c RECIPE.yaml, as for fit).
        gold: problems with gold answers, instead of the training data: a .jsonl file or any other
            source; the columns are named as in the recipe.
        limit: problems to take, evenly spread; 0 takes all.
        success: the reward that says whether an answer is right (default: the recipe's
            evaluation.success, else its first reward).
        threshold: from which it does (default: the recipe's evaluation.threshold).
        form: how a completion should look, with {reasoning} and {answer} (default: tags).
        report: write the numbers into this .json file, too.
    """
    if not recipes:
        raise ValueError("give the recipe with the rewards: -c configs/quickstart.yaml")
    if limit < 0:
        raise ValueError(f"limit is {limit}; it must be at least 1, or 0 for all")
    recipe = merged([_read(Path(path)) for path in recipes])
    settings = recipe.get("model", {}).get("init_args", {})
    evaluation = settings.get("evaluation") or {}
    if threshold is None:
        threshold = float(evaluation.get("threshold", 1.0))
    composite = rewards_of(settings)
    problems = problems_of(recipe, gold)
    step = max(1, len(problems) // limit) if limit else 1
    found = audit_rewards(
        composite,
        problems[::step][: limit or None],
        success=success or evaluation.get("success"),
        threshold=threshold,
        form=None if form is None else Form(form),
    )
    print("\n".join(as_text(found, composite)))
    if report is not None:
        Path(report).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if not found.passed:
        raise SystemExit(FAILED)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no recipe {path}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no recipe: it holds {type(content).__name__}, not keys")
    return content


def merged(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Later recipes over earlier ones, key by key; rewards are replaced whole, as in `fit`."""
    result: dict[str, Any] = {}
    for recipe in recipes:
        for key, value in recipe.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged([result[key], value]) if both and key != "rewards" else value
    return result


def rewards_of(settings: Mapping[str, Any]) -> Scorer:
    """The rewards of a model's settings."""
    if not settings.get("rewards"):
        raise ValueError("the recipe has no rewards under model.init_args.rewards")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=dict[str, Reward])
    config = parser.parse_object({"rewards": settings["rewards"]})
    rewards = parser.instantiate(config).rewards
    return Scorer(rewards, settings.get("reward_format", "text"))


def problems_of(recipe: Mapping[str, Any], gold: str | None) -> list[Problem]:
    """Problems with their gold answers, from the recipe's training data or from elsewhere."""
    if "data" not in recipe and gold is None:
        raise ValueError("the recipe has no data; give problems: --gold problems.jsonl")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    node = recipe.get("data", {"class_path": "litgrpo.data.prompts.PromptData"})
    data = parser.instantiate(parser.parse_object({"data": node})).data
    if not isinstance(data, PromptData):
        raise ValueError(f"audit reads PromptData only; the recipe has {type(data).__name__}")
    source: SourceLike | None = data.sources["train"] if gold is None else gold
    if source is None:
        raise ValueError("the recipe has no training data; give problems: --gold problems.jsonl")
    rows = data.table.read(source, data.style.template.needs | {"answer"})
    worked = _worked(source, data.table.columns.get("answer", "answer"))
    prompts = data.style.plain(rows)
    problems = []
    for row, prompt, solution in zip(rows, prompts, worked, strict=True):
        columns = {k: v for k, v in row.values.items() if k not in ("prompt", "answer")}
        if solution is None and isinstance(columns.get("completion"), str):
            solution = extract_reasoning(columns["completion"])  # noqa: PLW2901
        problems.append(Problem(prompt, row.values["answer"], columns, solution))
    return [problem for problem in problems if problem.answer is not None]


def _worked(source: SourceLike, column: str) -> Iterator[str | None]:
    """What precedes `####` in a worked answer, before a pattern of the recipe cuts it off."""
    for row in read(source):
        text = row.values.get(column)
        marked = isinstance(text, str) and "####" in text
        yield Problem("", text).reasoning if marked else None


def as_text(report: Report, composite: Scorer) -> Iterator[str]:
    """The report in lines."""
    yield f"{report.problems} problems; '{report.success}' says whether an answer is right"
    yield ""
    yield from _table(
        ("right answers, in form", "judged right", "mean reward", "example"),
        ([line.kind, _share(line), f"{line.mean:.3g}", _short(line)] for line in report.renderings),
    )
    yield ""
    yield from _table(
        ("everything else", "judged right", "mean reward", "best margin", "beats honest"),
        (
            [line.kind, _share(line), f"{line.mean:.3g}", f"{line.best_margin:+.3g}", line.beats]
            for line in sorted(report.attacks, key=lambda line: -line.mean)
        ),
    )
    yield ""
    yield from _table(
        ("reward", "weight", "lowest", "highest", "share", "slowest"),
        (
            [
                *(part.name, f"{composite.weights[part.name]:.3g}", f"{part.low:.3g}"),
                *(f"{part.high:.3g}", f"{part.share:.0%}", f"{part.slowest_s:.2f} s"),
            ]
            for part in report.parts
        ),
    )
    yield ""
    yield from (f"remark: {remark}" for remark in report.remarks)
    yield from (f"FAULT: {fault}" for fault in report.faults)
    yield "PASS" if report.passed else f"FAIL: {len(report.faults)} faults"


def _table(head: Sequence[str], rows: Iterator[list[Any]]) -> Iterator[str]:
    lines = [list(head), *([str(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(cells)} |"


def _share(line: Line) -> str:
    return f"{line.right} of {line.count}"


def _short(line: Line) -> str:
    text = " ".join(line.example.split())
    return repr("".join(islice(text[-SHOWN:], SHOWN))).replace("|", "/")
