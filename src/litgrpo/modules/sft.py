"""Supervised fine-tuning: learn to repeat demonstrations; its export is what GRPO starts from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.nn import Parameter

from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import at_least, require
from litgrpo.callbacks.progress import replace_stock_bar
from litgrpo.checks.callback import TargetChecks
from litgrpo.data.modules import validation_set_names
from litgrpo.data.pairs import PairBatch
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.memory import Attempt, RowLimit
from litgrpo.learning import kernel_choice
from litgrpo.learning.micro_batches import EvenBatches
from litgrpo.learning.optim import DefaultAdamW, check_max_grad_norm
from litgrpo.learning.steppers import (
    TrainerComm,
    clip_to_norm,
    drop_gradients,
    is_attached,
    list_parameters,
    zero_loss,
)
from litgrpo.models.loading.load import (
    LoRA,
    Precision,
    save_in_memory_model,
)
from litgrpo.models.loading.scratch import Scratch
from litgrpo.modules import hyper_parameters
from litgrpo.modules.data_checks import check_data_fits_model
from litgrpo.modules.language_module import LanguageModule
from litgrpo.modules.run_setup import (
    SFT_RATES,
    build_optimizer,
)
from litgrpo.tensors import token_logprobs
from litgrpo.types import StepReport

if TYPE_CHECKING:
    from litgrpo.models.loading.load import Pretrained
else:  # the type of a config; Python takes more
    Pretrained = str

Result = TypeVar("Result")
StepSizes = dict[str, Tensor]  # {targets, real, positions: number of tokens of all processes}


class SFT(LanguageModule):
    """Supervised fine-tuning on pairs of prompt and completion, with the loss on completions.

    Args:
        pretrained: hub id, folder, GGUF file, `builtin:<name>`; or give `scratch`. In Python also
            a `PreTrainedModel`, or `(model, tokenizer)`, of which a copy is trained.
        scratch: a new model and tokenizer instead of `pretrained`.
        optimizer: arguments of AdamW, such as `{"lr": 2e-5}`, a class with its arguments, or a
            callable that takes the parameters; default: AdamW, with a learning rate that is logged
            at start-up.
        lr_scheduler: callable that takes the optimizer, or `WarmupCosine`, `WarmupLinear`; it is
            stepped once per iteration, so give its length in iterations.
        max_grad_norm: gradients are scaled down to this norm; None leaves them.
        precision: dtype, gradient checkpointing and dropout.
        lora: train adapters instead of the weights.
        max_iterations: stop after this many optimizer steps; None: after three passes over the
            data, unless the trainer sets a limit.
        seed: random seed of the initial weights of `scratch`.
        micro_batch_size: pairs computed at once; their gradients are summed. None: the whole batch,
            or what fits into memory: it is halved after each out-of-memory error.
        check_invariants: compare the log-probabilities of a few targets with a plain forward pass
            before training starts.

    Example:
        >>> module = SFT("Qwen/Qwen2.5-0.5B", max_iterations=200)  # doctest: +SKIP
    """

    max_generated_tokens: int | None = None  # read by `resolve_run_length`; SFT generates nothing

    @check_argument_types("pretrained")
    def __init__(  # noqa: PLR0913, PLR0917 (each is an option of a recipe)
        self,
        pretrained: Pretrained | None = None,
        scratch: Scratch | None = None,
        optimizer: OptimizerCallable = DefaultAdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = 1.0,
        precision: Precision | None = None,
        lora: LoRA | None = None,
        max_iterations: int | None = None,
        seed: int = 0,
        micro_batch_size: int | None = None,
        check_invariants: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(hyper_parameters.describe_arguments(locals()))
        if (pretrained is None) == (scratch is None):
            raise ValueError(
                f"SFT starts from `pretrained` ({pretrained!r}) or from `scratch` ({scratch!r}): "
                "give exactly one of them"
            )
        untrained = scratch is not None and lora is not None
        require(not untrained, "lora adapts trained weights; `scratch` has none, leave lora out")
        at_least("max_iterations", max_iterations, 1)
        at_least("micro_batch_size", micro_batch_size, 1)
        self.pretrained = None if pretrained is None else save_in_memory_model(pretrained)
        self.scratch = scratch
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        check_max_grad_norm("max_grad_norm", max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.precision = precision
        self.lora = lora
        self.max_iterations = max_iterations
        self.seed = seed
        self.micro_batch_size = micro_batch_size
        self.check_invariants = check_invariants
        # After out-of-memory errors; it outlives the trainer.
        self.row_limit = RowLimit(
            "model.micro_batch_size",
            "shorten the pairs (data.max_length), or set model.precision.gradient_checkpointing",
        )
        self.success: dict[str, Any] = {}
        self.reports: list[StepReport] = []
        # Sums [2] and sizes of the batches since the last optimizer step, of all processes.
        self.earlier_batches: tuple[Tensor, StepSizes] | None = None
        # {name of a validation set: [loss, number of correct tokens, number of tokens]}
        self.sums: dict[str, Tensor] = {}

    def setup(self, stage: str) -> None:
        """Check the device.

        Raises:
            ValueError: the device compiles a program for every shape of a batch.
        """
        super().setup(stage)
        device = self.trainer.strategy.root_device
        self._reset_sums(validation_set_names(self.trainer))
        require(
            not backend(device).static_shapes,
            f"Supervised training does not run on {device.type!r} devices, which compile a "
            "program for each shape of a batch. Train on a CPU or a GPU (the config overrides in "
            "configs/hardware); GRPO from the export runs on either.",
        )

    @property
    def iteration(self) -> int:
        """Number of finished optimizer steps, resumed ones included."""
        return self.trainer.global_step

    def configure_model(self) -> None:
        """Load or make the policy, once.

        Raises:
            ValueError: a new model has no tokenizer yet.
        """
        is_new = self.policy is None
        policy = self.load_policy()
        if is_new:
            policy.train()
        if is_attached(self):
            check_data_fits_model(self, policy, 0, "max_length")
            kernel_choice.use_everywhere(self, policy)
            sizes = kernel_choice.choose_sizes(policy, self.trainer.strategy.root_device)
            if sizes is not None:
                kernel_choice.set_logits(self, sizes.logits)

    def configure_callbacks(self) -> list[Callback]:
        """Start-up checks, and a progress bar that counts iterations."""
        checks = [TargetChecks()] if self.check_invariants else []
        return [*checks, *replace_stock_bar(self)]

    def configure_optimizers(self) -> Any:
        """Build the optimizer over the trained parameters, and its schedule in iterations."""
        return build_optimizer(self, SFT_RATES)

    def score(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities of the K target tokens of a batch.

        Args:
            batch: M pairs of length T.

        Returns:
            [K] float32 log-probabilities with gradient, and [K] bool, True where the target is the
            most likely token.
        """
        policy, predictions = self.policy, []
        assert policy is not None

        def head(hidden: Tensor) -> Tensor:
            logits = policy.head(hidden)
            predictions.append(logits.argmax(-1))
            return logits

        targets = batch.input_ids[batch.loss_mask]
        with policy.autocast():
            hidden = policy.target_hidden_states(
                batch.input_ids, batch.attention_mask, batch.loss_mask
            )
            chunk_size = policy.chunk_size(len(hidden))
            logprobs, *_ = token_logprobs(hidden, targets, head, chunk_size=chunk_size)
        return logprobs, torch.cat(predictions) == targets

    def target_logprobs(self, batch: PairBatch) -> Tensor:
        """Compute the [K] log-probabilities of a batch's targets, in parts if memory needs it."""
        return self._score_in_parts(batch)[0]

    def _score_in_parts(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Return the result of `score`, in parts if memory needs it."""

        def score(max_rows: int | None) -> tuple[Tensor, Tensor]:
            parts = batch.split(self._rows_at_once(batch, max_rows))
            logprobs, correct = zip(*map(self.score, parts), strict=True)
            return torch.cat(logprobs), torch.cat(correct)

        return self._retry_with_fewer_rows(score, batch)

    def training_step(self, batch: PairBatch, batch_idx: int) -> dict[str, Any]:
        """Mean negative log-probability of all target tokens, over all processes, and its gradient.

        Optimization is Lightning's own, so that `trainer.accumulate_grad_batches` works: gradient
        and metrics of an optimizer step are means over the tokens of all of its batches. The
        gradient is computed here, in as many passes as memory needs. Lightning's backward pass then
        averages it over ranks: a rank that runs out of memory has entered no collective.

        Returns:
            For callbacks: `loss`, and `reports`, a `StepReport` for each optimizer step that ends
            with this batch: one, or none.
        """
        _check_pairs(batch)
        policy, sizes = self.policy, self._count_tokens(batch)
        assert policy is not None
        optimizer: Any = self.trainer.optimizers[0]
        trained = list_parameters(optimizer)
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.earlier_batches = None
        # An attempt starts without gradients, and is then averaged with those of earlier batches.
        earlier = [] if self.earlier_batches is None else [p.grad for p in trained]
        # Gradients are averaged over ranks: times world_size, the mean is one over all tokens.
        scale = self.trainer.world_size / sizes["targets"]
        attempt = partial(self._accumulate_gradients, batch, scale, trained)
        sums = self._retry_with_fewer_rows(attempt, batch)
        loss = -sums[0].float() * scale
        sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        step = self._add_earlier_batches(sums, sizes)
        share = float(sizes["targets"] / step[1]["targets"]) if earlier else 1.0
        for parameter, gradient in zip(trained, earlier, strict=bool(earlier)):
            new_gradient = None if parameter.grad is None else parameter.grad.mul_(share)
            if gradient is not None:
                gradient.mul_(1 - share)
                parameter.grad = gradient if new_gradient is None else gradient.add_(new_gradient)
        self._log_step(*step)
        # Lightning steps after this method; the hook below adds the report to this list.
        self.reports = []
        if self.trainer.world_size > 1 and not is_sharded(policy):
            loss = loss + zero_loss(trained)
        return {"loss": loss, "reports": self.reports}

    def _accumulate_gradients(
        self, batch: PairBatch, scale: Tensor, trained: list[Parameter], max_rows: int | None
    ) -> Tensor:
        """Compute the gradient of a batch; return [2] sums of log-probabilities and of hits."""
        drop_gradients(trained)
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # of 16-mixed
        for part, is_filler in self._split(batch, max_rows):
            logprobs, correct = self.score(part)
            loss = -logprobs.sum() * (0 if is_filler else scale)
            # Operators of the backward pass follow the types of the forward pass.
            with torch.autocast(self.device.type, enabled=False):
                (loss if scaler is None else scaler.scale(loss)).backward()
            if not is_filler:
                sums += torch.stack([logprobs.detach().sum().double(), correct.sum().double()])
        return sums

    def _split(self, batch: PairBatch, max_rows: int | None) -> Iterator[tuple[PairBatch, bool]]:
        """Yield parts of a batch, then fillers (True) that ranks with sharded weights need."""
        parts = batch.split(self._rows_at_once(batch, max_rows))
        # Before the first pass, which is a collective itself.
        num_fillers = self._even_batches.count_fillers(len(parts))
        yield from ((part, False) for part in parts)
        yield from ((parts[0], True) for _ in range(num_fillers))

    def _rows_at_once(self, batch: PairBatch, max_rows: int | None) -> int:
        limits = (len(batch), self.micro_batch_size, max_rows)
        return min(rows for rows in limits if rows is not None)

    def _retry_with_fewer_rows(self, attempt: Attempt[Result], batch: PairBatch) -> Result:
        """Return the result of an attempt, on all ranks, with fewer pairs if memory needs it."""
        return self.row_limit.run(
            attempt,
            lambda: self._rows_at_once(batch, self.row_limit.max_rows),
            comm=TrainerComm(self) if self.trainer.training else None,
            computes_alone=self._even_batches.computes_alone,
        )

    @property
    def _even_batches(self) -> EvenBatches:
        assert self.policy is not None
        return EvenBatches(self.policy, TrainerComm(self))

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep the gradients, which `training_step` has cleared and computed by now."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Average the gradients over ranks; with one process, and with FSDP2, they are complete."""
        if loss.requires_grad:
            super().backward(loss, *args, **kwargs)

    def _count_tokens(self, batch: PairBatch) -> StepSizes:
        """Count target tokens, real tokens and positions of the batches of all processes."""
        positions = torch.tensor(batch.input_ids.numel(), device=self.device)
        sizes = torch.stack([batch.loss_mask.sum(), batch.attention_mask.sum(), positions])
        sizes = self.trainer.strategy.reduce(sizes.double(), reduce_op="sum").float()
        return dict(zip(("targets", "real", "positions"), sizes, strict=True))

    def _add_earlier_batches(self, sums: Tensor, sizes: StepSizes) -> tuple[Tensor, StepSizes]:
        """Return sums and sizes of the optimizer step up to this batch."""
        if self.earlier_batches is not None:
            earlier_sums, earlier_sizes = self.earlier_batches
            sums = sums + earlier_sums
            sizes = {name: size + earlier_sizes[name] for name, size in sizes.items()}
        self.earlier_batches = sums, sizes
        return sums, sizes

    def _log_step(self, sums: Tensor, sizes: StepSizes) -> None:
        """Log means over the tokens of all processes and of all batches of the step so far."""
        total_logprob, num_correct = sums.float()
        mean_loss = -total_logprob / sizes["targets"]
        self.log("step", float(self.iteration + 1))  # loggers take it as their x-axis
        self.log_dict(
            {
                "sft/loss": mean_loss,
                "sft/perplexity": mean_loss.exp(),
                "sft/token_accuracy": num_correct / sizes["targets"],
                "sft/padding_frac": 1 - sizes["real"] / sizes["positions"],
                "optim/lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            }
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip here: gradients are unscaled and reduced over processes by now."""
        trained = list_parameters(optimizer)
        grad_norm = clip_to_norm(trained, self.max_grad_norm)
        self.log("optim/grad_norm", grad_norm)
        # All processes see the same gradient, so they skip the same steps.
        skipped = None if bool(grad_norm.isfinite()) else dict[int, str]()
        if skipped is not None:
            drop_gradients(trained)
        self.reports.append(StepReport(lr=optimizer.param_groups[0]["lr"], skipped=skipped))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save also the limit on pairs, which decides in which order sums are rounded."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lowered"] = {"micro_batch_size": self.row_limit.max_rows}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the linear kernels and the limit on pairs, which decide rounding."""
        self.row_limit.max_rows = checkpoint.get("lowered", {}).get("micro_batch_size")
        super().on_load_checkpoint(checkpoint)

    def on_train_batch_end(self, outputs: Any, batch: PairBatch, batch_idx: int) -> None:
        """Stop after `max_iterations`."""
        self.stop_if_done()

    def stop_if_done(self) -> None:
        """Stop after `max_iterations`."""
        if self.max_iterations is not None and self.iteration >= self.max_iterations:
            self.trainer.should_stop = True

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        """Count loss and accuracy of a batch, weighted by its tokens."""
        _check_pairs(batch)
        logprobs, correct = self._score_in_parts(batch)
        sums = [-float(logprobs.double().sum()), float(correct.sum()), logprobs.numel()]
        self.sums[batch.set_name] += torch.tensor(sums, dtype=torch.float64)

    def on_validation_epoch_end(self, stage: str = "val") -> None:
        """Report loss, perplexity and token accuracy over the whole set, or each of several."""
        comm, report = TrainerComm(self), {}
        for name, sums in self.sums.items():
            *totals, tokens = comm.sum(sums)
            if tokens:  # `trainer.limit_val_batches` may skip a set
                path = "/".join(filter(None, (stage, name)))
                loss, accuracy = ((total / tokens).float() for total in totals)
                report[f"{path}/loss"] = loss
                report[f"{path}/perplexity"] = loss.exp()
                report[f"{path}/token_accuracy"] = accuracy
        self._reset_sums(self.sums)
        self.log("step", float(self.iteration))
        self.log_dict(report)
        self.evaluation_report = {name: float(value) for name, value in report.items()}

    def _reset_sums(self, names: Iterable[str]) -> None:
        self.sums = {name: torch.zeros(3, dtype=torch.float64) for name in names}

    def test_step(self, batch: PairBatch, batch_idx: int) -> None:
        """Like a validation step."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Like the end of a validation."""
        self.on_validation_epoch_end("test")


def _check_pairs(batch: Any) -> None:
    require(
        isinstance(batch, PairBatch),
        f"The data module yields {type(batch).__name__}, but SFT needs pairs of prompt and "
        "completion. Use litgrpo.PairData.",
    )
