"""README.md, the pages of docs/, and their fenced blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
AT_ROOT = ("README.md", "SECURITY.md", "AGENTS.md", "CONTRIBUTING.md")


def pages() -> list[Path]:
    """Return the pages at the root, and every page of docs/ that is not generated."""
    written = [page for page in (ROOT / "docs").rglob("*.md") if "_made" not in page.parts]
    return [*(ROOT / name for name in AT_ROOT), *sorted(written)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language, without their indentation."""
    indented = re.findall(
        rf"^( *)```(?:{language})\n(.*?)^\1```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in indented]
