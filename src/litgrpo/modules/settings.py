"""Groups of settings that a recipe names: how to learn from a rollout and how to evaluate."""

from __future__ import annotations

from dataclasses import dataclass, field

from litgrpo.evaluation.dialogue import CorpusScores


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}.")


@dataclass(frozen=True)
class Learning:
    """How the optimizer uses one rollout.

    Args:
        inner_epochs: passes over the rollout.
        num_mini_batches: optimizer steps of each pass; the prompts are dealt out evenly, whole
            groups to one step.
        micro_batch_size: completions that go through the model at once; only memory and speed
            depend on it, the gradient does not. None sets no limit.
        micro_batch_tokens: tokens that go through the model at once, likewise; a prompt that its
            completions share counts once, otherwise padding counts too.
        max_grad_norm: gradients are scaled down to this norm; None leaves them.
    """

    inner_epochs: int = 1
    num_mini_batches: int = 1
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = 2048
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("inner_epochs", "num_mini_batches", "micro_batch_size", "micro_batch_tokens"):
            _at_least(f"learning.{name}", getattr(self, name), 1)
        _at_least("learning.max_grad_norm", self.max_grad_norm, 0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of one iteration."""
        return self.inner_epochs * self.num_mini_batches


@dataclass(frozen=True)
class Evaluation:
    """How held-out prompts are answered and counted.

    Args:
        samples: k completions of each prompt; avg@k is the mean success of a completion.
        pass_at: pass@j for each j listed: the chance that one of j completions succeeds.
        temperature: of these completions.
        greedy: answer each prompt once more with the most likely tokens.
        success: the reward that counts; None takes the first.
        threshold: a completion succeeds if that reward is at least this.
        predict_temperature: of the completions of `predict`; 0 takes the most likely tokens.
        corpus: what to compute from one reply to every prompt, such as `DialogueScores`: the most
            likely reply, or without `greedy` the first sample.
    """

    samples: int = 4
    pass_at: list[int] = field(default_factory=lambda: [1, 4])
    temperature: float = 1.0
    greedy: bool = True
    success: str | None = None
    threshold: float = 1.0
    predict_temperature: float = 0.0
    corpus: CorpusScores | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        _at_least("evaluation.samples", self.samples, 1)
        for k in self.pass_at:
            if not 1 <= k <= self.samples:
                raise ValueError(
                    f"evaluation.pass_at has {k}; with {self.samples} samples it can be 1 to "
                    f"{self.samples}. Raise evaluation.samples or take {k} out."
                )
