"""Pages of every option and every public name, read from the classes that they belong to."""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from docstring_parser import parse

from litgrpo import GRPO, PUBLIC, SFT, PairData, PromptData
from litgrpo.argument_types import UNSET, classes_in, subclasses
from litgrpo.cli.help import default_text
from litgrpo.cli.options import Option, options_of, type_name
from litgrpo.cli.parser import CALLBACKS, RUN_OPTIONS
from litgrpo.data import EpisodePrompts, ReasoningGym

# {page: (heading, first words, [(key, class that can be there)])}
OPTIONS: dict[str, tuple[str, str, list[tuple[str, type]]]] = {
    "model_keys": (
        "Options of the model",
        "What is trained, on which reward, and how. `GRPO` is the default; "
        "`class_path: litgrpo.SFT` fine-tunes.",
        [("model", GRPO), ("model", SFT)],
    ),
    "data_keys": (
        "Options of the data",
        "Prompts for `GRPO` (`PromptData`, the default), prompts with answers for `SFT` "
        "(`PairData`). [Data](/reference/data.md) has examples.",
        [("data", kind) for kind in (PromptData, PairData, EpisodePrompts, ReasoningGym)],
    ),
    "run_keys": (
        "Options of the run and of callbacks",
        "What is written, when it is saved, and what is watched. Keys of `trainer` are "
        "Lightning's: `litgrpo fit --trainer.help`.",
        list(CALLBACKS.items()),
    ),
}
# Its table names the public names of `litgrpo`, group by group.
API_PAGE = Path(__file__).parents[1] / "reference" / "api.md"
MODULES = ("litgrpo.rewards", "litgrpo.environments", "litgrpo.data", "litgrpo.evaluation")
# Their options have pages; their methods are Lightning's.
CONFIGURED = ("GRPO", "SFT", "PairData", "PromptData")


def pages() -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) of each page of the reference."""
    for name, (heading, text, classes) in OPTIONS.items():
        lines = [f"# {heading}", "", text, ""]
        if name == "run_keys":
            run = [Option(key, *option) for key, option in RUN_OPTIONS.items()]
            lines += option_table({option.key: option for option in run})
        for key, owner in with_classes_below(list(classes)):
            lines += section(key, owner)
        yield f"reference/{name}", lines
    rows = re.findall(r"^\| ([\w -]+) \| (.*`.*) \|$", API_PAGE.read_text("utf-8"), re.MULTILINE)
    for number, (group, cell) in enumerate(rows, start=1):
        names = [name for name in re.findall(r"`(\w+)`", cell) if name in PUBLIC]
        name = f"reference/api/{number:02}_{group.replace(' ', '_')}"
        yield name, [f"# {group.capitalize()}", "", *autodoc("litgrpo", names)]
    for module in MODULES:
        package = import_module(module)
        names = [name for name in package.__all__ if name not in PUBLIC]
        about = (inspect.getdoc(package) or "").splitlines()
        lines = [f"# `{module}`", "", *about, "", *autodoc(module, sorted(names))]
        yield f"reference/{module}", lines


def with_classes_below(classes: list[tuple[str, type]]) -> Iterator[tuple[str, type]]:
    """Yield classes, and those of litgrpo that their options take, once with the first key."""
    seen = {owner for _, owner in classes}
    for key, owner in classes:  # grows while it is read
        yield key, owner
        for option in options_of(owner, key).values():
            for base in classes_in(option.hint):
                for kind in (base, *subclasses(base)):
                    is_ours = kind.__module__.startswith("litgrpo") and not inspect.isabstract(kind)
                    if is_ours and kind not in seen:
                        seen.add(kind)
                        classes.append((option.key, kind))


def section(key: str, owner: type) -> Iterator[str]:
    """Yield the lines of a class: what it is, and a table of its options."""
    docstring = parse(owner.__doc__ or "")
    more = (docstring.long_description or "").partition("Example:")[0]
    yield from ("", f"## {owner.__name__}", "")
    yield from (f"At `{key}`. {escape(docstring.short_description or '')}", "", escape(more), "")
    yield from option_table(options_of(owner, key))


def option_table(options: dict[str, Option]) -> Iterator[str]:
    """Yield the lines of a table of options, none if there are none."""
    rows = [
        [
            f"`{name}`",
            f"`{type_name(option.hint)}`",
            "required"
            if option.default is UNSET
            else f"`{default_text(option.default).removeprefix(', default: ')}`",
            escape(option.text),
        ]
        for name, option in options.items()
    ]
    yield from table(["key", "type", "default", "what it is"], rows) if rows else ()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def escape(text: str) -> str:
    """Return a text in one line, in which `<` and `*` are themselves, also outside of code."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [part.replace("<", "\\<").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def autodoc(module: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the lines by which autodoc documents names of a module."""
    yield "```{eval-rst}"
    for name in names:
        value = getattr(import_module(module), name)
        if getattr(value, "__module__", "").startswith("litgrpo"):  # else the name of a type
            kind = "class" if inspect.isclass(value) else "function"
            yield f".. auto{kind}:: {module}.{name}"
            yield "   :members:\n" if kind == "class" and name not in CONFIGURED else ""
    yield "```"
