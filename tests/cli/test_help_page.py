import inspect

import pytest

from litgrpo import GRPO, SFT, PromptData
from litgrpo.cli.help_page import PACKAGE, WIDTH, documented, page
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


def test_docstrings_are_read_without_an_import():
    read = documented(PACKAGE / "modules" / "sft.py", "SFT")
    assert list(read) == list(inspect.signature(SFT).parameters)
    assert read["max_iterations"].startswith(
        "stop after so many optimizer steps; None: after three"
    )


def test_it_imports_nothing_slow():
    script = "import sys; sys.argv = ['litgrpo', 'fit', '--help']; from litgrpo.program import main"
    out, used_s = in_a_process(
        "-c", f"{script}; main(); print({{'torch', 'lightning'}} & {{*sys.modules}})"
    )
    assert out.endswith("set()\n")
    assert used_s < 3
