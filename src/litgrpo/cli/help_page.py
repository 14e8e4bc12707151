"""`VERB --help` on one screen, read from the source, so that nothing slow is imported."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from litgrpo.cli.plan_keys import PLAN_KEYS
from litgrpo.cli.recipes import brought
from litgrpo.cli.run_keys import RUN_KEYS

PACKAGE = Path(__file__).parents[1]
WIDTH = 100
COLUMN = 24
# Keys that most runs need; the others are named in one line below them.
MODEL_KEYS = [
    *("pretrained", "rewards", "objective", "group_size", "max_completion_length", "sampling"),
    *("engine", "update", "evaluation", "optimizer", "lr_scheduler", "max_iterations"),
    *("max_generated_tokens", "lora", "precision"),
]
DATA_KEYS = [
    *("train", "val", "test", "prompts", "columns", "template", "chat", "batch_size"),
    *("max_prompt_length", "val_fraction"),
]
GROUPS = (
    ("model", "GRPO", "training/grpo.py", MODEL_KEYS, "SFT"),
    ("data", "PromptData", "data/prompt_data.py", DATA_KEYS, "PairData"),
)
MORE = """
--trainer.KEY, of Lightning's Trainer: accelerator, devices, strategy, precision, logger, ...
--CALLBACK.KEY: checkpoint, completions, summary, export, predictions, progress, non_finite, ...

Every key of a group, with types and defaults:
  --model.help --model.lora.help --model.rewards.help --data.train.help --checkpoint.help
  --model.engine.help StaticEngine: the keys of a class
"""
ARGUMENT = re.compile(r"(\w+): (.*)")


def page(program: str, verb: str, what: str) -> str:
    """The page behind `VERB --help`.

    Args:
        program: how it was started.
        verb: one of Lightning's.
        what: the verb does.
    """
    return "\n".join(_lines(program, verb, what))


def _lines(program: str, verb: str, what: str) -> Iterator[str]:
    yield f"usage: {program} {verb} [-c RECIPE ...] [--KEY VALUE ...]"
    yield what
    yield ""
    yield "-c RECIPE: a file, or a recipe of litgrpo; a later one overrides an earlier one"
    names = [name for name in brought() if "/" not in name]
    alone = [name for name in names if name.removesuffix("_sft") not in {*names} - {name}]
    recipes = [f"{name}[_sft]" if f"{name}_sft" in names else name for name in alone]
    folders = sorted({name.partition("/")[0] for name in brought() if "/" in name})
    yield from _wrapped("  ", [*recipes, *(f"{folder}/..." for folder in folders)])
    yield ""
    yield "--KEY, of the run"
    yield _line("ckpt_path", "go on from: last, best, a .ckpt file or a run folder")
    yield from (_line(key, text) for key, (_, _, text) in RUN_KEYS.items())
    yield _line("seed_everything", "seed of model and data (0)")
    yield _line("print_config", "print every key with its value, as YAML, and exit")
    for group, name, file, shown, other in GROUPS:
        yield ""
        known = documented(PACKAGE / file, name)
        yield f"--{group}.KEY, of {name} ({other}: --{group}.help {other})"
        yield from (_line(key, known[key]) for key in shown)
        yield from _wrapped("  also: ", [key for key in known if key not in shown])
    yield MORE.rstrip()


def function_page(program: str, verb: str, module: str) -> str:
    """The page behind `VERB --help` of a verb that is a function.

    Args:
        program: how it was started.
        verb: its name.
        module: where it is, as an import path.
    """
    node = _definition(file_of(module), verb)
    summary = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
    texts = documented(file_of(module), verb)
    arguments, first = node.args.args, len(node.args.args) - len(node.args.defaults)
    lists = [
        each.arg for each in arguments[:first] if "list" in ast.unparse(each.annotation or each)
    ]
    needed = [f"{each.arg.upper()}{' ...' * (each.arg in lists)}" for each in arguments[:first]]
    lines = [" ".join([f"usage: {program} {verb}", *needed, "[--KEY VALUE ...]"]), summary, ""]
    for each, name in zip(arguments[:first], needed, strict=True):
        lines += _told(name, texts.get(each.arg, ""))
    for each, default in zip(arguments[first:], node.args.defaults, strict=True):
        given = ast.unparse(default)
        name = "-c RECIPE ..." if each.arg == "recipes" else f"--{each.arg}"
        shown = f" ({given})" * (given not in ("None", "False", "[]"))
        lines += _told(name, texts.get(each.arg, "") + shown)
    return "\n".join(lines)


def plan_page(program: str, what: str) -> str:
    """The page behind `plan --help`: its own options, before those that it shares with fit.

    Args:
        program: how it was started.
        what: the verb does.
    """
    lines = [f"usage: {program} plan -c RECIPE ... [--chip NAME] [--KEY VALUE ...]", what, ""]
    for name, (_, default, text) in PLAN_KEYS.items():
        lines += _told(f"--{name}", text + f" ({default})" * (default not in (None, False)))
    return "\n".join([*lines, "", f"and every key of a recipe: {program} fit --help"])


def _told(name: str, text: str) -> list[str]:
    """A name, and what it is, in as many lines as it takes."""
    start = f"  {name:<{COLUMN}}"
    return textwrap.wrap(start + " ".join(text.split()), WIDTH, subsequent_indent=" " * len(start))


def file_of(module: str) -> Path:
    """The source of a module of this package.

    Args:
        module: its import path.
    """
    return PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _definition(file: Path, name: str) -> ast.FunctionDef:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)


def documented(file: Path, name: str) -> dict[str, str]:
    """{argument: what it is} from the docstring of a class or function, without importing it.

    Args:
        file: the source.
        name: of the class or function.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    known = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    node = next(n for n in known if n.name == name)
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    last = ""
    for line in inspect.cleandoc(section).splitlines():
        argument = None if line.startswith(" ") else ARGUMENT.match(line)
        last = argument[1] if argument else last
        found[last] = argument[2] if argument else f"{found[last]} {line.strip()}"
    return found


def _line(key: str, text: str) -> str:
    room = WIDTH - COLUMN - 2
    short = text if len(text) <= room else text[: room - 3].rsplit(" ", 1)[0].rstrip(",:;") + " ..."
    return f"  {key:<{COLUMN}}{short}"


def _wrapped(start: str, words: list[str]) -> Iterator[str]:
    """Words with commas in lines, the first with a start."""
    line = start
    for word in words:
        if len(line) + len(word) + 2 > WIDTH:
            yield line.rstrip()
            line = " " * len(start)
        line += f"{word}, "
    yield line.rstrip(", ")
