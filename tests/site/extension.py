"""The Sphinx extension: writes the pages that come from code, and leads links to them."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.site import recipes, reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = DOCS / "_made"
LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<rest>[^)]*)\)")
ATTRIBUTES = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
}
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "explanation/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
}


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    write()
    app.connect("source-read", inside)
    app.connect("build-finished", reachable)
    renderers = ((visit_math, None), (visit_math_block, None))
    app.add_html_math_renderer("mathml", *renderers)
    return {"parallel_read_safe": True}


def visit_math(translator: Any, node: Any) -> None:
    """Write a formula in a line as MathML, which needs no script from elsewhere."""
    _write_math(translator, node.astext(), "<span>{}</span>", "inline")


def visit_math_block(translator: Any, node: Any) -> None:
    """Write a formula that is set off as MathML."""
    frame = '<div class="formula" tabindex="0">{}</div>'
    _write_math(translator, node.astext(), frame, "block")


def _write_math(translator: Any, formula: str, frame: str, display: str) -> None:
    from docutils.nodes import SkipNode
    from latex2mathml.converter import convert

    translator.body.append(frame.format(convert(formula, display=display)))
    raise SkipNode


def write() -> None:
    """Write every page that comes from code; what did not change keeps its date."""
    pages = [*reference.pages(), *recipes.pages(), *examples()]
    made = {f"{name}.md": text for name, text in pages}
    for stale in MADE.rglob("*.md"):
        if stale.relative_to(MADE).as_posix() not in made:
            stale.unlink()
    for name, text in made.items():
        file = MADE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
    (MADE / "notebooks").mkdir(exist_ok=True)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy2(notebook, MADE / "notebooks")


def examples() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of a page for each script of examples/."""
    for file in sorted((ROOT / "examples").glob("*.py")):
        code = file.read_text(encoding="utf-8")
        title = code.removeprefix('"""').partition(":")[0]
        yield f"examples/{file.stem}", f"# {title}\n\n```python\n{code}```\n"


def inside(_: Any, name: str, source: list[str]) -> None:
    """Links that leave docs/ lead to the page that shows the file."""
    folder = (DOCS / name).parent

    def link_source(found: re.Match[str]) -> str:
        file = (folder / found["path"]).resolve()
        page = shown(file)
        return f"](/{page}{found['rest']})" if page else found[0]

    source[0] = LINK.sub(link_source, source[0])


def reachable(app: Any, error: Exception | None) -> None:
    """Make scrolling regions focusable, and give captions their depth."""
    for file in [] if error or app.builder.format != "html" else Path(app.outdir).rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        for old, new in ATTRIBUTES.items():
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")


def shown(file: Path) -> str:
    """The page of the site that shows a file of the repository, from docs/ on; else nothing."""
    path = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("configs/") and path.endswith(".yaml"):
        return f"_made/{recipes.page_of(file)}.md"
    if path == "configs":
        return "_made/recipes/index.md"
    if path.startswith("examples/") and path.endswith(".py"):
        return f"_made/{path.removesuffix('.py')}.md"
    return f"_made/{path}" if path.startswith("notebooks/") else ""
