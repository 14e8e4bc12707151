"""Weights by hand: rows of 2, 1 and 0 tokens, a limit of 4."""

import pytest
import torch

from litgrpo.algorithm.objective import Objective
from litgrpo.algorithm.weighting import (
    Constant,
    PerSequence,
    PerToken,
    PerTokenOfMicroBatch,
)
from tests.comms import Twins

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
UNCUT = torch.zeros(3, dtype=torch.bool)
ROWS = [
    (PerSequence(), [[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (PerToken(), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (Constant(), [[1 / 12, 1 / 12, 0], [1 / 12, 0, 0], [0, 0, 0]]),
    (Constant(by_limit=False), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
]


@pytest.mark.parametrize(("weighting", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_weights_by_hand(weighting, expected):
    objective = Objective(weighting=weighting)

    weights = objective.token_weights(MASK, UNCUT, max_completion_len=4, dtype=torch.float64)

    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("weighting", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_two_equal_processes_halve_the_weights(weighting, expected):
    objective = Objective(weighting=weighting)

    weights = objective.token_weights(MASK, UNCUT, 4, comm=Twins())

    torch.testing.assert_close(weights, torch.tensor(expected) / 2)


def test_truncated_rows_lose_their_tokens_but_stay_in_the_number_of_rows():
    cut = torch.tensor([True, False, False])
    per_sequence = Objective(mask_truncated=True).token_weights(MASK, cut, 4)
    per_token = Objective(mask_truncated=True, weighting=PerToken()).token_weights(MASK, cut, 4)

    torch.testing.assert_close(per_sequence, torch.tensor([[0, 0, 0], [1 / 3, 0, 0], [0, 0, 0]]))
    torch.testing.assert_close(per_token, torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [0, 0, 0]]))
    assert Objective().token_weights(MASK, cut, 4)[0, 0] > 0


def test_bnpo_shares_out_the_part_of_each_micro_batch():
    weighting = PerTokenOfMicroBatch()
    weights = Objective(weighting=weighting).token_weights(MASK, UNCUT, 4)

    # One row of three, two tokens: each counts 1/3 * 1/2.
    torch.testing.assert_close(
        weighting.within(weights[:1], MASK[:1]), torch.tensor([[1 / 6, 1 / 6, 0.0]])
    )
    # All three rows: a plain mean over three tokens.
    assert weighting.within(weights, MASK).sum().item() == pytest.approx(1.0)


def test_a_batch_without_tokens_has_no_weight():
    for weighting, _ in ROWS:
        weights = Objective(weighting=weighting).token_weights(MASK & False, UNCUT, 4)
        assert (weights == 0).all()


@pytest.mark.parametrize(("weighting", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_tokens_of_an_environment_have_no_weight_and_are_in_no_denominator(weighting, expected):
    # The same three rows with two tokens of an environment after the first column.
    said = torch.zeros(3, 2, dtype=torch.bool)
    mask = torch.cat([MASK[:, :1], said, MASK[:, 1:]], 1)
    expected = torch.tensor(expected, dtype=torch.float64)

    weights = Objective(weighting=weighting).token_weights(mask, UNCUT, 4, dtype=torch.float64)

    torch.testing.assert_close(
        weights, torch.cat([expected[:, :1], said.double(), expected[:, 1:]], 1)
    )
