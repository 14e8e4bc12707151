"""A page for each recipe that litgrpo brings, and one for each folder of them."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.site.text import cell, table, title

CONFIGS = Path(__file__).parents[2] / "configs"
# {folder: (heading, first words)}
FOLDERS = {
    ".": ("Tasks", "Each trains something from beginning to end."),
    "algorithms": (
        "Algorithms",
        "Config overrides: a second `-c` after a task. [The algorithm](/explanation/algorithm.md) "
        "has the mathematics.",
    ),
    "hardware": (
        "Machines",
        "Config overrides. [Distributed training](/explanation/scale.md), "
        "[on a TPU](/howto/tpu.md).",
    ),
    "corrections": (
        "Corrections of samplers",
        "Config overrides, for engines whose log-probs differ from the trainer's.",
    ),
    "distillation": (
        "Distillation",
        "Config overrides: the policy learns from a [teacher](/howto/distillation.md), on its own "
        "samples.",
    ),
    "data": (
        "Data",
        "Config overrides: which prompts are sampled, see "
        "[tasks and curriculum](/howto/tasks_and_rollouts.md#curriculum).",
    ),
}


def pages() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of each page."""
    yield "recipes/index", "\n".join(index())
    for folder in FOLDERS:
        yield group_of(folder), "\n".join(group(folder))
    for file in sorted(CONFIGS.rglob("*.yaml")):
        yield page_of(file), "\n".join(recipe(file))


def page_of(file: Path) -> str:
    """The page of a recipe, as a path without its ending."""
    return f"recipes/{file.relative_to(CONFIGS).with_suffix('').as_posix().replace('/', '_')}"


def group_of(folder: str) -> str:
    """The page of a folder of recipes, as a path without its ending."""
    return f"recipes/{'tasks' if folder == '.' else folder}"


def name_of(file: Path) -> str:
    """Name of the recipe on a command line."""
    return file.relative_to(CONFIGS).with_suffix("").as_posix()


def head(file: Path) -> list[str]:
    """The three lines on top: what it is, which machine, what to expect."""
    return [line.removeprefix("# ") for line in file.read_text(encoding="utf-8").splitlines()[:3]]


def index() -> Iterator[str]:
    """Lines of the page that leads to the folders."""
    yield from title(
        "Recipes",
        "`litgrpo fit -c NAME` runs one; a second `-c` changes it. What was measured with them: "
        "[results](/evidence/results.md).",
    )
    for folder, (heading, words) in FOLDERS.items():
        yield f"- [{heading}](/_made/{group_of(folder)}.md): {words}"
    names = "\n".join(Path(group_of(folder)).name for folder in FOLDERS)
    yield f"\n```{{toctree}}\n:hidden:\n\n{names}\n```"


def group(folder: str) -> Iterator[str]:
    """Lines of the page of a folder: a table of its recipes."""
    yield from title(*FOLDERS[folder])
    files = sorted((CONFIGS / folder).glob("*.yaml"))
    rows = [
        [
            f"[{name_of(file)}]({Path(page_of(file)).name}.md)",
            # The columns say what the first word of a line does.
            *(cell(re.sub(r"^(Machine|Expected|Effect)[^:]*: ", "", line)) for line in head(file)),
        ]
        for file in files
    ]
    yield from table(["recipe", "what", "machine", "what to expect"], rows)
    names = "\n".join(Path(page_of(file)).name for file in files)
    yield f"\n```{{toctree}}\n:hidden:\n\n{names}\n```"


def recipe(file: Path) -> Iterator[str]:
    """Lines of the page of a recipe."""
    what, *rest = head(file)
    yield from title(name_of(file), what)
    yield from (f"{line}\n" for line in rest)
    flag = "" if file.parent == CONFIGS else "-c TASK "
    yield f"```\nlitgrpo fit {flag}-c {name_of(file)}\n```\n"
    body = file.read_text(encoding="utf-8").split("\n", 3)[3]
    yield f"```yaml\n{body.strip()}\n```"
