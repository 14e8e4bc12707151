import sys

import pytest

from litgrpo.data.sources import ReasoningGym, row_of_entry
from litgrpo.rewards import Reward, Scorer, Scoring
from litgrpo.rewards.builtin import reasoning_gym as reward
from litgrpo.rewards.calls import Call
from litgrpo.rewards.runner import stays_in_process
from litgrpo.workers.sandbox.wire import loads
from tests.support.raises import raises_for

# The package leaves its files open.
pytestmark = pytest.mark.filterwarnings("ignore")
NO_PACKAGE = "reasoning-gym is not installed"


def test_it_runs_in_a_worker_and_not_in_the_training_process():
    call = Call("right", reward.reasoning_gym, {}, {}, 1)
    assert not stays_in_process(call)
    assert call.row_timeout_s == 2.0


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('ls')",
        "exit()",
        "open ('x')",
        "open#\n('x')",
        "open\\\n('x')",
        "[open#\n('x', 'w')]",
        "[open\\\n('x', 'w')]",
        "[[open][0]#\n('x', 'w')]",
        "[open\f('x', 'w')]",
        "(open)('x')",
        "open('x')!",
        "[exec(x) for x in y]",
        "f'{exit()}'",
        "x[exit()]",
        "(lambda: 1)()",
        "[f][0](1)",
        "9**9**9",
        "9**(9**9)",
        "9**(99*99*99)",
        "(9**99)**99",
        "2**99999",
        "2**" + "-" * 1900 + "1",
        "1" * 2_001,
        "'{0.__class__}'.x",
        "x.y(1)",
        "sin(exit())",
        "sin(*exit())",
        "print(sin(1))",
        "import os",
        "2**'a'",
    ],
)
def test_dangerous_answers_are_screened_where_answers_are_evaluated(answer):
    for task in reward.EVALUATED:
        assert not reward.passes_screen(task, answer, "{}")


@pytest.mark.parametrize("answer", ["oracle_answer", "[oracle_answer]", "self", "entry", "answer"])
def test_a_list_cannot_name_the_variables_of_the_function_that_scores_it(answer):
    assert not reward.passes_screen("string_insertion", answer, "{}")


@pytest.mark.parametrize(
    "answer", ["exec", "eval*2", "sin(exec)", "x + self", "sin", "\uff45xec", "_1", "S[0]", "1j"]
)
def test_a_formula_has_variables_of_one_letter_and_calls_functions_of_mathematics(answer):
    assert not reward.passes_screen("countdown", answer, "{}")


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("countdown", "(3 + 4)*5 - 2/1"),
        ("polynomial_multiplication", "-84912*x**6 - 658068*x**5 + 7"),
        ("simple_integration", "7*X**9 - X**(2/3) + sin(2*X)*exp(X) + C"),
        ("simple_integration", "pi*X + C"),
        ("intermediate_integration", "3*Integral(x**3*cos(3*x), x) + C"),
        ("n_queens", "_ Q _ _\n_ _ _ Q"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("spiral_matrix", "1 2 3 6 9"),
        ("spiral_matrix", "[1, -2, 3.5]"),
        ("gcd", "f(x) __"),
    ],
)
def test_honest_answers_pass_the_screen(task, answer):
    assert reward.passes_screen(task, answer, "{}")


def test_the_reference_answer_passes_the_screen_whatever_it_is():
    entry = row_of_entry("string_insertion", {"question": "", "answer": " f(x)! "})["metadata"]
    assert reward.passes_screen("string_insertion", "f(x)!", entry)
    assert not reward.passes_screen("string_insertion", "f(y)!", entry)


def test_a_word_that_is_no_verdict_of_halting_passes_no_screen():
    assert not reward.passes_screen("game_of_life_halting", "banana", "{}")
    assert reward.passes_screen("game_of_life_halting", "True", "{}")


def test_one_answer_between_tags_counts():
    assert reward.extract_one_answer("so <answer> 7 </answer>") == "7"
    assert reward.extract_one_answer("<answer>7</answer> <answer>8</answer>") is None
    assert reward.extract_one_answer("7") is None
    assert reward.extract_one_answer("a b", require_tags=False) == "a b"


def test_scores_below_the_limit_count_as_nothing(monkeypatch):
    scores = {"1": 0.05, "2": 0.5, "3": 1.0}
    monkeypatch.setattr(reward, "installed_version", lambda: reward.TESTED_VERSION)
    monkeypatch.setattr(reward, "score_answer", lambda name, answer, *_: scores[answer])
    answers = [f"<answer>{text}</answer>" for text in scores]
    found = reward.reasoning_gym([], answers, ["{}"] * 3, ["countdown"] * 3, min_score=0.5)
    assert found == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("setting", [{"min_score": 2}, {"min_score": -0.1}], ids=str)
def test_settings_that_mean_nothing_are_refused(setting):
    with raises_for(next(iter(setting))):
        reward.reasoning_gym([], [], [], [], **setting)


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
        ours = reward.reasoning_gym([""], [said], [entry], [task])
        assert ours == [from_package(task)(row["answer"], loads(entry))], task
    assert len(without) == 5


def attack(program):
    """Return an answer that executes a program, for `eval` and for sympy, which replaces names."""
    builtins = "__import__('builtins')"
    return f"{builtins}.exec({builtins}.bytes.fromhex('{program.encode().hex()}'), {{}})"


def configs(task):
    """Return the settings of a task; `composite` has no problems without a list of tasks."""
    if task != "composite":
        return {}
    from reasoning_gym.composite import DatasetSpec

    return {task: {"datasets": [DatasetSpec(each, 1.0, {}) for each in ("n_queens", "countdown")]}}


def scores_with(task, program, **settings):
    """Return the scores of a correct, a hostile, an incorrect and a correct answer."""
    row, other = ReasoningGym({task: 1}, size=2, seed=4, configs=configs(task)).rows()
    incorrect = "0" if row["answer"] != "0" else "1"
    answers = [row["answer"], attack(program), incorrect, other["answer"]]
    entries = [row["metadata"]] * 3 + [other["metadata"]]
    said = [f"<answer>{each}</answer>" for each in answers]
    return reward.reasoning_gym([""] * 4, said, entries, [task] * 4, **settings)


def test_no_program_is_evaluated():
    for task in reward.EVALUATED:
        assert not reward.passes_screen(task, attack("import os\nos._exit(0)"), "{}")


@pytest.mark.parametrize("task", sorted(reward.EVALUATED))
def test_a_hostile_answer_scores_nothing_and_changes_no_score_of_another(task, tmp_path):
    pytest.importorskip("reasoning_gym", reason=NO_PACKAGE)
    marker = tmp_path / "marker"
    found = scores_with(task, f"import os\nos.mkdir({str(marker)!r})", min_score=0.5)
    assert found == [1.0, 0.0, 0.0, 1.0]
    assert not marker.exists()


@pytest.mark.parametrize(("found", "told"), [("9.9", "9.9"), (None, "none")])
def test_another_version_or_none_is_rejected_before_training_and_in_it(found, told, monkeypatch):
    monkeypatch.setattr(reward, "installed_version", lambda: found)
    # In this process, where the version is another one.
    settings = Scoring(num_workers=0)
    scorer = Scorer({"right": Reward("litgrpo.rewards.reasoning_gym")}, settings)
    columns = {"metadata": ["{}"] * 2, "task": ["gcd", "countdown"]}
    with raises_for("right", told, f"reasoning-gym=={reward.TESTED_VERSION}"):
        scorer.check(columns)
    with raises_for("right", told, f"reasoning-gym=={reward.TESTED_VERSION}"):
        scorer(["?"] * 2, ["<answer>1</answer>"] * 2, columns, group_size=2)


def test_answers_are_scored_in_workers():
    pytest.importorskip("reasoning_gym", reason=NO_PACKAGE)
    row = ReasoningGym({"countdown": 1}, size=1, seed=3).rows()[0]
    scorer = Scorer({"right": Reward("litgrpo.rewards.reasoning_gym")}, Scoring())
    columns = {"metadata": [row["metadata"]] * 2, "task": ["countdown"] * 2}
    said = [f"<answer>{row['answer']}</answer>", "<answer>exit()</answer>"]
    assert scorer(["?"] * 2, said, columns, group_size=2).total.tolist() == [[1.0, 0.0]]
    scorer.close()
