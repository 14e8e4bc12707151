"""Supervised fine-tuning: learn to repeat demonstrations; its export is what GRPO starts from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torchmetrics import MeanMetric

from litgrpo.learner.guarding import all_finite, drop_gradient
from litgrpo.models.scratch import Scratch
from litgrpo.modules import machine
from litgrpo.parallel.device import compiles_shapes
from litgrpo.tensors import head_chunk, token_logprobs
from litgrpo.types import ReportsSteps, Skipped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from litgrpo.data.pairs import PairBatch
    from litgrpo.models.loading import LoRA, Precision
    from litgrpo.models.policy import Policy


class SFT(LightningModule, ReportsSteps):
    """Supervised fine-tuning on pairs of prompt and completion; only completions are learned.

    Args:
        pretrained: hub id, folder or `builtin:<name>` to start from; or give `scratch`.
        scratch: a new model and tokenizer instead of `pretrained`.
        optimizer: as in torch, without parameters.
        lr_scheduler: as in torch, without optimizer; it is stepped once per iteration, so give its
            length in iterations.
        max_grad_norm: gradients are scaled down to this norm; None leaves them.
        precision: dtype, gradient checkpointing and dropout.
        lora: train adapters instead of the weights.
        max_iterations: stop after so many optimizer steps; None leaves it to the trainer.
        seed: of the initial weights of `scratch`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        scratch: Scratch | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = 1.0,
        precision: Precision | None = None,
        lora: LoRA | None = None,
        max_iterations: int | None = None,
        seed: int = 0,
    ) -> None:
        """Check the choices; weights are loaded in `configure_model`."""
        super().__init__()
        if (pretrained is None) == (scratch is None):
            raise ValueError(
                f"SFT starts from `pretrained` ({pretrained!r}) or from `scratch` ({scratch!r}): "
                "give exactly one of them"
            )
        if scratch is not None and lora is not None:
            raise ValueError("lora adapts trained weights; `scratch` has none, leave lora out")
        if max_iterations is not None and max_iterations < 1:
            raise ValueError(f"max_iterations is {max_iterations}; it must be at least 1, or null")
        self.pretrained = pretrained
        self.scratch = scratch
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.max_grad_norm = max_grad_norm
        self.precision = precision
        self.lora = lora
        self.max_iterations = max_iterations
        self.seed = seed
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.policy: Policy | None = None
        self.evaluation_report: dict[str, float] = {}
        self.steps = []
        self.mean_loss = MeanMetric()
        self.mean_accuracy = MeanMetric()

    def setup(self, stage: str) -> None:
        """Refuse a device that would compile a program for every batch.

        Raises:
            ValueError: it would; GRPO alone learns in fixed shapes.
        """
        device = self.trainer.strategy.root_device
        if compiles_shapes(device):
            raise ValueError(
                f"Supervised training does not run on {device.type!r} devices, which compile a "
                "program for each shape of a batch. Train on a CPU or a GPU (the overlays in "
                "configs/hardware); GRPO from the export runs on either."
            )

    @property
    def iteration(self) -> int:
        """Number of finished optimizer steps, resumed ones included."""
        return self.trainer.global_step

    def fit_tokenizer(self, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """The tokenizer of `pretrained`, or with `scratch` one that is fitted to the texts, once.

        Args:
            texts: prompts and completions of the training set.
        """
        from litgrpo.models.loading import load_tokenizer

        if self.tokenizer is None and self.scratch is not None:
            self.tokenizer = self.scratch.build_tokenizer(texts)
        elif self.tokenizer is None:
            assert self.pretrained is not None
            self.tokenizer = load_tokenizer(self.pretrained)
        return self.tokenizer

    def configure_model(self) -> None:
        """Load or make the policy, once."""
        from litgrpo.models.loading import as_policy, load_policy

        if self.policy is not None:
            return
        if self.scratch is None:
            assert self.pretrained is not None
            policy = load_policy(
                self.pretrained,
                tokenizer=self.tokenizer,
                precision=self.precision,
                lora=self.lora,
            )
        elif self.tokenizer is None:
            raise ValueError(
                "`scratch` has no tokenizer yet: call fit_tokenizer(texts) first, or train with a "
                "data module, which does"
            )
        else:
            model = self.scratch.build_model(self.tokenizer, seed=self.seed)
            policy = as_policy(model, self.tokenizer, precision=self.precision)
        self.policy = policy.train()

    def configure_optimizers(self) -> Any:
        """The optimizer over what is trained, and its schedule in iterations."""
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        if self.lr_scheduler is None:
            return optimizer
        schedule = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def score(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """How well the policy predicts the K target tokens of a batch.

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

        hidden = policy.predictors(batch.input_ids, batch.attention_mask, batch.loss_mask)
        targets = batch.input_ids[batch.loss_mask]
        chunk_size = head_chunk(len(hidden), policy.vocab_size)
        logprobs, _ = token_logprobs(hidden, targets, head, chunk_size=chunk_size)
        return logprobs, torch.cat(predictions) == targets

    def training_step(self, batch: PairBatch, batch_idx: int) -> Tensor:
        """Mean negative log-probability of all target tokens, over all processes."""
        logprobs, correct = self.score(batch)
        counted = [logprobs.detach().sum(), correct.sum(), batch.attention_mask.sum()]
        sizes = [batch.loss_mask.sum(), torch.tensor(batch.input_ids.numel(), device=self.device)]
        sums = torch.stack([value.double() for value in counted + sizes])
        sums = self.trainer.strategy.reduce(sums, reduce_op="sum").float()
        total_logprob, num_correct, num_real, num_targets, num_positions = sums
        mean_loss = -total_logprob / num_targets
        self.log("step", float(self.iteration + 1))  # loggers take it as their x-axis
        self.log_dict(
            {
                "sft/loss": mean_loss,
                "sft/perplexity": mean_loss.exp(),
                "sft/token_accuracy": num_correct / num_targets,
                "sft/padding_frac": 1 - num_real / num_positions,
                "optim/lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            }
        )
        # Gradients are averaged over processes, so this makes their mean the mean over all tokens.
        return -logprobs.sum() * self.trainer.world_size / num_targets

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip here: gradients are unscaled and reduced over processes by now."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        grad_norm = torch.nn.utils.clip_grad_norm_(trained, limit)
        self.log("optim/grad_norm", grad_norm)
        self.steps = [None if all_finite(grad_norm) else Skipped({})]
        if self.steps != [None]:
            drop_gradient(trained)

    def on_fit_start(self) -> None:
        """Let all processes compute alike."""
        machine.agree(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what decides how results are rounded."""
        machine.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Round as before."""
        machine.restore(self, checkpoint)

    def on_train_start(self) -> None:
        """A resumed run may be done already."""
        self._stop_when_done()

    def on_train_batch_end(self, outputs: Any, batch: PairBatch, batch_idx: int) -> None:
        """Stop after `max_iterations`."""
        self._stop_when_done()

    def _stop_when_done(self) -> None:
        if self.max_iterations is not None and self.iteration >= self.max_iterations:
            self.trainer.should_stop = True

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        """Count loss and accuracy of a batch, weighted by its tokens."""
        logprobs, correct = self.score(batch)
        self.mean_loss.update(-logprobs)
        self.mean_accuracy.update(correct.float())

    def on_validation_epoch_end(self) -> None:
        """Report loss, perplexity and token accuracy over the whole set."""
        self._report("val")

    def test_step(self, batch: PairBatch, batch_idx: int) -> None:
        """Like a validation step."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Like the end of a validation."""
        self._report("test")

    def _report(self, stage: str) -> None:
        loss = self.mean_loss.compute()
        report = {
            f"{stage}/loss": loss,
            f"{stage}/perplexity": loss.exp(),
            f"{stage}/token_accuracy": self.mean_accuracy.compute(),
        }
        self.mean_loss.reset()
        self.mean_accuracy.reset()
        self.log("step", float(self.iteration))
        self.log_dict(report)
        self.evaluation_report = {name: float(value) for name, value in report.items()}
