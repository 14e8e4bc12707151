"""What GRPO and SFT share: weights, tokenizer, device, the end of a run, and checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lightning import LightningModule

from litgrpo.callbacks.trainer_options import check_optimizers, check_trainer
from litgrpo.checkpointing.io import use_verified_io
from litgrpo.data.loader import BatchLoader
from litgrpo.distributed.cpu_contention import CpuContention
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.learning import kernel_choice
from litgrpo.lightning_compat import find_trainer, ignore_harmless_warnings, log_every_iteration
from litgrpo.models.architectures import ENCODER_DECODER
from litgrpo.models.loading.load import (
    build_policy,
    load_policy,
    load_tokenizer,
    reads_with_encoder,
)
from litgrpo.models.loading.scratch import Scratch, deserialize_tokenizer, serialize_tokenizer
from litgrpo.models.policy import Policy
from litgrpo.modules import hyper_parameters
from litgrpo.modules.end_token import add_end_token
from litgrpo.modules.hooks import check_super_is_called
from litgrpo.modules.run_setup import (
    check_trainer_precision,
    log_that_run_is_complete,
    make_sharding,
)
from litgrpo.tensor_files import loader_states

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LanguageModule(LightningModule, ABC):
    """A language model that is trained; subclasses say how.

    Constructors of subclasses set `pretrained` or `scratch`, `precision`, `lora` and `seed`.
    """

    pretrained: str | None
    scratch: Scratch | None = None  # a new model instead of `pretrained`
    precision: Any
    lora: Any
    seed: int
    _keywords: list[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the keyword arguments, of which a subclass may pass some on as `**kwargs`."""
        module = super().__new__(cls)
        module._keywords = list(kwargs)
        return module

    def __init__(self) -> None:
        super().__init__()
        ignore_harmless_warnings()
        # Loaded by `configure_model`.
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.policy: Policy | None = None
        self.evaluation_report: dict[str, float] = {}
        self.hooks_that_ran: set[str] = set()
        self.cpu_contention = CpuContention()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_super_is_called(cls)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", **arguments: Any
    ) -> Self:
        """Load a module and its weights; see `hyper_parameters.load_from_checkpoint`."""
        return hyper_parameters.load_from_checkpoint(
            cls, checkpoint_path, map_location, **arguments
        )

    # --- before training ---

    def setup(self, stage: str) -> None:
        """Check the trainer, and write checkpoints that are verified when they are read."""
        check_trainer(self)
        check_trainer_precision(str(self.trainer.precision))
        log_every_iteration(self.trainer)
        use_verified_io(self)
        if self.trainer.strategy.root_device.type == "cpu":
            self.cpu_contention.start()

    def on_fit_start(self) -> None:
        """Check optimizer and schedule."""
        check_optimizers(self)

    def fit_tokenizer(self, texts: Iterable[str] = ()) -> PreTrainedTokenizerBase:
        """Return the tokenizer: of `pretrained`, or with `scratch` one fitted to the texts, once.

        Args:
            texts: prompts and completions of the training set.
        """
        if self.tokenizer is None and self.policy is not None:
            self.tokenizer = self.policy.tokenizer
        elif self.tokenizer is None and self.scratch is not None:
            self.tokenizer = self.scratch.build_tokenizer(texts)
        elif self.tokenizer is None:
            self.tokenizer = load_tokenizer(str(self.pretrained))
        return self.tokenizer

    def take_tokenizer(self, checkpoint: dict[str, Any]) -> None:
        """With `scratch`, read with the tokenizer of a checkpoint instead of fitting one."""
        if self.scratch is not None and "tokenizer" in checkpoint:
            self.tokenizer = deserialize_tokenizer(checkpoint["tokenizer"])

    def uses_encoder(self) -> bool:
        """Return True for an encoder-decoder model."""
        if self.policy is not None:
            return bool(self.policy.bare_model.config.is_encoder_decoder)
        if self.scratch is not None:
            return self.scratch.architecture["model_type"] in ENCODER_DECODER
        return reads_with_encoder(str(self.pretrained))

    def load_policy(self) -> Policy:
        """Load or build the policy, once, with the end token of the data, and shard its weights.

        Raises:
            ValueError: a new model has no tokenizer yet.
        """
        sharding = make_sharding(self)
        if self.policy is None and self.scratch is None:
            self.policy = load_policy(
                str(self.pretrained),
                tokenizer=self.fit_tokenizer(),
                precision=self.precision,
                lora=self.lora,
                sharding=sharding,
            )
        elif self.policy is None:
            self.policy = self._build_policy()
        add_end_token(self, self.policy)
        if sharding is not None:
            sharding.shard(self.policy)
        return self.policy

    def _build_policy(self) -> Policy:
        assert self.scratch is not None
        if self.tokenizer is None:
            raise ValueError(
                "`scratch` has no tokenizer yet: call fit_tokenizer(texts) first, or train with a "
                "data module, which does"
            )
        model = self.scratch.build_model(self.tokenizer, seed=self.seed)
        return build_policy(model, self.tokenizer, precision=self.precision)

    # --- the end of a run ---

    @abstractmethod
    def stop_if_done(self) -> None:
        """End the training if a limit of the run is reached."""

    def on_train_start(self) -> None:
        """End a resumed run that is complete already."""
        self.stop_if_done()
        if self.trainer.should_stop:
            log_that_run_is_complete(self)

    def teardown(self, stage: str) -> None:
        """Stop watching the CPU."""
        self.cpu_contention.stop()

    # --- checkpoints ---

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the linear kernels, which decide rounding, and the tokenizer if it was fitted."""
        assert self.policy is not None
        if "loops" in checkpoint:
            self._drop_unfinished(checkpoint)
        checkpoint[hyper_parameters.KEYWORDS] = self._keywords
        checkpoint[kernel_choice.KEY] = kernel_choice.save_kernels(self.policy)
        if self.scratch is not None and self.tokenizer is not None:
            checkpoint["tokenizer"] = serialize_tokenizer(self.tokenizer)

    def _drop_unfinished(self, checkpoint: dict[str, Any]) -> None:
        """Resume with a batch or a validation that has not ended, as in `OnExceptionCheckpoint`."""
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]["current"]
        if isinstance(self.trainer.train_dataloader, BatchLoader):
            for state in loader_states(checkpoint):
                state["batches"] -= batches["ready"] - batches["processed"]
        validated = loop["epoch_loop.val_loop.batch_progress"]["current"]
        if validated["completed"] < validated["ready"]:
            validated["completed"] = 0  # the counts of its first batches are not saved

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the linear kernels, and warn if a resumed run leaves out batches."""
        kernel_choice.restore(self, checkpoint)
        trainer, loop = find_trainer(self), checkpoint.get("loops", {}).get("fit_loop")
        if trainer is None or trainer.state.fn != "fit" or loop is None:
            return
        epochs, batches = (loop[name] for name in ("epoch_progress", "epoch_loop.batch_progress"))
        has_ended = 0 < epochs["current"]["started"] == epochs["current"]["processed"]
        if has_ended and not batches["is_last_batch"]:
            rank_zero_info(
                f"The checkpoint's run ended after batch {batches['current']['ready']} of its "
                "epoch, and Lightning resumes with the next epoch: the other batches are left "
                "out. IterationCheckpoint resumes with the next batch."
            )
