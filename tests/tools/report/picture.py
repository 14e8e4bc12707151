"""Take a picture of a report: `python -m tests.tools.report.picture PAGE.html PICTURE.png`."""

import shutil
import sys
from pathlib import Path

WIDTH, HEIGHT = 1200, 1080


def take_picture(page: Path, image: Path) -> None:
    """Write the top of a page as a picture."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        window = found.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        window.goto(page.resolve().as_uri())
        window.screenshot(path=image)
        found.close()


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), Path(sys.argv[2]))
