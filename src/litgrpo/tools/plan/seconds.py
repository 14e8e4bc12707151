"""How long a run takes, from a device's peaks: each phase is a few terms, and the largest rules.

All of it is arithmetic (a roofline), nothing is measured. The lower bound takes the better share of
each peak and completions that end at half of their limit, the upper one the worse share and
completions that never end. `plan --measure` is for what runs here.

Source: Williams et al. 2009, "Roofline"; 2 operations per weight and token forward, 4 backward
(Kaplan et al., arXiv:2001.08361, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from litgrpo.tools.plan.devices import NOTHING, Assumed, Device, Span
from litgrpo.tools.plan.division import Chips, FullShard, bytes_of
from litgrpo.tools.plan.memory import Blueprint
from litgrpo.tools.plan.training import Training

# Share of its limit that a completion takes, on average: half, or all where none ends.
LENGTHS = Span(0.5, 1.0)
FORWARD, BACKWARD = 2, 4  # operations per weight and token
MOVED_IN_A_STEP = 7  # numbers per weight that Adam reads and writes: weight, gradient, moments
READING, CACHE, ARITHMETIC = "reading weights", "reading the cache", "arithmetic"
CALLS, GATHERING, STEPPING, WRITING = "calls", "gathering", "stepping", "writing"
ENGINES = "model.engine.dtype bfloat16"
# {phase: {term: what of a recipe changes it}}
KEYS = {
    "reading": {
        READING: f"data.batch_size up, {ENGINES}",
        ARITHMETIC: "data.max_prompt_length, data.batch_size",
    },
    "decoding": {
        READING: f"data.batch_size up (rows share a reading), {ENGINES}",
        CACHE: f"model.max_completion_length, {ENGINES}",
        ARITHMETIC: "model.max_completion_length, model.group_size",
        CALLS: "data.batch_size up; model.engine: StaticEngine or ServerEngine",
        GATHERING: "fewer chips, trainer.strategy",
    },
    "scoring": {ARITHMETIC: "model.objective.kl_coef 0, model.update.staleness 0"},
    "learning": {
        ARITHMETIC: "model.precision.autocast_dtype bfloat16, model.update.epochs_per_rollout",
        CALLS: "model.update.micro_batch_tokens up",
        GATHERING: "model.update.micro_batch_tokens up",
        STEPPING: "model.lora.rank, model.update.num_mini_batches",
    },
    "validations": {WRITING: "trainer.val_check_interval up, model.evaluation.samples"},
    "saves": {WRITING: "checkpoint.every_n_iterations up, checkpoint.save_weights_only true"},
    "start": {WRITING: ""},
}


@dataclass(frozen=True)
class Phase:
    """One phase of a run.

    Args:
        name: of the phase.
        terms: seconds of each term, one time.
        times: how often in the run.
    """

    name: str
    terms: dict[str, Span]
    times: int

    @property
    def once(self) -> Span:
        """Seconds of one time: memory and arithmetic overlap, everything else adds up."""
        memory = self._term(READING) + self._term(CACHE)
        total = memory.larger(self._term(ARITHMETIC))
        for name in (CALLS, GATHERING, STEPPING, WRITING):
            total = total + self._term(name)
        return total

    def _term(self, name: str) -> Span:
        return self.terms.get(name, NOTHING)

    @property
    def whole(self) -> Span:
        """Seconds in the whole run."""
        return self.once * self.times

    @property
    def mostly(self) -> str:
        """The term that rules."""
        return max(self.terms, key=lambda name: self.terms[name].middle)

    @property
    def key(self) -> str:
        """What of the recipe changes that term."""
        return KEYS[self.name].get(self.mostly, "")


@dataclass(frozen=True)
class Estimate:
    """Seconds of a recipe on devices.

    Args:
        training: what the recipe asks for.
        device: of which kind.
        number: how many of them learn.
        assumed: what no data sheet says.
        samplers: how many others sample; 0: those that learn do.
        lengths: share of its limit that a completion takes.
    """

    training: Training
    device: Device
    number: int
    assumed: Assumed
    samplers: int = 0
    lengths: Span = LENGTHS

    # --- the model ---

    @cached_property
    def model(self) -> Blueprint:
        """The policy in the precision that is computed in."""
        models = self.training.models
        found: Blueprint = models["computed"] or models["blueprint"]
        return found

    @cached_property
    def linear(self) -> int:
        """Weights of the layers that multiply each token."""
        return sum(w.numel() for block in self.model.blocks for w in block if w.dim() > 1)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return int(self.model.config.vocab_size * self.model.config.hidden_size)

    def _attention(self, tokens: float, context: float) -> float:
        """Operations of tokens that attend to a context, in all layers, forward."""
        config = self.model.config
        return 4.0 * config.num_hidden_layers * config.hidden_size * tokens * context

    # --- the device ---

    @cached_property
    def flops(self) -> Span:
        """Operations per second that the model reaches on one device."""
        precision = str(self.model.dtype).removeprefix("torch.")
        peak = self.device.flops.get(precision, max(self.device.flops.values()))
        weights = sum(w.numel() for w in self.model.weights)
        return self.assumed.share_of_peak(self.device.kind, weights) * peak

    @property
    def bandwidth(self) -> Span:
        """Bytes per second of one device's memory."""
        return self.assumed.bandwidth * self.device.bandwidth

    @property
    def link(self) -> Span:
        """Bytes per second between devices."""
        return self.assumed.links * self.device.link

    def _calls(self, passes: float, way: str = "eager") -> Span:
        """Seconds in which the calls of so many passes through all layers are made."""
        each = self.assumed.calls_us[self.device.kind][way]
        return each * (1e-6 * passes * len(self.model.blocks))

    # --- phases ---

    def phases(self) -> list[Phase]:
        """All phases of the run."""
        plan, work = self.training.schedule, self.training.work
        learning = Phase("learning", self._learning(), plan.iterations)
        found = [learning]
        if not plan.supervised:
            prompts, group = work.rollouts[0]
            found = [*self._rollout(prompts, group, plan.iterations), *self._scoring(), learning]
        start = Phase("start", {WRITING: self.assumed.start_s}, 1)
        return [start, *found, self._validations(), self._saves()]

    def _rollout(self, prompts: int, group: int, times: int) -> Iterator[Phase]:
        work = self.training.work
        number = self.samplers or self.number
        own_prompts, rows = -(-prompts // number), -(-prompts * group // number)
        divided = isinstance(self.training.division, Chips) and not self.samplers and number > 1
        weights = bytes_of(self.model.weights) // (1, number)[divided]
        read = Span(weights, weights).per(self.bandwidth)
        once = own_prompts * work.prompt_len
        operations = FORWARD * once * self.linear + self._attention(once, work.prompt_len / 2)
        reading = {READING: read, ARITHMETIC: Span(operations, operations).per(self.flops)}
        yield Phase("reading", reading, times)
        # The longest row decides how many steps: of many, one is as long as twice the mean.
        steps = Span(*(min(1.0, 2 * each) for each in (self.lengths.low, self.lengths.high)))
        steps, mean = steps * work.completion_len, self.lengths * work.completion_len
        token = self.model.cache_numbers * work.cache_bytes
        held = Span(*(own_prompts * work.prompt_len + rows * each / 2 for each in _both(mean)))
        said = mean * rows
        context = work.prompt_len + mean.high / 2
        operations = FORWARD * (self.linear + self.head) + self._attention(1, context)
        way = ("eager", "recorded")[self.training.schedule.recorded]
        decoding = {
            READING: _times(steps, read),
            CACHE: (_times(steps, held) * token).per(self.bandwidth),
            ARITHMETIC: (said * operations).per(self.flops),
            CALLS: _times(steps, self._calls(1, way)),
        }
        if divided:
            whole = bytes_of(self.model.weights)
            # A compiler may move activations in place of weights, which is next to nothing.
            decoding[GATHERING] = _times(steps, Span(0.0, Span(whole, whole).per(self.link).high))
        yield Phase("decoding", decoding, times)

    @property
    def _tokens(self) -> Span:
        """That one device scores or learns from in one pass over the rollout."""
        work, plan = self.training.work, self.training.schedule
        if plan.supervised:
            return self.lengths * (work.micro_rows * work.length / self.number)
        prompts, group = work.rollouts[0]
        shared = prompts * work.prompt_len
        own = self.lengths * (prompts * group * work.completion_len)
        return (own + Span(shared, shared)) * (1 / self.number)

    def _passes(self, tokens: Span) -> Span:
        """Operations of these tokens through the model, forward."""
        each = FORWARD * (self.linear + self.head)
        return tokens * (each + self._attention(1, self.training.work.length / 2))

    def _scoring(self) -> Iterator[Phase]:
        plan = self.training.schedule
        times = plan.iterations * (plan.scores_old + plan.scores_reference)
        if times:
            terms = {ARITHMETIC: self._passes(self._tokens).per(self.flops)}
            yield Phase("scoring", terms, times)

    @property
    def _micro_batches(self) -> int:
        work, division = self.training.work, self.training.over(self.number)
        own = division.rows(work.step_rows) if work.step_rows else work.micro_rows
        return max(1, -(-own // max(1, division.micro_rows(work.micro_rows, work.step_rows))))

    def _learning(self) -> dict[str, Span]:
        plan, training = self.training.schedule, self.training
        blueprint: Blueprint = training.models["blueprint"]
        # Gradients of weights that are not trained are not computed.
        backward = BACKWARD if training.lora is None else BACKWARD / 2
        passes = 1 + backward / FORWARD + training.checkpointing
        operations = self._passes(self._tokens) * (passes * plan.epochs_per_rollout)
        moved = MOVED_IN_A_STEP * training.over(self.number).share(blueprint.trained) * plan.steps
        through = self._micro_batches * plan.steps * (2 + training.checkpointing)
        terms = {
            ARITHMETIC: operations.per(self.flops),
            CALLS: self._calls(through),
            STEPPING: Span(moved, moved).per(self.bandwidth),
        }
        if self.number > 1:
            sharded = isinstance(training.division, FullShard | Chips)
            # A gathering forward, one backward, gradients reduced; or gradients alone.
            sent = 3 * self._micro_batches if sharded else 2
            whole = bytes_of(self.model.weights if sharded else blueprint.trained)
            sent_bytes = sent * plan.steps * whole
            terms[GATHERING] = Span(0.3 * sent_bytes, sent_bytes).per(self.link)  # some overlaps
        return terms

    def _validations(self) -> Phase:
        plan = self.training.schedule
        if plan.supervised:
            rows = plan.held_out * self.training.work.length / self.number
            seconds = self._passes(self.lengths * rows).per(self.flops)
        else:
            batch = self.training.work.rollouts[-1][0]
            parts = list(self._rollout(batch, plan.answers, -(-plan.held_out // batch)))
            seconds = sum((part.whole for part in parts), NOTHING)
        return Phase("validations", {WRITING: seconds}, plan.evaluations)

    def checkpoint_bytes(self) -> int:
        """Of one checkpoint on disk: what is trained, and what the optimizer keeps of it."""
        blueprint, states = (self.training.models[name] for name in ("blueprint", "states"))
        trained = bytes_of(blueprint.trained)
        kept = 2 * trained if states is None else bytes_of(tensor for _, tensor in states)
        return trained + kept * self.training.schedule.whole_checkpoints

    def _saves(self) -> Phase:
        size = self.checkpoint_bytes()
        seconds = Span(size, size).per(self.assumed.disk_gb_s * 1e9)
        return Phase("saves", {WRITING: seconds}, self.training.schedule.saves)


def _both(span: Span) -> tuple[float, float]:
    return span.low, span.high


def _times(left: Span, right: Span) -> Span:
    """Product of two numbers of which each lies between bounds."""
    return Span(left.low * right.low, left.high * right.high)


def total(phases: list[Phase]) -> Span:
    """Seconds of the whole run."""
    return sum((phase.whole for phase in phases), NOTHING)
