"""How held-out prompts are answered and counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from litgrpo.arguments import at_least, require
from litgrpo.evaluation.dialogue import CorpusScores


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
        predict_top_p: keep the most likely tokens up to this cumulative probability, when
            `predict_temperature` is above 0; 1 keeps all.
        corpus: what to compute from one reply to every prompt, such as `DialogueScores`: the most
            likely reply, or without `greedy` the first sample.
        fluency: measure the text of the samples, too: length, share that ended, distinct-n, and
            their perplexity and KL under the weights that training started from.
    """

    samples: int = 4
    pass_at: list[int] = field(default_factory=lambda: [1, 4])
    temperature: float = 1.0
    greedy: bool = True
    success: str | None = None
    threshold: float = 1.0
    predict_temperature: float = 0.0
    predict_top_p: float = 1.0
    corpus: CorpusScores | None = None
    fluency: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        known = 0 < self.predict_top_p <= 1
        said = f"evaluation.predict_top_p is {self.predict_top_p}; it must be above 0 and at most 1"
        require(known, f"{said} (off).")
        at_least("evaluation.samples", self.samples, 1)
        for k in self.pass_at:
            if not 1 <= k <= self.samples:
                raise ValueError(
                    f"evaluation.pass_at has {k}; with {self.samples} samples it can be 1 to "
                    f"{self.samples}. Raise evaluation.samples or take {k} out."
                )
