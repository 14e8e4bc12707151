"""Looks at a built site in chromium: `python -m tests.site.look FOLDER [--shots FOLDER]`.

Three widths, light and dark: nothing wider than the window, no request to elsewhere, no serious
finding of axe; and the search finds a key without a server.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTHS, SCHEMES = (390, 768, 1280), ("light", "dark")
SERIOUS = ("serious", "critical")
# Of several hundred pages, one of each kind.
PAGES = [
    *("index", "tutorials/quickstart", "explanation/iteration", "explanation/algorithm"),
    *("howto/index", "howto/watch_a_run", "howto/coming_from_trl", "reference/metrics"),
    *("reference/doctor", "tutorials/from_scratch", "project/contributing", "project/changelog"),
    *("genindex", "search", "evidence/results", "evidence/parity_and_speed"),
    "reference/models",
    *("_made/reference/model_keys", "_made/reference/litgrpo.rewards", "_made/recipes/index"),
    *("_made/recipes/quickstart", "_made/notebooks/03_turns"),
]


def faults(browser: Any, axe: Any, folder: Path, shots: Path | None) -> Iterator[str]:
    """One line for each thing that is wrong with a page."""
    for scheme in SCHEMES:
        for width in WIDTHS:
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
            )
            page = context.new_page()
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            for name in PAGES:
                where = f"{name}, {width} px, {scheme}"
                page.goto((folder / f"{name}.html").as_uri())
                over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                yield from [f"{where}: {over} px too wide"] * (over > 0)
                for found in axe.run(page).response["violations"]:
                    if found["impact"] in SERIOUS:
                        yield f"{where}: {found['id']}: {found['nodes'][0]['html'][:100]}"
                if shots:
                    file = shots / f"{name.replace('/', '_')}_{width}_{scheme}.png"
                    page.screenshot(path=file)
            yield from (f"asks {url}" for url in asked if not url.startswith(("file:", "data:")))
            context.close()


def found(browser: Any, folder: Path, word: str) -> list[str]:
    """Titles that the search lists for a word."""
    page = browser.new_page()
    page.goto(f"{(folder / 'search.html').as_uri()}?q={word}")
    page.wait_for_selector("ul.search li a", timeout=30_000)
    return [link.inner_text() for link in page.query_selector_all("ul.search li a")]


def main() -> None:
    """Print what is wrong; exit code 1 where something is."""
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shots", type=Path)
    asked = parser.parse_args()
    if asked.shots:
        asked.shots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        wrong = list(faults(browser, Axe(), asked.folder.resolve(), asked.shots))
        titles = found(browser, asked.folder.resolve(), "max_completion_length")
    print("\n".join(wrong) or f"{len(PAGES)} pages at {WIDTHS} px, light and dark: nothing wrong")
    print(f"search for max_completion_length: {len(titles)} pages, first {titles[:3]}")
    sys.exit(bool(wrong) or not titles)


if __name__ == "__main__":
    main()
