import re

import pytest

from litgrpo.callbacks.progress import Progress, headlines, short
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def test_kl_is_shown_only_where_there_is_a_reference():
    logged = {"reward/mean": 0.5, "completion/len_mean": 12.0, "optim/lr": 1e-3}
    assert short(logged) == {"reward": "0.500", "len": "12.0"}
    assert short(logged | {"policy/kl": 0.01}) == {"reward": "0.500", "kl": "0.010", "len": "12.0"}


def test_at_most_four_names_are_shown():
    logged = {"reward/mean": 1.0, "sft/loss": 1.0, "policy/kl": 1.0, "completion/len_mean": 1.0}
    assert list(short(logged | {"perf/tokens_per_s": 1.0})) == ["reward", "loss", "kl", "len"]


def test_each_set_of_prompts_has_its_numbers_in_the_line():
    names = ["avg@2", "greedy", "correct", "format", "len_mean"]
    numbers = dict.fromkeys(names, 0.5)
    one = [line.split()[0] for line in headlines(numbers)]
    assert one == names[:4]
    two = headlines({f"{name}/{key}": 0.5 for name in ("easy", "hard") for key in names})
    assert [line.split()[0] for line in two] == [
        "easy/avg@2",
        "easy/greedy",
        "hard/avg@2",
        "hard/greedy",
    ]
    six = headlines({f"{name}/{key}": 0.5 for name in "abcdef" for key in names})
    assert [line.split()[0] for line in six] == [f"{name}/avg@2" for name in "abcdef"]


ESTIMATE = "about T s to go: 2 iterations of T s, 1 evaluation of T s"


def without_times(line: str) -> str:
    return re.sub(r"[0-9.]+ s\b", "T s", line) if "to go" in line else line


def test_without_a_terminal_there_are_a_few_plain_lines(tmp_path, capsys):
    progress = Progress(every_s=0.0)
    fit(tmp_path, progress, module=StandIn(3), enable_progress_bar=True, val_check_interval=2)
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


def test_lines_are_rare_by_default(tmp_path, capsys):
    fit(tmp_path, Progress(), module=StandIn(3), enable_progress_bar=True)
    assert "1/3" not in capsys.readouterr().out
