import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from litgrpo.callbacks import progress
from litgrpo.callbacks.progress import (
    BATCHES,
    ITERATIONS,
    Progress,
    WholeItems,
    estimate_run_time,
    format_duration,
    format_metrics,
    main_metrics,
)
from tests.support.fitting import fit
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def test_only_logged_metrics_are_shown():
    logged = {"reward/mean": 0.5, "completion/len_mean": 12.0, "optim/lr": 1e-3}
    assert format_metrics(logged) == {"reward": "0.500", "len": "12.0"}
    assert format_metrics(logged | {"policy/kl": 0.01}) == {
        "reward": "0.500",
        "kl": "0.010",
        "len": "12.0",
    }


ITEMS = {"reward": "0.512", "kl": "0.001", "len": "123", "tok/s": "3189"}


def line_of(width, items, bar_format=ITERATIONS):
    bar = WholeItems(
        total=3000, desc="training", bar_format=bar_format, ncols=width, file=StringIO()
    )
    bar.n = 1250
    bar.set_postfix(items)
    return str(bar)


@pytest.mark.parametrize("items", [ITEMS, {"loss": "12.3"}, {}])
@pytest.mark.parametrize("bar_format", [ITERATIONS, BATCHES])
def test_no_item_of_the_bar_is_cut(items, bar_format):
    def parts(line):
        return re.split(r", | (?=\||\d+:)", line)

    whole = line_of(1000, items, bar_format)
    for width in range(30, 121):
        line = line_of(width, items, bar_format)
        assert len(line) <= width
        assert set(parts(line)) <= set(parts(whole))
        assert parts(line)[0] == parts(whole)[0]
        if width >= len(whole):
            assert line == whole


def test_a_line_of_80_columns_has_whole_metrics_and_a_wider_one_all_of_them():
    assert line_of(80, ITEMS).endswith("<00:00, reward=0.512, kl=0.001")
    assert line_of(120, ITEMS).endswith("<00:00, reward=0.512, kl=0.001, len=123, tok/s=3189")
    assert line_of(44, ITEMS) == "training 1250/3000 00:00<00:00, reward=0.512"


def test_at_most_four_names_are_shown():
    logged = {"reward/mean": 1.0, "sft/loss": 1.0, "policy/kl": 1.0, "completion/len_mean": 1.0}
    assert list(format_metrics(logged | {"perf/tokens_per_s": 1.0})) == [
        "reward",
        "loss",
        "kl",
        "len",
    ]


def test_each_validation_set_has_its_metrics_in_the_line():
    names = ["avg@2", "greedy", "correct", "format", "len_mean"]
    numbers = dict.fromkeys(names, 0.5)
    one = [line.split()[0] for line in main_metrics(numbers)]
    assert one == names[:4]
    two = main_metrics({f"{name}/{key}": 0.5 for name in ("easy", "hard") for key in names})
    assert [line.split()[0] for line in two] == [
        "easy/avg@2",
        "easy/greedy",
        "hard/avg@2",
        "hard/greedy",
    ]
    six = main_metrics({f"{name}/{key}": 0.5 for name in "abcdef" for key in names})
    assert [line.split()[0] for line in six] == [f"{name}/avg@2" for name in "abcdef"]


def test_the_time_that_is_left_counts_iterations_and_evaluations():
    line = "about 4 min left: 249 iterations at 0.8 s, 2 evaluations at 20.0 s"
    assert estimate_run_time(249, 0.8, 20.0, 125) == line
    assert (
        estimate_run_time(10_000, 3.6, None, 50) == "about 10.0 h left: 10,000 iterations at 3.6 s"
    )
    assert [*map(format_duration, (42.3, 600, 36_000))] == ["42 s", "10 min", "10.0 h"]


ESTIMATE = "about T s left: 2 iterations at T s, 1 evaluation at T s"


def without_times(line: str) -> str:
    return re.sub(r"[0-9.]+ s\b", "T s", line) if " left: " in line else line


def test_without_a_terminal_there_are_a_few_plain_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "ESTIMATE_AFTER_S", 0.0)
    module = StandIn(3)
    module.success = {}
    fit(
        tmp_path,
        Progress(every_s=0.0),
        module=module,
        enable_progress_bar=True,
        val_check_interval=2,
    )
    lines = [without_times(line) for line in capsys.readouterr().out.splitlines()]
    report = ", greedy {0}, correct 0.500, format 1.000"
    assert lines == [
        "before training 1 of 2",
        "before training 2 of 2",
        "iteration 0: avg@2 0.000 [-0.100, 0.100]" + report.format("0.000"),
        ESTIMATE,
        "training 1/3 reward 0.500 len 3.000",
        "training 2/3 reward 0.500 len 3.000",
        "iteration 2: avg@2 0.100 [0.000, 0.200]" + report.format("0.100"),
        "training 3/3 reward 0.500 len 3.000",
        "iteration 3: avg@2 0.200 [0.100, 0.300]" + report.format("0.200"),
    ]


def test_the_estimate_waits_for_some_seconds_and_leaves_out_the_first_iteration(
    monkeypatch, capsys
):
    now, bar = [0.0], Progress()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    trainer = SimpleNamespace(enable_validation=False, callback_metrics={})
    for iteration, seconds in enumerate([3.0, 1.0, 1.5, 9.0], start=1):
        bar.on_train_batch_start(trainer)
        now[0] += seconds
        module = SimpleNamespace(iteration=iteration, max_iterations=100)
        bar.on_train_batch_end(trainer, module)
        printed = capsys.readouterr().out
        assert printed == (
            "about 2 min left: 97 iterations at 1.2 s\n" if iteration == 3 else ""
        ), iteration


IN_A_TERMINAL = """
import logging, sys, warnings
from pathlib import Path
from litgrpo.cli.console import survive_closed_output
survive_closed_output()
from lightning.pytorch import Callback
from litgrpo.callbacks import progress
from litgrpo.callbacks.progress import Progress
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn
from tests.support.fitting import fit
from tests.support.standin import StandIn

class Talks(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        rank_zero_info("a log line")
        rank_zero_warn("a warning")
        print("no end yet [/INST] ", end="", flush=True)
        print("printed", module.iteration)
        print("the line of a file of Windows\\r")
        print("an error line", file=sys.stderr)
        if module.iteration == 2:
            print("without an end", end="")
            raise SystemExit(0)

warnings.simplefilter("always")
progress.ESTIMATE_AFTER_S = 0.0
fit(Path(), Progress(), Talks(), module=StandIn(3), enable_progress_bar=True, val_check_interval=2)
"""


def run_in_terminal(script: str, folder: Path, columns: int, **variables: str) -> list[str]:
    """Return the lines on the screen after a Python script ran in a terminal."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    environment = os.environ | {"PYTHONPATH": paths, "TERM": "xterm"} | variables
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    child = subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, env=environment, start_new_session=True, **ends
    )
    os.close(terminal)
    written = b""
    while part := read_some(controller):
        written += part
    os.close(controller)
    assert child.wait() == 0, written.decode()
    return screen(written.decode(), columns or 80)


def read_some(controller: int) -> bytes:
    """Return what was written; nothing when the program has ended."""
    try:
        return os.read(controller, 65536)
    except OSError:
        return b""


def screen(text: str, columns: int) -> list[str]:
    """Return the lines that a terminal shows: text, line breaks and carriage returns."""
    lines: list[list[str]] = [[]]
    column = 0
    for character in text:
        if character == "\r":
            column = 0
        elif character == "\n" or column == columns:
            lines.append([])
            column = 0
        if character not in "\r\n":
            row = lines[-1]
            row.extend(" " * (column + 1 - len(row)))
            row[column] = character
            column += 1
    return ["".join(row).rstrip() for row in lines]


# 0: a terminal that does not know its size
@pytest.mark.parametrize(("columns", "unbuffered"), [(80, "1"), (0, "")])
def test_the_bar_and_other_lines_are_on_lines_of_their_own(columns, unbuffered, tmp_path):
    lines = run_in_terminal(IN_A_TERMINAL, tmp_path, columns, PYTHONUNBUFFERED=unbuffered)
    for n in (1, 2):
        start = lines.index(f"no end yet [/INST] printed {n}")
        assert lines[start + 1 : start + 3] == ["the line of a file of Windows", "an error line"]
        assert lines[start - 4 :].count("a log line") == 3 - n
    assert sum("UserWarning: a warning" in line for line in lines) == 2
    assert "without an end" in lines
    (estimate,) = (line for line in lines if line.startswith("about "))
    assert without_times(estimate) == ESTIMATE
    bars = [line for line in lines if "|" in line]
    assert len(bars) == 1  # the others were cleared
    assert bars[0].startswith("training 2/3 |")
    assert lines[lines.index(bars[0]) :] == [bars[0], "", ""][: len(lines) - lines.index(bars[0])]


def test_lines_are_rare_by_default(tmp_path, capsys):
    fit(tmp_path, Progress(), module=StandIn(3), enable_progress_bar=True)
    assert "1/3" not in capsys.readouterr().out
