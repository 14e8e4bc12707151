import gc
import subprocess
import sys

import pytest

from litgrpo import __version__
from litgrpo.program import quick_imports
from tests.cli.running import ROOT, cli, in_a_process  # noqa: F401 (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:.*The process .* is using fork")


def test_the_help_of_the_program_is_one_page_and_immediate():
    page, _ = in_a_process("cli.py", "--help")
    script = "import sys; from litgrpo.program import help_page; help_page(); "
    script += "print({'torch', 'lightning'} & {*sys.modules})"
    assert in_a_process("-c", script)[0] == "set()\n"
    assert len(page.splitlines()) < 40
    for verb in ("fit", "validate", "test", "predict", "export"):
        assert f"\n  {verb}" in page
    assert "python cli.py fit -c quickstart" in page


def test_the_version_is_told(cli):  # noqa: F811
    assert cli("--version") == (0, f"litgrpo {__version__}\n", "")


def test_a_wrong_verb_names_the_nearest(cli):  # noqa: F811
    assert cli("fitt") == (2, "", "error: there is no verb 'fitt': did you mean 'fit'?\n")


def test_debug_shows_the_traceback_instead(cli):  # noqa: F811
    with pytest.raises(ValueError, match="group_size is 0"):
        cli("fit", "-c", "grpo.yaml", "--model.group_size", "0", "--debug")


def test_a_bug_keeps_its_traceback(cli):  # noqa: F811
    # Raised by code that is not ours and checks no input.
    with pytest.raises(ValueError, match="a bug"):
        cli("fit", "-c", "recipe.yaml", "--data.broken", "true")


def test_a_clone_that_is_not_installed_says_so_in_one_line():
    command = [sys.executable, "-I", "-S", str(ROOT / "cli.py"), "fit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: No module named 'torch'")
    assert "pip install -r requirements.txt" in line


@pytest.mark.parametrize("within", ["", "lightning"])
def test_ctrl_c_while_libraries_load_is_one_line(cli, monkeypatch, within):  # noqa: F811
    def interrupted(*_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if within:  # Lightning's trainer makes an exit of it
                raise SystemExit(1)  # noqa: B904
            raise

    monkeypatch.setattr("litgrpo.program.run", interrupted)
    said = "interrupted, with nothing to save yet\n"
    assert cli("fit", "-c", "recipe.yaml") == (130, "", said)


def test_garbage_is_looked_for_after_imports_and_not_during_them(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))

    def broken():
        with quick_imports():
            assert not gc.isenabled()
            raise ImportError("broken")

    for _ in range(2):
        with pytest.raises(ImportError, match="broken"):
            broken()
        assert gc.isenabled()
    assert len(frozen) == 1
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()  # as the caller had it
    finally:
        gc.enable()
