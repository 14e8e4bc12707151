"""The program: `python cli.py VERB ...` in a clone, `litgrpo VERB ...` when installed.

Training and inference go to LightningCLI (`trainer_cli`); every other verb is a plain function.
Nothing slow is imported before the verb is known, so that help and mistakes answer at once.
"""

from __future__ import annotations

import difflib
import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from litgrpo import __version__
from litgrpo.arguments import add_folders
from litgrpo.cli.streams import outlive_readers
from litgrpo.cli.verbs import COMMANDS, LIGHTNING_VERBS

# {verb: function that reads its words}: a recipe is given to audit as to fit, report takes folders.
READ_THEIR_WORDS = {"audit": "recipe_words", "report": "run_words"}
INTERRUPTED = 130  # 128 + SIGINT
TERMINATED = 143  # 128 + SIGTERM, what schedulers expect of a process that was asked to stop
WRONG_INPUT = 2
GO_ON_LATER = 75  # EX_TEMPFAIL: what was needed is away, and nothing is lost
# Errors by their names, because to import Lightning takes seconds.
STOPS = {
    "MisconfigurationException": WRONG_INPUT,
    "RewardFailure": WRONG_INPUT,
    "EnvironmentFailure": WRONG_INPUT,
    "ServerFailure": WRONG_INPUT,
    "ServersAway": GO_ON_LATER,
}


HELP = """\
litgrpo: GRPO for language models in PyTorch Lightning

usage: {program} VERB [-c RECIPE.yaml ...] [--KEY VALUE ...]

verbs:
{verbs}

examples:
  {program} fit -c quickstart
  {program} fit -c quickstart --seed_everything 1 --run_dir runs/second
  {program} fit -c quickstart --ckpt_path last
  {program} predict -c runs/quickstart/config.yaml --ckpt_path last --data.prompts '["3+4="]'

A recipe is a file, or the name of one that litgrpo brings (configs/). A later -c overrides an
earlier one, and --KEY VALUE overrides both. Everything of a run goes to one folder: runs/NAME,
after the first recipe's name, or --run_dir.

  {program} --version                 which version this is
  {program} VERB --help               every key of a verb
  {program} VERB --model.help GRPO    every key of a class
  --debug                            after any verb: tracebacks instead of one-line errors
  README.md, configs/, docs/         where to read on
"""


def main() -> int:
    """Run the verb on the command line.

    Returns:
        The exit code: 0; 2 for a mistake in the input; 75 where servers are away; 130 or 143 when
        asked to stop.
    """
    outlive_readers()
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "--version"):
        print(f"litgrpo {__version__}" if words == ["--version"] else help_page())
        return 0 if words else WRONG_INPUT
    verb, known = words[0], [*LIGHTNING_VERBS, *COMMANDS]
    if verb not in known:
        near = difflib.get_close_matches(verb, known, 1)
        guess = (
            f"did you mean {near[0]!r}?" if near else f"the verb comes first: {', '.join(known)}"
        )
        return print_error(f"there is no verb {verb!r}: {guess}")
    if asks_for_help(words):
        return print_help(verb)
    try:
        run(verb, words[1:])
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning makes an exit of the first; where something is trained, it is saved instead.
        if not isinstance(stop.__context__ or stop, KeyboardInterrupt):
            raise
        print("interrupted, with nothing to save yet", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        cause = users_mistake(error)
        if "--debug" in words or not cause:
            raise
        return print_error(cause, STOPS.get(type(error).__name__, WRONG_INPUT))
    return 0


def run(verb: str, words: list[str]) -> None:
    """Hand over to LightningCLI or to a function, with recipes as files."""
    from litgrpo.cli.first_look import refuse_mistakes
    from litgrpo.cli.recipes import prepared_words, with_classes

    add_folders([*recipe_folders(words), os.getcwd()])  # where a recipe's own rewards may lie
    with TemporaryDirectory() as folder:
        words = with_classes(verb, prepared_words(words, Path(folder)))
        sys.argv[2:] = words
        if verb in (*LIGHTNING_VERBS, "plan"):
            refuse_mistakes(words)
        if verb in LIGHTNING_VERBS:
            run_trainer()
        elif verb == "plan":  # reads the command line of fit by itself
            with quick_imports():
                module = import_module(COMMANDS[verb][0])
            module.plan()
        else:
            run_function(verb, words, Path(folder))


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import within this without looks for garbage, of which there is none: a fifth of the time.

    What the first imports bring stays to the end of the program, and later looks pass it over.
    """
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
        if looked:
            gc.enable()


def recipe_folders(words: list[str]) -> list[str]:
    """The folders of the recipes on a command line."""
    split = [part for word in words for part in word.split("=", 1)]
    given = [word for flag, word in pairwise(split) if flag in ("-c", "--config", "--recipe")]
    return [str(Path(word).parent) for word in given if Path(word).is_file()]


def run_trainer() -> None:
    """Train, evaluate or answer; the verb is on the command line."""
    with quick_imports():
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        from litgrpo.cli.trainer_cli import LitGRPOCLI, key_help

    if text := key_help(sys.argv[2:]):
        show(text)
        return
    try:
        done = LitGRPOCLI()
    except SIGTERMException as stop:
        raise SystemExit(TERMINATED) from stop
    if done.leaves_a_report:
        import_module(COMMANDS["report"][0]).report_at_end(done.settings.run_dir)


def run_function(verb: str, words: list[str], folder: Path) -> None:
    """Call the function of a verb with its arguments; the folder is for what has to be a file."""
    with quick_imports():
        from jsonargparse import auto_cli

        from litgrpo.cli.trainer_cli import PlainParser

        module = vars(import_module(COMMANDS[verb][0]))
    words = [re.sub("^--fail-on", "--fail_on", word) for word in words if word != "--debug"]
    if verb in READ_THEIR_WORDS:
        words = module[READ_THEIR_WORDS[verb]](words, folder)
    function = module[verb]
    program = f"{program_name()} {verb}"
    auto_cli(function, args=words, prog=program, parser_class=PlainParser)


def users_mistake(error: BaseException) -> str:
    """What a check of ours, of Lightning's or of a constructor in a recipe said; nothing for a bug.

    jsonargparse wraps what a constructor raises. An error from anywhere else, or an unforeseen one
    in our own constructors, is a bug, and its traceback is worth reading.
    """
    from litgrpo.cli.errors import constructor_reason, refused

    link: BaseException | None = error
    ours = False
    while link is not None:
        frames = [frame for frame, _ in traceback.walk_tb(link.__traceback__)]
        raised_by = frames[-1].f_globals.get("__name__", "") if frames else ""
        ours = raised_by.partition(".")[0] == "litgrpo"
        checked = isinstance(link, ValueError | FileNotFoundError) and ours
        if checked or type(link).__name__ in STOPS:
            return str(link)
        if said := constructor_reason(str(link)):
            return said
        link = link.__cause__
    return "" if ours else refused(error)


def print_error(message: str, code: int = WRONG_INPUT) -> int:
    """Print one line and return the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return code


def asks_for_help(words: list[str]) -> bool:
    """Whether `--help` stands on the command line."""
    return bool({"-h", "--help"}.intersection(words))


def print_help(verb: str) -> int:
    """Print the page of a verb; the exit code."""
    from litgrpo.cli import help_page

    if verb in LIGHTNING_VERBS:
        show(help_page.page(program_name(), verb, LIGHTNING_VERBS[verb]))
    elif verb == "plan":
        show(help_page.plan_page(program_name(), COMMANDS[verb][1]))
    else:
        show(help_page.function_page(program_name(), verb, COMMANDS[verb][0]))
    return 0


def show(text: str) -> None:
    """Print a page; a reader such as `head` may have enough before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def help_page() -> str:
    """The page behind `--help`."""
    texts = LIGHTNING_VERBS | {name: text for name, (_, text) in COMMANDS.items()}
    verbs = "\n".join(f"  {name:<10}{text}" for name, text in texts.items())
    return HELP.format(program=program_name(), verbs=verbs)


def program_name() -> str:
    """How the user started this program."""
    return "python cli.py" if Path(sys.argv[0]).suffix == ".py" else "litgrpo"
