"""Names in README.md and docs/ that nothing answers to: imports, files, keys, commands."""

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
SPAN = re.compile(r"`([^`\n]+)`")
IMPORT = re.compile(r"litgrpo(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*\.(?:py|yaml|md|ipynb|txt|cfg|toml)|configs/[\w./-]*")
KEY = re.compile(r"(?:--)?((?:model|data|trainer|" + "|".join(CALLBACKS) + r")(?:\.[a-z]\w*)+)\b")
PROGRAM = re.compile(r"python (?:cli\.py|-m (?:tests|litgrpo))\b.*?(?= > | \| |$)")
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
# What runs write, and what stands in an example for a file of the reader's own.
FILES = (".json", ".jsonl", ".csv", ".md", ".py", ".yaml", ".safetensors")
NO_KEYS = {"model.generate"}  # a method
MADE = ("runs/", "checkpoints/", "samples/", "my_", "path/", "out/")


def pages() -> list[Path]:
    """README.md, SECURITY.md, and every page of docs/ that is not made."""
    written = [page for page in (ROOT / "docs").rglob("*.md") if "_made" not in page.parts]
    return [ROOT / "README.md", ROOT / "SECURITY.md", *sorted(written)]


def stale(page: Path) -> Iterator[str]:
    """What a page names and nothing answers to, one line each."""
    text = page.read_text(encoding="utf-8")
    if page.name.startswith("coming_from"):  # the first column has names of other trainers
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    for span in dict.fromkeys(SPAN.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))):
        yield from (f"import {name}" for name in IMPORT.findall(span) if not importable(name))
        yield from (f"file {name}" for name in PATH.findall(span) if not there(name, page))
        key = KEY.fullmatch(span.split()[0].rstrip(":")) if span.strip() else None
        if (
            key
            and "/" not in span
            and span not in NO_KEYS
            and not key[1].endswith(FILES)
            and not taken(key[1].removesuffix(".help"))
        ):
            yield f"key {key[1]}"
    for line in commands(text):
        complaint = refused(shlex.split(line, comments=True))
        if complaint:
            yield f"command {line!r}: {complaint}"


def importable(path: str) -> bool:
    """Whether a dotted path can be imported: a module, or a name in one, or in a class there."""
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
            except ValueError:  # it is there, and says what this machine lacks for it
                return True
        return True
    return False


def there(name: str, page: Path) -> bool:
    """Whether a file or folder exists, named from the root, the package or the page."""
    places = (ROOT, ROOT / "configs", ROOT / "src", ROOT / "src" / "litgrpo", page.parent)
    return name.startswith(MADE) or any((place / name).exists() for place in places)


def taken(key: str) -> bool:
    """Whether a recipe may have this dotted key; `init_args` may be left out."""
    section, *parts = [part for part in key.split(".") if part not in ("init_args", "class_path")]
    return _takes(SECTIONS[section], parts)


def _takes(owners: Iterable[type], parts: list[str]) -> bool:
    if not parts:
        return True
    for owner in _with_subclasses(owners):
        if parts[0] in inspect.signature(owner).parameters:
            hint = _hints(owner).get(parts[0])
            if any(typing.get_origin(inner) is Callable for inner in _inside(hint)):
                return True  # a class of torch, whose arguments its own version decides
            classes = [c for c in _inside(hint) if inspect.isclass(c)]
            # What maps names to objects takes any name.
            named = typing.get_origin(hint) is dict or dict in classes
            if _takes(classes, parts[1:]) or (named and _takes(classes, parts[2:])):
                return True
    return False


def _with_subclasses(owners: Iterable[type]) -> Iterator[type]:
    for owner in owners:
        if owner.__module__.startswith(("litgrpo", "lightning")):
            yield owner
            yield from _with_subclasses(owner.__subclasses__())


def _hints(owner: type) -> dict[str, typing.Any]:
    try:
        return typing.get_type_hints(owner.__init__)
    except NameError:  # a name that is imported for type checkers only
        return {}


def _inside(hint: typing.Any) -> Iterator[typing.Any]:
    yield hint
    for inner in typing.get_args(hint):
        yield from _inside(inner)


def commands(text: str) -> Iterator[str]:
    """Every command of the shell blocks that starts this project's program or a module of tests."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                yield from re.findall(PROGRAM, command)


def refused(words: list[str]) -> str | None:
    """Why a command cannot be parsed, or None."""
    if words[1] == "-m" and words[2] != "litgrpo":
        return None if find_spec(words[2]) else f"there is no module {words[2]}"
    verb, rest = "".join(words[2:3]), _without_made(words[3:])
    if verb in ("", "--help"):
        return None
    if verb not in COMMANDS:
        return f"there is no command {verb}"
    sys.argv = ["cli.py", verb, *rest]
    keep_quiet()
    try:
        _parse(verb, rest)
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
    """The parser of a command, built once."""
    extra = {"plan": plan, "audit": audit}.get(name)
    return RecipeCLI(["-c", "quickstart"], name, extra=extra)


def _without_made(words: list[str]) -> list[str]:
    """The words without recipes that an earlier command makes; the quickstart stands for one."""
    kept = []
    for word in words:
        made = word.endswith((".yaml", ".json")) and not (ROOT / word).exists()
        kept.append("configs/quickstart.yaml" if made and kept and kept[-1] in FLAGS else word)
    return kept


FLAGS = ("-c", "--config")


def main() -> None:
    """Print all stale names of all pages."""
    for page in pages():
        for line in stale(page):
            print(f"{page.relative_to(ROOT)}: {line}")


if __name__ == "__main__":
    main()
