"""Run the files and commands of docs/tutorials/from_scratch.md, with fewer iterations."""

import doctest
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "from_scratch.md"
TEXT = PAGE.read_text(encoding="utf-8")
FILES = re.findall(r"`([\w.]+)`:\n\n```(?:python|yaml)\n(.*?)```", TEXT, flags=re.DOTALL)
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
# {recipe: options that shorten its training}
QUICK = {
    "sft.yaml": "--model.max_iterations 2",
    "grpo.yaml": "--model.max_iterations 2 --model.evaluation.greedy false --model.group_size 2",
}
QUICK |= {"grpo.yaml --ckpt_path last": QUICK["grpo.yaml"].replace(" 2 ", " 3 ", 1)}


@pytest.fixture
def folder(cli, monkeypatch):
    """Return an empty working folder with the files of the page."""
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "sorting", raising=False)
    for name, content in FILES:
        Path(name).write_text(content)
    runpy.run_path("make_data.py")
    for name, num_rows in (("held_out", 8), ("train", 40), ("demonstrations", 40)):
        lines = Path(f"{name}.jsonl").read_text().splitlines(keepends=True)
        Path(f"{name}.jsonl").write_text("".join(lines[:num_rows]))
    return Path.cwd()


def shorten(line: str) -> list[str]:
    """Return the arguments of a command; a training gets few iterations."""
    _, command, *rest = shlex.split(line)
    recipes = [recipe for recipe in QUICK if command == "fit" and recipe in line]
    # The last match is the most specific one: "grpo.yaml --ckpt_path last" contains "grpo.yaml".
    return [command, *rest, *(QUICK[recipes[-1]].split() if recipes else [])]


def test_the_page_has_four_files_and_the_commands_of_a_task_in_order():
    assert [name for name, _ in FILES] == ["make_data.py", "sft.yaml", "sorting.py", "grpo.yaml"]
    commands = [line.split()[1] for line in COMMANDS if line.startswith("litgrpo")]
    assert commands == ["fit", "audit", "fit", "validate", "predict", "export", "fit", "fit", "fit"]


def test_commands_of_the_page_succeed_in_order(cli, folder):
    for line in COMMANDS:
        if not line.startswith("litgrpo"):
            continue
        code, out, err = cli(*shorten(line))
        assert code == 0, f"{line}\n{out}\n{err}"
        if " audit " in line:
            assert out.rstrip().endswith("PASS")
    rows = Path("runs/grpo/samples/iteration-000001.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["rewards"].keys() == {"right", "places"}
    assert len(Path("runs/grpo/predictions.jsonl").read_text().splitlines()) == 2
    assert AutoModelForCausalLM.from_pretrained("sorter").config.hidden_size == 96
    last = {path.parts[1]: path.resolve().stem for path in Path("runs").glob("*/*/last.ckpt")}
    two, three = "iteration=000002", "iteration=000003"
    assert last == {"sft": two, "grpo": three, "second": two, "kl": two}


def test_audit_finds_the_stated_number_of_faults_in_a_reward_that_compares_digits(cli, folder):
    (worse,) = re.findall(r"```python\n(def same_digits.*?)```", TEXT, flags=re.DOTALL)
    (number,) = re.findall(r"it ends with (\d+) faults", TEXT)
    (option,) = re.findall(r"`(--model.rewards.right.function [\w.]+)`", TEXT)
    with (folder / "sorting.py").open("a") as file:
        file.write(f"\n\n{worse}")
    code, out, _ = cli("audit", "-c", "grpo.yaml", "--limit", "20", *option.split())
    assert code == 1
    assert f"FAIL: {number} faults" in out
    assert "<answer>not " in out


def test_the_reward_example_of_the_page_is_correct(folder):
    (shown,) = re.findall(r"```python\n(>>> .*?)```", TEXT, flags=re.DOTALL)
    example = doctest.DocTestParser().get_doctest(shown, {}, "first_task.md", None, 0)
    assert len(example.examples) == 2
    assert doctest.DocTestRunner().run(example).failed == 0
