"""Rewards: names, import paths, checks of settings."""

import subprocess
import sys

import pytest

from litgrpo import rewards
from litgrpo.arguments import add_folders
from litgrpo.rewards.reward import builtin_rewards, environment, resolve_function


@pytest.mark.parametrize("name", builtin_rewards())
def test_every_shipped_function_is_public_by_name(name):
    function = resolve_function("r", f"litgrpo.rewards.{name}", {})
    assert function.__name__ == name
    assert function is getattr(rewards, name)


@pytest.mark.parametrize("name", rewards.__all__)
def test_every_class_is_public_by_name(name):
    assert getattr(rewards, name).__name__ == name


def test_looking_up_a_function_imports_no_torch():
    code = "import sys; from litgrpo.rewards import correctness; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A folder of the user's on the module path, as that of a recipe."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_folders([str(tmp_path), str(tmp_path)])
    assert sys.path.count(str(tmp_path)) == 1
    assert sys.path[-1] == str(tmp_path)  # what is installed goes before it
    return tmp_path


def test_a_module_that_is_nowhere_says_where_was_looked_and_guesses_nothing(beside):
    with pytest.raises(ValueError, match="looked in") as caught:
        resolve_function("r", "sorted_things.share", {})
    assert str(beside) in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_that_name", r"\(No module named 'nothing_of_that_name', .*line 1\)"),
        ("\nx = {}['a']", r"\(KeyError: 'a', .*line 2\)"),
        ("raise SystemExit(3)", r"\(SystemExit: 3, .*line 1\)"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_fails_says_how_and_where(beside, code, message):
    name = f"failing_{abs(hash(code))}"
    (beside / f"{name}.py").write_text(code)
    with pytest.raises(ValueError, match=message):
        resolve_function("r", f"{name}.f", {})


def test_an_episode_is_worth_the_sum_of_its_turns_and_abstains_where_all_do():
    assert environment("abc", "abc", [[1.0, None, 0.5], [None], []]) == [1.5, None, None]
