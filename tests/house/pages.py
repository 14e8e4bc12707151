"""Find names in README.md and docs/ that do not exist: imports, files, settings, commands."""

import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from jsonargparse import auto_parser
from lightning.pytorch import LightningDataModule, Trainer

from litgrpo.argument_types import argument_hints
from litgrpo.cli.console import keep_quiet
from litgrpo.cli.export import export
from litgrpo.cli.main import COMMANDS, runs_as_list
from litgrpo.cli.parser import CALLBACKS, RecipeCLI
from litgrpo.cli.recipes import CommandLine
from litgrpo.tools.audit.command import audit
from litgrpo.tools.compare import compare
from litgrpo.tools.doctor.command import doctor
from litgrpo.tools.plan.command import plan
from litgrpo.tools.replay import replay
from litgrpo.tools.report.command import report
from litgrpo.training.grpo import GRPO
from litgrpo.training.sft import SFT

ROOT = Path(__file__).parents[2]
CODE_SPAN = re.compile(r"`([^`\n]+)`")
IMPORT = re.compile(r"litgrpo(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*\.(?:py|yaml|md|ipynb|txt|cfg|toml)|configs/[\w./-]*")
KEY = re.compile(r"(?:--)?((?:model|data|trainer|" + "|".join(CALLBACKS) + r")(?:\.[a-z]\w*)+)\b")
PROGRAM = re.compile(
    r"(?:python (?:cli\.py|-m (?:tests|litgrpo))\b|^ *litgrpo [a-z-]).*?(?= > | \| |$)"
)
FUNCTIONS: dict[str, Callable] = {
    "export": export,
    "compare": compare,
    "doctor": doctor,
    "replay": replay,
    "report": report,
}
BLOCK = re.compile(r"```(?:bash|sh|console)\n(.*?)```", re.DOTALL)
SECTIONS: dict[str, list[type]] = {
    "model": [GRPO, SFT],
    "data": [LightningDataModule],
    "trainer": [Trainer],
    **{name: [callback] for name, callback in CALLBACKS.items()},
}
# Files that runs write, and placeholders for the reader's files.
FILES = (".json", ".jsonl", ".csv", ".md", ".py", ".yaml", ".safetensors")
AT_ROOT = ("README", "SECURITY", "AGENTS", "CONTRIBUTING")
NO_KEYS = {"model.generate"}  # a method
GENERATED = ("runs/", "checkpoints/", "samples/", "my_", "path/", "out/")


def pages() -> list[Path]:
    """Return the pages at the root, and every page of docs/ that is not generated."""
    written = [page for page in (ROOT / "docs").rglob("*.md") if "_made" not in page.parts]
    return [*(ROOT / f"{name}.md" for name in AT_ROOT), *sorted(written)]


def stale(page: Path) -> Iterator[str]:
    """Yield a line for each name on a page that does not exist."""
    text = page.read_text(encoding="utf-8")
    if page.name.startswith("coming_from"):  # the first column has names of other trainers
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    for span in dict.fromkeys(CODE_SPAN.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))):
        yield from (f"import {name}" for name in IMPORT.findall(span) if not importable(name))
        yield from (f"file {name}" for name in PATH.findall(span) if not exists(name, page))
        key = KEY.fullmatch(span.split()[0].rstrip(":")) if span.strip() else None
        if (
            key
            and "/" not in span
            and span not in NO_KEYS
            and not key[1].endswith(FILES)
            and not is_setting(key[1].removesuffix(".help"))
        ):
            yield f"key {key[1]}"
    for line in commands(text):
        problem = check_command(shlex.split(line, comments=True))
        if problem:
            yield f"command {line!r}: {problem}"


def importable(path: str) -> bool:
    """Return whether a dotted path can be imported: a module, or a name in one or in a class."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            try:
                found = getattr(found, name)
            except AttributeError:
                return False
            except ValueError:  # it exists, but a library that it needs is not installed
                return True
        return True
    return False


def exists(name: str, page: Path) -> bool:
    """Return whether a file or folder exists, relative to the root, the package or the page."""
    places = (ROOT, ROOT / "configs", ROOT / "src", ROOT / "src" / "litgrpo", page.parent)
    return name.startswith(GENERATED) or any((place / name).exists() for place in places)


def is_setting(key: str) -> bool:
    """Return whether a recipe may have this dotted key, with or without `init_args`."""
    section, *parts = [part for part in key.split(".") if part not in ("init_args", "class_path")]
    return _takes(SECTIONS[section], parts)


def _takes(owners: Iterable[type], parts: list[str]) -> bool:
    if not parts:
        return True
    for owner in _with_subclasses(owners):
        if parts[0] in inspect.signature(owner).parameters:
            hint = argument_hints(owner).get(parts[0])
            if any(typing.get_origin(inner) is Callable for inner in _inside(hint)):
                return True  # a class of torch, whose arguments its own version decides
            classes = [c for c in _inside(hint) if inspect.isclass(c)]
            # A mapping from names to objects accepts any name.
            named = typing.get_origin(hint) is dict or dict in classes
            if _takes(classes, parts[1:]) or (named and _takes(classes, parts[2:])):
                return True
    return False


def _with_subclasses(owners: Iterable[type]) -> Iterator[type]:
    for owner in owners:
        if owner.__module__.startswith(("litgrpo", "lightning")):
            yield owner
            yield from _with_subclasses(owner.__subclasses__())


def _inside(hint: typing.Any) -> Iterator[typing.Any]:
    yield hint
    for inner in typing.get_args(hint):
        yield from _inside(inner)


def commands(text: str) -> Iterator[str]:
    """Yield commands of the shell blocks that start litgrpo or a module of tests."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                yield from re.findall(PROGRAM, command)


def check_command(words: list[str]) -> str | None:
    """Return why a command cannot be parsed, or None."""
    if words[0] == "litgrpo" or words[1:3] == ["-m", "litgrpo"]:
        words = ["python", "cli.py", *words[words.index("litgrpo") + 1 :]]
    if words[1] == "-m":
        return None if find_spec(words[2]) else f"there is no module {words[2]}"
    command, rest = "".join(words[2:3]), _replace_generated(words[3:])
    if command in ("", "--help"):
        return None
    if command not in COMMANDS:
        return f"there is no command {command}"
    sys.argv = ["cli.py", command, *rest]
    keep_quiet()
    try:
        _parse(command, rest)
    except SystemExit as stop:
        return f"exit code {stop.code}" if stop.code else None
    return None


def _parse(name: str, words: list[str]) -> None:
    if COMMANDS[name].recipe:
        reader = recipe_reader(name)
        reader.given = CommandLine.read(words)
        reader.parser.parse_args(reader.words())
    else:
        function = FUNCTIONS[name]
        words = runs_as_list(words) if name == "report" else words
        auto_parser(function).parse_args(words)


@cache
def recipe_reader(name: str) -> RecipeCLI:
    """Return the parser of a command, built once."""
    extra = {"plan": plan, "audit": audit}.get(name)
    return RecipeCLI(["-c", "quickstart"], name, extra=extra)


def _replace_generated(words: list[str]) -> list[str]:
    """Replace recipes that an earlier command generates by the quickstart."""
    kept = []
    for word in words:
        generated = word.endswith((".yaml", ".json")) and not (ROOT / word).exists()
        kept.append("configs/quickstart.yaml" if generated and kept and kept[-1] in FLAGS else word)
    return kept


FLAGS = ("-c", "--config")


def main() -> None:
    """Print all stale names of all pages."""
    for page in pages():
        for line in stale(page):
            print(f"{page.relative_to(ROOT)}: {line}")


if __name__ == "__main__":
    main()
