"""Links of the pages lead to the pages of the site that show the files."""

import fnmatch
import re
from pathlib import Path

import pytest

from tests.house.pages import pages
from tests.site import extension, recipes, reference
from tests.site.extension import DOCS, LINK, ROOT


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("README.md", "index.md"),
        ("examples/grpo_in_300_lines.py", "_made/examples/grpo_in_300_lines.md"),
        ("configs", "_made/recipes/index.md"),
        ("configs/quickstart.yaml", "_made/recipes/quickstart.md"),
        ("configs/algorithms/dapo.yaml", "_made/recipes/algorithms_dapo.md"),
        ("notebooks/03_turns.ipynb", "_made/notebooks/03_turns.ipynb"),
        ("src/litgrpo/types.py", ""),
        ("../elsewhere.md", ""),
    ],
)
def test_where_a_file_is_shown(file, page):
    assert extension.shown((ROOT / file).resolve()) == page


def test_a_link_that_leaves_the_docs_is_led_to_the_page():
    source = ["[a](../../configs/quickstart.yaml) [b](../data.md#x) [c](../../README.md#d)"]
    extension.inside(None, "howto/any", source)
    assert source == ["[a](/_made/recipes/quickstart.md) [b](../data.md#x) [c](/index.md#d)"]


INSIDE = [page for page in pages() if page.is_relative_to(DOCS)]


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.name)
def test_no_page_links_to_a_file_that_the_site_does_not_show(page: Path):
    linked = [found["path"] for found in LINK.finditer(page.read_text(encoding="utf-8"))]
    outside = [path for path in linked if not (page.parent / path).resolve().is_relative_to(DOCS)]
    assert not [path for path in outside if not extension.shown((page.parent / path).resolve())]


def test_what_is_made_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "MADE", tmp_path)
    monkeypatch.setattr(extension.reference, "pages", lambda: [("reference/one", "# One")])
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "gone.md").write_text("# Gone")
    extension.write()
    page = tmp_path / "reference" / "one.md"
    before = page.stat().st_mtime_ns
    extension.write()
    assert page.stat().st_mtime_ns == before
    assert not (tmp_path / "reference" / "gone.md").exists()
    assert (tmp_path / "recipes" / "quickstart.md").exists()
    assert (tmp_path / "notebooks" / "03_turns.ipynb").exists()


def test_pages_that_the_site_names_are_made():
    made = [*reference.pages(), *recipes.pages(), *extension.examples()]
    names = {name for name, _ in made}
    names |= {f"notebooks/{file.stem}" for file in (ROOT / "notebooks").glob("*.ipynb")}
    named = {
        name.removesuffix(".md")
        for page in INSIDE
        for name in re.findall(r"_made/([\w./*-]+)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not [name for name in named if not fnmatch.filter(names, name)]
