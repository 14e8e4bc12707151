import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from torch.distributed import DistNetworkError

from litgrpo import GRPO, PromptData, __version__
from litgrpo.cli.help import WIDTH
from litgrpo.cli.main import COMMANDS, CONNECTION_LOST, user_error
from litgrpo.cli.options import options_of
from litgrpo.cli.parser import RUN_OPTIONS, RecipeCLI
from tests.support.command_line import ROOT, error_of, run_python, without_leaks

pytestmark = pytest.mark.filterwarnings("ignore:.*The process .* is using fork")


def test_the_help_of_the_program_is_one_page_and_immediate():
    page, _ = run_python("cli.py", "--help")
    script = "import sys; from litgrpo.cli.main import help_page; help_page(); "
    script += "print({'torch', 'lightning'} & {*sys.modules})"
    assert run_python("-c", script)[0] == "set()\n"
    assert len(page.splitlines()) < 40
    for command in ("fit", "validate", "test", "predict", "export"):
        assert f"\n  {command}" in page
    assert "python cli.py fit -c quickstart" in page


def test_the_version_is_printed(cli):
    assert cli("--version") == (0, f"litgrpo {__version__}\n", "")


def test_an_unknown_command_gets_the_nearest(cli):
    code, _, err = cli("fitt")
    assert (code, "did you mean 'fit'" in err, err.count("\n")) == (2, True, 1)


@pytest.mark.parametrize("words", [["--debug"], ["--debug", "true"], ["--debug=true"]])
def test_debug_shows_the_traceback_instead(cli, words):
    with pytest.raises(ValueError, match="group_size is 0"):
        cli("fit", "-c", "grpo.yaml", "--model.group_size", "0", *words)


def test_debug_can_be_switched_off(cli):
    words = ("fit", "-c", "grpo.yaml", "--model.group_size", "0", "--debug", "false")
    assert "group_size is 0" in error_of(cli, *words)


def test_a_bug_keeps_its_traceback(cli):
    # Raised by third-party code that checks no input.
    with pytest.raises(ValueError, match="a bug"):
        cli("fit", "-c", "recipe.yaml", "--data.broken", "true")


@pytest.mark.parametrize(
    ("error", "is_noted"),
    [
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"), True),
        (DistNetworkError("Connection timed out"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_lost_connection_to_another_rank_keeps_its_traceback_and_gets_a_note(
    error, is_noted, cli, monkeypatch
):
    def lose_connection(*_):
        raise error

    monkeypatch.setattr("litgrpo.cli.main.run", lose_connection)
    with pytest.raises(type(error)):
        cli("fit", "-c", "recipe.yaml")
    assert getattr(error, "__notes__", []) == [CONNECTION_LOST] * is_noted


def test_a_clone_that_is_not_installed_prints_one_line():
    command = [sys.executable, "-I", "-S", str(ROOT / "cli.py"), "fit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: No module named 'torch'")
    assert "pip install -r requirements.txt" in line


@pytest.mark.parametrize("within", ["", "lightning"])
def test_ctrl_c_while_libraries_load_is_one_line(cli, monkeypatch, within):
    def interrupt(*_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if within:  # Lightning's trainer makes an exit of it
                raise SystemExit(1)  # noqa: B904
            raise

    monkeypatch.setattr("litgrpo.cli.main.run", interrupt)
    code, out, err = cli("fit", "-c", "recipe.yaml")
    assert (code, out, err.count("\n")) == (130, "", 1)


def test_garbage_of_the_imports_is_frozen_once(cli):
    assert cli("doctor", "nowhere")[0] == 2
    assert gc.get_freeze_count() > 0
    assert gc.isenabled()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_one_style_and_lists_its_options(cli, command):
    code, out, err = cli(command, "--help")
    assert (code, err) == (0, "")
    usage, _, summary, *_ = out.splitlines()
    said = COMMANDS[command].summary
    assert usage.startswith(f"usage: python cli.py {command} ")
    assert usage.endswith(" [--OPTION VALUE ...]")
    assert summary == f"{said[0].upper()}{said[1:]}."
    if COMMANDS[command].recipe:
        options = {**options_of(GRPO, "model"), **options_of(PromptData, "data")}
        keys = [*(option.key for option in options.values()), *RUN_OPTIONS]
        own = COMMANDS[command].load()
        keys += [*options_of(own)] if own else []
        assert [key for key in keys if f"--{key} " not in out] == []
        assert max(map(len, out.splitlines())) <= WIDTH


@pytest.mark.parametrize("columns", [60, 140])
def test_help_is_as_wide_as_the_terminal(cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["plan", "--help"], ["compare", "--help"]):
        described = [line for line in cli(*words)[1].splitlines() if line.startswith("  ")]
        assert columns - 25 < max(map(len, described)) <= columns


def test_pages_call_the_program_by_its_name():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [page.name for page in pages if "python cli.py" in page.read_text(encoding="utf-8")]
    # Where a clone without an installation is explained.
    assert found == ["command_line.md"]


def test_dashes_and_switches_without_a_value_are_accepted(cli):
    Path("metrics.csv").write_text("step\n1\n")
    code, _, err = cli("doctor", "nowhere", "--fail-on", "warning")
    assert (code, "nowhere" in err) == (2, True)
    code, out, _ = cli("fit", "-c", "recipe.yaml", "--overwrite", "--print_config")
    assert (code, "overwrite: true" in out) == (0, True)


TEXTS = ["{{ prompt }}", "Q: {{ prompt }}\nA:", "- x", "# Question", "[a]", "'a'", "5", "😀 a: b"]
TEXTS += ["[{{ prompt }}] # yes", '{{ prompt }}{{ "\\n" }}', "no", "010", "1:30", "a \\neq b"]


@pytest.mark.parametrize("text", TEXTS)
def test_an_option_that_takes_text_and_a_recipe_keep_any_text(text, cli):
    recipe = {"data": {"reference_template": text}}
    Path("text.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    words = [f"--data.{option}={text}" for option in ("template", "chat.system")]
    words += ["--data.columns.prompt", text, "-c", "text.yaml"]
    data = RecipeCLI(["-c", "grpo.yaml", *words]).recipe["data"]["init_args"]
    assert (data["template"], data["chat"]["system"], data["columns"]["prompt"]) == (text,) * 3
    assert data["reference_template"] == text


def test_one_prompt_needs_no_list(cli):
    words = ("--model.pretrained", "x", "--data.prompts", "Is a: b?", "--print_config")
    _, out, _ = cli("predict", *words)
    assert yaml.safe_load(out)["data"]["init_args"]["prompts"] == "Is a: b?"


INTERRUPTED_TWICE = """
import atexit, os, signal, sys, time
from litgrpo.cli import main as program
def interrupt_at_exit():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
def run(name, words):
    try:
        raise SystemExit(130)  # a run that a first Ctrl-C stopped, after it was saved
    finally:
        os.kill(os.getpid(), signal.SIGINT) if "teardown" in words else atexit.register(
            interrupt_at_exit
        )
        time.sleep(0.1)
program.run = run
sys.argv = ["cli.py", "fit", *sys.argv[1:]]
program.run_program()
"""


@pytest.mark.parametrize("when", ["teardown", "exit"])
def test_a_second_interrupt_while_the_process_exits_changes_nothing(when):
    command = [sys.executable, "-c", INTERRUPTED_TWICE, when]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=50
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["fit", "--run_dir", b"runs/\xfc"], {}, "LC_ALL=C.UTF-8"),
        (["fit", "--run_dir", "runs/ü"], {"LC_ALL": "C", "PYTHONUTF8": "0"}, "LC_ALL=C.UTF-8"),
        (["fit"], {"OMP_NUM_THREADS": "abc"}, "OMP_NUM_THREADS is 'abc'"),
        (["fit"], {"OMP_NUM_THREADS": "-1"}, "OMP_NUM_THREADS is '-1'"),
    ],
)
def test_a_wrong_environment_is_named_before_anything_is_imported(words, variables, said):
    command = [sys.executable, str(ROOT / "cli.py"), *words]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | variables)
    error = done.stderr.decode()
    assert (done.returncode, said in error, error.count("\n")) == (2, True, 1)


def test_a_recipe_whose_paths_the_locale_cannot_write_ends_in_one_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("run_dir: runs/ü\nmodel: {}\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "cli.py"), "fit", "-c", "quickstart", "-c", "mine.yaml"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        command, capture_output=True, check=False, env=environment, cwd=tmp_path, timeout=100
    )
    error = without_leaks(done.stderr.decode())
    assert (done.returncode, "LC_ALL=C.UTF-8" in error, error.count("\n")) == (2, True, 1)


def test_the_help_of_an_option_is_of_the_class_that_the_recipe_names(cli):
    Path("spo.yaml").write_text(
        "model: {class_path: litgrpo.GRPO, init_args: {engine: {class_path: "
        "litgrpo.rollout.engines.static.StaticEngine}, update: {max_grad_norm: 2.0}}}\n"
    )
    code, page, _ = cli("fit", "-c", "spo.yaml", "--model.engine.help")
    assert (code, "--model.engine.prompt_buckets" in page) == (0, True)
    assert "--model.engine.max_rows" not in page
    # An option's default class, and a class that is asked for, are not affected.
    assert "--model.engine.max_rows" in cli("fit", "--model.engine.help")[1]
    asked = cli("fit", "-c", "spo.yaml", "--model.engine.help", "LocalEngine")[1]
    assert "--model.engine.max_rows" in asked
    assert (
        "--model.update.num_mini_batches" in cli("fit", "-c", "spo.yaml", "--model.update.help")[1]
    )
    assert cli("fit", "-c", "spo.yaml", "--model.pretrained.help")[0] == 0


@pytest.mark.parametrize(
    ("blocks", "inodes", "file", "number", "is_shared_memory"),
    [
        (0, 9, None, errno.ENOSPC, True),  # of multiprocessing: it names no file
        (0, 9, "/dev/shm/psm_1", errno.ENOSPC, True),
        (9999, 0, None, errno.ENOSPC, True),
        (9999, 9, None, errno.ENOSPC, False),
        (0, 9, "runs/a/metrics.csv", errno.ENOSPC, False),
        (0, 9, None, errno.EROFS, False),
    ],
)
def test_full_shared_memory_is_not_reported_as_a_full_disk(
    monkeypatch, blocks, inodes, file, number, is_shared_memory
):
    state = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_favail=inodes, f_files=9)
    monkeypatch.setattr("os.statvfs", lambda path: state)
    message, code = user_error(OSError(number, os.strerror(number), file))
    assert code == 1
    assert ("--shm-size" in message) == is_shared_memory
    assert ("choose another folder" in message) != is_shared_memory
