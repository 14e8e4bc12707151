"""GRPO as a LightningModule: prompts, rollout, rewards, advantages, loss, optimizer steps."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.published import apply_name
from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import at_least
from litgrpo.callbacks.curriculum import CurriculumFeedback
from litgrpo.callbacks.iteration_metrics import IterationMetrics, NoLearningSignal
from litgrpo.callbacks.progress import BAR_METRICS, replace_stock_bar
from litgrpo.callbacks.trainer_options import check_trainer
from litgrpo.checks.callback import InvariantChecks
from litgrpo.data.loader import BatchLoader
from litgrpo.data.modules import (
    reward_columns,
    task_names,
    validation_set_names,
)
from litgrpo.distributed.device import Clock, backend
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.environments.agent import Agent
from litgrpo.environments.base import shown_tools_of
from litgrpo.evaluation.evaluator import Evaluation, Evaluator
from litgrpo.learning import kernel_choice
from litgrpo.learning.dynamic_sampling import DynamicSampling
from litgrpo.learning.learner import Learner, learning_row_limit
from litgrpo.learning.micro_batches import EvenBatches, MicroBatching, RaggedBatches
from litgrpo.learning.optim import DefaultAdamW
from litgrpo.learning.stages import GreedyBaseline, Stage
from litgrpo.learning.static_batches import StaticBatches, check_static_shapes
from litgrpo.learning.steppers import TrainerComm, TrainerStepper, is_attached
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.lightning_compat import log_numbers
from litgrpo.metrics import (
    advantage_stats,
    average_over_ranks,
    gather_rewards,
    reward_stats,
    rollout_stats,
)
from litgrpo.models.kernels import linear as linears
from litgrpo.models.loading.load import (
    LoRA,
    Precision,
    check_weights,
    load_reference,
    save_in_memory_model,
)
from litgrpo.models.policy import Policy
from litgrpo.models.reference import FrozenReference, Reference
from litgrpo.models.transformers_compat import checkpoints_activations
from litgrpo.modules import hyper_parameters
from litgrpo.modules.data_checks import (
    check_batch,
    check_data_fits_model,
    check_reference_prompts,
    check_served_reference,
    check_tasks,
)
from litgrpo.modules.end_token import find_end_token
from litgrpo.modules.episode_setup import build_episodes, check_environment
from litgrpo.modules.initial_policy import measure_initial_distance
from litgrpo.modules.language_module import LanguageModule
from litgrpo.modules.run_setup import (
    GRPO_RATES,
    build_optimizer,
    find_autocast_dtype,
    make_sharding,
    passes_over_data,
)
from litgrpo.rewards.reward import Reward, name_rewards
from litgrpo.rewards.reward_model import load_judges
from litgrpo.rewards.scorer import Scorer, overlong_reward
from litgrpo.rewards.scoring import Scoring
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.rollouter import Rollouter, rollout_row_limit
from litgrpo.rollout.sampling import Purpose, Sampling
from litgrpo.rollout.servers.reference import ReferenceServers, ServedReference, read_reference
from litgrpo.rollout.sources.base import (
    OnPolicy,
    RolloutSource,
    SourceParts,
    can_reuse_sampler_logprobs,
    with_importance_correction,
)
from litgrpo.run_options import RunOptions
from litgrpo.tensors import FEW_LOGITS
from litgrpo.types import Experience, Iteration, PromptBatch, Stats

if TYPE_CHECKING:
    from litgrpo.models.loading.load import Pretrained
    from litgrpo.rewards.reward import Rewards
else:  # the types of a config; Python takes more
    Pretrained, Rewards = str, dict[str, Reward]

REFERENCE = "reference."  # begins the names of the reference's weights


class GRPO(LanguageModule):
    """Group Relative Policy Optimization of a language model.

    One training step is one iteration: sample a group of completions for each prompt, compute their
    rewards, and reinforce completions by how they compare with their group.

    Args:
        pretrained: model to train: Hub id, folder, GGUF file or `builtin:<name>`; in Python also a
            `PreTrainedModel`, or `(model, tokenizer)`, of which a copy is trained.
        rewards: {name: reward function, weight, arguments}; their weighted sum is maximized.
        objective: advantages, surrogate loss, loss aggregation, KL and other terms; or the name of
            a published algorithm, such as `dapo` (docs/explanation/algorithm.md).
        group_size: completions per prompt, G (TRL: num_generations).
        max_completion_length: limit on the tokens of a completion, C.
        sampling: temperature and filters of the rollout.
        engine: computes the rollout.
        source: where the completions come from that an iteration trains on: `OnPolicy` (default),
            `Ahead` and `InFlight` sample while training on earlier rollouts, `StoredRollouts` are
            those of another run (docs/howto/tasks_and_rollouts.md), `DataCompletions` those of the
            data, for distillation (docs/howto/distillation.md).
        update: how the optimizer uses one rollout.
        evaluation: how held-out prompts are answered and scored.
        optimizer: arguments of AdamW, such as `{"lr": 1e-6}`, a class with its arguments, or a
            callable that takes the parameters; default: AdamW, with a learning rate that is logged
            at start-up.
        lr_scheduler: callable that takes the optimizer, or `WarmupCosine`, `WarmupLinear`; stepped
            after each optimizer step.
        max_iterations: stop after this many iterations; None: after three passes over the data,
            unless tokens or the trainer limit the run.
        max_generated_tokens: stop once this many training tokens have been generated (all ranks).
        dynamic_sampling_attempts: limit on attempts per iteration to replace zero-variance groups
            by groups of other prompts (DAPO's dynamic sampling); 0: off.
        reference: reference model of the KL term: Hub id or folder; with LoRA also the folder of
            other adapters; address of a vLLM server, or `ReferenceServers`; None: the initial
            policy (with LoRA: the model without adapters). Nothing is loaded if the KL coefficient
            is 0. A better model as reference is a teacher: docs/howto/distillation.md.
        precision: dtype of the weights, gradient checkpointing, dropout.
        lora: train adapters instead of all weights.
        check_invariants: compare sampling, training and reference on a few short prompts before
            training, and stop if they disagree; skipped on XLA devices.
        scoring: format that reward functions get, their time limit and processes, length limit.
        environment: for multi-turn episodes: an object with `reset(row, seed)` and `step(action)`,
            such as `litgrpo.environments.Tools`, or a list of functions for `Tools`; None: every
            completion is a single turn.
        episode: limits and format of multi-turn episodes.
        seed: random seed for generation.

    Example:
        >>> def count_vowels(prompts, completions):
        ...     return [float(sum(letter in "aeiou" for letter in text)) for text in completions]
        >>> module = GRPO("builtin:tiny-gemma2", {"vowels": count_vowels}, group_size=4)
        >>> module.group_size
        4

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """

    pretrained: str
    # Subclass Scorer and override `combine` to change how components become one reward.
    scorer_class: type[Scorer] = Scorer

    @check_argument_types("pretrained", "rewards", before=apply_name)
    def __init__(  # noqa: PLR0913 (each is an option of a config)
        self,
        pretrained: Pretrained,
        rewards: Rewards,
        *,
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        group_size: int = 8,
        max_completion_length: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        engine: RolloutEngine = LocalEngine(),  # noqa: B008 (frozen)
        source: RolloutSource | None = None,
        update: UpdateConfig = UpdateConfig(),  # noqa: B008 (frozen)
        evaluation: Evaluation = Evaluation(),  # noqa: B008 (frozen)
        optimizer: OptimizerCallable = DefaultAdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_iterations: int | None = None,
        max_generated_tokens: int | None = None,
        dynamic_sampling_attempts: int = 0,
        reference: str | ReferenceServers | None = None,
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        lora: LoRA | None = None,
        check_invariants: bool = True,
        scoring: Scoring = Scoring(),  # noqa: B008 (frozen)
        environment: object | None = None,
        episode: EpisodeSettings = EpisodeSettings(),  # noqa: B008 (frozen)
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(hyper_parameters.describe_arguments(locals()))
        # The learner accumulates gradients and takes several optimizer steps per iteration.
        self.automatic_optimization = False
        self.strict_loading = False  # checkpoints hold trained weights only

        at_least("group_size", group_size, 1)
        at_least("max_completion_length", max_completion_length, 1)
        at_least("max_iterations", max_iterations, 1)
        rewards = name_rewards(rewards)
        self.environment: Any = check_environment(environment, episode, engine, rewards)
        run = RunOptions(
            objective,
            sampling,
            engine,
            rewards,
            self.environment,
            isinstance(self.environment, Agent),
            group_size,
            dynamic_sampling_attempts,
        )
        self.source = OnPolicy() if source is None else copy(source)
        self.source.check(run)
        objective.check(run)
        self.reference_path = read_reference(reference, run)
        self.pretrained = save_in_memory_model(pretrained)
        self.group_size, self.max_completion_length = group_size, max_completion_length
        self.sampling = sampling.with_candidates()
        self.engine, self.update = engine, update
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.max_iterations, self.max_generated_tokens = max_iterations, max_generated_tokens
        self.dynamic_sampling_attempts = dynamic_sampling_attempts
        self.precision, self.lora = precision, lora
        self.check_invariants = check_invariants
        self.episode, self.seed = episode, seed

        self.objective = with_importance_correction(objective, engine, self.source)
        overlong = overlong_reward(scoring, max_completion_length)
        rewards |= overlong
        self.scorer = self.scorer_class(rewards, scoring, max_iterations)
        self.evaluator = Evaluator(evaluation, self.scorer, ignored=overlong)

        # Loaded and built by `configure_model`.
        self.reference: Reference | None = None
        self.moves_reference = False  # a callback changes its weights, which checkpoints then hold
        self.learner: Learner
        self.rollouter: Rollouter
        self.stages: list[Stage] = []
        self.clock = Clock()
        self.stepper: TrainerStepper | None = None
        self.task_names: list[str] = []  # whose metrics are logged
        self._built_for: tuple[torch.device, str] | None = None
        # Limits after out-of-memory errors outlive the trainer.
        self.rollout_limit, self.learning_limit = rollout_row_limit(), learning_row_limit()

        # Finished iterations, and completion tokens generated for them by all ranks.
        self.iteration, self.generated_tokens = 0, 0

    # --- setup ---

    def setup(self, stage: str) -> None:
        """Check the config against device and data, and load reward models."""
        super().setup(stage)
        device = self.trainer.strategy.root_device
        if stage == "fit":
            self.sampling.check_groups(self.group_size)
            check_reference_prompts(self, self.objective, self.environment)
            check_batch(
                self, self.group_size, self.max_completion_length, self.update.num_mini_batches
            )
        if backend(device).static_shapes:
            check_static_shapes(self.engine, self.objective, self.precision, self.source)
        backend(device).prepare()
        if backend(device).static_shapes:
            # Prompts stay on the host, where rollouts are assembled. Set on this object only:
            # Lightning warns about a class that overrides the hook if a data module is used.
            self.transfer_batch_to_device = _keep_on_host  # type: ignore[assignment,method-assign]
        self.evaluator.start(validation_set_names(self.trainer))
        sets = reward_columns(self.trainer)
        for columns in sets:
            self.scorer.check(columns, episodes=self.environment is not None)
        if stage == "fit":
            self.source.setup(self)
        self.task_names = task_names(self.trainer) if stage == "fit" else []
        check_tasks(self.task_names, sets, self.scorer)
        if stage != "predict":
            rule = self.evaluator.success_rule
            rank_zero_info(f"Correct: {rule} (model.evaluation.success_reward)")
            load_judges(self.scorer.functions.values(), device, self.pretrained)

    def configure_model(self) -> None:
        """Load the policy and the reference of the KL term, and build the parts of an iteration."""
        policy = self.load_policy()
        self._load_reference(policy)
        device, precision = policy.model.device, "32-true"
        if is_attached(self):
            device, precision = self.trainer.strategy.root_device, str(self.trainer.precision)
        if self._built_for != (device, precision):
            self._use_static_shapes(device)
            self.clock = Clock(device)
            self.rollouter = self._build_rollouter(policy)
            self.learner = self._build_learner(policy, device, precision)
            self._connect_source(policy, device)
            self._built_for = device, precision
        self.learner.objective = self.objective  # callbacks of an earlier fit may have changed it
        if is_attached(self):
            check_data_fits_model(self, policy, self.max_completion_length, "max_prompt_length")
            check_served_reference(self, self.reference, self.max_completion_length)
            kernel_choice.use_everywhere(self, policy)

    def _load_reference(self, policy: Policy) -> None:
        sharding = make_sharding(self)
        source = self.reference_path
        is_missing = self.reference is None and self.objective.needs_reference
        if is_missing and isinstance(source, ReferenceServers):
            self.reference = ServedReference(source, policy, self.objective.divergence)
        elif is_missing and not isinstance(source, ReferenceServers):
            self.reference = load_reference(
                policy,
                source,
                self.pretrained,
                self.precision,
                self.lora,
                sharding=sharding,
            )
            dtype = find_autocast_dtype(self)
            can_round = sharding is None and not self.moves_reference
            can_round = can_round and not backend(policy.model.device).static_shapes
            if isinstance(self.reference, FrozenReference) and can_round and dtype is not None:
                self.reference.round_weights(dtype)
        if sharding is not None and isinstance(self.reference, FrozenReference):
            sharding.shard(self.reference.policy)

    def _build_rollouter(self, policy: Policy) -> Rollouter:
        return Rollouter(
            policy,
            self.group_size,
            self.max_completion_length,
            engine=self.engine,
            episodes=build_episodes(self, self.environment, self.episode, policy),
            sampling=self.sampling,
            seed=self.seed,
            clock=self.clock,
            row_limit=self.rollout_limit,
        )

    def _build_learner(self, policy: Policy, device: torch.device, precision: str) -> Learner:
        comm = TrainerComm(self)
        sizes = kernel_choice.choose_sizes(policy, device)
        kernel_choice.set_logits(self, FEW_LOGITS if sizes is None else sizes.logits)
        update = self.update
        micro_batching: MicroBatching = RaggedBatches()
        if backend(device).static_shapes:  # padded, so "auto" keeps its smallest value
            micro_batching = StaticBatches(backend(device))
        else:
            linear_outputs = linears.count_linear_outputs(policy.model)
            update = update.resolve_auto(linear_outputs, sizes=sizes)
            if is_sharded(policy):
                micro_batching = EvenBatches(policy, comm)
        return Learner(
            policy,
            self.objective,
            update,
            self.sampling,
            self.group_size,
            self.max_completion_length,
            reference=self.reference,
            reuse_sampler_logprobs=can_reuse_sampler_logprobs(
                precision,
                self.precision,
                self.engine,
                self.environment,
                self.source,
            ),
            comm=comm,
            micro_batching=micro_batching,
            clock=self.clock,
            row_limit=self.learning_limit,
        )

    def _build_stages(self, device: torch.device) -> list[Stage]:
        stages: list[Stage] = []
        if self.dynamic_sampling_attempts:
            stages.append(
                DynamicSampling(
                    self.rollouter,
                    self.scorer,
                    self.learner,
                    self.dynamic_sampling_attempts,
                    backend(device),
                )
            )
        if self.objective.advantages.needs_greedy:
            stages.append(GreedyBaseline(self.rollouter, self.scorer))
        return stages

    def _connect_source(self, policy: Policy, device: torch.device) -> None:
        self.source.connect(
            SourceParts(
                self.rollouter,
                partial(self._next_prompts, backend(device).data_device),
                self.learner.add_policy_logprobs,
                partial(find_end_token, self, policy),
            )
        )

    def _use_static_shapes(self, device: torch.device) -> None:
        static_shapes = backend(device).static_shapes
        for part in self.modules():
            if isinstance(part, Policy):
                part.static_shapes = static_shapes
                if static_shapes and checkpoints_activations(part.bare_model):
                    # A hook that XLA cannot trace; checkpoints without reentry need none.
                    part.bare_model.disable_input_require_grads()

    def _next_prompts(self, device: torch.device, ahead: int) -> PromptBatch:
        loader = self.trainer.train_dataloader
        if not isinstance(loader, BatchLoader):
            raise ValueError(
                f"model.source is {type(self.source).__name__}, which needs litgrpo.PromptData. "
                "Leave it out."
            )
        return loader.peek(ahead).to(device)

    def configure_callbacks(self) -> list[Callback]:
        """Return start-up checks, metrics and a progress bar that counts iterations.

        The trainer is checked here because Lightning checks its own options only after this hook,
        with advice that a user of litgrpo cannot follow.
        """
        if is_attached(self):
            check_trainer(self)
        callbacks: list[Callback] = [IterationMetrics(), CurriculumFeedback()]
        if self.objective.reward_coef:
            callbacks.append(NoLearningSignal())
        if self.check_invariants:
            callbacks.insert(0, InvariantChecks())
        return callbacks + replace_stock_bar(self)

    def configure_optimizers(self) -> Any:
        """Build the optimizer over the trained weights, and its schedule in optimizer steps."""
        batch_size = getattr(self.trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
        num_prompts = None if batch_size is None else batch_size // self.trainer.world_size
        return build_optimizer(self, GRPO_RATES, self.update.count_steps(num_prompts))

    # --- training ---

    def on_train_start(self) -> None:
        """Build and connect the stages; a resumed run may be complete already."""
        self.stepper = TrainerStepper(self)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        self.stages = self._build_stages(self.device)
        self.stages += [callback for callback in callbacks if isinstance(callback, Stage)]
        for stage in self.stages:
            stage.connect(self.trainer.train_dataloader)
        super().on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock; seed the device's own generator, if it has one (XLA)."""
        self.clock.restart()
        self.rollouter.generated_tokens = 0
        self._seed_device()

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Run one iteration: completions, rewards, advantages, optimizer steps.

        Prompts [B] -> rollout of N = B * G completions -> rewards [B, G] -> advantages [N, C] ->
        weights. Comments name the calls of the default classes; docs/project/design.md lists more.

        Args:
            prompts: B prompts.
            batch_idx: number of the batch in this epoch.

        Returns:
            `{"iteration": Iteration}`, for callbacks.
        """
        assert self.stepper is not None
        # 1. Completions: sampled now or ahead, read from a run folder, or those of the data.
        #    OnPolicy.take -> Rollouter.generate -> LocalEngine.generate -> RowDecoder.decode
        rollout = self.source.take(prompts, self.iteration)

        # 2. Rewards. Workers run the user's functions while the device computes log-probabilities:
        #    the old policy's if there are several steps, the reference's if there is a KL term.
        #    Most built-in reward functions, and reward models, run in `wait`.
        #    Scorer.start -> Runner.start
        #    Learner.old_and_reference_logprobs -> Policy.logprobs, Reference.logprobs
        #    PendingRewards.wait -> Scorer.combine
        with self.clock.phase("time/reward_s"):
            pending = self.scorer.start(rollout, self.iteration)
        logprobs = self.learner.old_and_reference_logprobs(rollout)
        with self.clock.phase("time/reward_s"):
            rewards = pending.wait()
        # As the data has them: without what an environment added, or those of a stored rollout.
        prompts = self.source.prompts_of(rollout, prompts)
        experience = Experience(prompts, rollout, rewards, logprobs, sampled=((rollout, rewards),))

        # 3. Dynamic sampling replaces groups without a gradient; ReMax adds the reward of a greedy
        #    completion; callbacks that are stages adapt the objective to the rollout.
        for stage in self.stages:
            experience = stage(experience, self.iteration)

        # 4. One advantage and one loss weight per token; then one step per mini-batch and epoch.
        #    Learner.build_batch -> Objective.token_advantages, Objective.loss_weights
        #    Learner.update -> Learner.take_optimizer_step -> Policy.logprobs, Objective.loss
        batch = self.learner.build_batch(
            experience.rollout, experience.rewards, experience.logprobs
        )
        # [B, G], to log and for callbacks; training uses those per token in `batch`.
        advantages = self.learner.group_advantages(batch, experience.rewards)
        steps = self.learner.update(batch, self.stepper)

        # 5. Log, end the run. Callbacks, which may validate, see all of the iteration but the
        #    hidden states of the reference, which need much memory.
        self.iteration += 1
        batch = replace(batch, ref_hidden=None)
        logprobs = replace(experience.logprobs, ref_hidden=None)
        experience = replace(experience, logprobs=logprobs)
        iteration = Iteration(self.iteration, experience, batch, advantages, steps)
        iteration = replace(iteration, averages=self._log_iteration(iteration))
        self.stop_if_done()
        self._seed_device()
        return {"iteration": iteration}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip gradients, which are complete only here: with fp16, Lightning has unscaled them."""
        assert self.stepper is not None
        self.stepper.clip_before_step()

    def _log_iteration(self, iteration: Iteration) -> Stats:
        """Log an iteration, and return its averages."""
        experience, comm = iteration.experience, self.learner.comm
        rank_tokens = self.rollouter.generated_tokens
        self.generated_tokens += int(comm.sum(torch.tensor(rank_tokens)))
        # Rewards and completions as they were first sampled: dynamic sampling selects groups of
        # later rollouts by reward. What follows describes the rollout that was trained on.
        first_rollout, first_rewards = experience.sampled[0]
        stats = reward_stats(gather_rewards(first_rewards, comm.gather))
        stats |= rollout_stats(first_rollout)
        stats |= experience.stats | self.rollouter.stats(experience.rollout)
        stats |= self.source.stats(experience.rollout, iteration.number - 1)
        stats |= self.learner.reward_kl_stats(experience.rollout, experience.logprobs)
        stats |= advantage_stats(iteration.advantages, experience.rewards, comm)
        stats |= self.clock.stats(rank_tokens)
        averages = average_over_ranks(
            stats, iteration.steps, comm, backend(self.device).data_device
        )
        if self.learner.objective.kl_coef > 0:
            averages["policy/kl_coef"] = torch.tensor(self.learner.objective.kl_coef)
        averages["perf/tokens_per_s"] *= comm.world_size  # ranks generate at the same time
        averages["perf/peak_memory_gib"] = torch.tensor(backend(self.device).peak_memory_gib())
        averages["perf/generated_tokens"] = torch.tensor(float(self.generated_tokens))
        averages["data/epoch"] = torch.tensor(passes_over_data(self.trainer))
        # Of this rank: functions may log other names on others.
        metrics = experience.rewards.metrics
        averages |= {name: torch.tensor(number) for name, number in metrics.items()}
        # Lightning's loggers take a metric of this name as their x-axis.
        step = {"step": torch.tensor(float(iteration.number))}
        log_numbers(self, averages | step, prog_bar=BAR_METRICS.values())
        return averages

    def stop_if_done(self) -> None:
        """End the training at the limits of the run, or if its source has no more completions."""
        max_iterations = self.max_iterations or torch.inf
        max_tokens = self.max_generated_tokens or torch.inf
        if self.iteration >= max_iterations or self.generated_tokens >= max_tokens:
            self.trainer.should_stop = True
        elif reason := self.source.find_end(self.iteration):
            self.trainer.should_stop = True
            rank_zero_info(f"{reason}: training ends.")

    def _seed_device(self) -> None:
        # XLA programs draw dropout from the device's own generator. A seed per iteration makes a
        # resumed run draw the same; the generators of CPU and CUDA are saved instead
        # (distributed/random_state.py), and this does nothing.
        backend(self.device).seed(self.seed * 1_000_003 + self.iteration)

    # --- evaluation and prediction ---

    def validation_step(
        self, prompts: PromptBatch, batch_idx: int, purpose: Purpose = "val"
    ) -> dict[str, Any]:
        """Answer held-out prompts and count correct answers; return rollout and rewards."""
        evaluated = self.evaluator.evaluate(
            self.rollouter, prompts, purpose, self.iteration, name=prompts.set_name
        )
        return vars(evaluated)

    def on_validation_epoch_end(self) -> None:
        """Report accuracies with intervals, and mean rewards."""
        self._report_evaluation("val")

    def test_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Run a validation step with the random numbers of the test stage."""
        return self.validation_step(prompts, batch_idx, "test")

    def on_test_epoch_end(self) -> None:
        """Report accuracies with intervals, and mean rewards."""
        self._report_evaluation("test")

    def _report_evaluation(self, stage: str) -> None:
        measure_initial_distance(self)
        self.evaluation_report = self.evaluator.report(stage)
        self._seed_device()
        report = self.evaluation_report | {"step": float(self.iteration)}
        self.log_dict({name: torch.tensor(value) for name, value in report.items()})

    @property
    def success(self) -> dict[str, Any]:
        """Rewards by task, "" for all others, and the threshold that make a completion correct."""
        evaluator = self.evaluator
        return {
            "rewards": evaluator.success_rewards,
            "threshold": evaluator.settings.success_threshold,
        }

    @property
    def shown_tools(self) -> Any:
        """Schemas of the environment's tools, which the chat format lists in prompts."""
        return shown_tools_of(self.environment)

    def predict_step(self, prompts: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Answer prompts."""
        return self.evaluator.predict(self.rollouter, prompts)

    # --- checkpoints ---

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the run, and drop weights that never change."""
        if self._built_for is None:  # this process only waits for those that it spawned
            self.configure_model()
        super().on_save_checkpoint(checkpoint)
        weights, changing = checkpoint["state_dict"], self._changing_weights()
        checkpoint["state_dict"] = {name: weights[name] for name in weights if name in changing}
        # Limits on rows decide in which order sums are rounded.
        lowered = {
            "micro_batch_size": self.learning_limit.max_rows,
            "max_rows": self.rollout_limit.max_rows,
        }
        checkpoint |= {
            "source": self.source.state_dict(self.iteration),
            "iteration": self.iteration,
            "generated_tokens": self.generated_tokens,
            "judges": self.scorer.state_dict(),
            "lowered": {name: rows for name, rows in lowered.items() if rows is not None},
            "micro_batch_tokens": self.learner.update_config.max_tokens,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of the run.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        weights = checkpoint["state_dict"]
        self.moves_reference |= any(name.startswith(REFERENCE) for name in weights)
        check_weights(weights, self._changing_weights())
        self.iteration = checkpoint["iteration"]
        self.generated_tokens = checkpoint["generated_tokens"]
        self.scorer.load_state_dict(checkpoint.get("judges", {}))
        self.learning_limit.max_rows = checkpoint["lowered"].get("micro_batch_size")
        self.rollout_limit.max_rows = checkpoint["lowered"].get("max_rows")
        self.rollouter.forget_weights()
        self.source.load_state_dict(checkpoint["source"])
        super().on_load_checkpoint(checkpoint)
        if self.update.micro_batch_tokens == "auto" and kernel_choice.follows_memory(self):
            tokens = checkpoint["micro_batch_tokens"]
            self.learner.update_config = replace(
                self.learner.update_config, micro_batch_tokens=tokens
            )

    def _changing_weights(self) -> dict[str, Tensor]:
        """Return {name: tensor} of the weights that training changes."""
        return {
            name: parameter.data
            for name, parameter in self.named_parameters()
            if parameter.requires_grad or (self.moves_reference and name.startswith(REFERENCE))
        }

    # --- devices ---

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a number; on XLA devices as a host tensor, since each would become a program."""
        if backend(self.device).static_shapes and isinstance(value, int | float):
            value = torch.tensor(float(value))
        super().log(name, value, *args, **kwargs)

    def teardown(self, stage: str) -> None:
        """Stop watching the CPU, and shut down workers of reward functions and environments."""
        super().teardown(stage)
        self.scorer.close()
        if self._built_for is None:
            return
        self.source.close()
        if self.rollouter.episodes is not None:
            self.rollouter.episodes.close()


def _keep_on_host(batch: Any, *_: Any) -> Any:
    return batch
