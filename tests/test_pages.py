"""What README and docs/ show works: names exist, commands parse, Python runs, YAML is a recipe.

Blocks of one page share their names, and trainings in them are shortened.
"""

import ast
import inspect
import pydoc
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningDataModule, Trainer

from litgrpo import GRPO, SFT, PairData, PromptData
from litgrpo.cli.console import keep_quiet
from litgrpo.cli.main import COMMANDS
from litgrpo.cli.options import find_option
from litgrpo.cli.parser import CALLBACKS, RecipeCLI, parse_options
from tests.support.pages import ROOT, blocks, name_of, pages

SOURCE = ROOT / "src" / "litgrpo"
SECTIONS: dict[str, Any] = {
    "model": GRPO | SFT,
    "data": LightningDataModule,
    "trainer": Trainer,
    **CALLBACKS,
}
IMPORT = re.compile(r"litgrpo(?:\.[A-Za-z_]\w*)+")
NAMES_OF = re.compile(r"((?:`\w+`(?:,? and |, )?)+) of\s`(litgrpo(?:\.\w+)*)`")
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*\.(?:py|yaml|md|ipynb|txt|cfg|toml)|configs/[\w./-]*")
KEY = re.compile(rf"(?:--)?((?:{'|'.join(SECTIONS)})(?:\.[a-z]\w*)+)")
COMMAND = re.compile(
    r"(?:python (?:cli\.py|-m (?:tests|litgrpo))\b|^ *litgrpo [a-z-]).*?(?= > | \| |$)"
)
# What only looks like a key: files that runs write, and methods.
NO_KEYS = re.compile(r".*\.(jsonl?|csv|md|py|yaml|safetensors|generate)")
# Files that commands or the reader write.
GENERATED = ("runs/", "checkpoints/", "samples/", "my_", "path/", "out/")
# Pages whose Python blocks another test runs.
REPLAYED = {"docs/tutorials/from_scratch.md": "test_first_task.py"}
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
# Methods of models and modules, and a file.
METHODS = {
    "model.lr_scheduler.step",
    "model.merge_and_unload",
    "model.resize_token_embeddings",
    "model.safetensors",
    "model.safetensors.index.json",
}
# {option below a section: that section}
PREFIXES = {
    name: section
    for section, owners in {"model": (GRPO, SFT), "data": (PromptData, PairData)}.items()
    for owner in owners
    for name in inspect.signature(owner).parameters
}
ROWS = "".join(f'{{"question": "What is 3+{n}?", "answer": "{3 + n}"}}\n' for n in range(80))


def of_pages(language: str = "") -> list[Any]:
    return [
        pytest.param(page, id=name_of(page))
        for page in pages()
        if not language or blocks(page, language)
    ]


def is_importable(path: str) -> bool:
    try:
        return pydoc.locate(path) is not None
    except ValueError:  # it exists, but a library that it needs is not installed
        return True


def is_file(name: str, page: Path) -> bool:
    places = (ROOT, ROOT / "configs", ROOT / "src", SOURCE, page.parent)
    return name.startswith(GENERATED) or any((place / name).exists() for place in places)


def is_option(key: str) -> bool:
    try:
        find_option(re.sub(r"\.(help|class_path)$", "", key), SECTIONS)
    except ValueError:
        return False
    return True


def stale_names(page: Path) -> Iterator[str]:
    """Yield what a page names and links to that does not exist, and commands that do not parse."""
    text = page.read_text(encoding="utf-8")
    if page.name.startswith("coming_from"):  # the first column has names of other trainers
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", prose):
        yield from (f"import {name}" for name in IMPORT.findall(span) if not is_importable(name))
        yield from (f"file {name}" for name in PATH.findall(span) if not is_file(name, page))
        key = KEY.fullmatch(span.partition(" ")[0].rstrip(":"))
        if key and not NO_KEYS.fullmatch(key[1]) and not is_option(key[1]):
            yield f"key {key[1]}"
    for listed, module in NAMES_OF.findall(prose):
        names = [f"{module}.{name}" for name in re.findall(r"\w+(?=`)", listed)]
        yield from (f"import {name}" for name in names if not is_importable(name))
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
        if "_made/" not in link and not (page.parent / link).exists():
            yield f"link {link}"
    for block in blocks(page, "bash|sh|console"):
        for line in re.split(r"\n|&&", block.replace("\\\n", " ")):
            yield from (f"command {words!r}" for words in COMMAND.findall(line) if fails(words))


def fails(line: str) -> bool:
    """Return whether the program rejects a command line."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["python", "-m"] and words[2] != "litgrpo":
        return find_spec(words[2]) is None
    name, *words = words[1 if words[0] == "litgrpo" else 3 if words[1] == "-m" else 2 :] or [""]
    if name in ("", "--help", "--version"):
        return False
    if name not in COMMANDS:
        return True
    # A recipe that an earlier command has written is replaced by the quickstart.
    for flag, word in enumerate(words[1:]):
        if words[flag] in ("-c", "--config") and re.search(r"\.(yaml|json)$", word):
            words[flag + 1] = word if (ROOT / word).exists() else "configs/quickstart.yaml"
    keep_quiet()
    try:
        if COMMANDS[name].recipe:
            parse_recipe(name, words)
        else:
            parse_options(COMMANDS[name].load(), words)
    except SystemExit as stop:
        return bool(stop.code)
    except ValueError:
        return True
    return False


@cache
def recipe_reader(name: str) -> RecipeCLI:
    return RecipeCLI(["-c", "quickstart"], name, extra=COMMANDS[name].load())


def parse_recipe(name: str, words: list[str]) -> Any:
    reader = recipe_reader(name)
    return reader.parser.parse_object(reader.read(words))


@pytest.mark.parametrize("page", of_pages())
def test_a_page_names_what_exists_and_its_commands_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["litgrpo"])
    assert not list(stale_names(page))


def test_stale_names_are_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["litgrpo"])
    page = tmp_path / "page.md"
    page.write_text(
        "`litgrpo.nowhere.Thing` `litgrpo.GRPO` `objectives/losses.py` `algorithms/objective.py`\n"
        "`model.learning.epochs` `model.update.epochs_per_rollout` `trainer.max_epoch: 1`\n"
        "[a](nowhere.md) [b](page.md)\n"
        "`GRPO`, `Nothing` and `SFT` of `litgrpo`\n"
        "```bash\n"
        "python -m tests.nothing\n"
        "python cli.py export run && litgrpo export run out\n"
        "python cli.py fit -c configs/quickstart.yaml --model.group_sise 2\n"
        "```\n"
    )
    assert list(stale_names(page)) == [
        "import litgrpo.nowhere.Thing",
        "file objectives/losses.py",
        "key model.learning.epochs",
        "key trainer.max_epoch",
        "import litgrpo.Nothing",
        "link nowhere.md",
        "command 'python -m tests.nothing'",
        "command 'python cli.py export run '",
        "command 'python cli.py fit -c configs/quickstart.yaml --model.group_sise 2'",
    ]


def test_options_in_messages_can_be_typed_as_they_are_written():
    import litgrpo.rollout.engines.static
    import litgrpo.rollout.servers.vllm
    import litgrpo.rollout.sources.data_completions  # noqa: F401 (classes that recipes name)

    wrong = []
    for file in SOURCE.rglob("[!_]*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in {*ast.walk(tree)} - docstrings:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                wrong += [f"{file}:{node.lineno}: {key}" for key in wrong_options(node.value)]
    assert not wrong


def wrong_options(text: str) -> Iterator[str]:
    """Yield dotted options of a message that do not exist, or lack their first part."""
    for key in re.findall(r"(?<![\w./-])((?:--)?[a-z_]+(?:\.[a-z_]\w*)+)", text):
        first, *rest = key.removeprefix("--").split(".")
        if first in ("model", "data", "trainer", "checkpoint"):
            if key != text and key not in METHODS and not is_option(key.removeprefix("--")):
                yield key
        elif first in PREFIXES and is_option(".".join([PREFIXES[first], first, *rest])):
            yield key


def test_files_that_ci_runs_exist():
    """Parts of it skip on most machines, so a moved test shows late."""
    scripts = "".join(path.read_text() for path in (ROOT / ".ci").iterdir() if path.is_file())
    paths = re.findall(r"\btests/[\w/.]*\w", scripts)
    paths += [module.replace(".", "/") for module in re.findall(r"-m (tests\.[\w.]+)", scripts)]
    assert paths
    # `tests/xla/test_*.py` is a pattern.
    assert not [path for path in paths if not list(ROOT.glob(f"{path}*"))]


@pytest.mark.parametrize("page", of_pages("python"))
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    if name_of(page) in REPLAYED:
        assert page.name in (ROOT / "tests" / REPLAYED[name_of(page)]).read_text()
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(ROWS)
    (tmp_path / "my_model").symlink_to(SOURCE / "assets" / "tiny-gemma2")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        code = block
        for old, new in SHORT.items():
            code = code.replace(old, new)
        compiled = compile(code, name_of(page), "exec")
        if not block.startswith(FOREIGN):
            exec(compiled, namespace)
    trained = [value for value in namespace.values() if hasattr(value, "max_iterations")]
    assert all(module.iteration == module.max_iterations for module in trained)
    assert bool(trained) == any(".fit(" in block for block in blocks(page, "python"))


@pytest.mark.parametrize("page", of_pages("yaml"))
def test_the_yaml_of_a_page_loads_as_a_recipe(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["litgrpo", "fit"])
    for block in blocks(page, "python"):
        if module := re.search(r"# (my_\w+\.py)\b", block):  # the page names its file
            (tmp_path / module[1]).write_text(block)
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block)
        if not content.keys() & SECTIONS.keys():  # a part of the model
            content = {"model": content}
        model = content.get("model", {})
        model = model.get("init_args", model)
        is_whole = "pretrained" in model or "scratch" in model
        (tmp_path / "block.yaml").write_text(yaml.safe_dump(content))
        config = parse_recipe(
            "fit", [*([] if is_whole else ["-c", "quickstart"]), "-c", "block.yaml"]
        )
        for section in content.keys() & SECTIONS.keys():
            assert config[section] is not None
