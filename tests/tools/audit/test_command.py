import json
from pathlib import Path

import pytest

from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.builtin import reasoning_gym as library
from litgrpo.tools.audit import command as audit_command
from litgrpo.tools.audit.cases import Problem
from litgrpo.tools.audit.command import read_problems
from tests.support.cases import WORKED

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
FAULTY = str(ROOT / "tests" / "rewards" / "faulty_rules.yaml")


@pytest.fixture
def references(tmp_path) -> str:
    lines = [json.dumps({"question": q, "answer": a}) for q, a in WORKED]
    (tmp_path / "references.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "references.jsonl")


def test_a_sound_recipe_passes_with_exit_code_0(cli, tmp_path) -> None:
    report = str(tmp_path / "report.json")
    code, out, err = cli("audit", "-c", QUICKSTART, "--limit", "5", "--report", report)
    assert (code, err) == (0, "")
    assert "| dollar sign " in out
    assert "5 of 5" in out
    assert out.splitlines()[-1] == "PASS"
    content = json.loads(Path(report).read_text())
    assert content["passed"]
    assert content["problems"] == 5


def test_faulty_rules_fail_with_exit_code_1_and_every_fault(cli, references) -> None:
    code, out, _ = cli("audit", "-c", FAULTY, "--problems", references)
    assert code == 1
    assert "FAULT: giving up pays: 'no idea' in format earns 4.5" in out
    assert "FAULT: the format outweighs the answer" in out
    assert "FAIL: " in out.splitlines()[-1]


def last_line(prompts, completions, answer):
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip().splitlines()[-1:] == [gold]) for text, gold in pairs]


def test_rewards_of_another_format_have_one_fault_which_names_the_option(cli, tmp_path) -> None:
    override = tmp_path / "override.yaml"
    reward = "{function: tests.tools.audit.test_command.last_line}"
    override.write_text(f"model: {{init_args: {{rewards: {{right: {reward}}}}}}}")
    command = ("audit", "-c", QUICKSTART, "-c", str(override), "--limit", "5")
    code, out, _ = cli(*command, "--success_reward", "right")
    assert code == 1
    assert out.count("FAULT: ") == 1
    assert "--answer_format" in out


def test_config_overrides_and_given_problems_are_used(cli, references, tmp_path) -> None:
    override = tmp_path / "override.yaml"
    override.write_text("model: {init_args: {rewards: {right: {function: litgrpo.rewards.gsm8k}}}}")
    code, out, _ = cli(
        *(
            "audit",
            "-c",
            FAULTY,
            "-c",
            str(override),
            "--problems",
            references,
            "--success_threshold",
            "1.0",
        ),
        *("--answer_format", "{reasoning}\n#### {answer}"),
    )
    assert code == 0, out
    assert "'right' decides if" in out
    assert "check_answer" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "model.rewards"),
        (["-c", "nowhere.yaml"], "'nowhere.yaml'"),
        (["-c", "recipe.yaml"], "model.rewards"),
        (["-c", QUICKSTART, "--success_reward", "right"], "success_reward is 'right'"),
        (["-c", QUICKSTART, "--limit", "-1"], "limit is -1"),
        (["-c", FAULTY], "--problems"),
    ],
)
def test_mistakes_are_one_line(cli, words, message) -> None:
    code, _, err = cli("audit", *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


OPEN = """
model:
  class_path: litgrpo.GRPO
  init_args:
    pretrained: builtin:tiny-gemma2
    max_completion_length: 8
    rewards:
      cheerful: {function: tests.tools.audit.test_open_text.cheerful}
data:
  class_path: litgrpo.PromptData
  init_args:
    train: [Write me a story.]
"""


def test_a_recipe_without_answers_is_audited_with_samples_and_overrides(
    cli,
    tmp_path,
) -> None:
    recipe = tmp_path / "open.yaml"
    recipe.write_text(OPEN)
    code, out, _ = cli("audit", "-c", str(recipe))
    assert code == 1
    assert "1 prompts without a column `answer`" in out
    assert "correctness was not tested; 4 samples of the initial policy" in out
    assert "FAULT: exploit: 'words of the reward' earns" in out
    half = "{half: {function: tests.tools.audit.test_open_text.always_half}}"
    more = ("--data.train=[a b, c d]", "--model.rewards.half.weight", "2")
    code, out, _ = cli("audit", "-c", str(recipe), "--model.rewards", half, *more)
    assert code == 0
    assert "2 prompts without a column `answer`" in out
    assert "earn 1 on average" in out


def test_columns_may_be_used_under_both_names() -> None:
    # The audit reads `answer`; a user's reward may read the name in the data.
    names = {"columns": {"prompt": "task", "answer": "solution"}}
    settings = {"train": [{"task": "1+1?", "solution": "two"}], **names}
    recipe = {"data": {"class_path": "litgrpo.PromptData", "init_args": settings}}
    _, (problem,) = read_problems(recipe, None)
    assert (problem.prompt, problem.answer) == ("1+1?", "two")
    assert problem.columns == {"task": "1+1?", "solution": "two"}


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        (["countdown", "gcd"], "executed as Python by the scorers of: countdown; screened"),
        (["gcd"], "executed by none of their scorers"),
    ],
)
def test_tasks_of_reasoning_gym_that_execute_answers_are_listed(tasks, text, monkeypatch):
    monkeypatch.setattr(library, "installed_version", lambda: library.TESTED_VERSION)
    scorer = Scorer({"right": Reward("litgrpo.rewards.reasoning_gym")})
    problems = [Problem("", "1", {"task": task}) for task in tasks]
    assert text in "\n".join(audit_command.execution_lines(scorer, problems))
    assert (
        audit_command.execution_lines(Scorer({"right": Reward("litgrpo.rewards.exact")}), problems)
        == []
    )
