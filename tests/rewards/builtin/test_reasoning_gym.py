import socket
import subprocess
import sys

import pytest

from litgrpo.data.sources import ReasoningGym, row_of_entry
from litgrpo.rewards.builtin import reasoning_gym as reward
from litgrpo.rewards.calls import Call
from litgrpo.rewards.process_runner import stays_in_process
from litgrpo.workers import sandbox
from litgrpo.workers.sandbox.wire import loads
from tests.support.raises import raises_for

# The package leaves its files open.
pytestmark = pytest.mark.filterwarnings("ignore")
NO_PACKAGE = "reasoning-gym is not installed"
in_sandbox = pytest.mark.skipif(
    not sandbox.available(), reason=f"sandbox: {sandbox.unavailable_reason()}"
)


def test_it_runs_in_a_worker_and_not_in_the_training_process():
    assert not stays_in_process(Call("right", reward.reasoning_gym, {}, {}, 1))


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('ls')",
        "exit()",
        "open ('x')",
        "(lambda: 1)()",
        "[f][0](1)",
        "9**9**9",
        "9**(9**9)",
        "(9**99)**99",
        "2**99999",
        "1" * 2_001,
        "'{0.__class__}'",
        "x.y(1)",
        "sin(exit())",
        "print(sin(1))",
    ],
)
def test_dangerous_answers_are_screened_where_answers_are_executed(answer, monkeypatch):
    monkeypatch.setattr(reward, "installed_version", lambda: reward.TESTED_VERSION)
    assert not reward.passes_screen("countdown", answer, "{}")
    monkeypatch.setattr(reward, "installed_version", lambda: "9.9")  # nothing is known of it
    assert not reward.passes_screen("gcd", answer, "{}")


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("countdown", "(3 + 4)*5 - 2/1"),
        ("polynomial_multiplication", "-84912*x**6 - 658068*x**5 + 7"),
        ("simple_integration", "7*X**9 - X**(2/3) + sin(2*X)*exp(X) + C"),
        ("intermediate_integration", "3*Integral(x**3*cos(3*x), x) + C"),
        ("gcd", "f(x) __"),
    ],
)
def test_honest_answers_pass_the_screen(task, answer, monkeypatch):
    monkeypatch.setattr(reward, "installed_version", lambda: reward.TESTED_VERSION)
    assert reward.passes_screen(task, answer, "{}")


def test_a_word_that_is_no_verdict_of_halting_passes_no_screen(monkeypatch):
    monkeypatch.setattr(reward, "installed_version", lambda: reward.TESTED_VERSION)
    assert not reward.passes_screen("game_of_life_halting", "banana", "{}")
    assert reward.passes_screen("game_of_life_halting", "True", "{}")


def test_one_answer_between_tags_counts():
    assert reward.extract_one_answer("so <answer> 7 </answer>") == "7"
    assert reward.extract_one_answer("<answer>7</answer> <answer>8</answer>") is None
    assert reward.extract_one_answer("7") is None
    assert reward.extract_one_answer("a b", require_tags=False) == "a b"


@pytest.mark.parametrize(
    "setting",
    [{"min_score": 2}, {"min_score": -0.1}, {"timeout_s": 0}, {"isolation": "maybe"}],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(setting):
    with raises_for(next(iter(setting))):
        reward.reasoning_gym([], [], [], [], **setting)


def test_a_sandbox_that_died_scores_zero_and_is_replaced(monkeypatch):
    scorer = object.__new__(reward.SandboxedScorer)
    scorer.end, other = socket.socketpair()
    other.close()
    scorer.lines = scorer.end.makefile("r")
    scorer.running = subprocess.Popen(["sleep", "60"])
    monkeypatch.setitem(reward._scorers, 7.0, scorer)
    assert reward._score_in_sandbox("basic_arithmetic", "7", "{}", 7.0) == 0
    assert 7.0 not in reward._scorers
    assert scorer.running.wait() != 0  # killed


def names():
    """The tasks of the package; none without it."""
    library = pytest.importorskip("reasoning_gym", reason=NO_PACKAGE)
    assert library.__name__ in sys.modules
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def test_gold_answers_of_all_tasks_pass_the_screen_and_score_as_the_package_does():
    from_package = pytest.importorskip("reasoning_gym", reason=NO_PACKAGE).get_score_answer_fn
    tasks = names()
    assert len(tasks) == 105
    without = set()
    for task in tasks:
        row = ReasoningGym({task: 1}, size=1, seed=3).rows()[0]
        if row["answer"] is None:
            without.add(task)
            continue
        said, entry = f"<answer>{row['answer']}</answer>", row["metadata"]
        assert reward.passes_screen(task, row["answer"], entry), task
        ours = reward.reasoning_gym([""], [said], [entry], [task], isolation="never")
        assert ours == [from_package(task)(row["answer"], loads(entry))], task
    assert len(without) == 5


@in_sandbox
def test_what_an_executed_answer_does_stays_in_the_sandbox(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym", reason=NO_PACKAGE)
    monkeypatch.setattr(reward, "passes_screen", lambda *given: True)  # the second wall alone
    marker = tmp_path / "marker"
    row = ReasoningGym({"countdown": 1}, size=1).rows()[0]
    attacks = [
        f"__import__('os').mkdir({str(marker)!r})",
        "__import__('os')._exit(0)",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "9**9**9**9",
        row["answer"],
    ]
    said = [f"<answer>{each}</answer>" for each in attacks]
    rest = ([row["metadata"]] * 5, ["countdown"] * 5)
    scores = reward.reasoning_gym([""] * 5, said, *rest, min_score=0.5, timeout_s=1.0)
    assert scores == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert not marker.exists()


def test_always_refuses_to_go_without_a_sandbox(monkeypatch):
    monkeypatch.setattr(sandbox, "available", lambda: False)
    monkeypatch.setattr(sandbox, "unavailable_reason", lambda: "there is no bubblewrap")
    monkeypatch.setattr(reward, "installed_version", lambda: reward.TESTED_VERSION)
    monkeypatch.setattr(reward, "_scorers", {})
    row = row_of_entry("countdown", {"question": "", "answer": "1"})
    with raises_for("isolation", "bubblewrap"):
        reward.reasoning_gym(
            [""], ["<answer>1</answer>"], [row["metadata"]], ["countdown"], isolation="always"
        )
