"""The command `audit`: check the rewards of a recipe for false negatives and exploits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from litgrpo.arguments import at_least, require
from litgrpo.audit.cases import AnswerFormat, Problem
from litgrpo.audit.episode_command import audit_environment, episode_lines, instantiate_data
from litgrpo.audit.episodes import EpisodeReport
from litgrpo.audit.open_text import OpenReport, audit_open_text
from litgrpo.audit.report import KindResult, Report
from litgrpo.audit.run import audit_rewards
from litgrpo.data.modules import PromptData
from litgrpo.data.prompts import tokenize_prompts
from litgrpo.data.sources import read_rows
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.builtin.reasoning_gym import is_executed, reasoning_gym
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Sampling
from litgrpo.text.answers import extract_reasoning, list_answers
from litgrpo.text.counts import plural
from litgrpo.text.tables import markdown_table
from litgrpo.text.visible import visible
from litgrpo.training.episode_setup import check_own_reward

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
    r"""Check the reward functions of a recipe for false negatives and exploits; exit code 1 if any.

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
            evaluation.success_reward, else the one with the largest weight).
        success_threshold: least value of that reward for a correct answer (default: the recipe's
            evaluation.success_threshold).
        answer_format: format of a completion, with {reasoning} and {answer} (default: tags, ####,
            \boxed or the last line, in which most correct answers are judged correct).
        report: also write the numbers to this .json file.
    """
    at_least("limit", limit, 0)
    recipe = given.recipe
    settings = recipe["model"]["init_args"]
    scorer = build_scorer(settings)
    evaluation = settings["evaluation"]
    if settings.get("environment") is not None:
        played = audit_environment(recipe, scorer, problems, limit)
        print_report(played, episode_lines(played), report)
        return
    data, found = read_problems(recipe, problems)
    answered = [problem for problem in found if list_answers(problem.answer)]
    if not answered:
        open_report = audit_open(scorer, settings, data, limit)
        print_report(open_report, open_lines(open_report), report)
        return
    step = max(1, len(answered) // (limit or len(answered) or 1))
    threshold = evaluation["success_threshold"] if success_threshold is None else success_threshold
    result = audit_rewards(
        scorer,
        answered[::step][: limit or None],
        success=success_reward or evaluation["success_reward"],
        threshold=float(threshold),
        answer_format=None if answer_format is None else AnswerFormat(answer_format),
    )
    print("\n".join(execution_lines(scorer, answered)))
    print_report(result, report_lines(result, scorer.weights), report)


def execution_lines(scorer: Scorer, problems: Sequence[Problem]) -> list[str]:
    """List reasoning-gym tasks whose scorers execute answers; [] without such a reward."""
    if reasoning_gym not in scorer.functions.values():
        return []
    tasks = sorted({str(problem.columns.get("task")) for problem in problems})
    executed = [task for task in tasks if is_executed(task)]
    how = "executed by none of their scorers"
    if executed:
        (name,) = [n for n, each in scorer.functions.items() if each is reasoning_gym][:1]
        isolated = scorer.components[name].kwargs.get("isolation") != "none"
        where = "in bubblewrap" if isolated else "without a sandbox"
        names = ", ".join(executed)
        how = f"executed as Python by the scorers of: {names}; screened, and run {where}"
    return [
        f"tasks of reasoning-gym: {', '.join(tasks)}",
        f"answers are {how}",
    ]


def print_report(
    found: Report | OpenReport | EpisodeReport, lines: list[str], path: str | None
) -> None:
    """Print a report and write it to `path`; exit with code 1 if it has faults."""
    print(visible("\n".join(lines)))
    if path is not None:
        Path(path).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if not found.passed:
        raise SystemExit(FAILED)


def build_scorer(settings: Mapping[str, Any]) -> Scorer:
    """Build the rewards from the settings of a model."""
    if not settings.get("rewards"):
        raise ValueError("the recipe has no rewards: set model.rewards")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=dict[str, Reward])
    config = parser.parse_object({"rewards": settings["rewards"]})
    rewards = parser.instantiate(config).rewards
    if settings.get("environment") is None:
        check_own_reward(rewards)
    return Scorer(rewards, settings.get("reward_format", "text"))


def read_problems(
    recipe: Mapping[str, Any], reference_source: str | None
) -> tuple[PromptData, list[Problem]]:
    """Return the data, and its problems with reference answers (None: open-ended text)."""
    data = instantiate_data(recipe)
    source: Any = data.sources["train"] if reference_source is None else reference_source
    if source is None:
        raise ValueError(
            "the recipe has no training data; give problems: --problems problems.jsonl"
        )
    needed = data.prompt_format.template.required
    if reference_source is not None:
        needed = needed | {"answer"}
    rows = data.reader.read(source, needed)
    solutions = _read_solutions(source, data.reader.columns.get("answer", "answer"))
    prompts = data.prompt_format.plain_texts(rows)
    problems = []
    for row, prompt, solution in zip(rows, prompts, solutions, strict=True):
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
    require(bool(name), "audit samples the initial policy: set model.pretrained")
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
    head = ("exploit", "mean reward", "beats the best sample", "beats the mean", "highest reward")
    return [
        f"{report.prompts} prompts without a column `answer` (another name: data.columns), so "
        f"correctness was not tested; {report.samples} samples of the initial "
        f"policy earn {report.mean:.3g} on average, the best of them {report.best:.3g}",
        "",
        *markdown_table(head, rows),
        "",
        *(f"remark: {remark}" for remark in report.remarks),
        *(f"FAULT: {fault}" for fault in report.faults),
        "PASS" if report.passed else "FAIL: " + plural(len(report.faults), "fault"),
    ]


def _read_solutions(source: Any, column: str) -> Iterator[str | None]:
    """Yield the solution before `####`, which the answer pattern of a recipe removes."""
    for row in read_rows(source):
        text = row.values.get(column)
        marked = isinstance(text, str) and "####" in text
        yield Problem("", text).reasoning if marked else None


def report_lines(report: Report, weights: Mapping[str, float]) -> list[str]:
    """Return the report in lines."""
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
    numbers = ("judged correct", "mean reward", "best margin", "beats correct", "equals correct")
    return [
        f"{report.problems} problems; '{report.success}' decides if an answer is correct; "
        f"completions look like {report.answer_format!r}",
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
        "PASS" if report.passed else "FAIL: " + plural(len(report.faults), "fault"),
    ]


def _share(line: KindResult) -> str:
    return f"{line.correct} of {line.count}"


def _short(text: str) -> str:
    """Return the end of a completion, which has the answer, on one line."""
    return repr(" ".join(text.split())[-SHOWN:]).replace("|", "/")
