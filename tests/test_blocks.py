"""Every fenced block of the pages works: Python runs, YAML loads as a recipe.

Commands of shell blocks are parsed by `tests/house/pages.py`.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from litgrpo.cli.recipes import CommandLine
from litgrpo.tools.plan.devices import load_devices
from tests.house.pages import ROOT, SECTIONS, pages, recipe_reader

# Pages whose Python blocks another test runs.
REPLAYED = {
    "docs/tutorials/from_scratch.md": "test_first_task.py",
    "docs/reference/api.md": "test_public_api.py",
}
FOREIGN = "# TRL\n"  # code of another library, which is only compiled
# What makes a training short and needs no download.
SHORT = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': '"builtin:tiny-gemma2"',
    "chat=True": "chat=False",
    "group_size=8": "group_size=2, max_iterations=1",
    "max_completion_length=256": "max_completion_length=8",
    "max_completion_length=512": "max_completion_length=8",
    "batch_size=8": "batch_size=2",
}
ROWS = "".join(f'{{"question": "What is 3+{n}?", "answer": "{3 + n}"}}\n' for n in range(80))
MODEL = ROOT / "src" / "litgrpo" / "assets" / "tiny-gemma2"


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language, without their indentation."""
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_with(language: str) -> list[Any]:
    found = [page for page in pages() if blocks(page, language)]
    return [pytest.param(page, id=name_of(page)) for page in found]


def write_modules(page: Path, folder: Path) -> None:
    """Write the Python blocks that name their file in a comment."""
    for block in blocks(page, "python"):
        name = re.search(r"# (my_\w+\.py)\b", block)
        if name is not None:
            (folder / name[1]).write_text(block)


@pytest.fixture(autouse=True)
def optional_package(monkeypatch):
    """Let a page import openai where it is absent: its agent is defined and not called."""
    if find_spec("openai") is None:
        monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=None))


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    if name_of(page) in REPLAYED:
        assert page.name in (ROOT / "tests" / REPLAYED[name_of(page)]).read_text()
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(ROWS)
    (tmp_path / "my_model").symlink_to(MODEL)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        code = block
        for old, new in SHORT.items():
            code = code.replace(old, new)
        compiled = compile(code, name_of(page), "exec")
        if not block.startswith(FOREIGN):
            exec(compiled, namespace)
    trained = [each for each in namespace.values() if hasattr(each, "max_iterations")]
    assert all(module.iteration == module.max_iterations for module in trained)
    assert bool(trained) == any(".fit(" in block for block in blocks(page, "python"))


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_the_yaml_of_a_page_loads_as_a_recipe(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["litgrpo", "fit"])
    write_modules(page, tmp_path)
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block)
        if content.keys() <= {"devices", "sessions"}:
            (tmp_path / "devices.yaml").write_text(block)
            assert content["devices"].keys() <= load_devices("devices.yaml").devices.keys()
            continue
        if not content.keys() & SECTIONS.keys():  # a part of the model
            content = {"model": content}
        model = content.get("model", {})
        model = model.get("init_args", model)
        whole = "pretrained" in model or "scratch" in model
        (tmp_path / "block.yaml").write_text(yaml.safe_dump(content))
        reader = recipe_reader("fit")
        words = [*([] if whole else ["-c", "quickstart"]), "-c", "block.yaml"]
        reader.given = CommandLine.read(words)
        loaded = reader.parser.parse_args(reader.words())
        for section in content.keys() & SECTIONS.keys():
            assert loaded[section] is not None


def test_a_block_that_does_not_work_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("- a\n\n  ```python\n  x = 1\n  ```\n\n```python\nimport no\n```\n")
    first, second = blocks(page, "python")
    assert first == "x = 1\n"
    exec(first, {})
    with pytest.raises(ModuleNotFoundError):
        exec(second, {})
