import inspect
from importlib import import_module

import pytest

from litgrpo import GRPO, SFT, PromptData
from litgrpo.cli.help_page import PACKAGE, WIDTH, documented, function_page, page, plan_page
from litgrpo.cli.plan_keys import PLAN_KEYS
from litgrpo.cli.verbs import COMMANDS
from tests.cli.running import in_a_process

MOST_LINES = 60


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_the_page_fits_on_a_screen(verb):
    lines = page("python cli.py", verb, "what it does").splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= WIDTH


def test_every_key_of_model_and_data_is_on_the_page():
    shown = page("litgrpo", "fit", "")
    for owner in (GRPO, PromptData):
        assert [p for p in inspect.signature(owner).parameters if p not in shown] == []


@pytest.mark.parametrize("verb", sorted(COMMANDS.keys() - {"plan"}))
def test_the_page_of_a_function_names_all_it_takes_and_fits_on_a_screen(verb):
    module = COMMANDS[verb][0]
    shown = function_page("litgrpo", verb, module)
    lines = shown.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= WIDTH
    for name, each in inspect.signature(vars(import_module(module))[verb]).parameters.items():
        key = "-c RECIPE" if name == "recipes" else f"--{name}"
        assert (name.upper() if each.default is each.empty else key) in shown


def test_the_page_of_plan_names_its_options():
    shown = plan_page("litgrpo", "what it does")
    assert [name for name in PLAN_KEYS if f"--{name}" not in shown] == []
    assert len(shown.splitlines()) <= MOST_LINES


def test_defaults_that_say_something_are_shown():
    shown = function_page("litgrpo", "compare", "litgrpo.tools.compare")
    assert "usage: litgrpo compare RECIPE [--KEY VALUE ...]" in shown
    assert "each use one thread. (1)" in shown
    assert "(None)" not in shown


def test_docstrings_are_read_without_an_import():
    read = documented(PACKAGE / "training" / "sft.py", "SFT")
    assert list(read) == list(inspect.signature(SFT).parameters)
    assert read["max_iterations"].startswith(
        "stop after so many optimizer steps; None: after three"
    )


@pytest.mark.parametrize("verb", ["fit", "plan", "doctor"])
def test_it_imports_nothing_slow(verb):
    words = f"['litgrpo', {verb!r}, '--help']"
    script = f"import sys; sys.argv = {words}; from litgrpo.program import main"
    out, used_s = in_a_process(
        "-c", f"{script}; main(); print({{'torch', 'lightning'}} & {{*sys.modules}})"
    )
    assert out.endswith("set()\n")
    assert used_s < 3
