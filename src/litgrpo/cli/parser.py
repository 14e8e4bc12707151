"""The parser of all commands: LightningCLI's, with one-line errors."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from litgrpo.argument_types import classes_in, find_class, members
from litgrpo.arguments import require
from litgrpo.callbacks.completions import Completions
from litgrpo.callbacks.evaluation_files import EvaluationFiles, Predictions
from litgrpo.callbacks.export import Export
from litgrpo.callbacks.guards import NonFinite, Recompilation, Watchdog
from litgrpo.callbacks.progress import Progress
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.cli.console import one_line
from litgrpo.cli.mistakes import MISSING, find_mistake, last_line
from litgrpo.cli.options import (
    UNSET,
    Option,
    find_option,
    is_list_of_texts,
    is_text,
    is_text_or_list,
    options_of,
    type_name,
)
from litgrpo.cli.recipes import DEFAULT_CLASSES, CommandLine, option_word, read_value
from litgrpo.runs.doctor.callback import Doctor
from litgrpo.runs.summary import Summary
from litgrpo.text.secrets import find_masked, mask_known, mask_settings
from litgrpo.text.yaml_limits import check_limits, is_misread

# Callbacks with options: {name of the group: class}.
CALLBACKS: dict[str, type[Callback]] = {
    "progress": Progress,
    "completions": Completions,
    "evaluation_files": EvaluationFiles,
    "summary": Summary,
    "export": Export,
    "predictions": Predictions,
    "non_finite": NonFinite,
    "doctor": Doctor,
    "watchdog": Watchdog,
    "recompilation": Recompilation,
    "checkpoint": IterationCheckpoint,
}
TRAINER_DEFAULTS = {
    "max_epochs": -1,  # the module's max_iterations ends the training
    "num_sanity_val_steps": -1,  # the whole validation before training is the summary's "before"
    "check_val_every_n_epoch": None,  # val_check_interval then counts iterations
    "val_check_interval": 50,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,  # the samplers keep groups whole and know their position
    "enable_model_summary": False,
}
# Options of a run that belong to no class: {name: (type, default, help)}.
RUN_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "run_dir": (
        str | None,
        None,
        "Folder for everything that a run writes (default: runs/<name of the first -c>); {seed} in "
        "it is replaced by the seed.",
    ),
    "overwrite": (
        bool,
        False,
        "Move the run in run_dir to a folder beside it, and start anew.",
    ),
    "auto_resume": (
        bool,
        False,
        "Resume from the newest valid checkpoint in run_dir; start from scratch if there is none.",
    ),
    "tensorboard": (bool, True, "Log to TensorBoard."),
    "csv": (bool, True, "Log to metrics.csv."),
    "html": (bool, True, "Write report.html to run_dir when the run has ended."),
    "debug": (bool, False, "Show tracebacks instead of one-line errors."),
}
# Options that GRPO requires, and these commands do not.
NOT_REQUIRED = {
    "predict": {"rewards": "{none: {function: litgrpo.rewards.correctness}}"},
    "audit": {"pretrained": ""},
}
NULLS = ("", "null", "~", "none")  # how YAML and a command line write null
MOST_RUNS = 8  # that a message lists
MAX_SEED = 2**32 - 1  # numpy's largest
PARSER_OPTIONS = ("config", "seed_everything", "print_config", "help")
# Options of one call, which are not part of the configuration of a run.
CALL_OPTIONS = {"auto_resume", "ckpt_path", "config", "debug", "overwrite"}
CALL_OPTIONS |= {"return_predictions", "verbose", "weights_only"}


@functools.cache
def configure_jsonargparse() -> None:
    """Set how jsonargparse reads values, once per process."""
    # An environment may be any object, and a recipe names its class.
    set_parsing_settings(instantiate_subclass_spec_in_any=True)
    read_yaml = get_loader("yaml")

    def load_yaml(text: str, **kwargs: Any) -> Any:
        # YAML reads a lone `?` as a mapping without a key, and `1:30` as 90; here they are texts.
        if text.strip() == "?" or is_misread(text):
            return text
        if text[:1] == "{":
            # JSON writes an emoji as two escapes, which YAML reads as two broken characters.
            with suppress(ValueError, RecursionError):
                return json.loads(text)
        check_limits(text)
        value = read_yaml(text, **kwargs)
        # A text such as `# Question` is a comment in YAML, which is null.
        return text if value is None and text.strip().lower() not in NULLS else value

    set_loader("yaml", load_yaml, (yaml.YAMLError,))


def import_named_classes() -> None:
    """Import the classes that recipes may name without their module, such as StaticEngine."""
    import litgrpo.data.modules
    import litgrpo.environments
    import litgrpo.rollout.engines.static
    import litgrpo.rollout.engines.vllm
    import litgrpo.training.grpo
    import litgrpo.training.optim
    import litgrpo.training.sft  # noqa: F401


class OneLineParser(ArgumentParser):
    """Prints what is wrong in one line instead of a page of usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Abbreviated options are an error, also in inner parsers.
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self.explain: Callable[[], str] = str

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class without sub-configs: `prompts.txt` stays a file name."""
        return super().add_class_arguments(*args, **kwargs | {"sub_configs": False})

    def parse_args(self, args: Any = None, *others: Any, **kwargs: Any) -> Any:
        """Parse; an inner parser gets null as `None`, which it would take for a text."""
        if not self.exit_on_error and args is not None:
            args = [re.sub("=None$", "=null", word) for word in args]
        return super().parse_args(args, *others, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the line and exit; inner parsers raise, for the outer one."""
        if not self.exit_on_error or "--debug" in sys.argv:
            super().error(message, ex)
        self.exit(2, f"error: {one_line(self.explain() or last_line(message))}\n")


def build_data(settings: Mapping[str, Any]) -> Any:
    """Build the data module of a recipe, and nothing else.

    Args:
        settings: {class_path, init_args}.
    """
    parser = OneLineParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    return parser.instantiate(parser.parse_object({"data": settings})).data


class RecipeParser(OneLineParser, LightningArgumentParser):
    """The same for LightningCLI; keys are masked where it prints the configuration."""

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Return the configuration as YAML with masked keys."""
        text = str(super().dump(*args, **kwargs))
        # jsonargparse reads the texts of inner parsers again.
        return mask_known(text) if self.exit_on_error else text

    def dump_with_keys(self, config: Any) -> str:
        """Return the configuration as YAML, to be read and not to be shown."""
        return str(super().dump(config, skip_unset=False, skip_link_targets=False))


class RecipeCLI(LightningCLI):
    """Parse recipes and overrides; build nothing.

    `fit` builds what this parses; `plan` and `audit` read the settings.

    Args:
        words: what follows the command.
        command: a method of the trainer, whose options are added, or another command.
        extra: a function whose options are added.

    Example:
        >>> settings = RecipeCLI(["-c", "quickstart", "--model.group_size", "4"]).config
        >>> settings.model.class_path, settings.model.init_args.group_size
        ('litgrpo.GRPO', 4)
    """

    def __init__(
        self,
        words: Sequence[str],
        command: str = "fit",
        extra: Callable[..., Any] | None = None,
        build: bool = False,
    ) -> None:
        configure_jsonargparse()
        import_named_classes()
        self.command, self.extra, self.build = command, extra, build
        self.given = CommandLine.read(words)
        check_keys(self.given.settings)
        super().__init__(
            LightningModule,
            LightningDataModule,
            args=self.words(),
            run=False,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,  # the module builds it from its own arguments
            save_config_callback=None,  # RunFolder writes the configuration, also into checkpoints
            seed_everything_default=0,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_class=RecipeParser,
            load_from_checkpoint_support=build,
        )

    def words(self) -> list[str]:
        """Return the words for the parser.

        Raises:
            ValueError: an option has no value.
        """
        for key, value in self.given.options:
            switch = key in self.switches() or key.startswith("print_")
            require(value is not None or switch, f"--{key} needs a value: --{key} VALUE")
        words = add_true_to_switches(self.given.words(self.option_word), self.switches())
        model = self.given.settings["model"]
        is_grpo = isinstance(model, dict) and str(model.get("class_path")).endswith("GRPO")
        added = [
            f"--model.{name}={value}"
            for name, value in NOT_REQUIRED.get(self.command, {}).items()
            if is_grpo and name not in model
        ]
        # `--print_config` prints what stands before it.
        numbers = (n for n, word in enumerate(words) if word.startswith("--print_"))
        end = next(numbers, len(words))
        return [*words[:end], *added, *words[end:]]

    def option_word(self, key: str, value: str | None) -> str:
        """Return an option as one word for the parser.

        The parser takes a text such as `Answer: {{ prompt }}` for a mapping, so it gets those as
        part of a configuration, where they are texts.
        """
        try:
            hint = find_option(key, self.roots()).hint
        except ValueError:  # the parser reports it
            return option_word(key, value)
        # The parser would read 1:30 as 90 where a number is expected.
        is_base_60 = value is not None and ":" in value and is_misread(value)
        require(
            not is_base_60 or str in members(hint) or hint in (Any, UNSET),
            f"{key} is {value}, expected {type_name(hint)}",
        )
        if value is not None and is_list_of_texts(hint) and value.strip().lower() not in NULLS:
            if not value.lstrip().startswith("["):
                value = json.dumps([value])
        elif (
            value is not None
            and "." in key
            and is_list_or_mapping(value)
            and (is_text(hint) or (is_text_or_list(hint) and not value.lstrip().startswith("[")))
        ):
            return f"--config={json.dumps(self.build_config(key, value))}"
        return option_word(key, value)

    def build_config(self, key: str, value: str) -> dict[str, Any]:
        """Return a configuration with one option."""
        parts = [part for part in key.split(".") if part != "init_args"]
        tree: Any = value
        for depth in range(len(parts) - 1, -1, -1):
            tree = {parts[depth]: tree}
            above = find_option(".".join(parts[:depth]), self.roots()) if depth > 0 else None
            if above is not None and has_classes(above):
                tree = {"init_args": tree}
        return dict(tree)

    def roots(self) -> dict[str, type]:
        """Return {first part of an option: class}, with model and data as they are named."""
        settings = self.given.settings
        roots: dict[str, type] = {"trainer": Trainer, **CALLBACKS}
        for key in DEFAULT_CLASSES:
            node = settings[key]
            path = node.get("class_path") if isinstance(node, dict) else node
            roots[key] = find_class(str(path), [object])
        return roots

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of a run, of its callbacks, and of the command."""
        for key, (kind, default, text) in RUN_OPTIONS.items():
            parser.add_argument(f"--{key}", type=kind, default=default, help=text)
        for name, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, name)
        if self.extra is not None:
            parser.add_function_arguments(self.extra, skip={"given"})
        if self.command in LightningCLI.subcommands():
            skip = LightningCLI.subcommands()[self.command]
            parser.add_method_arguments(Trainer, self.command, skip=skip)
        parser.explain = self.explain  # type: ignore[attr-defined]

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the words; LightningCLI would warn that `sys.argv` has others."""
        self.config = parser.parse_args(args)
        seed = self.config.seed_everything
        require(
            isinstance(seed, bool) or 0 <= seed <= MAX_SEED,
            f"seed_everything is {seed}; it must be from 0 to {MAX_SEED}",
        )

    def explain(self) -> str:
        """Return which option a parse failed at, in one line; "" if none is found."""
        return find_mistake(self.given.settings, self.top_options())

    def top_options(self) -> dict[str, Option]:
        """Return {name: option} without parts; those of sections have a class as type."""
        options = {name: Option(name, UNSET, None, "") for name in PARSER_OPTIONS}
        options["seed_everything"] = Option("seed_everything", bool | int, None, "")
        for name, (kind, default, text) in RUN_OPTIONS.items():
            options[name] = Option(name, kind, default, text)
        if self.extra is not None:
            options |= {
                name: each for name, each in options_of(self.extra).items() if name != "given"
            }
        options |= self.trainer_options()
        roots: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
        with suppress(ValueError):  # a wrong class is reported as such
            roots = self.roots()
        sections = {"trainer": Trainer, **CALLBACKS, **roots}
        return options | {name: Option(name, kind, UNSET, "") for name, kind in sections.items()}

    def trainer_options(self) -> dict[str, Option]:
        """Return the options of the trainer's method, such as `ckpt_path`."""
        skip = LightningCLI.subcommands().get(self.command)
        if skip is None:
            return {}
        options = options_of(getattr(Trainer, self.command))
        return {name: each for name, each in options.items() if name not in skip}

    def switches(self) -> list[str]:
        """Return the options that may stand without a value."""
        run = [name for name, (kind, *_) in RUN_OPTIONS.items() if kind is bool]
        return run + (bool_options(self.extra) if self.extra is not None else [])

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of `fit` as plain values, without options of one call."""
        parser: Any = self.parser
        content = yaml.safe_load(parser.dump_with_keys(self.config))
        unwanted = CALL_OPTIONS | set(options_of(self.extra) if self.extra else ())
        return {name: each for name, each in content.items() if name not in unwanted}

    @property
    def extra_options(self) -> dict[str, Any]:
        """Values of the options that the extra function adds."""
        names = [] if self.extra is None else options_of(self.extra)
        return {name: self.config[name] for name in names if name != "given"}

    def instantiate_classes(self) -> None:
        """Build model, data and trainer, unless the settings alone are wanted."""
        if self.build:
            super().instantiate_classes()


def check_keys(settings: dict[str, Any]) -> None:
    """Remember keys and passwords, which are masked from now on.

    Args:
        settings: settings of a command line; values of options are YAML texts.

    Raises:
        ValueError: a value is already masked, as in the `config.yaml` of a run.
    """

    def parse(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: parse(each) for name, each in value.items()}
        if isinstance(value, str) and value[:1] in ("{", "["):
            return read_value(value)
        return value

    plain = parse(settings)
    mask_settings(plain)
    masked = find_masked(plain)
    require(
        not masked,
        f"{', '.join(masked)}: the value is masked, as keys are in every config.yaml; use the "
        "original recipe, or write the value back",
    )


def is_list_or_mapping(text: str) -> bool:
    """Return True if YAML reads a text as a list or a mapping.

    Example:
        >>> is_list_or_mapping("Answer with: yes"), is_list_or_mapping("{{ prompt }}")
        (True, False)
    """
    return isinstance(read_value(text), dict | list)


def has_classes(option: Option) -> bool:
    """Return True if an option holds an object of one of several classes: it has `init_args`."""
    return option.key in DEFAULT_CLASSES or any(
        inspect.isabstract(each) or each.__subclasses__() for each in classes_in(option.hint)
    )


def bool_options(function: Callable[..., Any]) -> list[str]:
    """Return the options of a function that are true or false."""
    return [name for name, each in options_of(function).items() if bool in members(each.hint)]


def add_true_to_switches(words: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Return the words with `=true` behind each switch that has no value.

    Example:
        >>> add_true_to_switches(["--force", "--adapter", "false"], ["force", "adapter"])
        ['--force=true', '--adapter', 'false']
    """
    values = [*words, "--"][1:]
    return [
        f"{word}=true" if word.removeprefix("--") in switches and value.startswith("--") else word
        for word, value in zip(words, values, strict=True)
    ]


def call(function: Callable[..., Any], words: Sequence[str]) -> None:
    """Call a function with its arguments from the command line.

    Args:
        function: whose signature and docstring are the options; those without a default need no
            name.
        words: what follows the command.
    """
    configure_jsonargparse()
    parser = OneLineParser()
    parser.add_function_arguments(function, as_positional=True, fail_untyped=False)
    known = options_of(function)

    words = add_true_to_switches([with_underscores(word) for word in words], bool_options(function))

    def explain() -> str:
        return mistake_in_words(words, known)

    parser.explain = explain
    function(**vars(parser.instantiate(parser.parse_args(list(words)))))


def mistake_in_words(words: Sequence[str], options: Mapping[str, Option]) -> str:
    """Return what is wrong with the words of a command that reads no recipe; "" if nothing is.

    Args:
        words: what follows the command.
        options: {name: option}; those without a default are given in their order.

    Example:
        >>> mistake_in_words(["--jobs", "x"], {"jobs": Option("jobs", int, 1, "")})
        "jobs is 'x', expected int"
    """
    required = [name for name, option in options.items() if option.default is UNSET]
    settings: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            free = [each for each in required if each not in settings]
            if not free:
                return f"unexpected {word!r}: expected {' '.join(required)} [--OPTION VALUE ...]"
            settings[free[0]] = word
        elif equals:
            settings[name] = value
        elif rest and not rest[0].startswith("--"):
            settings[name] = rest.pop(0)
        elif name in options:
            return f"--{name} needs a value: --{name} VALUE"
        else:
            settings[name] = ""
    missing = [options[name] for name in required if name not in settings]
    others = {name: Option(name, UNSET, None, "") for name in ("help", "config")}
    mistake = find_mistake(settings, {**options, **others})
    if mistake or not missing:
        return mistake
    listed = ", ".join(f"{each.key} ({each.text.rstrip('.')})" for each in missing)
    folders = ""
    if any("run folder" in each.text for each in missing):
        runs = find_runs()
        folders = (
            f"; run folders here: {', '.join(runs)}" if runs else "; no run folder below runs/"
        )
    return f"{MISSING}{listed}{folders}"


def find_runs() -> list[str]:
    """Return the newest run folders below runs/, the last one first."""
    files = [
        path for name in ("*/config.yaml", "*/*/config.yaml") for path in Path("runs").glob(name)
    ]
    newest = sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [str(path.parent) for path in newest[:MOST_RUNS]]


def with_underscores(word: str) -> str:
    """Return an option with underscores: `--fail-on` is `--fail_on`."""
    option, equals, value = word.partition("=")
    return (
        option.replace("-", "_").replace("__", "--", 1) + equals + value
        if word[:2] == "--"
        else word
    )
