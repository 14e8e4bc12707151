"""The Sphinx extension of the site: pages that are made from code, links to them, formulas."""

import re
import shutil
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import reference
from docutils.nodes import SkipNode, literal
from docutils.utils import unescape
from latex2mathml.converter import convert
from reference import table

ROOT = Path(__file__).parents[2]
DOCS, CONFIGS = ROOT / "docs", ROOT / "configs"
MADE = DOCS / "_made"
# Links of pages that leave docs/.
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)([^)]*)\)")
SHOWN = {
    "README.md": "/index.md",
    "CHANGELOG.md": "/project/changelog.md",
    "SECURITY.md": "/explanation/security.md",
    "CONTRIBUTING.md": "/project/contributing.md",
    "configs": "/_made/recipes/index.md",
}


def setup(app: Any) -> dict[str, bool]:
    """Write the pages; Sphinx calls this."""
    shutil.rmtree(MADE, ignore_errors=True)
    for name, lines in [*reference.pages(), *recipes(), *examples()]:
        file = MADE / f"{name}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (MADE / "notebooks").mkdir()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy2(notebook, MADE / "notebooks")
    app.connect("source-read", lead_links_to_made_pages)
    app.add_role("as_written", as_written)
    # MathML needs no script of another site.
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True}


def recipes() -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) of a page for each folder of recipes, and of the page above them."""
    folders = [CONFIGS, *sorted(path for path in CONFIGS.iterdir() if path.is_dir())]
    names = {folder: "tasks" if folder == CONFIGS else folder.name for folder in folders}
    text = "`litgrpo fit -c NAME` trains with a recipe; `-c` of a config override follows that."
    toctree = ["```{toctree}", ":maxdepth: 1", "", *names.values(), "```"]
    yield "recipes/index", ["# Recipes", "", text, "", *toctree]
    for folder, name in names.items():
        files = sorted(folder.glob("*.yaml"))
        lines = [f"# {name.capitalize()}", ""]
        lines += table(["recipe", "what"], ([link_to(file), head(file)[0]] for file in files))
        for file in files:
            recipe = file.relative_to(CONFIGS).with_suffix("").as_posix()
            source = [
                "```{literalinclude} /../configs/" + f"{recipe}.yaml",
                ":language: yaml",
                "```",
            ]
            lines += ["", f"({label(file)})=", f"## {recipe}", "", *head(file), "", *source]
        yield f"recipes/{name}", lines


def label(file: Path) -> str:
    """Return the name by which links find a recipe."""
    return "recipe-" + re.sub(r"\W", "-", file.relative_to(CONFIGS).with_suffix("").as_posix())


def link_to(file: Path) -> str:
    """Return a link to the section of a recipe."""
    return f"[{file.stem}](#{label(file)})"


def head(file: Path) -> list[str]:
    """Return the comment above a recipe: what it is, its machine, what to expect."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return [line.removeprefix("#").strip() + "  " for line in comment] or [""]


def examples() -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) of a page for each script of examples/."""
    for file in sorted((ROOT / "examples").glob("*.py")):
        title = file.read_text(encoding="utf-8").removeprefix('"""').partition(":")[0]
        source = f"```{{literalinclude}} /../examples/{file.name}"
        yield f"examples/{file.stem}", [f"# {title}", "", source, ":language: python", "```"]


def lead_links_to_made_pages(_: Any, name: str, source: list[str]) -> None:
    """Let links that leave docs/ lead to the page that shows the file."""
    folder = (DOCS / name).parent

    def lead(link: re.Match[str]) -> str:
        file = (folder / link[1]).resolve()
        path = file.relative_to(ROOT).as_posix()
        if path in SHOWN:
            return f"]({SHOWN[path]}{link[2]})"
        if file.is_relative_to(CONFIGS):
            return f"](#{label(file)})"
        if path.startswith("examples/"):
            return f"](/_made/examples/{file.stem}.md)"
        return f"](/_made/{path}{link[2]})" if path.startswith("notebooks/") else link[0]

    source[0] = LINK.sub(lead, source[0])


def as_written(_: str, raw: str, text: str, *__: Any, **___: Any) -> tuple[list[Any], list[Any]]:
    """Return inline code of a docstring with its backslashes, which other roles drop."""
    return [literal(raw, unescape(text, restore_backslashes=True))], []


def visit_math(translator: Any, node: Any) -> None:
    """Write a formula in a line as MathML."""
    translator.body.append(f"<span>{convert(node.astext())}</span>")
    raise SkipNode


def visit_math_block(translator: Any, node: Any) -> None:
    """Write a formula that is set off as MathML."""
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="formula">{formula}</div>')
    raise SkipNode
