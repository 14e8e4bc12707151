"""Terms and masks of a user's own: one class each, with losses worked out by hand."""

from dataclasses import dataclass

import pytest
import torch

from litgrpo.algorithms.divergences import JSD
from litgrpo.algorithms.masks import CompletionMask, StepMask, TokenMask
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import PolicyGradient
from litgrpo.algorithms.terms import KLDivergence, MeanTerm, Term
from litgrpo.types import TokenLogprobs
from tests.support.by_hand import batch_of
from tests.support.comms import in_turns

MASK = torch.tensor([[True, True], [True, False]])
LOGPROBS = torch.tensor([[-1.0, -3.0], [-2.0, 9.0]])
NEW = TokenLogprobs(LOGPROBS, torch.zeros(2, 2))
UNCUT = torch.zeros(2, dtype=torch.bool)


@dataclass(frozen=True)
class Toward(Term):
    """The distance of log-probabilities from a constant."""

    needs = frozenset({"all_rows"})
    metric = "distance"
    coef: float = 0.5
    constant: float = -1.0

    def __call__(self, inputs):
        return (inputs.logprobs - self.constant).square()


@dataclass(frozen=True)
class FirstTokens(MeanTerm):
    """The mean of -log p over the first token of each completion."""

    metric = "first_nll"
    coef: float = 0.1

    def select(self, tokens):
        return tokens.generated & (torch.arange(tokens.generated.shape[1]) == 0)

    def __call__(self, inputs):
        return -inputs.new.logprobs


@dataclass(frozen=True)
class Likely(TokenMask):
    def __call__(self, inputs):
        return inputs.logprobs > -2.5


@dataclass(frozen=True)
class FirstCompletion(CompletionMask):
    is_counted = False

    def __call__(self, completions):
        return torch.arange(len(completions.truncated)) == 0


@dataclass(frozen=True)
class LikelyHalf(StepMask):
    def __call__(self, inputs, comm):
        of_rank = inputs.logprobs.detach().masked_fill(~inputs.mask, torch.nan).flatten()
        return inputs.logprobs >= comm.gather(of_rank).nanmedian()


def rows_of(objective):
    """Two completions, of two tokens and one, with an advantage of 1."""
    return batch_of(
        MASK,
        sampler_logprobs=LOGPROBS,
        advantages=torch.ones(2, 2),
        loss_weights=objective.loss_weights(MASK, UNCUT, 2),
    )


def objective_of(**parts):
    return Objective(surrogate=PolicyGradient(), **parts)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # The surrogate is -l, a mean over three tokens: (1 + 3 + 2) / 3.
        ({}, 2.0),
        # 0, 4 and 1, times 0.5.
        ({"terms": (Toward(),)}, 2.0 + 0.5 * 5 / 3),
        # The first tokens have 1 and 2.
        ({"terms": (FirstTokens(),)}, 2.0 + 0.1 * 1.5),
        ({"terms": (Toward(), FirstTokens())}, 2.0 + 0.5 * 5 / 3 + 0.1 * 1.5),
        # A masked token counts in the denominator, and a term is not masked.
        ({"masks": (Likely(),)}, (1 + 2) / 3),
        ({"masks": (Likely(),), "terms": (Toward(),)}, (1 + 2) / 3 + 0.5 * 5 / 3),
        ({"masks": (LikelyHalf(),)}, (1 + 2) / 3),
        ({"masks": (LikelyHalf(), Likely())}, (1 + 2) / 3),
        # A masked completion has no tokens in the denominator: (1 + 3) / 2, and 0 and 4.
        ({"masks": (FirstCompletion(),), "terms": (Toward(),)}, 2.0 + 0.5 * 2),
    ],
)
def test_a_loss_with_a_class_of_the_user_by_hand(parts, expected):
    objective = objective_of(**parts)
    assert objective.loss(NEW, rows_of(objective)).loss.item() == pytest.approx(expected)


def test_terms_are_logged_by_the_name_of_their_metric():
    objective = objective_of(terms=(Toward(), FirstTokens()))
    stats = objective.loss(NEW, rows_of(objective)).stats

    assert stats["policy/distance"].tolist() == [5, 3]
    assert stats["policy/first_nll"].tolist() == [3, 2]


def test_what_a_part_needs_is_what_the_objective_needs():
    assert objective_of(terms=(Toward(),)).needs == {"all_rows"}
    both = objective_of(masks=(LikelyHalf(),), terms=(Toward(),))
    assert both.needs == {"all_rows", "before_step"}
    assert objective_of(masks=(Likely(),), terms=(FirstTokens(),)).needs == frozenset()


def test_micro_batches_and_processes_add_up():
    parts = {"masks": (LikelyHalf(),), "terms": (Toward(), FirstTokens())}
    objective = objective_of(**parts, entropy_coef=0.2)
    new, rows = TokenLogprobs(LOGPROBS, torch.tensor([[0.4, 0.3], [0.7, 9.0]])), rows_of(objective)
    whole = objective.loss(new, rows).loss

    def process(row):
        def loss(comm):
            part = rows.select(torch.tensor([row]))
            width = part.loss_mask.shape[1]
            given = [values[row : row + 1, :width] for values in (new.logprobs, new.entropy)]
            given = TokenLogprobs(*given)
            return objective.loss(given, objective.prepare_step(part, given, comm)).loss

        return loss

    parts = in_turns(process(0), process(1))
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_terms_that_exclude_each_other_raise_with_both_names():
    with pytest.raises(ValueError, match="kl_coef and KLToStudent"):
        Objective(kl_coef=0.1, kl_estimator="reverse_kl", terms=(KLToStudent(0.1, JSD()),))
    with pytest.raises(ValueError, match="Toward and Toward"):
        Objective(terms=(Toward(), Toward(constant=0.0)))


class KLToStudent(KLDivergence):
    setting = ""
    metric = ""


def test_a_class_of_the_user_is_named_if_the_correction_does_not_weight_it():
    assert Objective(old_policy="sampler", terms=(Toward(),)).find_uncorrected() == ["Toward"]
