import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from litgrpo.runs.doctor.diagnosis import examine
from litgrpo.runs.report.command import open_run
from litgrpo.runs.report.page import render_page
from litgrpo.runs.run import Run
from tests.runs.report.run_folders import HOSTILE, lines, make_diagnosis, make_finding, make_run

VOID = {"meta", "path", "circle"}
LIMIT, GOAL = 2_000_000, 500_000


class Tags(HTMLParser):
    """Every tag with its attributes; those that are open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.wrong = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if self.open[-1:] != [tag]:
            self.wrong.append(tag)
        self.open = self.open[:-1]


def check_page(text: str) -> Tags:
    """The tags of a page: closed, none that acts or loads, every id once."""
    found = Tags(text)
    assert not found.wrong
    assert not found.open
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "img", "iframe", "link", "object", "form", "audio", "base"}
    given = {name for _, attributes in found.tags for name in attributes}
    assert not {name for name in given if name.startswith("on") or name in ("src", "style")}
    links = [values["href"] for tag, values in found.tags if "href" in values]
    assert all(link.startswith("#run-") for link in links)
    ids = [values["id"] for _, values in found.tags if "id" in values]
    assert len(ids) == len({*ids})
    return found


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "mine")


def test_the_committed_example_is_a_sound_page():
    text = (Path(__file__).parents[3] / "docs" / "reference" / "quickstart_report.html").read_text()
    check_page(text)
    verdict = "Held-out accuracy (reward &#39;correct&#39; &gt;= 1) rose: 0.406 before"
    assert verdict in text
    assert len(text) < GOAL


def test_a_page_shows_the_run(run):
    text = render_page([Run(run)])
    check_page(text)
    for part in (
        "Held-out accuracy (reward &#39;correct&#39; &gt;= 1) rose",
        "Held-out prompts over time",
        "Hardest prompts",
        "The rewards were not audited",
        "python cli.py fit -c runs/mine/config.yaml --run_dir runs/mine-again",
        "Always 0: log ratio.",
    ):
        assert part in text
    assert "Diagnosis" not in text
    assert len(text) < GOAL


def test_the_same_folder_gives_the_same_bytes(run):
    assert render_page([Run(run)], [make_diagnosis(make_finding())]) == render_page(
        [Run(run)], [make_diagnosis(make_finding())]
    )


def test_findings_are_cards_with_their_sample_and_marks_in_the_curves(run):
    sample = {"prompt": "1+1?", "completion": HOSTILE["script"], "reward": 0.5}
    text = render_page([Run(run)], [make_diagnosis(make_finding(samples=(sample,)))])
    check_page(text)
    assert "Rewards are equal in every group." in text
    assert "Since iteration 7." in text
    assert "<h5>Example</h5>" in text
    assert text.count('class="mark"') == text.count('class="chart"')
    assert "Completions end." in text
    assert "needs a metric" in text
    assert "No problems found" in render_page([Run(run)], [make_diagnosis()])


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_completions_cannot_act(text, tmp_path):
    run = make_run(tmp_path / "hostile", texts=[text])
    written = render_page(
        [Run(run)], [make_diagnosis(make_finding(problem=text, evidence=(text,)))]
    )
    check_page(written)
    assert len(written.encode()) < GOAL


def test_names_of_a_recipe_cannot_act_either(run):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("runs/mine", f"'{HOSTILE['script']}'"))
    name = HOSTILE["svg"].replace(",", "")
    (run / "metrics.csv").write_text(f"step,reward/{name},reward/{name}_std\n1,1,1\n2,0.5,1\n")
    check_page(render_page([open_run(run)]))


@pytest.mark.parametrize("value", ["[1, {a: b}]", "1" + "0" * 400, "{a: [b]}", "x", "0"])
def test_values_of_another_kind_in_config_and_summary_end_no_report(value, run):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r": [^\n{]+", f": {value}", config))
    (run / "summary.json").write_text('{"seconds": 1' + "0" * 400 + ', "versions": [1]}')
    opened = open_run(run)
    check_page(render_page([opened], [examine(opened)]))


def test_names_in_files_are_visible(run, tmp_path):
    name = f"{HOSTILE['control']} {HOSTILE['directions']}".replace("\0", "")
    for file in (run / "evaluation").iterdir():
        rows = [json.loads(line) | {"set": name} for line in file.read_text().splitlines()]
        file.write_text(lines(rows))
    (run / "summary.json").write_text(json.dumps({"versions": {name: name}}))
    metrics = (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text(metrics.replace("reward/mean", f"reward/{name}"))
    other = make_run(tmp_path / name)
    (other / "metrics.csv").write_text((run / "metrics.csv").read_text())
    text = render_page([open_run(run), open_run(other)], [make_diagnosis()] * 2)
    check_page(text)
    assert "right [U+202E] to" in text
    assert not {*"\x1b\x07\x7f\u202e\u2066\u200f"} & {*text}


def test_an_episode_is_shown_turn_by_turn(tmp_path):
    told = [
        {"role": "assistant", "content": "call it"},
        {"role": "tool", "content": "<b>output</b>"},
        {"role": "assistant", "content": "6"},
    ]
    more = {"messages": told, "turn_rewards": [0.25, None], "calls": {"search": [2, 1]}}
    text = render_page([Run(make_run(tmp_path / "turns", **more))])
    check_page(text)
    assert "&lt;b&gt;output&lt;/b&gt;" in text
    assert "reward of the turn 0.25" in text
    assert "2 calls of search, 1 failed" in text


def test_an_audit_is_shown(run):
    found = {"passed": False, "faults": ["<b>gamed</b>"], "remarks": ["slow"]}
    (run / "audit.json").write_text(json.dumps(found))
    text = render_page([Run(run)])
    assert "found faults" in text
    assert "fault: &lt;b&gt;gamed&lt;/b&gt;" in text


@pytest.mark.parametrize("kept", ["metrics.csv", "config.yaml", "evaluation", ""])
def test_a_page_is_made_of_any_remaining_files(kept, run):
    for path in run.iterdir():
        if path.name not in (kept, "evaluation"):
            path.unlink()
    for path in (run / "evaluation").iterdir():
        if kept != "evaluation":
            path.unlink()
    check_page(render_page([Run(run)], [None]))


def test_ten_thousand_iterations_stay_small(tmp_path):
    text = render_page([Run(make_run(tmp_path / "long", iterations=10_000))])
    check_page(text)
    assert len(text) < GOAL
    assert "99" in re.findall(r"optim/grad_norm.*", text)[-1]  # the spike is in the last table


def test_several_runs_are_paired_with_the_first(tmp_path):
    runs = [Run(make_run(tmp_path / name, right=n)) for name, n in (("a", 15), ("b", 4))]
    text = render_page(runs)
    check_page(text)
    assert "b against a" in text
    assert "0 gained, 11 lost" in text
    assert "Charts of all runs" in text
    assert len(text) < LIMIT


def test_eight_runs_keep_to_the_limit(tmp_path):
    runs = [Run(make_run(tmp_path / f"r{n}", iterations=2_000)) for n in range(8)]
    assert len(render_page(runs).encode()) < LIMIT
