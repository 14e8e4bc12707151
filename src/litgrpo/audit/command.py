"""The command `audit`: check the rewards of a recipe for false negatives and exploits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from litgrpo.arguments import at_least, require_folder_of
from litgrpo.audit.answers import audit_rewards
from litgrpo.audit.cases import AnswerFormat, Problem
from litgrpo.audit.code_tests import REFERENCE, find_test_faults
from litgrpo.audit.samples import audit_environment, audit_open, instantiate_data
from litgrpo.audit.score import evenly
from litgrpo.data.sources import read_rows
from litgrpo.modules.episode_setup import check_own_reward
from litgrpo.rewards import Reward, Scorer, Scoring
from litgrpo.rewards.builtin.code import unit_tests
from litgrpo.rewards.builtin.reasoning_gym import EVALUATED, reasoning_gym
from litgrpo.text.answers import extract_reasoning, list_answers
from litgrpo.text.visible import visible

FAILED = 1  # exit code


def audit(
    cli: Any,
    /,
    problems: str | None = None,
    limit: int = 500,
    success_reward: str | None = None,
    success_threshold: float | None = None,
    answer_format: str | None = None,
    report: str | None = None,
) -> None:
    r"""Check the reward functions of a recipe for false negatives and exploits; exit code 1 if any.

    Correct answers must be judged correct, numbers in fifteen formatting variants. Incorrect,
    empty, repeated, stuffed or copied answers must earn less. The audit also finds rewards that are
    slow, constant, failing, dominant or in conflict, and tasks of reasoning-gym that execute
    answers. Without a column `answer` the text is open-ended: then exploits (the prompt copied, one
    sentence repeated, words shuffled, keywords, words in the reward's own source) must not earn
    more than the best of a few samples of the initial policy, and no text, a refusal or the prompt
    copied not as much. The tests of code are run against code that does nothing, and against the
    column `reference_solution`.

    Args:
        cli: a parsed command line, `RecipeCLI(words, "audit", extra=audit)`.
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
    require_folder_of("report", report)
    recipe = cli.recipe
    settings = recipe["model"]["init_args"]
    scorer = build_scorer(settings)
    evaluation = settings["evaluation"]
    plays = settings.get("environment") is not None
    code_rewards = [
        scorer.components[name]
        for name, function in scorer.functions.items()
        if function is unit_tests
    ]
    all_problems = [] if plays and not code_rewards else read_problems(recipe, problems)
    answered = [problem for problem in all_problems if list_answers(problem.answer)]
    if plays:
        result = audit_environment(recipe, scorer, problems, limit)
    elif not answered:
        result = audit_open(recipe, scorer, limit)
    else:
        threshold = success_threshold
        if threshold is None:
            threshold = float(evaluation["success_threshold"])
        result = audit_rewards(
            scorer,
            evenly(answered, limit or len(answered)),
            success=success_reward or evaluation["success_reward"],
            threshold=threshold,
            answer_format=None if answer_format is None else AnswerFormat(answer_format),
        )
        print("\n".join(evaluation_lines(scorer, answered)))
    rows = [problem.columns for problem in all_problems]
    for reward in code_rewards:
        result.faults.extend(find_test_faults(reward, rows))
        if any(row.get(REFERENCE) is not None for row in rows):
            result = replace(result, untested="")
    print(visible("\n".join(result.lines())))
    if report is not None:
        text = json.dumps(result.as_dict(), indent=1)
        Path(report).write_text(text + "\n", encoding="utf-8")
    if not result.passed:
        raise SystemExit(FAILED)


def evaluation_lines(scorer: Scorer, problems: Sequence[Problem]) -> list[str]:
    """List reasoning-gym tasks whose scorers evaluate answers; [] without such a reward."""
    if reasoning_gym not in scorer.functions.values():
        return []
    tasks = sorted({str(problem.columns.get("task")) for problem in problems})
    names = ", ".join(task for task in tasks if task in EVALUATED)
    how = "by none of their scorers"
    if names:
        how = f"as Python by the scorers of: {names}; only formulas and literals reach them"
    return [f"tasks of reasoning-gym: {', '.join(tasks)}", f"answers are evaluated {how}"]


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
    return Scorer(rewards, Scoring(settings.get("scoring", {}).get("format", "text")))


def read_problems(recipe: Mapping[str, Any], reference_source: str | None) -> list[Problem]:
    """Return the problems of the data with reference answers (None: open-ended text)."""
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
    return problems


def _read_solutions(source: Any, column: str) -> Iterator[str | None]:
    """Yield the solution before `####`, which the answer pattern of a recipe removes."""
    for row in read_rows(source):
        text = row.values.get(column)
        marked = isinstance(text, str) and "####" in text
        yield Problem("", text).reasoning if marked else None
