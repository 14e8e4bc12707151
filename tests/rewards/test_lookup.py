import subprocess
import sys
from importlib import import_module

import pytest

from litgrpo import rewards
from litgrpo.rewards.lookup import PUBLIC, resolved


@pytest.mark.parametrize("name", PUBLIC)
def test_every_shipped_function_is_public_by_name(name):
    function = resolved("r", f"litgrpo.rewards.{name}", {})
    assert function.__name__ == name
    assert function is getattr(rewards, name)


@pytest.mark.parametrize("name", rewards.__all__)
def test_every_class_is_public_by_name(name):
    assert getattr(rewards, name).__name__ == name


def test_looking_up_a_function_imports_no_torch():
    code = "import sys; from litgrpo.rewards import correctness; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("litgrpo.rewards.math.correctness", "litgrpo.rewards.correctness"),
        ("litgrpo.rewards.length.cosine_length", "litgrpo.rewards.cosine_length"),
        ("litgrpo.rewards.diversity.distinct", "litgrpo.rewards.distinct"),
        ("litgrpo.rewards.dialogue.lapdog", "litgrpo.rewards.lapdog"),
    ],
)
def test_an_old_path_works_with_a_line_that_names_the_new_one(old, new, caplog):
    module, _, name = new.rpartition(".")
    assert resolved("r", old, {}) is getattr(import_module(module), name)
    assert caplog.messages == [f"the reward function {old} is now {new}; the old path will go"]
