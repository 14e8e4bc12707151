"""What a user typed wrong, in one line with the nearest valid word.

jsonargparse names the wrong key precisely, but inside a tree of every type that was tried.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from litgrpo.arguments import import_by_path
from litgrpo.cli.entry_names import with_entry

KEY = re.compile(r"""Parser key ["'](.+?)["']:\s*(.*)""")
CALLABLE = re.compile(
    r"Type (?:typing|collections\.abc)\.Callable\[.+ expects a function or a callable class: "
    r"(.*?)(?:\.+ Got value: .*class_path='([\w.]+)'.*)?$"
)
GIVEN_CLASS = re.compile(r"class_path[ =]'([\w.]+)'")
OWNER = re.compile(r"Problem with given class_path '(.+)':")
# The frame around the reasons.
FRAME = re.compile(
    r"Does not validate|Errors:|Given value type|Not a valid subclass|Subclass types"
    r"|a class path |a dict |Expected a path but|Unable to load config '|$"
)
SUBTYPES = re.compile(r"Subtypes: (.+)")
CLASSES = re.compile(r"(?:<class '|list\[)([\w.]+\.\w+)")
UNKNOWN_KEY = re.compile(
    r"Option '(.+)' is not accepted|Subcommand .* does not accept option '(.+)'"
    r"|unrecognized arguments: --([^\s=]+)"
)
UNKNOWN_IN_GROUP = re.compile(r"Group '(.+)' does not accept option '(.+)'")
UNKNOWN_CLASS = re.compile(
    r"Expected a dot import path string: (.+)|Unable to load config \"(.+)\""
    r"|Subclasses are disabled for \w+, thus '(.+)' is not accepted"
)
ABSTRACT = re.compile(r"Expected an instantiatable class, but (.+) is abstract")
UNION = "Does not validate against any of the Union subtypes"
# What checks of reward classes begin with; anything else may be a bug of somebody's class.
OURS = re.compile(r"^\s*- ((?:rubric|judge|reward model|reward_runner)\b.+)$", re.MULTILINE)
REQUIRED = re.compile(r"the following arguments are required: (.+)")
TYPE = re.compile(r"Expected a (.+?)(?:\. Got value: (.+))?$")
VALUE = re.compile(r"Given value: (.+?)(?:\. Got value: .*)?$")
ANYTHING = re.compile(r".*")
# How a type is written there, and how a user writes it.
PLAIN_TYPES = (
    (re.compile(r"<class '(?:\w+\.)*(\w+)'>"), r"\1"),
    (re.compile(r"typing\.Literal\[(.+)\]"), r"\1"),
    (re.compile(r"NoneType"), "null"),
)
BROKEN_YAML = "Problems parsing config"
MOST_LISTED = 20
# {key: the verb that takes it}, where it is not a key of `fit`.
OF_VERBS = {
    **dict.fromkeys(("chip", "chips", "model_config"), "plan"),
    **dict.fromkeys(("gold", "limit", "success", "threshold", "form"), "audit"),
    **dict.fromkeys(("algorithms", "tokens", "seeds", "samples", "jobs", "further"), "compare"),
}
OF_EVERY_PARSER = ("help", "config", "print_config", "print_shtab")
OF_RECIPES = ("model", "data", "trainer", "checkpoint", "run_dir", "ckpt_path", "seed_everything")
# {word of other trainers: our key}.
SYNONYMS = {
    **dict.fromkeys(("folder", "output_dir", "out_dir"), "run_dir"),
    **dict.fromkeys(("lr", "learning_rate", "model.lr"), "model.optimizer.lr"),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "ckpt_path"),
    **dict.fromkeys(("max_steps", "max_iterations"), "model.max_iterations"),
    **dict.fromkeys(("num_generations", "group_size"), "model.group_size"),
    **dict.fromkeys(("beta", "kl_coef"), "model.objective.kl_coef"),
    "temperature": "model.sampling.temperature",
    "batch_size": "data.batch_size",
}
CLOSE = 0.5
# Keys of other trainers that are left out on purpose, and what to do instead.
PENALTY = (
    "what is sampled would be another distribution than the one that is learned. In training the "
    "reward litgrpo.rewards.repetition does it; for text of a trained model give it to "
    "transformers' generate on final_model"
)
LEFT_OUT = dict.fromkeys(
    ("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size"), PENALTY
)


def explain(message: str, keys: Sequence[str] = ()) -> str:
    """One line that says what is wrong and what was probably meant.

    Args:
        message: what jsonargparse says.
        keys: every key of the parser, dotted.

    Returns:
        One line, without "error:".
    """
    if message.startswith(BROKEN_YAML):
        return " ".join(message.replace('in "<unicode string>", ', "").split())
    trail = _Trail(keys)
    for line in message.splitlines():
        if sentence := trail.read(line.strip().removeprefix("- ")):
            return with_entry(sentence, message)
    return " ".join(message.split())


def constructor_reason(message: str) -> str | None:
    """What a reward class says against its settings, out of the tree of types that were tried."""
    reasons = OURS.findall(message) if message.startswith(UNION) else []
    return reasons[-1] if reasons else None


class _Trail:
    """The way down the message's tree, to the first reason."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.path: list[str] = []  # parts of the key so far
        self.owner = ""  # class path of the object whose arguments are read
        self.since_owner: list[str] = []  # parts of the key below the owner
        self.bases: list[str] = []  # class paths of which the value must be an instance
        self.types: list[str] = []  # what would have been accepted
        self.reasons: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
            (FRAME, lambda found: ""),
            (OWNER, self.enter),
            (SUBTYPES, self.narrow),
            (UNKNOWN_KEY, self.unknown_key),
            (UNKNOWN_IN_GROUP, self.unknown_in_group),
            (UNKNOWN_CLASS, self.unknown_class),
            (ABSTRACT, self.which_class),
            (REQUIRED, self.missing),
            (TYPE, self.wrong_type),
            (VALUE, self.wrong_value),
            (ANYTHING, lambda found: ": ".join(filter(None, [self.key, found[0]]))),
        )

    def read(self, text: str) -> str:
        """Take one line up; the sentence, once the reason is found."""
        if found := KEY.match(text):
            self.descend(found[1])
            text = found[2]
        if found := CALLABLE.match(text):
            self.owner, self.since_owner = found[2] or self.owner, []
            return self.read(found[1])
        return next(tell(found) for shape, tell in self.reasons if (found := shape.match(text)))

    def descend(self, key: str) -> None:
        parts = key.split(".")
        if self.path[-len(parts) :] != parts:  # said twice
            self.path += parts
            self.since_owner += parts

    def enter(self, found: re.Match[str]) -> str:
        self.owner, self.since_owner, self.bases = found[1], [], []
        return ""

    def narrow(self, found: re.Match[str]) -> str:
        self.bases = CLASSES.findall(found[1])
        return ""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def unknown_key(self, found: re.Match[str]) -> str:
        *groups, name = _first(found).split(".") if self.owner else [_first(found)]
        return self._unknown_under(groups, name)

    def unknown_in_group(self, found: re.Match[str]) -> str:
        return self._unknown_under(found[1].split("."), found[2])

    def _unknown_under(self, groups: list[str], name: str) -> str:
        owner = argument_class(self.owner, groups)
        return unknown_key([*self.path, *groups], name, owner, self.keys)

    def unknown_class(self, found: re.Match[str]) -> str:
        if self.types:  # a plain value was expected first
            return self.wrong_value(found)
        default = default_of(self.owner, self.since_owner)
        if isinstance(default, FunctionType):
            return unknown_function(self.key, _first(found), default)
        bases = self.bases or [argument_class(self.owner, self.since_owner)]
        return unknown_class(self.key, _first(found), bases)

    def which_class(self, found: re.Match[str]) -> str:
        known = sorted(c.__name__ for c in _under(found[1]))
        return (
            f"{self.key} has settings but no class: give --{self.key} CLASS before them (a recipe:"
            f" class_path), where CLASS is one of {', '.join(known)}"
        )

    def missing(self, found: re.Match[str]) -> str:
        return missing(self.path, found[1], self.owner, recipe="model" in self.keys)

    def wrong_type(self, found: re.Match[str]) -> str:
        plain = found[1]
        for shape, word in PLAIN_TYPES:
            plain = shape.sub(word, plain)
        self.types.append(plain)
        return self._expected(found[2]) if found[2] else ""

    def wrong_value(self, found: re.Match[str]) -> str:
        return self._expected(_first(found)) if self.types else ""

    def _expected(self, value: str) -> str:
        return f"{self.key} is {value!r}, expected {' or '.join(dict.fromkeys(self.types))}"


def unknown_key(path: list[str], name: str, owner: str, keys: Sequence[str]) -> str:
    """A key that nothing takes, and the nearest that something does.

    Args:
        path: the parts of the key above it.
        name: the key.
        owner: class path of the object that refused it, or nothing for the parser itself.
        keys: every key of the parser, dotted.
    """
    key = ".".join([*path, name])
    if name in LEFT_OUT:
        return f"there is no key {key!r}: {LEFT_OUT[name]}"
    if not owner:
        if where := elsewhere(key, keys):
            return f"there is no key {key!r} here: {where}"
        near = nearest_dotted(key, keys)
        return f"there is no key {key!r}" + (
            f": did you mean {near!r}?" if near else "; see --help"
        )
    return unknown_argument(path, name, owner.rpartition(".")[2], parameters(owner))


def unknown_argument(path: list[str], name: str, owner: str, allowed: Sequence[str]) -> str:
    """A key that an object does not take, and the nearest that it does.

    Args:
        path: the parts of the key above it.
        name: the key.
        owner: the class of the object, if that says more than the key.
        allowed: its arguments.
    """
    key = ".".join([*path, name])
    of = f"there is no key {key!r}" + (f" (of {owner})" if owner else "")
    if name in LEFT_OUT:
        return f"there is no key {key!r}: {LEFT_OUT[name]}"
    if key in SYNONYMS:
        return f"{of}: it is {SYNONYMS[key]!r}"
    near = nearest(name, allowed)
    if near:
        return f"{of}: did you mean {'.'.join([*path, near])!r}?"
    return f"{of}: it has {', '.join(allowed[:MOST_LISTED])}"


def elsewhere(key: str, keys: Sequence[str]) -> str:
    """What to do with a key of another verb or another trainer; nothing for any other word.

    Args:
        key: dotted, that the parser at hand does not know.
        keys: every key that it does know.
    """
    takes_recipes = "model" in keys
    if takes_recipes and key in SYNONYMS:
        return f"it is {SYNONYMS[key]!r}"
    if key in OF_VERBS:
        return f"{OF_VERBS[key]!r} takes it ({OF_VERBS[key]} --help)"
    if takes_recipes or key.partition(".")[0] not in OF_RECIPES:
        return ""
    if "further" in keys:
        return f"'fit' takes it; hand it on by --further='[\"--{key}\", \"VALUE\"]'"
    own = ", ".join(name for name in keys if name not in OF_EVERY_PARSER)
    return "'fit' takes it; " + ("write it into a recipe" if "recipes" in keys else f"here: {own}")


def unknown_function(key: str, name: str, default: FunctionType) -> str:
    """A function by its name alone, where an import path is taken.

    Args:
        key: where it was given.
        name: of the function.
        default: of that key.
    """
    module = default.__module__
    found = vars(import_by_path(module)).items()
    known = [n for n, f in found if isinstance(f, FunctionType) and f.__module__ == module]
    public = [n for n in known if not n.startswith("_")]
    near = nearest(name, public) or default.__name__
    return (
        f"{key} is {name!r}, but a function is given by its import path: {module}.{near} "
        f"(there: {', '.join(public)})"
    )


def unknown_class(key: str, name: str, bases: Sequence[str]) -> str:
    """A class that does not exist, and the nearest that does.

    Args:
        key: where it was given.
        name: the class.
        bases: class paths of which it should be a subclass.
    """
    known = sorted({found.__name__ for base in filter(None, bases) for found in _under(base)})
    near = nearest(name.rpartition(".")[2], known)
    no = f"{key}: there is no class {name!r}"
    if near:
        return f"{no}: did you mean {near!r}?"
    listed = f"there is {', '.join(known[:MOST_LISTED])}, or " if known else "give "
    return f"{no}: {listed}the path package.module.Class of your own"


def missing(path: list[str], names: str, owner: str, *, recipe: bool) -> str:
    """Keys without which nothing can start.

    Args:
        path: the parts of the key above them.
        names: the missing keys, separated by commas.
        owner: class path of the object that needs them, or nothing for the parser itself.
        recipe: whether a recipe could have given them.
    """
    wanted = [".".join([*path, name.rpartition(".")[2]]) for name in names.split(", ")]
    of = f" (of {owner.rpartition('.')[2]})" if owner else ""
    hint = "; give a recipe, such as -c quickstart" if recipe and not owner else ""
    return f"missing: {', '.join(wanted)}{of}{hint}"


def nearest(name: str, allowed: Sequence[str]) -> str | None:
    """The allowed word that begins with the name or looks most alike, if any does."""
    longer = [word for word in allowed if word.startswith(name)]
    return next(iter(longer + difflib.get_close_matches(name, allowed, 1, CLOSE)), None)


def nearest_dotted(key: str, keys: Sequence[str]) -> str | None:
    """The same for dotted keys, part by part, so that the right parent counts most.

    Example:
        >>> nearest_dotted("trainer.max_epoch", ["trainer.max_epochs", "max_epoch"])
        'trainer.max_epochs'
    """
    found: list[str] = []
    for depth, part in enumerate(key.split(".")):
        choices = (choice.split(".") for choice in keys)
        near = nearest(part, sorted({c[depth] for c in choices if c[:depth] == found != c}))
        if near is None:
            break
        found.append(near)
    near = ".".join(found)
    return near if near and not key.startswith(near + ".") and near != key else None


def parameters(class_path: str) -> list[str]:
    """The names that a class takes."""
    return list(inspect.signature(import_by_path(class_path)).parameters)


def argument_class(owner: str, path: Sequence[str]) -> str:
    """Class path of what an argument takes, or nothing if it takes no object.

    Args:
        owner: class path of the object with the argument.
        path: the argument, and arguments of it.
    """
    found = owner
    for part in path:
        if not found:
            return ""
        try:
            hint = typing.get_type_hints(import_by_path(found).__init__).get(part)
        except NameError:  # a name that is imported for type checkers only
            return ""
        choices = [c for c in (hint, *typing.get_args(hint)) if inspect.isclass(c)]
        found = next((f"{c.__module__}.{c.__qualname__}" for c in choices), "")
    return found


def default_of(owner: str, path: Sequence[str]) -> Any:
    """The default of an argument, or None.

    Args:
        owner: class path of the object with the argument.
        path: the argument, and arguments of it.
    """
    *above, last = path or [""]
    found = argument_class(owner, above)
    parameter = inspect.signature(import_by_path(found)).parameters.get(last) if found else None
    return None if parameter is None else parameter.default


def refused(error: BaseException | None) -> str:
    """The sentence of a constructor that refused what a recipe gave it, or nothing.

    Args:
        error: raised while a recipe's objects were built, and its causes: jsonargparse wraps what
            constructors raise, and hides it among all types that it tried.
    """
    while error is not None and error.__cause__ is not None:
        found = GIVEN_CLASS.search(str(error))
        inner = error.__cause__
        if found and not GIVEN_CLASS.search(str(inner)):
            sentence = " ".join(str(inner).split()) or type(inner).__name__
            return f"{found[1].rpartition('.')[2]} cannot be made: {sentence}"
        error = inner
    return ""


def _under(class_path: str) -> list[type]:
    found = [import_by_path(class_path)]
    for base in found:  # grows while it is read
        found += base.__subclasses__()
    return [c for c in found if not inspect.isabstract(c) and not c.__name__.startswith("_")]


def _first(found: re.Match[str]) -> str:
    return next(filter(None, found.groups()))
