"""GRPO as a LightningModule: the walk from prompts to a better policy."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from litgrpo.algorithms.losses import Objective
from litgrpo.callbacks.invariant_checks import InvariantChecks
from litgrpo.callbacks.iteration_metrics import IterationMetrics, NoLearningSignal
from litgrpo.callbacks.progress import replace_stock_bar
from litgrpo.callbacks.trainer_options import check_trainer
from litgrpo.data.source_data import reward_columns, set_names
from litgrpo.distributed.device import backend
from litgrpo.environments.base import shown_schemas_of
from litgrpo.evaluation.evaluator import Evaluator
from litgrpo.evaluation.settings import Evaluation
from litgrpo.models.loading import LoRA, Precision, load_tokenizer, save_in_memory_model
from litgrpo.models.policy import Policy
from litgrpo.models.reference import Reference
from litgrpo.rewards.reward import Reward, RewardFormat, named_rewards
from litgrpo.rewards.reward_model import load_judges
from litgrpo.rewards.runner import RewardRunner
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.rollouter import PendingTable
from litgrpo.rollout.sampling import Purpose, Sampling
from litgrpo.training import initial_policy as start
from litgrpo.training import kernel_choice
from litgrpo.training import saved_arguments as arguments_kept
from litgrpo.training.assembly import (
    Settings,
    changing,
    check_sizes,
    corrected,
    join,
    loaded,
    overlong,
    place_of,
    prepare_device,
    remembered,
)
from litgrpo.training.context import check_data
from litgrpo.training.controllers import Controllers, coefficients_of
from litgrpo.training.defaults import GRPO_RATES, refuse_greedy_training, settled
from litgrpo.training.episode_setup import checked, close_episodes
from litgrpo.training.learner import advantage_stats, advantages_of, averages
from litgrpo.training.lightning_compat import ignore_harmless_warnings, log_numbers
from litgrpo.training.optim import DefaultAdamW
from litgrpo.training.optimizers import optimizer_and_schedule
from litgrpo.training.state import load, save
from litgrpo.training.trainer_adapters import TrainerStepper, is_attached, passes_over_data
from litgrpo.training.update_config import UpdateConfig
from litgrpo.types import PromptBatch, Stats, StepReport, TrainingBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GRPO(LightningModule):
    """Group Relative Policy Optimization of a language model.

    One training step is one iteration: sample a group of completions of each prompt, reward them,
    and learn from how each compares with its group.

    Args:
        pretrained: the model to train: hub id, folder, GGUF file, `builtin:<name>`; in Python also
            a `PreTrainedModel`, or `(model, tokenizer)`, of which a copy is trained.
        rewards: {name: reward function, weight, arguments}; their weighted sum is maximized.
        objective: what is maximized: advantages, surrogate, loss_aggregation and KL term.
        group_size: completions of each prompt, G.
        max_completion_length: tokens of a completion at most, C.
        sampling: temperature and filters of the rollout.
        engine: how the rollout is computed.
        update: how the optimizer uses one rollout.
        evaluation: how held-out prompts are answered and counted.
        optimizer: as in torch, without parameters; default: AdamW at a rate that the start names.
        lr_scheduler: as in torch, or `WarmupCosine`, `WarmupLinear`; a step per optimizer step.
        max_iterations: stop after so many iterations; None: after three passes over the data,
            unless tokens or the trainer set a limit.
        max_generated_tokens: stop after so many tokens were sampled for training, by all processes.
        dynamic_sampling_attempts: where all completions of a prompt are equally good, sample
            another prompt, at
            most so many times per iteration (DAPO's dynamic sampling); 0 learns from what there is.
        soft_overlong: share of max_completion_length, at its end, over which a completion loses
            up to
            1 point of reward (DAPO's soft overlong punishment); 0 punishes nothing.
        reference: model that the KL term refers to; None takes the start (with LoRA: the model
            without adapters). Nothing is loaded when the KL coefficient is 0.
        controllers: steer the coefficients of entropy and KL, let the reference follow the policy.
        precision: dtype of the weights, gradient checkpointing, dropout.
        lora: train adapters instead of the weights.
        check_invariants: refuse to train where sampling, learning and reference disagree on a few
            short prompts; skipped on devices that compile a program for each shape.
        reward_format: `text`, or `chat` for functions that expect lists of messages.
        reward_runner: `ProcessRunner` (default) ends functions that hang; or `InProcessRunner`.
        environment: answers between the turns of an episode: an object with `reset(row, seed)` and
            `step(said)`, such as `litgrpo.environments.Tools`; null: every completion is one turn.
        episode: limits of an episode, and how turns follow each other.
        seed: names the random numbers of all rollouts.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """

    scorer_class: type[Scorer] = Scorer  # whose `combine` makes rewards of what functions gave

    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        pretrained: str,
        rewards: dict[str, Reward],
        *,
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        group_size: int = 8,
        max_completion_length: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        engine: RolloutEngine = LocalEngine(),  # noqa: B008 (frozen)
        update: UpdateConfig = UpdateConfig(),  # noqa: B008 (frozen)
        evaluation: Evaluation = Evaluation(),  # noqa: B008 (frozen)
        optimizer: OptimizerCallable = DefaultAdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_iterations: int | None = None,
        max_generated_tokens: int | None = None,
        dynamic_sampling_attempts: int = 0,
        soft_overlong: float = 0.0,
        reference: str | None = None,
        controllers: Controllers = Controllers(),  # noqa: B008 (frozen)
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        lora: LoRA | None = None,
        check_invariants: bool = True,
        reward_format: RewardFormat = "text",
        reward_runner: RewardRunner | None = None,
        environment: object | None = None,
        episode: EpisodeSettings = EpisodeSettings(),  # noqa: B008 (frozen)
        seed: int = 0,
    ) -> None:
        super().__init__()
        ignore_harmless_warnings()
        self.arguments = arguments_kept.kept(locals())
        check_sizes(group_size, max_completion_length, max_iterations, objective)
        self.automatic_optimization = False
        self.strict_loading = False  # a checkpoint holds what is trained and nothing else
        self.pretrained, self.reference_path = save_in_memory_model(pretrained), reference
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.max_iterations, self.max_generated_tokens = max_iterations, max_generated_tokens
        self.lora, self.check_invariants = lora, check_invariants
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.policy: Policy | None = None
        self.reference: Reference | None = None
        self.settings = Settings(
            group_size=group_size,
            max_completion_length=max_completion_length,
            sampling=remembered(sampling),
            engine=engine,
            environment=checked(environment, episode, engine, named_rewards(rewards)),
            episode=episode,
            update=update,
            precision=precision,
            dynamic_sampling_attempts=dynamic_sampling_attempts,
            seed=seed,
        )
        self.coefficients = coefficients_of(controllers, corrected(objective, engine, update))
        parts = named_rewards(rewards) | overlong(soft_overlong, max_completion_length)
        self.scorer = self.scorer_class(parts, reward_format, reward_runner, max_iterations)
        self.evaluator = Evaluator(evaluation, self.scorer)
        self.iteration, self.generated_tokens = 0, 0
        self.evaluation_report: dict[str, float] = {}

    load_from_checkpoint: Any = classmethod(arguments_kept.loaded)
    # What callbacks ask after an evaluation, besides `evaluation_report`.
    evaluated_prompts = property(attrgetter("evaluator.of_prompts"))
    complete_evaluation = start.complete
    # What the data show to the model in their chat format: schemas of the environment's tools.
    shown_tools = property(lambda self: shown_schemas_of(self.settings.environment))

    def setup(self, stage: str) -> None:
        """Refuse what the trainer's device or precision cannot compute; load judges."""
        check_trainer(self)
        device = self.trainer.strategy.root_device
        if stage == "fit":
            refuse_greedy_training(self.settings.sampling, self.settings.group_size)
        prepare_device(self, device)
        self.evaluator.start(backend(device).data_device, set_names(self.trainer))
        for columns in reward_columns(self.trainer):  # before a model is loaded
            self.scorer.check(columns, episodes=self.settings.environment is not None)
        if stage != "predict":
            load_judges(self.scorer.functions.values(), device, self.pretrained)

    def teardown(self, stage: str) -> None:
        """Let the processes of reward functions and environments go."""
        self.scorer.close()
        close_episodes(self)

    def fit_tokenizer(self, texts: Iterable[str] = ()) -> PreTrainedTokenizerBase:
        """The tokenizer of `pretrained`, loaded once; the texts are not looked at."""
        if self.tokenizer is None:
            policy = self.policy
            self.tokenizer = policy.tokenizer if policy else load_tokenizer(self.pretrained)
        return self.tokenizer

    def configure_model(self) -> None:
        """Load the policy and, where the objective has a KL term, its reference; join the parts."""
        self.policy, self.reference = loaded(self)
        if vars(self).get("place") != place_of(self, self.policy):
            self.place = place_of(self, self.policy)
            self.clock, self.rollouter, self.learner, self.dynamic_sampling = join(
                self.settings, self.policy, self.reference, self.coefficients, self.scorer, self
            )
        if is_attached(self):
            check_data(self, self.policy, self.settings.max_completion_length, "max_prompt_length")
            kernel_choice.use_everywhere(self, self.policy)

    def configure_callbacks(self) -> list[Callback]:
        """Start-up checks, metrics of an iteration, a progress bar that counts iterations."""
        callbacks: list[Callback] = [IterationMetrics(), NoLearningSignal()]
        if self.check_invariants:
            callbacks.insert(0, InvariantChecks())
        return callbacks + replace_stock_bar(self)

    def configure_optimizers(self) -> Any:
        """The optimizer over what is trained, and its schedule in optimizer steps."""
        made = settled(self, GRPO_RATES, self.settings.update.num_steps)
        return optimizer_and_schedule(self, *made)

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """One iteration: sample, reward, and learn from the comparison.

        Reward functions of other processes work while the models compute log-probabilities.
        Returns the rollout, its rewards, the [B, G] advantages and a report of each optimizer step.
        """
        n = self.iteration
        rollout = self.rollouter.generate(prompts, "train", n)
        with self.clock.phase("time/reward_s"):  # worker processes run from here on
            pending: PendingTable = self.scorer.start(rollout, n)
        rollout, pending, first = self.dynamic_sampling.replace_uninformative(rollout, pending, n)
        logprobs = self.learner.old_and_reference_logprobs(rollout)
        with self.clock.phase("time/reward_s"):
            rewards = pending.wait()
        experience = self.learner.experience(rollout, rewards, logprobs)
        reports = self.learner.update(experience, TrainerStepper(self))
        self.log_dict(rewards.metrics)
        seen = rewards.stats() | rollout.stats() | self.rollouter.episode_stats(rollout) | first
        self.log_iteration(seen, experience, reports)
        shown = {"rollout": rollout, "rewards": rewards, "reports": reports}
        return shown | {"advantages": advantages_of(experience, rewards)}

    def log_iteration(
        self, seen: Stats, experience: TrainingBatch, reports: list[StepReport]
    ) -> None:
        """Count the iteration and log it; its number is the loggers' x-axis."""
        self.iteration += 1
        comm, tokens = self.learner.comm, self.rollouter.take_sampled_tokens()
        self.generated_tokens += int(comm.sum(torch.tensor(tokens)))
        seen |= advantage_stats(experience) | self.clock.stats(tokens)
        stats = averages(seen, reports, comm, backend(self.device).data_device)
        stats |= self.coefficients.stats()
        stats["perf/tokens_per_s"] *= comm.world_size
        stats["perf/peak_memory_gib"] = torch.tensor(backend(self.device).peak_memory_gib())
        stats["data/epoch"] = torch.tensor(passes_over_data(self))
        stats["perf/generated_tokens"] = torch.tensor(float(self.generated_tokens))
        log_numbers(self, stats | {"step": torch.tensor(float(self.iteration))})
        self.learner.follow(stats, self.iteration)
        self.stop_when_done()
        self.reseed()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock and the device's random numbers."""
        self.clock.restart()
        self.reseed()

    def reseed(self) -> None:
        """Seed the device's own numbers, which dropout draws from and compiled programs advance."""
        backend(self.device).seed(self.settings.seed * 1_000_003 + self.iteration)

    def on_train_start(self) -> None:
        """Let dynamic sampling ask the training data; a resumed run may be done already."""
        self.dynamic_sampling.connect(self.trainer.train_dataloader)
        self.stop_when_done()

    def stop_when_done(self) -> None:
        """Stop after `max_iterations` or `max_generated_tokens`."""
        most = self.max_generated_tokens or torch.inf
        if self.iteration >= (self.max_iterations or torch.inf) or self.generated_tokens >= most:
            self.trainer.should_stop = True

    def validation_step(
        self, prompts: PromptBatch, batch_idx: int, purpose: Purpose = "val"
    ) -> dict[str, Any]:
        """Answer held-out prompts and count successes; the sampled rollout and its rewards."""
        self.evaluator.start_logprobs = start.start_logprobs(self)
        asked = (self.rollouter, prompts, purpose, self.iteration)
        return vars(self.evaluator.evaluate(*asked, name=prompts.set_name))

    def test_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Like a validation step, with random numbers of its own."""
        return self.validation_step(prompts, batch_idx, "test")

    def on_validation_epoch_end(self, stage: str = "val") -> None:
        """Report accuracies with intervals, and mean rewards."""
        self.evaluation_report = self.evaluator.report(stage, self.learner.comm)
        self.reseed()
        report = self.evaluation_report | {"step": float(self.iteration)}
        self.log_dict({name: torch.tensor(value) for name, value in report.items()})

    def on_test_epoch_end(self) -> None:
        """Like the end of a validation."""
        self.on_validation_epoch_end("test")

    def predict_step(self, prompts: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Answer prompts; see `Evaluator.predict`."""
        return self.evaluator.predict(self.rollouter, prompts)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what changes: no frozen reference, no weights under adapters."""
        if "learner" not in vars(self):  # the trainer's processes were forked, and this one waits
            self.configure_model()
        checkpoint |= {"iteration": self.iteration, "generated_tokens": self.generated_tokens}
        checkpoint |= {arguments_kept.KEY: self.arguments, "judges": self.scorer.state_dict()}
        save(checkpoint, changing(self, self.coefficients), self.learner, self.rollouter)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken; refuse one of another model."""
        load(checkpoint, changing(self, self.coefficients), self.learner, self.rollouter)
        kernel_choice.restore(self, checkpoint)
        self.iteration = checkpoint["iteration"]
        self.generated_tokens = checkpoint["generated_tokens"]
        self.scorer.load_state_dict(checkpoint.get("judges", {}))
