"""The parser of all commands: LightningCLI's, with one-line errors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import litgrpo
from litgrpo.argument_types import UNSET, classes_in
from litgrpo.arguments import require
from litgrpo.callbacks.completions import Completions
from litgrpo.callbacks.evaluation_files import EvaluationFiles, Predictions
from litgrpo.callbacks.export import Export
from litgrpo.callbacks.guards import NonFinite, Recompilation, Watchdog
from litgrpo.callbacks.progress import Progress
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.cli.console import one_line
from litgrpo.cli.mistakes import MISSING, find_mistake, last_line, mistake_in_value
from litgrpo.cli.options import Option, is_list_of_texts, options_of
from litgrpo.cli.recipes import pair_words, with_init_args
from litgrpo.cli.settings import (
    NULLS,
    PRINT,
    CommandLine,
    iterate_options,
    lookup,
    read_option,
)
from litgrpo.modules.sft import SFT
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
NOT_REQUIRED: dict[str, dict[str, Any]] = {
    "predict": {"rewards": {"none": {"function": "litgrpo.rewards.correctness"}}},
    "audit": {"pretrained": ""},
}
FIT_OPTIONS = "fit_options"  # argument of a function that passes options on to `fit`
MOST_RUNS = 8  # that a message lists
MAX_SEED = 2**32 - 1  # numpy's largest
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
        check_limits(text)
        value = read_yaml(text, **kwargs)
        # A text such as `# Question` is a comment in YAML, which is null.
        return text if value is None and text.strip().lower() not in ("", *NULLS) else value

    set_loader("yaml", load_yaml, (yaml.YAMLError,))


def import_named_classes() -> None:
    """Import classes of the public API that recipes may name without their module."""
    for module in set(litgrpo.PUBLIC.values()):
        if module.startswith(("litgrpo.rollout.", "litgrpo.callbacks.")):
            importlib.import_module(module)


class OneLineParser(ArgumentParser):
    """Prints what is wrong in one line instead of a page of usage."""

    explain: Callable[[], str] = str  # returns what is wrong, or ""

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        # Without sub-configs `prompts.txt` stays a file name.
        return super().add_class_arguments(*args, **kwargs | {"sub_configs": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Inner parsers raise, for the outer one.
        if not self.exit_on_error:
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
        super().__init__(
            LightningModule,
            LightningDataModule,
            args=self.read(words),
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

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Read a command line; return its settings in the parser's form."""
        self.command_line = CommandLine.read(
            words, {name: o.hint for name, o in self.options.items()}
        )
        check_keys(self.command_line.settings)
        check_groups(self.command_line)
        require(
            self.command != "predict" or not issubclass(self.command_line.hints["model"], SFT),
            "SFT generates nothing: predict without its recipe, from the model that it trained: "
            "--model.pretrained RUN/final_model",
        )
        settings = {
            name: value for name, value in self.command_line.settings.items() if name != PRINT
        }
        model = settings["model"]
        if isinstance(model, dict) and str(model.get("class_path")).endswith("GRPO"):
            settings["model"] = NOT_REQUIRED.get(self.command, {}) | model
        return {name: with_init_args(value) for name, value in settings.items()}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, (kind, default, text) in RUN_OPTIONS.items():
            parser.add_argument(f"--{key}", type=kind, default=default, help=text)
        for name, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, name)
        if self.extra is not None:
            parser.add_function_arguments(self.extra, skip={1})
        if self.command in LightningCLI.subcommands():
            skip = LightningCLI.subcommands()[self.command]
            parser.add_method_arguments(Trainer, self.command, skip=skip)
        parser.explain = self.explain  # type: ignore[attr-defined]

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # LightningCLI would parse `sys.argv` instead and warn that it differs.
        self.config = parser.parse_object(args)
        seed = self.config.seed_everything
        require(
            isinstance(seed, bool) or (isinstance(seed, int) and 0 <= seed <= MAX_SEED),
            f"seed_everything is {seed}; it must be from 0 to {MAX_SEED}",
        )
        if PRINT in self.command_line.settings:
            flags = self.command_line.settings[PRINT]
            parser.parse_args([f"--{PRINT}={flags or ''}"], namespace=self.config)

    def explain(self) -> str:
        """Return which option a parse failed at, in one line; "" if none is found."""
        classes = {
            name: Option(name, kind, UNSET, "") for name, kind in self.command_line.hints.items()
        }
        return find_mistake(self.command_line.settings, classes | self.options)

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """{name: option} without parts, other than model and data."""
        options = {PRINT: Option(PRINT, str | None, None, "")}
        options["seed_everything"] = Option("seed_everything", bool | int, None, "")
        for name, (kind, default, text) in RUN_OPTIONS.items():
            options[name] = Option(name, kind, default, text)
        if self.extra is not None:
            options |= options_of(self.extra)
        options |= self.trainer_options()
        sections = {"trainer": Trainer, **CALLBACKS}
        return options | {name: Option(name, kind, UNSET, "") for name, kind in sections.items()}

    def trainer_options(self) -> dict[str, Option]:
        """Return the options of the trainer's method, such as `ckpt_path`."""
        skip = LightningCLI.subcommands().get(self.command)
        if skip is None:
            return {}
        options = options_of(getattr(Trainer, self.command))
        return {name: option for name, option in options.items() if name not in skip}

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of `fit` as plain values, without options of one call."""
        parser: Any = self.parser
        content = yaml.safe_load(parser.dump_with_keys(self.config))
        unwanted = CALL_OPTIONS | set(options_of(self.extra) if self.extra else ())
        return {name: value for name, value in content.items() if name not in unwanted}

    @property
    def extra_options(self) -> dict[str, Any]:
        """Values of the options that the extra function adds."""
        names = [] if self.extra is None else options_of(self.extra)
        return {name: self.config[name] for name in names}

    def instantiate_classes(self) -> None:
        if self.build:
            super().instantiate_classes()


def check_groups(command_line: CommandLine) -> None:
    """Check that options with options below them are mappings: the parser takes a number for one.

    Raises:
        ValueError: one is a number or a list.
    """
    for key, value in iterate_options(command_line.settings):
        option = lookup(key, command_line.hints)
        is_group = classes_in(option.hint) == [option.hint]
        if is_group and value is not None and not isinstance(value, str):
            raise ValueError(mistake_in_value(option, value))


def check_keys(settings: dict[str, Any]) -> None:
    """Remember keys and passwords, which are masked from now on.

    Raises:
        ValueError: a value is already masked, as in the `config.yaml` of a run.
    """
    mask_settings(settings)
    masked = find_masked(settings)
    require(
        not masked,
        f"{', '.join(masked)}: the value is masked, as keys are in every config.yaml; use the "
        "original recipe, or write the value back",
    )


def parse_options(function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a function; those without a default need no name."""
    configure_jsonargparse()
    options = options_of(function)
    settings = read_words([with_underscores(word) for word in words], options)
    parser = OneLineParser()
    parser.add_function_arguments(function, as_positional=True, fail_untyped=False)
    parser.explain = lambda: find_mistake(settings, options)
    return dict(vars(parser.instantiate(parser.parse_object(dict(settings)))))


def read_words(words: Sequence[str], options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the settings of a command that reads no recipe.

    Args:
        words: what follows the command.
        options: {name: option}; those without a default are given in their order, and a list takes
            all words that are left. Dotted options are those of `fit`.

    Raises:
        ValueError: a word belongs to no option, an option has no value, or one is missing.
    """
    required = [option for option in options.values() if option.default is UNSET]
    hints = {name: option.hint for name, option in options.items()}
    settings: dict[str, Any] = {}
    fit_options: list[str] = []
    for option, value in pair_words(words):
        name = option.removeprefix("--")
        if name == option:  # "" or one dash, which means nothing here
            arguments = (option or None, value)
            for argument in (word for word in arguments if word is not None):
                add_argument(settings, argument, required)
        elif "." in name and FIT_OPTIONS in options:
            fit_options += [f"--{name}"] if value is None else [f"--{name}", value]
        else:
            settings[name] = read_option(name, value, hints) if name in options else value
    if fit_options:
        settings[FIT_OPTIONS] = [*settings.get(FIT_OPTIONS, []), *fit_options]
    missing = [option for option in required if option.key not in settings]
    if missing:
        require(False, find_mistake(settings, options) or describe_missing(missing))
    return settings


def add_argument(settings: dict[str, Any], word: str, required: Sequence[Option]) -> None:
    """Set the first required option that is not set yet; a list takes all words that are left."""
    unset = [option for option in required if option.key not in settings]
    for option in [*unset, *required[-1:]][:1]:
        if is_list_of_texts(option.hint):
            settings[option.key] = [*settings.get(option.key, []), word]
            return
    expected = " ".join(option.key for option in required)
    require(bool(unset), f"unexpected {word!r}: expected {expected} [--OPTION VALUE ...]")
    settings[unset[0].key] = word


def describe_missing(options: Sequence[Option]) -> str:
    """Return which options are missing, with the run folders here if one is meant."""
    described = ", ".join(f"{option.key} ({option.text.rstrip('.')})" for option in options)
    folders = ""
    if any("run folder" in option.text for option in options):
        runs = find_runs()
        folders = (
            f"; run folders here: {', '.join(runs)}" if runs else "; no run folder below runs/"
        )
    return f"{MISSING}{described}{folders}"


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
