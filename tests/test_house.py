"""The house rules: who may import whom, how large a room may be, and that every page is true."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "litgrpo"
FILES = sorted(SOURCE.rglob("*.py"))
# A file imports its own room and rooms of a lower number, nothing else of the package.
LAYER = {
    **dict.fromkeys(("arguments", "types", "tensors", "text"), 0),
    "parallel": 1,
    **dict.fromkeys(("algorithm", "models", "data", "evaluation"), 2),
    "rollout": 3,
    "rewards": 3,
    "learner": 4,
    "checks": 5,
    "modules": 6,
    "callbacks": 6,
    "checkpointing": 7,
    "cli": 8,
    "tools": 9,
}
LIGHTNING = {"modules", "callbacks", "checkpointing", "cli", "tools", "data", "parallel"}
NAMELESS = {"utils", "common", "helpers", "base", "registry", "misc"}
names = [str(path.relative_to(SOURCE)) for path in FILES]


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every module or name that a file imports, dotted, relative imports resolved."""
    package = ("litgrpo", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden(path: Path) -> Iterator[str]:
    here = room(path)
    for name in imported(path):
        if name.split(".")[0] in {"lightning", "pytorch_lightning"} and here not in LIGHTNING:
            yield f"{here} must not know Lightning"
        if not name.startswith("litgrpo.") or here == "__init__":
            continue
        there = name.split(".")[1]
        if there != here and LAYER.get(there, 0) >= LAYER[here]:
            yield f"{here} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=names)
def test_imports_point_down(path):
    assert not list(forbidden(path))


def test_an_import_that_points_up_is_found(tmp_path, monkeypatch):
    bad = tmp_path / "rewards" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("from ..modules import grpo\nimport lightning\n")
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert len(list(forbidden(bad))) == 2


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_file_and_its_functions_can_be_read_at_a_sitting(path):
    text = path.read_text()
    assert text.count("\n") <= 600
    assert path.stem not in NAMELESS
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 60, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=names)
def test_nothing_is_guessed_at_or_left_unfinished(path):
    text = path.read_text()
    assert not re.search(r"\bTODO\b|\bFIXME\b|NotImplementedError", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr"
            assert not (node.func.id == "getattr" and len(node.args) == 3)
        if isinstance(node, ast.ExceptHandler):
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass))


def test_nothing_in_the_core_depends_on_what_is_beside_the_project():
    for path in FILES:
        assert "../shared" not in path.read_text()


def recipes() -> list[Path]:
    return sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", recipes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_opens_with_what_machine_and_expected_result(path):
    lines = path.read_text().splitlines()
    assert all(line.startswith("# ") for line in lines[:3])
    assert not lines[3].startswith("#")
    assert yaml.safe_load(path.read_text())


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(page: Path) -> Iterator[list[str]]:
    """Every shell command of a page that starts this project's program."""
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                words = shlex.split(command, comments=True)
                if words[:2] == ["python", "cli.py"]:
                    yield words[2:]


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    for command in commands_of(page):
        linked += [
            f"../{word}" if page.parent.name == "docs" else word
            for flag, word in itertools.pairwise(command)
            if flag == "-c" and not word.startswith("runs/")  # made by the commands before it
        ]
    for target in linked:
        assert (page.parent / target).exists(), f"{page.name} names {target}"
