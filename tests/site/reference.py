"""Pages of every key and every public name, read from the classes that they belong to."""

import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from docstring_parser import parse

from litgrpo import PUBLIC, rewards
from litgrpo.argument_types import UNSET, classes_in, subclasses
from litgrpo.cli.help import default_text
from litgrpo.cli.options import Option, options_of, type_name
from litgrpo.cli.parser import CALLBACKS, RUN_OPTIONS
from tests.site.text import cell, escape, table, title

# {page: (heading, first words, {key: classes that can stand there})}
KEYS: dict[str, tuple[str, str, dict[str, list[str]]]] = {
    "model": (
        "Options of the model",
        "What is trained, on which reward, and how. `GRPO` is the default; "
        "`class_path: litgrpo.SFT` fine-tunes.",
        {"model": ["litgrpo.training.grpo.GRPO", "litgrpo.training.sft.SFT"]},
    ),
    "data": (
        "Options of the data",
        "Prompts for `GRPO` (`PromptData`, the default), prompts with answers for `SFT` "
        "(`PairData`). [Data](/reference/data.md) has examples.",
        {
            "data": [
                "litgrpo.data.modules.PromptData",
                "litgrpo.data.modules.PairData",
                "litgrpo.data.EpisodePrompts",
                "litgrpo.data.ReasoningGym",
            ]
        },
    ),
}
# Its table names the public names of `litgrpo`, group by group.
API_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
# Their options are on the pages of keys; their methods are Lightning's.
CONFIGURED = {"GRPO", "SFT", "PairData", "PromptData"}
API = {
    "litgrpo.rewards": sorted(rewards.__all__),
    "litgrpo.environments": [],
    "litgrpo.data": [],
    "litgrpo.evaluation": [],
}


def pages() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of each page of the reference."""
    for name, (heading, words, roots) in KEYS.items():
        yield f"reference/{name}_keys", "\n".join(keys_page(heading, words, roots))
    yield "reference/run_keys", "\n".join(run_keys_page())
    for number, (group, names) in enumerate(api_groups().items(), 1):
        page = f"reference/api/{number:02}_{group.replace(' ', '_')}"
        yield page, "\n".join(api_page("litgrpo", names, group.capitalize()))
    for module, names in API.items():
        words = (import_module(module).__doc__ or "").strip().split("\n")[0]
        yield f"reference/{module}", "\n".join(api_page(module, names, f"`{module}`", words))


def api_groups() -> dict[str, list[str]]:
    """Return {group: public names} of the table of docs/reference/api.md."""
    rows = re.findall(r"^\| ([\w -]+) \| (.*) \|$", API_PAGE.read_text("utf-8"), re.MULTILINE)
    groups = {group: re.findall(r"`(\w+)`", cell) for group, cell in rows}
    return {group: [n for n in names if n in PUBLIC] for group, names in groups.items() if names}


def keys_page(heading: str, words: str, roots: dict[str, list[str]]) -> Iterator[str]:
    """Lines of a page: the classes that stand at a key, then all that their keys name."""
    yield from title(heading, words)
    yield "Deeper classes follow in the order in which they are named.\n"
    for key, paths in roots.items():
        found = [(key, import_name(path)) for path in paths]
        for place, owner in all_below(found):
            yield from section(place, owner)


def run_keys_page() -> Iterator[str]:
    """Lines of the page of the keys that belong to the whole run, and of the callbacks."""
    yield from title(
        "Options of the run and of callbacks",
        "What is written, when it is saved, and what is watched. Keys of `trainer` are "
        "Lightning's: `litgrpo fit --trainer.help`.",
    )
    rows = [
        [f"`{key}`", f"`{default}`", cell(text)] for key, (_, default, text) in RUN_OPTIONS.items()
    ]
    yield from table(["key", "default", "what it is"], rows)
    for place, owner in all_below([(name, kind) for name, kind in CALLBACKS.items()]):
        yield from section(place, owner)


def all_below(found: list[tuple[str, type]]) -> Iterator[tuple[str, type]]:
    """Classes, and those of litgrpo that their keys take, each once with the first key."""
    seen = [owner for _, owner in found]
    for place, owner in found:  # grows while it is read
        yield place, owner
        for option in options_of(owner, place).values():
            for base in classes_in(option.hint):
                for kind in [base, *subclasses(base)]:
                    if kind not in seen and is_configurable(kind):
                        seen.append(kind)
                        found.append((option.key, kind))


def is_configurable(kind: type) -> bool:
    """Return whether a class is litgrpo's and can be instantiated."""
    return kind.__module__.startswith("litgrpo") and not inspect.isabstract(kind)


def section(place: str, owner: type) -> Iterator[str]:
    """Lines of a class: what it is, and a table of its keys."""
    described = parse(owner.__doc__ or "")
    yield f"\n## {owner.__name__}\n"
    yield f"At `{place}`. {prose(described.short_description or '')}\n"
    if described.long_description:
        yield prose(described.long_description.partition("Example:")[0]) + "\n"
    rows = [
        [f"`{name}`", f"`{hint(option)}`", default(option), cell(option.text)]
        for name, option in options_of(owner, place).items()
    ]
    if rows:
        yield from table(["key", "type", "default", "what it is"], rows)


def hint(option: Option) -> str:
    """Type of an option, fit for a cell."""
    return type_name(option.hint).replace("|", "\\|")


def default(option: Option) -> str:
    """Default of an option, fit for a cell."""
    if option.default is UNSET:
        return "required"
    return f"`{default_text(option.default).removeprefix(', default: ')}`".replace("|", "\\|")


def prose(text: str) -> str:
    """Sentences of a docstring as one paragraph of Markdown."""
    return escape(" ".join(text.split()))


def api_page(module: str, names: Iterable[str], heading: str, words: str = "") -> Iterator[str]:
    """Lines of the page of a module's public names, for autodoc to fill in."""
    yield from title(heading, words)
    names = list(names) or import_module(module).__all__
    yield "```{eval-rst}"
    for name in names:
        found = getattr(import_module(module), name)
        if not getattr(found, "__module__", "").startswith("litgrpo"):
            continue  # the name of a type
        if module != "litgrpo" and name in PUBLIC:
            continue  # on the page of `litgrpo`
        kind = "class" if inspect.isclass(found) else "function"
        yield f".. auto{kind}:: {module}.{name}"
        if kind == "class" and found.__module__.startswith("litgrpo") and name not in CONFIGURED:
            yield "   :members:"
        yield ""
    yield "```"


def import_name(path: str) -> Any:
    """Import the object of a path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
