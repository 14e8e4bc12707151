"""The page in a real browser. Needs playwright and chromium; axe if it is installed."""

import shutil
from importlib import util
from pathlib import Path

import pytest

from litgrpo.runs.report.page import render_page
from litgrpo.runs.run import Run
from tests.runs.report.run_folders import HOSTILE, make_diagnosis, make_finding, make_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.filterwarnings("ignore"),  # the driver leaves sockets open
]
PHONE, TABLET, DESK = 390, 768, 1280
SERIOUS = {"serious", "critical"}
SMALLEST_TEXT = 12  # px


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: page} of an ordinary, a hostile, an empty, a long run, and of two."""
    folder = tmp_path_factory.mktemp("runs")
    sound = Run(make_run(folder / "sound"))
    hostile = Run(make_run(folder / "hostile", texts=list(HOSTILE.values())))
    other = Run(make_run(folder / "other", right=3))
    long = Run(make_run(folder / "long", iterations=10_000))
    (folder / "empty").mkdir()
    sample = {"prompt": "1+1?", "completion": HOSTILE["script"], "reward": 0.5}
    texts = {
        "sound": render_page([sound], [make_diagnosis(make_finding())]),
        "hostile": render_page([hostile], [make_diagnosis(make_finding(samples=(sample,)))]),
        "empty": render_page([Run(folder / "empty")]),
        "long": render_page([long]),
        "several": render_page([sound, other]),
    }
    paths = {name: folder / f"{name}.html" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text, encoding="utf-8")
    return paths


class OpenPage:
    """A page in its own window, with its requests and messages."""

    def __init__(self, browser, path: Path, width: int = DESK, **options) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, offline=True, **options)
        self.page = self.context.new_page()
        self.requests, self.messages = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.page.goto(path.as_uri())

    def evaluate(self, script: str):
        return self.page.evaluate(script)

    def unfold(self) -> None:
        self.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")


NAMES = ["sound", "hostile", "empty", "long", "several"]


@pytest.mark.parametrize("name", NAMES)
def test_no_request_leaves_the_page_and_no_script_runs(name, browser, files):
    opened = OpenPage(browser, files[name])
    opened.unfold()
    assert opened.requests == [files[name].as_uri()]
    assert opened.messages == []
    assert opened.page.title().endswith("litgrpo report")
    assert opened.evaluate("document.scripts.length") == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [PHONE, TABLET, DESK])
def test_the_page_fits_the_window(name, width, browser, files):
    opened = OpenPage(browser, files[name], width)
    opened.unfold()
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    sizes = "[...document.querySelectorAll('p, td, th, pre, li, dd')].map("
    sizes += "each => parseFloat(getComputedStyle(each).fontSize))"
    assert min(opened.evaluate(sizes)) >= SMALLEST_TEXT


@pytest.mark.skipif(util.find_spec("axe_playwright_python") is None, reason="axe is not installed")
@pytest.mark.parametrize(
    ("name", "scheme"),
    [("sound", "light"), ("hostile", "dark"), ("several", "light"), ("empty", "light")],
)
def test_axe_finds_no_serious_violation(name, scheme, browser, files):
    (place,) = util.find_spec("axe_playwright_python").submodule_search_locations
    axe = next(Path(place).rglob("axe.min.js")).read_text(encoding="utf-8")
    opened = OpenPage(browser, files[name], color_scheme=scheme, bypass_csp=True)
    opened.unfold()
    opened.page.add_script_tag(content=axe)
    found = opened.evaluate("axe.run()")["violations"]
    assert not [
        (each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS
    ]


def test_dark_mode_is_dark_and_print_is_light_and_unfolded(browser, files):
    paper = "getComputedStyle(document.body).backgroundColor"
    opened = OpenPage(browser, files["sound"], color_scheme="dark")
    assert opened.evaluate(paper) == "rgb(18, 22, 28)"
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.evaluate(paper) == "rgb(255, 255, 255)"
    height = "[...document.querySelectorAll('details')].at(-1).offsetHeight"
    assert opened.evaluate(height) > 100
    assert opened.page.pdf()[:4] == b"%PDF"


def test_a_folded_section_opens_with_the_keyboard(browser, files):
    opened = OpenPage(browser, files["sound"])
    summary = opened.page.locator("summary").last
    summary.focus()
    opened.page.keyboard.press("Enter")
    assert opened.evaluate("[...document.querySelectorAll('details')].at(-1).open")
