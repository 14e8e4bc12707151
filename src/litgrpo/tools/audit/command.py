"""The command `audit`: are the rewards of a recipe fair, and can they be gamed?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule

from litgrpo.arguments import at_least, require
from litgrpo.data.modules import PromptData
from litgrpo.data.prompts import tokenize_prompts
from litgrpo.data.sources import read_rows
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.builtin.reasoning_gym import is_executed, reasoning_gym
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Sampling
from litgrpo.text.answers import extract_reasoning
from litgrpo.text.tables import markdown_table
from litgrpo.text.visible import visible
from litgrpo.tools.audit.cases import AnswerFormat, Problem
from litgrpo.tools.audit.episode_command import audit_environment, episode_lines
from litgrpo.tools.audit.episodes import EpisodeReport
from litgrpo.tools.audit.open_text import OpenReport, audit_open_text
from litgrpo.tools.audit.report import Line, Report
from litgrpo.tools.audit.run import audit_rewards
from litgrpo.training.episode_setup import check_own_reward
from litgrpo.workers.sandbox import available, unavailable_reason

FAILED = 1  # exit code
SHOWN = 44  # characters of an example
OPEN_PROMPTS, SAMPLES = 32, 4  # of open text, whose samples take time


def audit(
    given: Any,
    problems: str | None = None,
    limit: int = 500,
    success_reward: str | None = None,
    success_threshold: float | None = None,
    answer_format: str | None = None,
    report: str | None = None,
) -> None:
    """Check the reward functions of a recipe for false negatives and exploits; exit code 1 if any.

    Correct answers in fifteen formatting variants must be judged correct. Incorrect, empty,
    repeated, stuffed or copied answers must earn less. The audit also finds rewards that are slow,
    constant, failing, dominant or in conflict, and tasks of reasoning-gym that execute answers.
    Without a column `answer` the text is open-ended: then exploits (the prompt copied, one sentence
    repeated, words shuffled, keywords, words in the reward's own source) must not earn more than
    the best of a few samples of the initial policy.

    Args:
        given: a parsed command line, `RecipeCLI(words, "audit", extra=audit)`.
        problems: problems with reference answers, instead of the training data: a .jsonl file or
            any other source, with columns named as in the recipe.
        limit: number of problems, evenly spread; 0 takes all. Open-ended text and episodes use at
            most 32.
        success_reward: the reward that says if an answer is correct (default: the recipe's
            evaluation.success_reward, else its first reward).
        success_threshold: least value of that reward for a correct answer (default: the recipe's
            evaluation.success_threshold).
        answer_format: format of a completion, with {reasoning} and {answer} (default: tags).
        report: also write the numbers to this .json file.
    """
    at_least("limit", limit, 0)
    recipe = given.recipe
    settings = recipe["model"]["init_args"]
    scorer = rewards_of(settings)
    evaluation = settings["evaluation"]
    if settings.get("environment") is not None:
        played = audit_environment(recipe, scorer, problems, limit)
        print_report(played, episode_lines(played), report)
        return
    data, found = problems_of(recipe, problems)
    if all(problem.answer is None for problem in found):
        open_report = audit_open(scorer, settings, data, limit)
        print_report(open_report, open_lines(open_report), report)
        return
    answered = [problem for problem in found if problem.answer is not None]
    step = max(1, len(answered) // (limit or len(answered) or 1))
    threshold = evaluation["success_threshold"] if success_threshold is None else success_threshold
    result = audit_rewards(
        scorer,
        answered[::step][: limit or None],
        success=success_reward or evaluation["success_reward"],
        threshold=float(threshold),
        form=None if answer_format is None else AnswerFormat(answer_format),
    )
    print("\n".join(executed_lines(scorer, answered)))
    print_report(result, as_text(result, scorer.weights), report)


def executed_lines(scorer: Scorer, problems: Sequence[Problem]) -> list[str]:
    """Which tasks of reasoning-gym would execute what the model writes; none without its reward."""
    if reasoning_gym not in scorer.functions.values():
        return []
    tasks = sorted({str(problem.columns.get("task")) for problem in problems})
    executed = [task for task in tasks if is_executed(task)]
    where = "bubblewrap" if available() else f"worker processes alone ({unavailable_reason()})"
    told = (
        f"executed as Python by the scorers of: {', '.join(executed)}; screened, and run in {where}"
    )
    none = "executed by none of their scorers"
    return [
        f"tasks of reasoning-gym: {', '.join(tasks)}",
        f"answers are {told if executed else none}",
    ]


def print_report(
    found: Report | OpenReport | EpisodeReport, lines: list[str], path: str | None
) -> None:
    """Print a report and write it, if asked; exit code 1 where the rewards are unfit."""
    print(visible("\n".join(lines)))
    if path is not None:
        Path(path).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if not found.passed:
        raise SystemExit(FAILED)


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
    """Return the data, and its problems with reference answers (None: open-ended text)."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    data = parser.instantiate(parser.parse_object({"data": recipe["data"]})).data
    if not isinstance(data, PromptData):
        raise ValueError(f"audit reads PromptData only; the recipe has {type(data).__name__}")
    source: Any = data.sources["train"] if gold is None else gold
    if source is None:
        raise ValueError(
            "the recipe has no training data; give problems: --problems problems.jsonl"
        )
    needed = data.prompt_format.template.required | ({"answer"} if gold is not None else set())
    rows = data.reader.read(source, needed)
    worked = _worked(source, data.reader.columns.get("answer", "answer"))
    prompts = data.prompt_format.plain_texts(rows)
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
    """Try exploits on rewards of open text, and compare them with samples of the initial policy."""
    from litgrpo.models.loading import load_policy, load_tokenizer

    name = settings.get("pretrained")
    require(bool(name), "the recipe has no model.pretrained, whose samples are compared")
    tokenizer = load_tokenizer(str(name))
    rows = data.reader.read(data.sources["train"] or [], data.prompt_format.template.required)
    wanted = min(limit or OPEN_PROMPTS, OPEN_PROMPTS, len(rows))
    rows = rows[:: len(rows) // wanted][:wanted]
    prompts = tokenize_prompts(
        rows,
        "audit",
        prompt_format=data.prompt_format,
        limit=data.limit,
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )
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
    """Return the report of an audit of open text in lines."""
    rows = [
        (
            exploit.kind,
            f"{exploit.mean:.3g}",
            exploit.beats,
            exploit.above_mean,
            _short(exploit.example),
        )
        for exploit in sorted(report.exploits, key=lambda exploit: -exploit.mean)
    ]
    head = ("exploit", "mean reward", "beats the best sample", "beats the mean", "best paid")
    return [
        f"{report.prompts} prompts without an answer; {report.samples} samples of the initial "
        f"policy earn {report.mean:.3g} on average, the best of them {report.best:.3g}",
        "",
        *markdown_table(head, rows),
        "",
        *(f"remark: {remark}" for remark in report.remarks),
        *(f"FAULT: {fault}" for fault in report.faults),
        "PASS" if report.passed else f"FAIL: {len(report.faults)} faults",
    ]


def _worked(source: Any, column: str) -> Iterator[str | None]:
    """What precedes `####` in a worked answer, before a pattern of the recipe cuts it off."""
    for row in read_rows(source):
        text = row.values.get(column)
        marked = isinstance(text, str) and "####" in text
        yield Problem("", text).reasoning if marked else None


def as_text(report: Report, weights: Mapping[str, float]) -> list[str]:
    """The report in lines."""
    variants = [
        (line.kind, _share(line), f"{line.mean:.3g}", _short(line.example))
        for line in report.variants
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
    numbers = ("judged correct", "mean reward", "best margin", "beats honest", "equals honest")
    return [
        f"{report.problems} problems; '{report.success}' says whether an answer is right",
        "",
        *markdown_table(
            ("correct answers, in format", "judged correct", "mean reward", "example"), variants
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
