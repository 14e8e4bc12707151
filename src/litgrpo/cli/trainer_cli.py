"""LightningCLI with a run folder, one-line errors, and nothing that a recipe did not say."""

from __future__ import annotations

import argparse
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_module
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

# Imported so that recipes may say GRPO, SFT, PromptData, PairData, StaticEngine without the module.
from litgrpo.arguments import import_by_path, require
from litgrpo.callbacks.completions import Completions
from litgrpo.callbacks.evaluation_files import EvaluationFiles
from litgrpo.callbacks.export import Export, HFCheckpoints
from litgrpo.callbacks.loggers import Board, Hyperparameters, name_runs, with_allowed_names
from litgrpo.callbacks.metrics_csv import MetricsCSV
from litgrpo.callbacks.non_finite import NonFinite
from litgrpo.callbacks.predictions import Predictions
from litgrpo.callbacks.progress import Progress
from litgrpo.callbacks.recompilation import Recompilation
from litgrpo.callbacks.run_folder import (
    RunFolder,
    checkpoint_file,
    mark,
    newest_checkpoint,
    refuse_if_taken,
    saved_config,
    written,
)
from litgrpo.callbacks.run_lock import held
from litgrpo.callbacks.summary import Summary
from litgrpo.callbacks.time_budget import TimeBudget
from litgrpo.callbacks.trainer_options import check_trainer_options, cluster_plugins
from litgrpo.callbacks.watchdog import Watchdog
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.logger_state import LoggerState, never_failing
from litgrpo.checkpointing.recipe_settings import RecipeSettings
from litgrpo.checkpointing.rng_state import RngState
from litgrpo.checkpointing.shards import read_any
from litgrpo.cli.errors import explain
from litgrpo.cli.key_help import asked, explained, roots_of
from litgrpo.cli.run_keys import RUN_KEYS
from litgrpo.distributed.machine import check_machine
from litgrpo.distributed.restarts import meet_anew
from litgrpo.tools.doctor.callback import Doctor
from litgrpo.training.sft import SFT

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
    "hf_checkpoints": HFCheckpoints,
}
TRAINER_DEFAULTS = {
    "max_epochs": -1,  # the module's max_iterations ends the training
    "num_sanity_val_steps": -1,  # the whole validation before training is the summary's "before"
    "check_val_every_n_epoch": None,  # val_check_interval then counts iterations
    "val_check_interval": 50,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,  # our samplers keep groups whole and know their position
    "enable_model_summary": False,
}
# Summary prints the evaluation, with intervals; Predictions writes the completions.
VERB_DEFAULTS = {
    "validate": {"verbose": False},
    "test": {"verbose": False},
    "predict": {"return_predictions": False},
}
OF_ONE_CALL = {"auto_resume", "ckpt_path", "config", "debug", "overwrite"}
OF_ONE_CALL |= {"return_predictions", "verbose", "weights_only"}

# Lines that Lightning prints in every run and that ask nothing of the user.
CHATTER: tuple[str, ...] = ("Tip:", "GPU available:", "TPU available:", "HPU available:")
CHATTER += ("Seed set to", "Restoring states from", "Restored all states")
CHATTER += ("was configured so 1 batch", "callbacks returned in `LightningModule.configure_call")
HARMLESS_WARNINGS = (
    r".*does not have many workers",
    r".*in eval mode at the start of training",
    r".*sync_dist=True",  # our modules average over processes before they log
    r".*You have overridden `transfer_batch_to_device`",
    r".*isinstance\(treespec, LeafSpec\)",
    r".*is_gradient_checkpointing. is deprecated",  # peft asks transformers by the old name
    # Lightning's calls of jsonargparse, not ours.
    r"(?s).*(JsonargparseDeprecationWarning|deprecated in v4\.\d+\.\d+ and will be removed in v5)",
)


def keep_quiet() -> None:
    """Leave out what Lightning says in every run."""
    for name in ("pytorch", "fabric"):
        for module in ("rank_zero", "seed"):
            logging.getLogger(f"lightning.{name}.utilities.{module}").addFilter(tells_something)
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message)


def tells_something(record: logging.LogRecord) -> bool:
    """Whether a line of Lightning's log is worth a look."""
    return not any(words in record.getMessage() for words in CHATTER)


# Any object may be an environment, and a recipe names it by its class.
set_parsing_settings(instantiate_subclass_spec_in_any=True)
yaml_loader = get_loader("yaml")


def load_yaml(text: str, **kwargs: Any) -> Any:
    """What the parser's own loader reads, but a lone `?` is a text and no mapping of nothing."""
    return text if text.strip() == "?" else yaml_loader(text, **kwargs)


set_loader("yaml", load_yaml, (yaml.YAMLError,))


class PlainParser(ArgumentParser):
    """Says what is wrong in one line instead of a page of usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Also inner parsers refuse an abbreviated key, which argparse takes silently."""
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Leave file names alone; with sub-configs `prompts.txt` is replaced by its content."""
        return super().add_class_arguments(*args, **kwargs | {"sub_configs": False})

    def parse_args(self, args: Any = None, *others: Any, **kwargs: Any) -> Any:
        """An inner parser is handed a word of the command line read already: null as `None`."""
        if not self.exit_on_error and args is not None:
            args = [re.sub("=None$", "=null", word) for word in args]
        return super().parse_args(args, *others, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the line and exit; inner parsers hand their message to the outer one."""
        if not self.exit_on_error or "--debug" in sys.argv:
            super().error(message, ex)
        self.exit(2, f"error: {explain(message, list(_keys(self)))}\n")


class RecipeParser(PlainParser, LightningArgumentParser):
    """The same for LightningCLI."""


def _keys(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _keys(inner)
        yield action.dest


# How every verb that takes a recipe reads it.
READING: dict[str, Any] = {
    "model_class": LightningModule,
    "datamodule_class": LightningDataModule,
    "subclass_mode_model": True,
    "subclass_mode_data": True,
    # The module builds its optimizer from its own arguments.
    "auto_configure_optimizers": False,
    # RunFolder writes the configuration, also into checkpoints.
    "save_config_callback": None,
    "seed_everything_default": 0,
    "trainer_defaults": TRAINER_DEFAULTS,
    "parser_class": RecipeParser,
}


class LitGRPOCLI(LightningCLI):
    """Reads recipes, prepares the run folder, and calls the trainer's verb."""

    def __init__(self) -> None:
        """Parse the command line, build everything, and run the verb."""
        keep_quiet()
        verb = sys.argv[1]
        usage = f"cli.py {verb} [-c RECIPE.yaml ...] [--KEY VALUE ...]"
        with ExitStack() as self.until_the_end:  # what is let go when the verb has ended
            super().__init__(**READING, parser_kwargs={verb: {"usage": usage}})

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Only the verb at hand, because every parser takes a second to build."""
        return {sys.argv[1]: LightningCLI.subcommands()[sys.argv[1]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and our callbacks, each under its own key."""
        for key, (kind, default, text) in RUN_KEYS.items():
            parser.add_argument(f"--{key}", type=kind, default=default, help=text)
        parser.add_argument(
            "--debug", action="store_true", help="Show tracebacks instead of one-line errors."
        )
        for name, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, name)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.set_defaults(**VERB_DEFAULTS.get(subcommand, {}))
        return parser

    @property
    def settings(self) -> Any:
        """The configuration of the verb."""
        return self.config[self.config.subcommand]

    def _parse_ckpt_path(self) -> None:
        # Stock LightningCLI lets the checkpoint's hyperparameters override YAML and command line
        # (Lightning #21455). Here it brings weights and state, the recipe everything else.
        settings = self.settings
        recipes = [path for path in settings.config or [] if path is not None]
        name = Path(str(recipes[0])).stem if recipes else self.config.subcommand
        run_dir = settings.run_dir or settings.trainer.default_root_dir or f"runs/{name}"
        run_dir = str(run_dir).replace("{seed}", str(settings.seed_everything))
        settings.run_dir = settings.trainer.default_root_dir = run_dir
        given = settings.ckpt_path
        require(
            given is None or not self._resumes_itself(),
            f"--auto_resume looks for a checkpoint, and --ckpt_path names one ({given}): leave one "
            "of them out.",
        )
        path = newest_checkpoint(Path(run_dir)) if self._resumes_itself() else None
        if given is not None:
            path = checkpoint_file(str(given), Path(run_dir))
        settings.ckpt_path = None if path is None else str(path)

    def _resumes_itself(self) -> bool:
        return self.config.subcommand == "fit" and self.settings.auto_resume

    def before_instantiate_classes(self) -> None:
        """See what the machine lacks, hand the seed down, and stop before two runs mix."""
        settings = self.settings
        prompts = settings.data.init_args.get("batch_size")
        group = settings.model.init_args.get("group_size")
        rows = prompts * group if self.subcommand == "fit" and prompts and group else None
        check_machine(settings.trainer, rows)
        meet_anew()
        for key in ("model", "data"):
            self._take_defaults_for_null(self.settings[key])
            self._hand_seed_to(self.settings[key])
        folder = Path(self.settings.run_dir)
        if self._writes_a_run():
            rank_zero_only(self._hold)(folder)
        name_runs(settings.trainer.logger, folder.name)
        if self._starts_anew():
            # A run that died before its first checkpoint left nothing to go on from.
            overwrite = self.settings.overwrite or self._resumes_itself()
            rank_zero_only(refuse_if_taken)(folder, overwrite=overwrite)

    def after_instantiate_classes(self) -> None:
        """Mark the run folder, now that the recipe is known to be sound."""
        if self.subcommand != "fit" and self.settings.ckpt_path and isinstance(self.model, SFT):
            # Before the data are read with it; a fit builds the same one from the same data.
            self.model.take_tokenizer(read_any(Path(self.settings.ckpt_path)))
        if self._starts_anew():
            rank_zero_only(mark)(Path(self.settings.run_dir), self.config_text)

    def _hold(self, folder: Path) -> None:
        # A process that was killed may need a moment to end.
        patience_s = 5.0 if self._resumes_itself() else 0.0
        self.until_the_end.enter_context(held(folder, patience_s))

    def _writes_a_run(self) -> bool:
        return self.config.subcommand == "fit" and not self.settings.trainer.fast_dev_run

    @property
    def leaves_a_report(self) -> bool:
        """Whether this process shall write the page of the run that has just ended."""
        return self._writes_a_run() and self.settings.html and self.trainer.is_global_zero

    def _starts_anew(self) -> bool:
        settings = self.settings
        from_here = settings.ckpt_path is not None and (
            Path(settings.run_dir).resolve() in Path(settings.ckpt_path).resolve().parents
        )
        return self._writes_a_run() and not from_here

    def _take_defaults_for_null(self, node: Any) -> None:
        # So that one recipe can take back what another one set: `episode: null`.
        taken = inspect.signature(import_by_path(node.class_path)).parameters
        for name, parameter in taken.items():
            if is_dataclass(parameter.default) and node.init_args.get(name, parameter) is None:
                del node.init_args[name]

    def _hand_seed_to(self, node: Any) -> None:
        # A seed that differs from its class's default was given on purpose.
        taken = inspect.signature(import_by_path(node.class_path)).parameters
        if "seed" in taken and node.init_args.seed == taken["seed"].default:
            node.init_args.seed = self.settings.seed_everything

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with our loggers and callbacks, unless the recipe says otherwise."""
        chosen = {**self._get(self.config_init, "trainer"), **kwargs}
        check_trainer_options(chosen, self.model)
        given = chosen["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        ours = [self._get(self.config_init, name) for name in CALLBACKS]
        no_bar = chosen["enable_progress_bar"] is False
        off: dict[type, bool] = {
            Checkpoint: chosen["enable_checkpointing"] is False,
            ProgressBar: no_bar or any(isinstance(each, ProgressBar) for each in given),
        }
        unwanted = tuple(kind for kind, is_off in off.items() if is_off)
        ours = [callback for callback in ours if not isinstance(callback, unwanted)]
        max_time = chosen.pop("max_time")
        if max_time is not None:
            ours.append(TimeBudget(max_time))
        for callback in ours:
            if isinstance(callback, IterationCheckpoint):
                callback.falls_back = self._resumes_itself()
        replaced = written(Path(self.settings.run_dir)) if self._starts_anew() else []
        always = [
            RunFolder(self.config_text, replaced),
            Hyperparameters(self.config_text),
            RecipeSettings(),
            RngState(),
            LoggerState(self.settings.run_dir),
        ]
        # Lightning moves Checkpoint callbacks behind all others, so the state of random numbers and
        # loggers is noted before a file is written; HFCheckpoints follows IterationCheckpoint.
        chosen["callbacks"] = [*ours, *always, *given]
        chosen["logger"] = self._loggers(chosen["logger"])
        chosen["plugins"] = cluster_plugins(chosen["plugins"])
        return self._instantiate_trainer(chosen, [])

    def _loggers(self, given: Any) -> list[Logger] | bool:
        if given is False or self.subcommand != "fit":
            return given if isinstance(given, list) else False
        folder = self.settings.run_dir
        loggers: list[Logger] = []
        if self.settings.tensorboard:
            loggers.append(Board(folder))
        if self.settings.csv:
            loggers.append(MetricsCSV(folder))
        extra = given if isinstance(given, list) else [given]
        loggers += [logger for logger in extra if isinstance(logger, Logger)]
        return [never_failing(with_allowed_names(logger)) for logger in loggers]

    @cached_property
    def config_text(self) -> str:
        """The settled configuration as YAML for any verb, less what is for this call only."""
        text = self.parser.dump(self.config, skip_unset=False, skip_link_targets=False)
        content = yaml.safe_load(text)[self.config.subcommand]
        kept = {name: value for name, value in content.items() if name not in OF_ONE_CALL}
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def key_help(words: list[str]) -> str:
    """The help that `--KEY.help [CLASS]` on a command line asks for, or nothing if none does."""
    question = asked(words)
    if question is None:
        return ""
    roots = roots_of(words, {"trainer": Trainer, **CALLBACKS})
    return "\n".join(explained(*question, roots))


def load_module(path: Path) -> Any:
    """The module that a checkpoint holds, with its weights, outside of any trainer.

    Args:
        path: a checkpoint written by `cli.py fit`.
    """
    checkpoint = read_any(path)
    node = yaml.safe_load(saved_config(checkpoint))["model"]
    module = instantiate_module(
        LightningModule, {"_class_path": node["class_path"], **node["init_args"]}
    )
    if isinstance(module, SFT):
        module.take_tokenizer(checkpoint)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    return module
