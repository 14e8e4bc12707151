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
from litgrpo.data.prompt_data import PromptData
from litgrpo.data.prompts import tokenized_prompts
from litgrpo.data.sources import read
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.builtin.reasoning_gym import is_executed, reasoning_gym
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Sampling
from litgrpo.text.answers import extract_reasoning
from litgrpo.text.tables import markdown_table
from litgrpo.text.visible import visible
from litgrpo.tools.audit.cases import Form, Problem
from litgrpo.tools.audit.episode_command import audit_environment, episode_lines
from litgrpo.tools.audit.episodes import EpisodeReport
from litgrpo.tools.audit.open_text import OpenReport, audit_open_text
from litgrpo.tools.audit.report import Line, Report
from litgrpo.tools.audit.run import audit_rewards
from litgrpo.training.episode_setup import check_own_reward
from litgrpo.workers.sandbox import available, why_not

FAILED = 1  # exit code
SHOWN = 44  # characters of an example
OPEN_PROMPTS, SAMPLES = 32, 4  # of open text, whose samples take time
OVERRIDES = ("--model.", "--data.")


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
    conflict; and tasks of reasoning-gym that execute answers. Without a column `answer` the text is
    open: then tricks (the prompt copied, one sentence repeated, words shuffled, keywords, words
    that the reward itself holds) must not earn more than the best of a few samples of the model
    that training would start from.

    Args:
        recipes: the recipe and its overlays (-c RECIPE.yaml, as for fit); --model.KEY VALUE and
            --data.KEY VALUE override them, as for fit.
        gold: problems with gold answers, instead of the training data: a .jsonl file or any other
            source; the columns are named as in the recipe.
        limit: problems to take, evenly spread; 0 takes all. Of open text and episodes at most 32.
        success: the reward that says whether an answer is right (default: the recipe's
            evaluation.success, else its first reward).
        threshold: from which it does (default: the recipe's evaluation.threshold).
        form: how a completion should look, with {reasoning} and {answer} (default: tags).
        report: write the numbers into this .json file, too.
    """
    require(bool(recipes), "give the recipe with the rewards: -c quickstart")
    at_least("limit", limit, 0)
    read_recipes = [_read(Path(path)) for path in recipes]
    recipe = merged([each for each in read_recipes if not _is_command_line(each)])
    for each in filter(_is_command_line, read_recipes):
        for key, value in each.items():
            overridden(recipe, key, value)
    settings = recipe.get("model", {}).get("init_args", {})
    evaluation = {"success": None, "threshold": 1.0} | (settings.get("evaluation") or {})
    scorer = rewards_of(settings)
    if settings.get("environment") is not None:
        played = audit_environment(recipe, scorer, gold, limit)
        tell(played, episode_lines(played), report)
        return
    data, problems = problems_of(recipe, gold)
    if all(problem.answer is None for problem in problems):
        open_report = audit_open(scorer, settings, data, limit)
        tell(open_report, open_lines(open_report), report)
        return
    problems = [problem for problem in problems if problem.answer is not None]
    step = max(1, len(problems) // (limit or len(problems) or 1))
    found = audit_rewards(
        scorer,
        problems[::step][: limit or None],
        success=success or evaluation["success"],
        threshold=float(evaluation["threshold"] if threshold is None else threshold),
        form=None if form is None else Form(form),
    )
    print("\n".join(executed_lines(scorer, problems)))
    tell(found, as_text(found, scorer.weights), report)


def executed_lines(scorer: Scorer, problems: Sequence[Problem]) -> list[str]:
    """Which tasks of reasoning-gym would execute what the model writes; none without its reward."""
    if reasoning_gym not in scorer.functions.values():
        return []
    tasks = sorted({str(problem.columns.get("task")) for problem in problems})
    executed = [task for task in tasks if is_executed(task)]
    where = "bubblewrap" if available() else f"worker processes alone ({why_not()})"
    told = (
        f"executed as Python by the scorers of: {', '.join(executed)}; screened, and run in {where}"
    )
    none = "executed by none of their scorers"
    return [
        f"tasks of reasoning-gym: {', '.join(tasks)}",
        f"answers are {told if executed else none}",
    ]


def tell(found: Report | OpenReport | EpisodeReport, lines: list[str], path: str | None) -> None:
    """Print a report and write it, if asked; exit code 1 where the rewards are unfit."""
    print(visible("\n".join(lines)))
    if path is not None:
        Path(path).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if not found.passed:
        raise SystemExit(FAILED)


def recipe_words(words: list[str], folder: Path) -> list[str]:
    """The words of the command line with `-c` and overrides of keys as one list of recipes.

    Args:
        words: as typed behind the verb.
        folder: where overrides are written, as a recipe.
    """
    split = [part for word in words for part in _halves(word)]
    kept, overrides, waiting = [], dict[str, Any](), iter(split)
    for word in waiting:
        if word.startswith(OVERRIDES):
            given = next(waiting, None)
            require(given is not None, f"{word} needs a value")
            overrides[word.removeprefix("--")] = yaml.safe_load(str(given))
        else:
            kept.append("--recipes+" if word in ("-c", "--config") else word)
    if overrides:
        path = folder / "command_line.yaml"
        path.write_text(yaml.safe_dump(overrides), encoding="utf-8")
        kept += ["--recipes+", str(path)]
    return kept


def _halves(word: str) -> list[str]:
    """`--model.key=value` as two words."""
    key, equals, value = word.partition("=")
    return [key, value] if equals and word.startswith(OVERRIDES) else [word]


def overridden(recipe: dict[str, Any], path: str, value: Any) -> None:
    """Set a key of a recipe as the command line names it, `model.rewards.right.weight`."""
    first, *names = path.split(".")
    node = recipe.setdefault(first, {})
    if names[:1] != ["class_path"]:
        node = node.setdefault("init_args", {})
    for name in (names := names[names[:1] == ["init_args"] :])[:-1]:
        inner = node.get(name)
        node[name] = inner if isinstance(inner, dict) else {} if inner is None else {"path": inner}
        node = node[name]
    node[names[-1]] = value


def _read(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"there is no recipe {path}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    kind = type(content).__name__
    require(isinstance(content, dict), f"{path} is no recipe: it holds {kind}, not keys")
    return dict(content)


def _is_command_line(recipe: Mapping[str, Any]) -> bool:
    """Whether the keys are paths, as `recipe_words` writes them."""
    return all("." in key for key in recipe)


def merged(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Later recipes over earlier ones, key by key; rewards are replaced whole, as in `fit`."""
    result: dict[str, Any] = {}
    for recipe in recipes:
        for key, value in recipe.items():
            joined = key != "rewards" and _joins(result.get(key), value)
            result[key] = merged([result[key], value]) if joined else value
    return result


def _joins(old: Any, new: Any) -> bool:
    """Whether two nodes are merged: both have keys, and not of different classes."""
    both = isinstance(old, dict) and isinstance(new, dict)
    return both and new.get("class_path", old.get("class_path")) == old.get("class_path")


def rewards_of(settings: Mapping[str, Any]) -> Scorer:
    """The rewards of a model's settings."""
    given = bool(settings.get("rewards"))
    require(given, "the recipe has no rewards under model.init_args.rewards")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=dict[str, Reward])
    config = parser.parse_object({"rewards": settings["rewards"]})
    rewards = parser.instantiate(config).rewards
    if settings.get("environment") is None:
        check_own_reward(rewards)
    return Scorer(rewards, settings.get("reward_format", "text"))


def problems_of(recipe: Mapping[str, Any], gold: str | None) -> tuple[PromptData, list[Problem]]:
    """The data, and problems with their gold answers (None: open text), from there or elsewhere."""
    known = "data" in recipe or gold is not None
    require(known, "the recipe has no data; give problems: --gold problems.jsonl")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    node = recipe.get("data", {"class_path": "litgrpo.PromptData"})
    data = parser.instantiate(parser.parse_object({"data": node})).data
    if not isinstance(data, PromptData):
        raise ValueError(f"audit reads PromptData only; the recipe has {type(data).__name__}")
    source: Any = data.sources["train"] if gold is None else gold
    if source is None:
        raise ValueError("the recipe has no training data; give problems: --gold problems.jsonl")
    needed = data.style.template.needs | ({"answer"} if gold is not None else set())
    rows = data.table.read(source, needed)
    worked = _worked(source, data.table.columns.get("answer", "answer"))
    prompts = data.style.plain(rows)
    problems = []
    for row, prompt, solution in zip(rows, prompts, worked, strict=True):
        columns = {k: v for k, v in row.values.items() if k not in ("prompt", "answer")}
        if solution is None and isinstance(columns.get("completion"), str):
            solution = extract_reasoning(columns["completion"])  # noqa: PLW2901
        problems.append(Problem(prompt, row.values.get("answer"), columns, solution))
    return data, problems


def audit_open(
    scorer: Scorer, settings: Mapping[str, Any], data: PromptData, limit: int
) -> OpenReport:
    """Try tricks on rewards of open text, and compare them with samples of the start model."""
    from litgrpo.models.loading import load_policy, load_tokenizer

    name = settings.get("pretrained")
    require(name is not None, "the recipe has no model.pretrained, whose samples are compared")
    tokenizer = load_tokenizer(str(name))
    rows = data.table.read(data.sources["train"] or [], data.style.template.needs)
    wanted = min(limit or OPEN_PROMPTS, OPEN_PROMPTS, len(rows))
    rows = rows[:: len(rows) // wanted][:wanted]
    asked: Any = {"style": data.style, "limit": data.limit, "tokenizer": tokenizer}
    prompts = tokenized_prompts(rows, "audit", **asked, pad_to_multiple_of=1)
    rollouter = Rollouter(
        load_policy(str(name), tokenizer=tokenizer),
        SAMPLES,
        int(settings.get("max_completion_length", 256)),
        sampling=Sampling(**(settings.get("sampling") or {})),
    )
    print(f"sampling {SAMPLES} completions of {len(prompts)} prompts by {name}")
    rollout = rollouter.generate(prompts[list(range(len(prompts)))], "predict")
    texts = rollout.completions
    samples = [texts[start : start + SAMPLES] for start in range(0, len(texts), SAMPLES)]
    problems = [
        Problem(text, None, {name: values[n] for name, values in prompts.columns.items()})
        for n, text in enumerate(prompts.texts)
    ]
    return audit_open_text(scorer, problems, samples)


def open_lines(report: OpenReport) -> list[str]:
    """The report of an audit of open text in lines."""
    rows = [
        (trick.kind, f"{trick.mean:.3g}", trick.beats, trick.above_mean, _short(trick.example))
        for trick in sorted(report.tricks, key=lambda trick: -trick.mean)
    ]
    head = ("trick", "mean reward", "beats the best sample", "beats the mean", "best paid")
    return [
        f"{report.prompts} prompts without an answer; {report.samples} samples of the start model "
        f"earn {report.mean:.3g} on average, the best of them {report.best:.3g}",
        "",
        *markdown_table(head, rows),
        "",
        *(f"remark: {remark}" for remark in report.remarks),
        *(f"FAULT: {fault}" for fault in report.faults),
        "PASS" if report.passed else f"FAIL: {len(report.faults)} faults",
    ]


def _worked(source: Any, column: str) -> Iterator[str | None]:
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
        (
            *(line.kind, _share(line), f"{line.mean:.3g}", f"{line.best_margin:+.3g}"),
            *(line.beats, line.equals),
        )
        for line in sorted(report.attacks, key=lambda line: -line.mean)
    ]
    parts = [
        (
            *(part.name, f"{weights[part.name]:.3g}", f"{part.low:.3g}", f"{part.high:.3g}"),
            *(f"{part.share:.0%}", f"{part.slowest_s:.2f} s"),
        )
        for part in report.parts
    ]
    numbers = ("judged right", "mean reward", "best margin", "beats honest", "equals honest")
    return [
        f"{report.problems} problems; '{report.success}' says whether an answer is right",
        "",
        *markdown_table(
            ("right answers, in form", "judged right", "mean reward", "example"), renderings
        ),
        "",
        *markdown_table(("everything else", *numbers), attacks),
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
