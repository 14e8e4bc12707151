"""The program: `litgrpo COMMAND ...` when installed, `python cli.py COMMAND ...` in a clone."""

from __future__ import annotations

import difflib
import errno
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from litgrpo import __version__
from litgrpo.arguments import add_folders, import_by_path
from litgrpo.cli.console import keep_quiet, one_line, survive_closed_output
from litgrpo.cli.recipes import pair_words, recipe_file, split_words
from litgrpo.text.program import program_name
from litgrpo.text.secrets import mask_text
from litgrpo.text.visible import visible

WRONG_INPUT = 2
SIGNALLED = 128  # a process that stops because of a signal exits with 128 + its number
INTERRUPTED = 130  # 128 + SIGINT
TERMINATED = 143  # 128 + SIGTERM, the code that schedulers expect after a stop request
HELP_FLAGS = {"-h", "--help"}
# Errors of a disk that no check has reported.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_HINT = (
    "remove what other programs left there, enlarge it (docker run --shm-size), or use fewer "
    "processes"
)
CONNECTION_LOST = (
    "The connection to another rank is lost: a rank, its host or the network failed. The output of "
    "the other ranks may have the cause. Resume with --auto_resume true."
)
ENCODING_HINT = "is not text in the encoding of this terminal: set LC_ALL=C.UTF-8"

HELP = """\
litgrpo: GRPO for language models in PyTorch Lightning

usage: {program} COMMAND [-c RECIPE.yaml ...] [--OPTION VALUE ...]

commands:
{commands}

examples:
  {program} fit -c quickstart
  {program} fit -c quickstart --seed_everything 1 --run_dir runs/second
  {program} fit -c quickstart --ckpt_path last
  {program} predict -c runs/quickstart/config.yaml --ckpt_path last \\
    --data.prompts '["3+4="]'

A recipe is a YAML file or the name of a built-in one. A later -c overrides an
earlier one, and --OPTION VALUE overrides both. A run writes to one folder:
runs/NAME, with the name of the first recipe, or --run_dir.

  {program} --version                print the version
  {program} COMMAND --help           options of a command
  {program} fit --model.lora.help    options below an option
  {program} fit --model.help SFT     options of a class
  {program} COMMAND --debug          show tracebacks instead of one-line errors
"""


@dataclass(frozen=True)
class Command:
    """A command of the program.

    Args:
        summary: one line for `--help`.
        function: import path of the function whose options it has; "" for a method of the trainer.
        recipe: True if it reads recipes and overrides, as `fit` does.
    """

    summary: str
    function: str = ""
    recipe: bool = True

    def load(self) -> Callable[..., Any] | None:
        """Import the function."""
        return import_by_path(self.function) if self.function else None


COMMANDS = {
    "fit": Command("train; write results, checkpoints and the model to the run folder"),
    "validate": Command("evaluate on the held-out validation prompts"),
    "test": Command("evaluate on the test prompts"),
    "predict": Command("generate answers to prompts: print them, write JSONL"),
    "export": Command(
        "write a checkpoint's policy in Hugging Face format",
        "litgrpo.cli.export.export",
        recipe=False,
    ),
    "audit": Command(
        "check reward functions for false negatives and exploits", "litgrpo.audit.command.audit"
    ),
    "plan": Command(
        "count the memory of a recipe: does it fit, and what to change",
        "litgrpo.plan.command.plan",
    ),
    "compare": Command(
        "compare algorithms over seeds, with confidence intervals",
        "litgrpo.runs.compare.compare",
        recipe=False,
    ),
    "doctor": Command(
        "diagnose a run and suggest changes", "litgrpo.runs.doctor.command.doctor", recipe=False
    ),
    "replay": Command(
        "print an episode of a run, turn by turn", "litgrpo.runs.replay.replay", recipe=False
    ),
    "report": Command(
        "write one HTML page that shows a run, or compares several",
        "litgrpo.runs.report.command.report",
        recipe=False,
    ),
}


def run_trainer(command: str, words: Sequence[str]) -> None:
    """Train, evaluate or predict; write the HTML report of a training."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from litgrpo.cli.lightning_cli import LitGRPOCLI
    from litgrpo.runs.report.command import report_at_end

    try:
        done = LitGRPOCLI(command, words)
    except SIGTERMException as stop:
        raise SystemExit(TERMINATED) from stop
    if done.writes_a_report:
        report_at_end(done.config.run_dir)
    done.mark_complete()


def call(name: str, function: Callable[..., Any], words: Sequence[str]) -> None:
    """Call the function of a command, with its options or with a parsed recipe."""
    from litgrpo.cli.parser import RecipeCLI, parse_options

    if COMMANDS[name].recipe:
        parsed = RecipeCLI(words, name, extra=function)
        function(parsed, **parsed.extra_options)
    else:
        function(**parse_options(function, [word for word in words if word != "--debug"]))


def run_program() -> NoReturn:
    """Run the command on the command line, and exit."""
    code = main()
    exit_at_once_on_signals(code)
    sys.exit(code)


def main() -> int:
    """Run the command on the command line.

    Returns:
        The exit code: 0; 2 for wrong input; 75 if servers are away; 130 or 143 if stopped.
    """
    survive_closed_output()
    sys.excepthook = print_traceback
    words = sys.argv[1:]
    if problem := environment_problem(words):
        return print_error(problem)
    if not words or words[0] in HELP_FLAGS:
        print(help_page())
        return 0 if words else WRONG_INPUT
    if words == ["--version"]:
        print(f"litgrpo {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(COMMANDS)}"
        return print_error(f"unknown command {name!r}: {hint}")
    try:
        code = run_to_the_end(name, rest)
    except (KeyboardInterrupt, SystemExit) as stop:
        saved = code_of_interrupt(stop)
        if saved is None:
            raise
        code = saved
    return code


def run_to_the_end(name: str, words: list[str]) -> int:
    """Run a command; print an error that the user can fix. Return the exit code.

    The traceback of a lost connection ends with a note, because another rank has the cause.
    """
    try:
        run(name, words)
    except Exception as error:
        message, code = user_error(error)
        if message and not shows_tracebacks(words):
            return print_error(message, code)
        if is_connection_lost(error):
            error.add_note(CONNECTION_LOST)
        raise
    return 0


def shows_tracebacks(words: Sequence[str]) -> bool:
    """Return True for `--debug`, unless its value is false."""
    return any(option == "--debug" and value != "false" for option, value in pair_words(words))


def code_of_interrupt(stop: BaseException) -> int | None:
    """Return the exit code if a signal caused an exit, possibly a second one; else None."""
    chain, link = list[BaseException](), stop.__context__
    chain.append(stop)
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__context__
    codes = [error.code for error in chain if isinstance(error, SystemExit)]
    saved = next((code for code in codes if isinstance(code, int) and code > SIGNALLED), None)
    if saved is not None:
        return saved
    # Lightning turns an interrupt into an exit; during training it is saved instead.
    if any(isinstance(error, KeyboardInterrupt) for error in chain):
        print("interrupted; nothing to save yet", file=sys.stderr)
        return INTERRUPTED
    return None


def environment_problem(words: Sequence[str]) -> str:
    """Return what is wrong with the words or the environment variables; "" if nothing is."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:  # bytes that are no text in the locale's encoding
            return f"{word!a} {ENCODING_HINT}"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and not all(
        number.strip().isdigit() and int(number) for number in threads.split(",")
    ):
        return f"OMP_NUM_THREADS is {threads!r}, expected a number of threads, such as 4"
    return ""


def exit_at_once_on_signals(code: int) -> None:
    """Let a signal end the process at once: everything is saved, and the process is exiting.

    Another Ctrl-C would otherwise end in a traceback and another exit code.
    """
    sys.stdout.flush()
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda *_: os._exit(code))


@cache
def import_parser() -> None:
    """Import what commands need. Most of the start is imports, which leave no garbage."""
    gc.disable()
    try:
        import litgrpo.cli.parser  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def run(name: str, words: list[str]) -> None:
    """Print the help that is asked for, or run a command."""
    command = COMMANDS[name]
    import_parser()
    keep_quiet()
    function = command.load()
    if HELP_FLAGS.intersection(words):
        from litgrpo.cli.help import command_page, function_page

        page = command_page if command.recipe else function_page
        print(page(program_name(), name, command.summary, function))
        return
    if command.recipe:
        from litgrpo.cli.help import find_question, option_page

        if question := find_question(words):
            print(option_page(*question))
            return
        # Rewards, environments and data may be in modules beside a recipe.
        folders = [str(recipe_file(name).parent) for name in split_words(words)[0]]
        add_folders([*folders, "."])
    if function is None:
        run_trainer(name, words)
    else:
        call(name, function, words)


def user_error(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code of an error that the user can fix; ("", 0) for a bug.

    The user can fix what the checks of litgrpo raise, and errors that carry an `exit_code`.
    jsonargparse wraps what constructors raise, so the causes are searched as well.
    """
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    link: BaseException | None = error
    while link is not None:
        if isinstance(link, UnicodeEncodeError) and link.encoding != "utf-8":
            return f"{link.object[:80]!a} {ENCODING_HINT}", WRONG_INPUT
        code = getattr(link, "exit_code", None)
        if code is not None:
            return str(link), code
        frames = [frame for frame, _ in traceback.walk_tb(link.__traceback__)]
        module = frames[-1].f_globals.get("__name__", "") if frames else ""
        checked = isinstance(link, ValueError | FileNotFoundError) and module.startswith("litgrpo")
        if checked or isinstance(link, MisconfigurationException):
            return str(link), WRONG_INPUT
        if isinstance(link, OSError) and is_shared_memory_full(link):
            return f"{link}: {SHARED_MEMORY} is full; {SHARED_MEMORY_HINT}", 1
        if isinstance(link, OSError) and link.errno in DISK_ERRORS:
            return f"{link}; free space or choose another folder, and run the command again", 1
        link = link.__cause__
    return "", 0


def is_shared_memory_full(error: OSError) -> bool:
    """Return True if the error is about the memory that processes share, not about a disk.

    Locks and blocks of shared memory are files below /dev/shm, which their errors do not name.
    """
    name = os.fsdecode(error.filename or "")
    if error.errno != errno.ENOSPC or (name and not name.startswith(SHARED_MEMORY)):
        return False
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError:  # another system
        return False
    return state.f_bavail * state.f_frsize < 2**20 or 0 == state.f_favail < state.f_files


def is_connection_lost(error: Exception) -> bool:
    """Return True if a collective operation failed because another rank cannot be reached."""
    from torch.distributed import DistNetworkError

    # gloo raises a plain RuntimeError, which begins with the name of a source file.
    from_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return from_gloo or isinstance(error, DistNetworkError)


def print_error(message: str, code: int = WRONG_INPUT) -> int:
    """Print one line and return the exit code."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    return code


def print_traceback(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback; texts of servers and models in it must not act on the terminal."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(visible(mask_text(text)), end="", file=sys.stderr)


def help_page() -> str:
    """Return the page of `--help`."""
    commands = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return HELP.format(program=program_name(), commands=commands)
