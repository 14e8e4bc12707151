"""A policy that answers prompts, is rewarded, evaluated, and asked for predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric

from litgrpo.evaluation.accuracy import GreedyAccuracy, RewardMeans, SampledAccuracy
from litgrpo.learner.config import Evaluation
from litgrpo.learner.guarding import rollout_within_memory
from litgrpo.learner.metrics import on_host
from litgrpo.models.loading import load_tokenizer
from litgrpo.models.policy import Policy
from litgrpo.parallel.device import make_ready, seed
from litgrpo.rewards.models import load_judges
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.engines.interface import RolloutEngine
from litgrpo.rollout.sampling import Purpose, Sampling, draw_uniforms
from litgrpo.text import extract_answer, extract_reasoning
from litgrpo.types import PromptBatch, RewardTable, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AnsweringModule(LightningModule):
    """Everything of a recipe but the learning: rollouts, rewards, validation, test, predict.

    Args:
        pretrained: hub id, folder, or `builtin:<name>`.
        rewards: judges completions.
        engine: computes rollouts.
        evaluation: how held-out prompts are answered and counted.
        max_completion_len: tokens of a completion at most, C.
        max_iterations: iterations of training; None leaves it to the trainer.
        seed: names the random numbers of all rollouts.
    """

    def __init__(
        self,
        pretrained: str,
        rewards: Scorer,
        *,
        engine: RolloutEngine,
        evaluation: Evaluation,
        max_completion_len: int,
        max_iterations: int | None,
        seed: int,
    ) -> None:
        """Hold the settings; the policy comes with `configure_model`."""
        super().__init__()
        self.pretrained = pretrained
        self.rewards = rewards
        self.engine = engine
        self.evaluation = evaluation
        self.max_completion_len = max_completion_len
        self.max_iterations = max_iterations
        self.seed = seed
        self.iteration = 0
        self.evaluation_report: dict[str, float] = {}
        self.lowered: dict[str, int] = {}  # limits on rows at once, where memory was short
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.policy: Policy | None = None
        names = list(rewards.parts)
        self.success = names[0] if evaluation.success is None else evaluation.success
        if self.success not in names:
            raise ValueError(
                f"evaluation.success is {self.success!r}; it must name a reward: {', '.join(names)}"
            )
        self.sampled_accuracy = SampledAccuracy(evaluation.samples, evaluation.pass_at)
        self.greedy_accuracy = GreedyAccuracy()
        self.reward_means = RewardMeans(names)
        self.corpus_scores = evaluation.corpus

    def setup(self, stage: str) -> None:
        """Refuse a precision plugin that would convert prompts instead of weights; load judges.

        Raises:
            ValueError: the trainer's precision is a `-true` one other than 32.
        """
        precision = str(self.trainer.precision)
        if precision.endswith("-true") and precision != "32-true":
            raise ValueError(
                f"trainer.precision is {precision!r}; the weights' type is model.precision.dtype. "
                "Give trainer.precision 32-true or bf16-mixed."
            )
        device = self.trainer.strategy.root_device
        make_ready(device)
        if self.engine.fixed_shapes and device.type != "cpu":
            # Overridden here alone, because Lightning warns of it.
            self.transfer_batch_to_device = self.placed  # type: ignore
        if stage != "predict":
            functions = self.rewards.functions.values()
            load_judges(functions, device, self.pretrained)

    def teardown(self, stage: str) -> None:
        """Let the reward functions' processes go."""
        self.rewards.runner.close()

    def fit_tokenizer(self, texts: Iterable[str] = ()) -> PreTrainedTokenizerBase:
        """The tokenizer of `pretrained`, loaded once; the texts are not looked at."""
        if self.policy is not None:
            return self.policy.tokenizer
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.pretrained)
        return self.tokenizer

    # --- where things are ---

    @property
    def fixed_on(self) -> torch.device | None:
        """The device that computes in fixed shapes; None where shapes may follow the content.

        Prompts, rollouts, rewards and numbers to log then stay on the host.
        """
        return self.device if self.engine.fixed_shapes else None

    @property
    def counts_on(self) -> torch.device:
        """Where numbers to log are added up."""
        return self.device if self.fixed_on is None else torch.device("cpu")

    def use_shapes_of_engine(self) -> None:
        """Let policies compute in fixed shapes if the engine does."""
        for part in self.modules():
            if isinstance(part, Policy):
                part.fixed_shapes = self.engine.fixed_shapes
                if part.fixed_shapes and part.bare_model.is_gradient_checkpointing:
                    # A hook that compilers cannot trace; checkpoints without reentry need none.
                    part.bare_model.disable_input_require_grads()

    def placed(self, prompts: Any, *_: Any) -> Any:
        """A batch where it is needed: on the device, or on the host if shapes are fixed."""
        return prompts.to(self.device) if self.fixed_on is None else prompts

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As in Lightning, but a plain number does not go to the device and back."""
        super().log(name, on_host(value), *args, **kwargs)

    def on_validation_epoch_start(self) -> None:
        """Count on the host where the device wants fixed shapes."""
        for metric in self._metrics():
            metric.to(self.counts_on)

    def on_test_epoch_start(self) -> None:
        """As for a validation."""
        self.on_validation_epoch_start()

    def draw_anew(self) -> None:
        """Let the device's random numbers depend on seed and iteration alone, whatever ran before.

        A device that compiles goes on by one with each program, and how many there are before an
        iteration depends on where the process began. Nothing but dropout draws from them.
        """
        seed(self.device, self.seed * 1_000_003 + self.iteration)

    def _metrics(self) -> list[Metric]:
        metrics: list[Metric] = [self.sampled_accuracy, self.reward_means]
        if self.evaluation.greedy:
            metrics.append(self.greedy_accuracy)
        if self.corpus_scores is not None:
            metrics.append(self.corpus_scores)
        return metrics

    def _arithmetic(self) -> AbstractContextManager[None]:
        """What the recipe computes in, if that is lower than the weights."""
        assert self.policy is not None
        return self.policy.arithmetic()

    # --- answering ---

    def generate(
        self,
        prompts: PromptBatch,
        purpose: Purpose,
        group_size: int,
        sampling: Sampling,
        attempt: int = 0,
    ) -> Rollout:
        """Sample completions and decode them.

        Args:
            prompts: B prompts.
            purpose: names the stream of random numbers; validation uses the same numbers each time.
            group_size: completions of each prompt, G.
            sampling: temperature and filters.
            attempt: number of the redraw of dynamic sampling.

        Returns:
            Rollout of N = B * G completions with their texts.
        """
        assert self.policy is not None
        if not isinstance(prompts, PromptBatch):
            raise ValueError(
                f"The data module gave a {type(prompts).__name__}, but completions are sampled for "
                "prompts alone. Use litgrpo.data.prompts.PromptData."
            )
        iteration = self.iteration if purpose == "train" else 0
        uniforms = draw_uniforms(
            self.seed,
            purpose,
            iteration,
            prompts.index,
            group_size,
            self.max_completion_len,
            attempt=attempt,
        )
        self.policy.eval()
        with self._arithmetic():
            self.engine, rollout = rollout_within_memory(
                self.engine, self.policy, prompts, group_size, uniforms, sampling, self.lowered
            )
        texts = self.policy.tokenizer.batch_decode(rollout.token_lists(), skip_special_tokens=True)
        return replace(rollout, completions=texts)

    def reward(self, rollout: Rollout) -> RewardTable:
        """Ask every reward function about every completion.

        Args:
            rollout: N completions with texts.

        Returns:
            [B, G] rewards.
        """
        return self.start_reward(rollout)()

    def start_reward(self, rollout: Rollout) -> Callable[[], RewardTable]:
        """Begin to ask; the functions' processes work until somebody waits for the rewards.

        Args:
            rollout: N completions with texts.

        Returns:
            What waits for the [B, G] rewards.
        """
        return self.rewards.submit(rollout, self.iteration, self.max_iterations).result

    def validation_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Answer held-out prompts and count successes.

        Args:
            prompts: B prompts.
            batch_idx: unused.

        Returns:
            The sampled rollout and its rewards.
        """
        return self._evaluate(prompts, "val")

    def test_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Like a validation step, with random numbers of its own."""
        return self._evaluate(prompts, "test")

    def _evaluate(self, prompts: PromptBatch, purpose: Purpose) -> dict[str, Any]:
        settings = self.evaluation
        sampling = Sampling(temperature=settings.temperature)
        rollout = self.generate(prompts, purpose, settings.samples, sampling)
        gather = self.start_reward(rollout)  # the greedy completions are sampled meanwhile
        replies = rollout.completions[:: settings.samples]
        if settings.greedy:
            greedy = self.generate(prompts, purpose, 1, Sampling(temperature=0.0))
            replies = greedy.completions
        rewards = gather()
        index = prompts.index
        self.sampled_accuracy.update(index, self._successes(rewards))
        self.reward_means.update(index, rewards)
        if settings.greedy:
            self.greedy_accuracy.update(index, self._successes(self.reward(greedy)).squeeze(1))
        if self.corpus_scores is not None:
            self.corpus_scores.update(index, replies, prompts.columns)
        return {"rollout": rollout, "rewards": rewards}

    def _successes(self, rewards: RewardTable) -> Tensor:
        """[B, G] True where the reward that counts reached its threshold."""
        part = rewards.parts[self.success]
        successes = (part >= self.evaluation.threshold) & rewards.valid
        return successes.to(self.sampled_accuracy.device)

    def on_validation_epoch_end(self) -> None:
        """Report accuracies with intervals, and mean rewards."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Like the end of a validation."""
        self._report("test")

    def _report(self, stage: Purpose) -> None:
        report: dict[str, float] = {}
        for metric in self._metrics():
            report |= {f"{stage}/{name}": float(value) for name, value in metric.compute().items()}
            metric.reset()
        self.evaluation_report = report
        self.draw_anew()
        self.log("step", float(self.iteration))
        self.log_dict(report)

    def predict_step(self, prompts: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Answer prompts.

        Args:
            prompts: B prompts.
            batch_idx: unused.

        Returns:
            One dict per prompt: prompt, completion, reasoning, answer, truncated, other columns.
        """
        sampling = Sampling(temperature=self.evaluation.predict_temperature)
        rollout = self.generate(prompts, "predict", 1, sampling)
        return [
            {name: values[row] for name, values in prompts.columns.items()}
            | {
                "prompt": prompts.prompts[row],
                "completion": text,
                "reasoning": extract_reasoning(text),
                "answer": extract_answer(text),
                "truncated": bool(rollout.truncated[row]),
            }
            for row, text in enumerate(rollout.completions)
        ]
