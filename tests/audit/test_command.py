import json
import re
from pathlib import Path

import pytest

from litgrpo.audit import command as audit_command
from litgrpo.audit.answers import audit_rewards
from litgrpo.audit.cases import Problem
from litgrpo.audit.command import read_problems
from litgrpo.rewards import Reward, Scorer
from litgrpo.text.answers import parse_number
from tests.support.cases import WORKED

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
FAULTY = str(ROOT / "tests" / "rewards" / "faulty_rules.yaml")


@pytest.fixture
def references(tmp_path) -> str:
    lines = [json.dumps({"question": q, "answer": a}) for q, a in WORKED]
    (tmp_path / "references.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "references.jsonl")


def test_a_sound_recipe_passes_with_exit_code_0(cli, tmp_path, worker_processes) -> None:
    report = str(tmp_path / "report.json")
    code, out, err = cli("audit", "-c", QUICKSTART, "--limit", "5", "--report", report)
    assert (code, err) == (0, "")
    assert "dollar sign " in out
    assert re.search(r"dollar sign +5 +5 +", out)
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


def solution_line(prompts, completions, answer):
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip().splitlines()[-1:] == [f"Solution = {gold}"]) for text, gold in pairs]


def test_rewards_of_another_format_have_one_fault_which_names_the_option(cli, tmp_path) -> None:
    override = tmp_path / "override.yaml"
    reward = "{function: tests.audit.test_command.solution_line}"
    override.write_text(f"model: {{init_args: {{rewards: {{right: {reward}}}}}}}")
    command = ("audit", "-c", QUICKSTART, "-c", str(override), "--limit", "5")
    code, out, _ = cli(*command, "--success_reward", "right")
    assert code == 1
    assert out.count("FAULT: ") == 1
    assert "give that with --answer_format" in out
    # An option that is set is not suggested again.
    code, out, _ = cli(*command, "--success_reward", "right", "--answer_format", "So {answer}")
    assert code == 1
    assert "with --answer_format 'So {answer}'; give the format that it reads" in out


READERS = {
    "####": lambda text: text.partition("\n#### ")[2],
    "boxed": lambda text: text.partition("boxed{")[2].rpartition("}")[0],
    "{reasoning}\\n{answer}": lambda text: "\n".join(text.splitlines()[-1:]),
    "<answer>": lambda text: text.partition("<answer>")[2].partition("</answer>")[0],
}


@pytest.mark.parametrize("name", READERS)
def test_the_usual_formats_of_an_answer_are_recognized(name) -> None:
    def right(completions, answer):
        pairs = zip(completions, answer, strict=True)
        return [float(parse_number(READERS[name](text)) == int(gold)) for text, gold in pairs]

    problems = [Problem(f"{n} + 1?", str(n + 1), solution="I add.") for n in range(3, 9)]
    report = audit_rewards(Scorer({"right": Reward(right)}), problems)
    assert name in repr(report.numbers["answer_format"])
    assert report.numbers["false_negatives"] == 0


PAGES = {"README.md": 1, "docs/tutorials/pretrained_model.md": 2}  # {page: number of rewards}


@pytest.mark.parametrize("page", PAGES)
def test_the_rewards_of_the_pages_pass_the_audit_that_the_pages_run(
    page, cli, tmp_path, monkeypatch
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    imports = "from litgrpo.text import parse_number\n\n"
    functions = re.findall(r"^def .*?\n(?=\n|```)", text, re.DOTALL | re.MULTILINE)
    recipe = next(each for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    assert recipe.count("function: my_rewards.") == PAGES[page]
    module = f"rewards_of_{Path(page).stem}"  # each page has a my_rewards
    (tmp_path / f"{module}.py").write_text(imports + "\n".join(functions))
    (tmp_path / "my.yaml").write_text(recipe.replace("my_rewards", module))
    question = "Ann has {} pens and buys {}. How many has she?"
    rows = [{"question": question.format(n, 2 * n), "answer": str(3 * n)} for n in (3, 7, 20, 400)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    assert "litgrpo audit -c my.yaml" in text
    code, out, err = cli("audit", "-c", "my.yaml")
    assert (code, out.splitlines()[-1]) == (0, "PASS"), out + err


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
      cheerful: {function: tests.audit.test_open_text.cheerful}
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
    half = "{half: {function: tests.audit.test_open_text.always_half}}"
    more = ("--data.train=[a b, c d]", "--model.rewards.half.weight", "2")
    code, out, _ = cli("audit", "-c", str(recipe), "--model.rewards", half, *more)
    assert code == 1
    assert out.count("FAULT: ") == 1
    assert "FAULT: paid for nothing: 'no completion', " in out
    assert "2 prompts without a column `answer`" in out
    assert "earn 1 on average" in out


def test_a_file_of_one_row_is_data_and_not_a_recipe(tmp_path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    settings = {"train": str(tmp_path / "one.jsonl")}
    recipe = {"data": {"class_path": "litgrpo.PromptData", "init_args": settings}}
    (problem,) = read_problems(recipe, None)
    assert (problem.prompt, problem.answer) == ("1 + 1?", "2")


def test_columns_may_be_used_under_both_names() -> None:
    # The audit reads `answer`; a user's reward may read the name in the data.
    names = {"columns": {"prompt": "task", "answer": "solution"}}
    settings = {"train": [{"task": "1+1?", "solution": "two"}], **names}
    recipe = {"data": {"class_path": "litgrpo.PromptData", "init_args": settings}}
    (problem,) = read_problems(recipe, None)
    assert (problem.prompt, problem.answer) == ("1+1?", "two")
    assert problem.columns == {"task": "1+1?", "solution": "two"}


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        (["countdown", "gcd"], "evaluated as Python by the scorers of: countdown; only formulas"),
        (["gcd"], "evaluated by none of their scorers"),
    ],
)
def test_tasks_of_reasoning_gym_that_evaluate_answers_are_listed(tasks, text):
    scorer = Scorer({"right": Reward("litgrpo.rewards.reasoning_gym")})
    problems = [Problem("", "1", {"task": task}) for task in tasks]
    assert text in "\n".join(audit_command.evaluation_lines(scorer, problems))
    assert (
        audit_command.evaluation_lines(Scorer({"right": Reward("litgrpo.rewards.exact")}), problems)
        == []
    )
