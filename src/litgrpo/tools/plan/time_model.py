"""Estimate the time of a run from a device's peak rates (a roofline model).

Each phase of an iteration is a sum of a few terms. Nothing is measured; `plan --measure` measures
what runs here. The lower bound takes the better fraction of each peak and completions of half the
maximum length; the upper bound takes the worse fraction and completions of the maximum length.

Source: Williams et al. 2009, "Roofline"; 2 operations per weight and token forward, 4 backward
(Kaplan et al., arXiv:2001.08361, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from litgrpo.models.architectures import ARCHITECTURES, Architecture
from litgrpo.tools.plan.devices import ZERO, Assumptions, Bounds, Device
from litgrpo.tools.plan.memory import MetaModel
from litgrpo.tools.plan.sharding import FSDPSharding, XLASharding, total_bytes
from litgrpo.tools.plan.sizes import RecipeSizes

# Mean length of completions as a fraction of the maximum.
LENGTHS = Bounds(0.5, 1.0)
FORWARD, BACKWARD = 2, 4  # operations per weight and token
ADAM_TRAFFIC = 7  # numbers per weight that Adam reads and writes: weight, gradient, state
READING, CACHE, ARITHMETIC = "reading weights", "reading the cache", "arithmetic"
CALLS, GATHERING, STEPPING, OTHER = "kernel launches", "communication", "optimizer step", "other"
ENGINE_DTYPE = "model.engine.dtype bfloat16"
# {phase: {term: settings that reduce it}}
SETTINGS = {
    "prefill": {
        READING: f"data.batch_size up, {ENGINE_DTYPE}",
        ARITHMETIC: "data.max_prompt_length, data.batch_size",
    },
    "decoding": {
        READING: f"data.batch_size up (rows share a read), {ENGINE_DTYPE}",
        CACHE: f"model.max_completion_length, {ENGINE_DTYPE}",
        ARITHMETIC: "model.max_completion_length, model.group_size",
        CALLS: "data.batch_size up; model.engine: ServerEngine",
        GATHERING: "fewer chips, trainer.strategy",
    },
    "greedy": {OTHER: "data.batch_size up, model.objective.advantages Normalized"},
    "scoring": {ARITHMETIC: "model.objective.kl_coef 0, model.update.staleness 0"},
    "learning": {
        ARITHMETIC: "model.precision.autocast_dtype bfloat16, model.update.epochs_per_rollout",
        CALLS: "model.update.micro_batch_tokens up",
        GATHERING: "model.update.micro_batch_tokens up",
        STEPPING: "model.lora.rank, model.update.num_mini_batches",
    },
    "validations": {OTHER: "trainer.val_check_interval up, model.evaluation.num_samples"},
    "saves": {OTHER: "checkpoint.every_n_iterations up, checkpoint.save_weights_only true"},
    "start": {OTHER: ""},
}


@dataclass(frozen=True)
class RunPhase:
    """One phase of a run.

    Args:
        name: its name.
        terms: {term: seconds of one time}.
        times: how often it happens in the run.

    Example:
        >>> terms = {READING: Bounds(2, 2), ARITHMETIC: Bounds(1, 5), CALLS: Bounds(1, 1)}
        >>> RunPhase("decoding", terms, times=3).once
        Bounds(low=3.0, high=6.0)
    """

    name: str
    terms: dict[str, Bounds]
    times: int

    @property
    def once(self) -> Bounds:
        """Seconds of one time."""
        # max(reading weights + reading the cache, arithmetic) + all others: memory traffic and
        # arithmetic overlap
        memory = self.terms.get(READING, ZERO) + self.terms.get(CACHE, ZERO)
        total = memory.larger(self.terms.get(ARITHMETIC, ZERO))
        for name in (CALLS, GATHERING, STEPPING, OTHER):
            total = total + self.terms.get(name, ZERO)
        return total

    @property
    def whole(self) -> Bounds:
        """Seconds in the whole run."""
        return self.once * self.times

    @property
    def largest_term(self) -> str:
        """Term that takes most of the time."""
        return max(self.terms, key=lambda name: self.terms[name].middle)

    @property
    def setting(self) -> str:
        """Settings that reduce the largest term."""
        return SETTINGS[self.name].get(self.largest_term, "")


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated run time of a recipe on devices.

    Args:
        recipe: sizes of the recipe.
        device: kind of device.
        number: devices that train.
        assumptions: efficiencies that data sheets do not state.
        samplers: further devices that generate; 0: those that train generate.
        lengths: mean length of completions as a fraction of the maximum.

    Example:
        estimate = make_plan(PlanCLI(["-c", "configs/quickstart.yaml"]).config).estimate
        total_seconds(estimate.phases())  # Bounds(low=310.5, high=1204.2)
    """

    recipe: RecipeSizes
    device: Device
    number: int
    assumptions: Assumptions
    samplers: int = 0
    lengths: Bounds = LENGTHS

    # --- the model ---

    @cached_property
    def model(self) -> MetaModel:
        """The policy in its compute precision."""
        return self.recipe.models.compute or self.recipe.models.policy

    @cached_property
    def linear(self) -> int:
        """Weights of the linear layers, which multiply each token."""
        return sum(w.numel() for block in self.model.blocks for w in block if w.dim() > 1)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return int(self.model.config.vocab_size * self.model.config.hidden_size)

    def _attention(self, tokens: float, context: float) -> float:
        """Count the operations of attention over a context, in all layers, forward."""
        config = self.model.config
        return 4.0 * config.num_hidden_layers * config.hidden_size * tokens * context

    # --- the device ---

    @cached_property
    def flops(self) -> Bounds:
        """Operations per second that the model reaches on one device."""
        precision = str(self.model.dtype).removeprefix("torch.")
        peak = self.device.flops.get(precision, max(self.device.flops.values()))
        weights = sum(w.numel() for w in self.model.weights)
        return self.assumptions.flops_frac(self.device.kind, weights) * peak

    @property
    def bandwidth(self) -> Bounds:
        """Bytes per second of one device's memory."""
        return self.assumptions.bandwidth * self.device.bandwidth

    @property
    def link(self) -> Bounds:
        """Bytes per second between devices."""
        return self.assumptions.links * self.device.link

    def _records_decoding(self) -> bool:
        schedule, kind = self.recipe.schedule, self.recipe.config.model_type
        is_fused = ARCHITECTURES.get(kind, Architecture()).fused is not None
        on_cuda = self.device.kind == "cuda" and schedule.records_on_cuda
        return schedule.replays_graph or (on_cuda and is_fused)

    def _launches(self, passes: float, mode: str = "eager") -> Bounds:
        """Return the seconds to launch the kernels of passes through all layers."""
        per_layer = self.assumptions.calls_us[self.device.kind][mode]
        return per_layer * (1e-6 * passes * len(self.model.blocks))

    # --- phases ---

    def phases(self) -> list[RunPhase]:
        """Return all phases of the run."""
        schedule = self.recipe.schedule
        phases = [RunPhase("start", {OTHER: self.assumptions.start_s}, 1)]
        if not schedule.is_sft:
            prompts, group = self.recipe.work.rollouts[0]
            phases += self._rollout(prompts, group, schedule.sampled)
            if schedule.greedy:
                seconds = total_seconds(list(self._rollout(prompts, 1, 1)))
                phases.append(RunPhase("greedy", {OTHER: seconds}, schedule.iterations))
            phases += self._scoring()
        phases.append(RunPhase("learning", self._learning(), schedule.iterations))
        return [*phases, self._validations(), self._saves()]

    def _rollout(self, prompts: int, group: int, times: int) -> Iterator[RunPhase]:
        work = self.recipe.work
        number = self.samplers or self.number
        own_prompts, rows = -(-prompts // number), -(-prompts * group // number)
        # Under SPMD each chip reads its share of the weights; other engines gather them before.
        weights = whole = total_bytes(self.model.weights)
        spmd = isinstance(self.recipe.sharding, XLASharding) and not self.samplers and number > 1
        if spmd:
            weights //= number
        read = Bounds(weights, weights).per(self.bandwidth)
        tokens = own_prompts * work.prompt_len
        operations = FORWARD * tokens * self.linear + self._attention(tokens, work.prompt_len / 2)
        prefill = {READING: read, ARITHMETIC: Bounds(operations, operations).per(self.flops)}
        yield RunPhase("prefill", prefill, times)
        # The longest row decides the number of steps; in a batch it is about twice the mean.
        low, high = min(1.0, 2 * self.lengths.low), min(1.0, 2 * self.lengths.high)
        steps = Bounds(low, high) * work.completion_len
        mean = self.lengths * work.completion_len
        # On average half of a completion is in the cache.
        prompt_tokens = own_prompts * work.prompt_len
        cached = Bounds(prompt_tokens + rows * mean.low / 2, prompt_tokens + rows * mean.high / 2)
        cache_bytes = self.model.cache_numbers * work.cache_bytes
        context = work.prompt_len + mean.high / 2
        operations = FORWARD * (self.linear + self.head) + self._attention(1, context)
        mode = "recorded" if self._records_decoding() else "eager"
        decoding = {
            READING: steps.times(read),
            CACHE: (steps.times(cached) * cache_bytes).per(self.bandwidth),
            ARITHMETIC: (mean * rows * operations).per(self.flops),
            CALLS: steps.times(self._launches(1, mode)),
        }
        if spmd:
            # The low bound is 0: a compiler may move activations, which are tiny, not weights.
            gathering = Bounds(0.0, Bounds(whole, whole).per(self.link).high)
            decoding[GATHERING] = steps.times(gathering)
        yield RunPhase("decoding", decoding, times)

    @property
    def _tokens(self) -> Bounds:
        """Tokens per device in one epoch over the rollout."""
        work = self.recipe.work
        if self.recipe.schedule.is_sft:
            return self.lengths * (work.micro_rows * work.length / self.number)
        prompts, group = work.rollouts[0]
        shared = prompts * work.prompt_len
        own = self.lengths * (prompts * group * work.completion_len)
        return (own + Bounds(shared, shared)) * (1 / self.number)

    def _forward_operations(self, tokens: Bounds) -> Bounds:
        per_token = FORWARD * (self.linear + self.head)
        return tokens * (per_token + self._attention(1, self.recipe.work.length / 2))

    def _scoring(self) -> Iterator[RunPhase]:
        times = self.recipe.schedule.scorings
        if times:
            terms = {ARITHMETIC: self._forward_operations(self._tokens).per(self.flops)}
            yield RunPhase("scoring", terms, times)

    @property
    def _micro_batches(self) -> int:
        work, sharding = self.recipe.work, self.recipe.shard_over(self.number)
        own = sharding.rows(work.step_rows) if work.step_rows else work.micro_rows
        return max(1, -(-own // max(1, sharding.micro_rows(work.micro_rows, work.step_rows))))

    def _learning(self) -> dict[str, Bounds]:
        recipe, schedule = self.recipe, self.recipe.schedule
        trained = recipe.models.policy.trained
        # With LoRA the gradients of the frozen weights are not computed.
        backward = BACKWARD if recipe.lora is None else BACKWARD / 2
        passes = 1 + backward / FORWARD + recipe.checkpointing
        operations = self._forward_operations(self._tokens) * (passes * schedule.epochs_per_rollout)
        traffic = ADAM_TRAFFIC * recipe.shard_over(self.number).share(trained) * schedule.steps
        layer_passes = self._micro_batches * schedule.steps * (2 + recipe.checkpointing)
        terms = {
            ARITHMETIC: operations.per(self.flops),
            CALLS: self._launches(layer_passes),
            STEPPING: Bounds(traffic, traffic).per(self.bandwidth),
        }
        if self.number > 1:
            if isinstance(recipe.sharding, FSDPSharding | XLASharding):
                # All-gather forward, all-gather backward, reduce-scatter of the gradients.
                sent = 3 * self._micro_batches * schedule.steps * total_bytes(self.model.weights)
            else:
                # All-reduce of the gradients.
                sent = 2 * schedule.steps * total_bytes(trained)
            # Some of it overlaps with computation.
            terms[GATHERING] = Bounds(0.3 * sent, sent).per(self.link)
        return terms

    def _validations(self) -> RunPhase:
        schedule, work = self.recipe.schedule, self.recipe.work
        if schedule.is_sft:
            tokens = self.lengths * (schedule.val_prompts * work.length / self.number)
            seconds = self._forward_operations(tokens).per(self.flops)
        else:
            batch_size = work.rollouts[-1][0]
            batches = -(-schedule.val_prompts // batch_size)
            phases = self._rollout(batch_size, schedule.val_completions, batches)
            seconds = total_seconds(list(phases))
        return RunPhase("validations", {OTHER: seconds}, schedule.evaluations)

    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint: trained weights and their optimizer state."""
        models = self.recipe.models
        trained = total_bytes(models.policy.trained)
        if not self.recipe.schedule.saves_optimizer:
            return trained
        if models.states is None:
            return trained + 2 * trained
        return trained + total_bytes(tensor for _, tensor in models.states)

    def _saves(self) -> RunPhase:
        size = self.checkpoint_bytes()
        seconds = Bounds(size, size).per(self.assumptions.disk_gb_s * 1e9)
        return RunPhase("saves", {OTHER: seconds}, self.recipe.schedule.saves)


def total_seconds(phases: list[RunPhase]) -> Bounds:
    """Add the seconds of all phases of a run."""
    return sum((phase.whole for phase in phases), ZERO)
