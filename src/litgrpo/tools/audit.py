"""The verb `audit`: are the rewards of a recipe fair, and can they be gamed?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule

from litgrpo.arguments import at_least, require
from litgrpo.data.sources import SourceLike, read
from litgrpo.modules.prompt_data import PromptData
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.audit.cases import Form, Problem
from litgrpo.rewards.audit.report import Line, Report
from litgrpo.rewards.audit.run import audit_rewards
from litgrpo.text.answers import extract_reasoning
from litgrpo.text.tables import markdown_table

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
    require(bool(recipes), "give the recipe with the rewards: -c quickstart")
    at_least("limit", limit, 0)
    recipe = merged([_read(Path(path)) for path in recipes])
    settings = recipe.get("model", {}).get("init_args", {})
    evaluation = {"success": None, "threshold": 1.0} | (settings.get("evaluation") or {})
    scorer = rewards_of(settings)
    problems = problems_of(recipe, gold)
    step = max(1, len(problems) // (limit or len(problems) or 1))
    found = audit_rewards(
        scorer,
        problems[::step][: limit or None],
        success=success or evaluation["success"],
        threshold=float(evaluation["threshold"] if threshold is None else threshold),
        form=None if form is None else Form(form),
    )
    print("\n".join(as_text(found, scorer.weights)))
    if report is not None:
        Path(report).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if not found.passed:
        raise SystemExit(FAILED)


def _read(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"there is no recipe {path}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    kind = type(content).__name__
    require(isinstance(content, dict), f"{path} is no recipe: it holds {kind}, not keys")
    return dict(content)


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
    given = bool(settings.get("rewards"))
    require(given, "the recipe has no rewards under model.init_args.rewards")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=dict[str, Reward])
    config = parser.parse_object({"rewards": settings["rewards"]})
    rewards = parser.instantiate(config).rewards
    return Scorer(rewards, settings.get("reward_format", "text"))


def problems_of(recipe: Mapping[str, Any], gold: str | None) -> list[Problem]:
    """Problems with their gold answers, from the recipe's training data or from elsewhere."""
    known = "data" in recipe or gold is not None
    require(known, "the recipe has no data; give problems: --gold problems.jsonl")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    node = recipe.get("data", {"class_path": "litgrpo.PromptData"})
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


def as_text(report: Report, weights: Mapping[str, float]) -> list[str]:
    """The report in lines."""
    renderings = [
        (line.kind, _share(line), f"{line.mean:.3g}", _short(line.example))
        for line in report.renderings
    ]
    attacks = [
        (line.kind, _share(line), f"{line.mean:.3g}", f"{line.best_margin:+.3g}", line.beats)
        for line in sorted(report.attacks, key=lambda line: -line.mean)
    ]
    parts = [
        (
            *(part.name, f"{weights[part.name]:.3g}", f"{part.low:.3g}", f"{part.high:.3g}"),
            *(f"{part.share:.0%}", f"{part.slowest_s:.2f} s"),
        )
        for part in report.parts
    ]
    attack_head = ("everything else", "judged right", "mean reward", "best margin", "beats honest")
    return [
        f"{report.problems} problems; '{report.success}' says whether an answer is right",
        "",
        *markdown_table(
            ("right answers, in form", "judged right", "mean reward", "example"), renderings
        ),
        "",
        *markdown_table(attack_head, attacks),
        "",
        *markdown_table(("reward", "weight", "lowest", "highest", "share", "slowest"), parts),
        "",
        *(f"remark: {remark}" for remark in report.remarks),
        *(f"FAULT: {fault}" for fault in report.faults),
        "PASS" if report.passed else f"FAIL: {len(report.faults)} faults",
    ]


def _share(line: Line) -> str:
    return f"{line.right} of {line.count}"


def _short(text: str) -> str:
    """The end of a completion, where its answer is, on one line."""
    return repr(" ".join(text.split())[-SHOWN:]).replace("|", "/")
