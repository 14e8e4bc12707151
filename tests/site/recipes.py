"""A page for each recipe that litgrpo brings, and one that lists them by what they are for."""

from collections.abc import Iterator
from pathlib import Path

from tests.site.text import cell, table, title

CONFIGS = Path(__file__).parents[2] / "configs"
# {folder: (heading, first words)}
FOLDERS = {
    ".": ("Tasks", "Each trains something from beginning to end."),
    "algorithms": (
        "Algorithms",
        "Config overrides: a second `-c` after a task. [The algorithm](/algorithm.md) has the "
        "mathematics.",
    ),
    "hardware": (
        "Machines",
        "Config overrides. [Distributed training](/scale.md), [on a TPU](/tpu.md).",
    ),
    "corrections": (
        "Corrections of samplers",
        "Config overrides, for engines whose log-probs differ from the trainer's.",
    ),
    "distillation": (
        "Distillation",
        "Config overrides: the policy learns from a [teacher](/distillation.md), on its own "
        "samples.",
    ),
    "loggers": ("Loggers", "Config overrides. TensorBoard and `metrics.csv` are written anyway."),
}


def pages() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of each page."""
    yield "recipes/index", "\n".join(index())
    for file in sorted(CONFIGS.rglob("*.yaml")):
        yield page_of(file), "\n".join(recipe(file))


def page_of(file: Path) -> str:
    """The page of a recipe, as a path without its ending."""
    return f"recipes/{file.relative_to(CONFIGS).with_suffix('').as_posix().replace('/', '_')}"


def name_of(file: Path) -> str:
    """Name of the recipe on a command line."""
    return file.relative_to(CONFIGS).with_suffix("").as_posix()


def head(file: Path) -> list[str]:
    """The three lines on top: what it is, which machine, what to expect."""
    return [line.removeprefix("# ") for line in file.read_text(encoding="utf-8").splitlines()[:3]]


def index() -> Iterator[str]:
    """Lines of the list of all recipes."""
    yield from title(
        "Recipes",
        "`litgrpo fit -c NAME` runs one; a second `-c` changes it. What was measured with them: "
        "[results](/results.md), [real weights](/real.md).",
    )
    for folder, (heading, words) in FOLDERS.items():
        yield f"\n## {heading}\n\n{words}\n"
        files = sorted((CONFIGS / folder).glob("*.yaml"))
        rows = [
            [
                f"[{name_of(file)}]({Path(page_of(file)).name}.md)",
                *(cell(line) for line in head(file)),
            ]
            for file in files
        ]
        yield from table(["recipe", "what", "machine", "what to expect"], rows)
    yield "```{toctree}\n:hidden:\n:glob:\n\n*\n```"


def recipe(file: Path) -> Iterator[str]:
    """Lines of the page of a recipe."""
    what, *rest = head(file)
    yield from title(name_of(file), what)
    yield from (f"{line}\n" for line in rest)
    flag = "" if file.parent == CONFIGS else "-c TASK "
    yield f"```\nlitgrpo fit {flag}-c {name_of(file)}\n```\n"
    body = file.read_text(encoding="utf-8").split("\n", 3)[3]
    yield f"```yaml\n{body.strip()}\n```"
