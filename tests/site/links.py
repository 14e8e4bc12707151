"""Links of a built site that lead nowhere, and what it would load from elsewhere.

`python -m tests.site.links FOLDER`.
"""

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


class Page(HTMLParser):
    """Links, names that can be linked to, and files that are loaded.

    Args:
        text: HTML.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, is called, and loads."""
        found = {name: value or "" for name, value in attrs}
        self.names |= {found.get("id", "")} - {""}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        if tag in LOADS and LOADS[tag] in found and found.get("rel") not in ("canonical", "index"):
            self.loaded.add(found[LOADS[tag]])


@cache
def parsed(file: Path) -> Page:
    """A page that was read before is not read again."""
    return Page(file.read_text(encoding="utf-8"))


def faults(folder: Path) -> Iterator[str]:
    """`page: link`, for each that leads nowhere, and for each file of another place."""
    for file in sorted(folder.rglob("*.html")):
        for link in sorted(parsed(file).links | parsed(file).loaded):
            address = urlsplit(link)
            elsewhere = bool(address.scheme or address.netloc)
            if elsewhere and link in parsed(file).loaded and address.scheme != "data":
                yield f"{file.relative_to(folder)}: loads {link}"
            elif not elsewhere and not leads(file, address.path, address.fragment):
                yield f"{file.relative_to(folder)}: {link}"


def leads(file: Path, path: str, fragment: str) -> bool:
    """Return whether the file and the anchor of a link on a page exist."""
    target = (file.parent / unquote(path)).resolve() if path else file
    if not target.exists():
        return False
    named = fragment and target.suffix == ".html"
    return not named or unquote(fragment) in parsed(target).names


def main() -> None:
    """Print all faults; exit code 1 where there are some."""
    found = list(faults(Path(sys.argv[1])))
    print("\n".join(found) or "every link leads somewhere; nothing is loaded from elsewhere")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
