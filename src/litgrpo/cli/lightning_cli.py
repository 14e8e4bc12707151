"""Train, validate, test and predict from a recipe: LightningCLI with a run folder."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from litgrpo.arguments import as_list, import_by_path, require
from litgrpo.callbacks.guards import TimeBudget
from litgrpo.callbacks.iteration_metrics import StepTime
from litgrpo.callbacks.loggers import (
    Hyperparameters,
    MetricsCSV,
    TensorBoard,
    guard,
    name_runs,
)
from litgrpo.callbacks.trainer_options import (
    check_accelerator,
    check_trainer_options,
    choose_accelerator,
    cluster_plugins,
)
from litgrpo.checkpointing.io import VerifiedCheckpointIO
from litgrpo.checkpointing.resume import LoggerState, OptimizerOptions, RngState
from litgrpo.checkpointing.shards import read_checkpoint, verify_checkpoint
from litgrpo.cli.mistakes import root_cause
from litgrpo.cli.parser import CALLBACKS, RecipeCLI
from litgrpo.cli.settings import iterate_options
from litgrpo.distributed.device import check_machine
from litgrpo.distributed.messages import forget_warnings
from litgrpo.distributed.restarts import open_restart_store
from litgrpo.files import read_text, write_if_possible
from litgrpo.modules.sft import SFT
from litgrpo.run_folder import (
    REPORT,
    RunFolder,
    check_is_free,
    check_links,
    checkpoint_folder,
    claim_folder,
    earlier_files,
    find_newest_checkpoint,
    lock_run_folder,
    resolve_checkpoint,
)
from litgrpo.tensor_files import NEEDED_TO_RESUME
from litgrpo.text.secrets import mask_settings
from litgrpo.text.yaml_limits import check_limits

# Summary prints the evaluation, with intervals; Predictions writes the completions.
COMMAND_DEFAULTS: dict[str, dict[str, Any]] = {
    "validate": {"verbose": False},
    "test": {"verbose": False},
    "predict": {"return_predictions": False},
}
COMPLETE = "complete.json"  # beside the checkpoints of a run that has written everything
MODEL_LIMITS = ("max_iterations", "max_generated_tokens")
# Options that may differ each time a run is started, such as the addresses of servers.
NOT_IDENTITY = (
    *(f"model.{name}" for name in MODEL_LIMITS),
    *("model.engine", "model.update.micro_batch"),
    *("model.scoring.timeout_s", "model.scoring.num_workers", "model.scoring.max_failed_frac"),
)
TRAINER_LIMITS = ("max_epochs", "max_steps", "min_epochs", "min_steps", "limit_train_batches")
LOCK_PATIENCE_S = 5.0  # a process that was killed may need a moment to exit


class ConstructionError(ValueError):
    """A class that a recipe names rejects its options, or lacks a package."""

    exit_code = 2


class LitGRPOCLI(RecipeCLI):
    """Build model, data and trainer from a recipe, and call a method of the trainer.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        words: what follows the command.

    Example::

        LitGRPOCLI("fit", ["-c", "quickstart", "--model.max_iterations", "10"])
    """

    def __init__(self, command: str, words: Sequence[str]) -> None:
        self.is_complete = False
        forget_warnings()
        with ExitStack() as self.until_the_end:  # holds the lock of the run folder
            super().__init__(words, command, build=True)
            if self.is_complete:
                return
            arguments = {name: self.config[name] for name in self.trainer_options()}
            getattr(self.trainer, command)(self.model, datamodule=self.datamodule, **arguments)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.set_defaults(**COMMAND_DEFAULTS.get(self.command, {}))

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        settings = self.config
        name = Path(self.command_line.names[0]).stem if self.command_line.names else self.command
        run_dir = settings.run_dir or settings.trainer.default_root_dir or f"runs/{name}"
        run_dir = str(run_dir).replace("{seed}", str(settings.seed_everything))
        settings.run_dir = settings.trainer.default_root_dir = run_dir
        ckpt_path = settings.ckpt_path
        require(
            ckpt_path is None or not self.resumes_automatically,
            f"--auto_resume finds the checkpoint itself, but --ckpt_path names {ckpt_path}: leave "
            "one of them out.",
        )
        path = find_newest_checkpoint(Path(run_dir)) if self.resumes_automatically else None
        if ckpt_path is not None:
            path = resolve_checkpoint(str(ckpt_path), Path(run_dir))
        settings.ckpt_path = None if path is None else str(path)

    @property
    def resumes_automatically(self) -> bool:
        """True for `fit --auto_resume true`."""
        return self.command == "fit" and bool(self.config.auto_resume)

    @property
    def writes_a_run(self) -> bool:
        """True for a training that is not a `fast_dev_run`."""
        return self.command == "fit" and not self.config.trainer.fast_dev_run

    @property
    def writes_a_report(self) -> bool:
        """True if this process shall write the HTML report of the run."""
        return self.writes_files and bool(self.config.html)

    @property
    def writes_files(self) -> bool:
        """True if this process writes the files of a run."""
        return self.writes_a_run and not self.is_complete and self.trainer.is_global_zero

    @property
    def starts_from_scratch(self) -> bool:
        """True for a training that does not continue the run in its folder."""
        settings = self.config
        resumes = settings.ckpt_path is not None and (
            # (`Path.resolve` raises for a cycle of links.)
            Path(os.path.realpath(settings.run_dir))
            in Path(os.path.realpath(settings.ckpt_path)).parents
        )
        return self.writes_a_run and not resumes

    def before_instantiate_classes(self) -> None:
        settings = self.config
        prompts = settings.data.init_args.get("batch_size")
        group = settings.model.init_args.get("group_size")
        rows = prompts * group if self.command == "fit" and prompts and group else None
        check_machine(settings.trainer, rows)
        open_restart_store()
        for key in ("model", "data"):
            self.replace_null_by_default(settings[key])
            self.pass_seed_to(settings[key])
        folder = Path(settings.run_dir)
        rank_zero_only(check_links)(folder)
        if self.writes_a_run:
            rank_zero_only(self.lock)(folder)
            self.is_complete = not self.starts_from_scratch and self.has_completed(folder)
        name_runs(settings.trainer.logger, folder.name)
        if self.starts_from_scratch:
            # A run that died before its first checkpoint left nothing to resume from.
            overwrite = settings.overwrite or self.resumes_automatically
            rank_zero_only(check_is_free)(folder, overwrite=overwrite)

    def has_completed(self, folder: Path) -> bool:
        """Log and return True if the run has ended, and this start would train nothing.

        Raises:
            ValueError: its model or data are not those of the recipe.
        """
        done = read_completion(folder)
        source = os.path.basename(os.path.realpath(self.config.ckpt_path))
        missing = [name for name in self.outputs if not (folder / name).exists()]
        if done.get("checkpoint") != source or missing:
            return False
        limits = run_limits(self.config)
        last = limits["model.max_iterations"]
        if done.get("limits") != limits and (last is None or done["iteration"] < last):
            return False
        try:
            checkpoint = verify_checkpoint(Path(self.config.ckpt_path), NEEDED_TO_RESUME)
            changes = find_changes(read_recipe(checkpoint), mask_settings(self.recipe))
        except (ValueError, OSError):  # the start reports it, or resumes from an earlier one
            return False
        require(
            not changes,
            f"{folder} is complete after {done['iteration']} iterations, but of another recipe: "
            f"{'; '.join(changes)}. Restore the options, raise --model.max_iterations to train "
            "further if model and data still fit, or choose another folder with --run_dir.",
        )
        rank_zero_only(print)(
            f"{folder} is complete after {done['iteration']} iterations: nothing to train, and no "
            "file is changed. Raise --model.max_iterations to train further."
        )
        return True

    @property
    def outputs(self) -> list[str]:
        """Files and folders that a run writes at its end."""
        settings = self.config
        outputs = {
            "summary.json": True,
            "final_model": settings.export.final,
            REPORT: settings.html,
        }
        return [name for name, is_wanted in outputs.items() if is_wanted]

    def mark_complete(self) -> None:
        """Note that everything of a finished run is written, so that a repeated start ends.

        A run that its time limit ended is not complete: the next start continues it.
        """
        newest = find_newest_checkpoint(Path(self.config.run_dir))
        timers = (Timer, TimeBudget)
        if not self.writes_files or newest is None or self.config.checkpoint.save_weights_only:
            return
        limits, iteration = run_limits(self.config), self.model.iteration
        limit = self.model.max_iterations
        is_reached = limit is not None and iteration >= limit
        trainer: Any = self.trainer
        if not is_reached and any(isinstance(callback, timers) for callback in trainer.callbacks):
            return
        note = {"checkpoint": newest.resolve().name, "iteration": iteration, "limits": limits}
        path = checkpoint_folder(self.config.run_dir) / COMPLETE
        write_if_possible(path, json.dumps(note), COMPLETE)

    def lock(self, folder: Path) -> None:
        """Lock the run folder until the command has ended."""
        patience_s = LOCK_PATIENCE_S if self.resumes_automatically else 0.0
        self.until_the_end.enter_context(lock_run_folder(folder, patience_s))

    def replace_null_by_default(self, node: Any) -> None:
        """Let a config override take back what a recipe sets, as by `episode: null`."""
        parameters = inspect.signature(import_by_path(node.class_path)).parameters
        for name, parameter in parameters.items():
            if is_dataclass(parameter.default) and node.init_args.get(name, parameter) is None:
                del node.init_args[name]

    def pass_seed_to(self, node: Any) -> None:
        """Set the seed of model or data, unless the recipe gives them another."""
        parameters = inspect.signature(import_by_path(node.class_path)).parameters
        if "seed" in parameters and node.init_args.seed == parameters["seed"].default:
            node.init_args.seed = self.config.seed_everything

    def instantiate_classes(self) -> None:
        if self.is_complete:
            return
        try:
            super().instantiate_classes()
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            if mistake := self.explain():
                raise ConstructionError(mistake) from error
            name, module = raising_class(cause)
            if cause is error or module.partition(".")[0] == "litgrpo" or not name:
                raise
            raise ConstructionError(f"Could not construct {name}: {root_cause(error)}") from error

    def after_instantiate_classes(self) -> None:
        if self.is_complete:
            return
        if self.command != "fit" and self.config.ckpt_path and isinstance(self.model, SFT):
            # The data are read with the checkpoint's tokenizer; fit builds the same from its data.
            self.model.take_tokenizer(read_checkpoint(Path(self.config.ckpt_path)))
        if self.starts_from_scratch:
            rank_zero_only(claim_folder)(Path(self.config.run_dir), self.config_text)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = {**self.config_init["trainer"], **kwargs}
        check_trainer_options(options, self.model)
        check_accelerator(options["accelerator"])
        options["accelerator"] = choose_accelerator(options["accelerator"])
        recipe_callbacks = as_list(options["callbacks"])
        has_bar = any(isinstance(callback, ProgressBar) for callback in recipe_callbacks)
        with_options = {name: self.config_init[name] for name in CALLBACKS}
        with_options["checkpoint"].fall_back = self.resumes_automatically
        if options["enable_checkpointing"] is False:
            del with_options["checkpoint"]
        if options["enable_progress_bar"] is False or has_bar:
            del with_options["progress"]
        max_time = options.pop("max_time")
        time_limits = [] if max_time is None else [TimeBudget(max_time)]
        folder = Path(self.config.run_dir)
        replaced = earlier_files(folder) if self.starts_from_scratch else []
        always = [
            RunFolder(self.config_text, replaced),
            Hyperparameters(self.config_text),
            OptimizerOptions(),
            StepTime(),
            RngState(),
            LoggerState(self.config.run_dir),
        ]
        # Lightning moves Checkpoint callbacks behind all others, so the state of random numbers and
        # loggers is noted before a file is written.
        options["callbacks"] = [*with_options.values(), *time_limits, *always, *recipe_callbacks]
        options["logger"] = self.loggers(options["logger"])
        options["plugins"] = [*cluster_plugins(options["plugins"]), VerifiedCheckpointIO()]
        return Trainer(**options)

    def loggers(self, recipe_loggers: Any) -> list[Logger] | bool:
        """Return TensorBoard, CSV and the recipe's loggers for `fit`; else the recipe's alone."""
        if recipe_loggers is False or self.command != "fit":
            return recipe_loggers if isinstance(recipe_loggers, list) else False
        folder = self.config.run_dir
        loggers: list[Logger] = []
        if self.config.tensorboard:
            loggers.append(TensorBoard(folder))
        if self.config.csv:
            loggers.append(MetricsCSV(folder))
        loggers += [logger for logger in as_list(recipe_loggers) if isinstance(logger, Logger)]
        return [guard(logger) for logger in loggers]

    @cached_property
    def config_text(self) -> str:
        """Resolved configuration as YAML, without options of one call; keys are masked."""
        return yaml.safe_dump(mask_settings(self.recipe), sort_keys=False, allow_unicode=True)


def run_limits(settings: Any) -> dict[str, Any]:
    """The options that end a run, {option: value}."""
    model = {f"model.{name}": settings.model.init_args.get(name) for name in MODEL_LIMITS}
    return model | {f"trainer.{name}": settings.trainer.get(name) for name in TRAINER_LIMITS}


def read_recipe(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint.

    Raises:
        ValueError: the checkpoint has none.
    """
    text = checkpoint["callbacks"].get(RunFolder.__name__, {}).get("config")
    try:
        check_limits(str(text))
        content = yaml.safe_load(str(text))
    except yaml.YAMLError as error:
        raise ValueError("the checkpoint's configuration is not valid YAML") from error
    require(isinstance(content, dict), "the checkpoint has no configuration")
    return dict(content)


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return which options of model and data changed, except limits and those of the machine.

    Example:
        >>> find_changes({"data": {"batch_size": 8}}, {"data": {"batch_size": 4}})
        ['data.batch_size was 8, now it is 4']
    """
    flat: list[dict[str, Any]] = []
    for settings in (before, now):
        nodes = {name: settings.get(name) for name in ("model", "data")}
        flat.append({path.replace(".init_args", ""): x for path, x in iterate_options(nodes)})
    first, second = flat
    return [
        f"{path} was {first.get(path)!r:.60}, now it is {second.get(path)!r:.60}"
        for path in dict.fromkeys([*first, *second])
        if first.get(path) != second.get(path) and not path.startswith(NOT_IDENTITY)
    ]


def read_completion(folder: Path) -> dict[str, Any]:
    """Content of the file that `LitGRPOCLI.mark_complete` writes; {} if the run has not ended."""
    try:
        content = json.loads(read_text(checkpoint_folder(folder) / COMPLETE))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def raising_class(error: BaseException) -> tuple[str, str]:
    """Return name and module of the class whose constructor raised; ("", "") if there is none."""
    trace, innermost = error.__traceback__, ("", "")
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "__init__" and "self" in frame.f_locals:
            kind = type(frame.f_locals["self"])
            innermost = (kind.__name__, str(frame.f_globals.get("__name__", "")))
        trace = trace.tb_next
    return innermost
