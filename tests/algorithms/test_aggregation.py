"""Loss weights of the aggregations."""

import pytest
import torch

from litgrpo.algorithms.aggregation import (
    ConstantLength,
    MicroBatchTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from litgrpo.algorithms.objective import Objective
from tests.support.comms import Twins

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
UNCUT = torch.zeros(3, dtype=torch.bool)
ROWS = [
    (SequenceMean(), [[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (TokenMean(), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
    (ConstantLength(), [[1 / 12, 1 / 12, 0], [1 / 12, 0, 0], [0, 0, 0]]),
    (SequenceSum(), [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0], [0, 0, 0]]),
]


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_weights_by_hand(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation)

    weights = objective.loss_weights(MASK, UNCUT, max_completion_length=4, dtype=torch.float64)

    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_two_equal_processes_halve_the_weights(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation)

    weights = objective.loss_weights(MASK, UNCUT, 4, comm=Twins())

    torch.testing.assert_close(weights, torch.tensor(expected) / 2)


def test_truncated_rows_lose_their_tokens_but_stay_in_the_number_of_rows():
    cut = torch.tensor([True, False, False])
    per_sequence = Objective(
        mask_truncated_completions=True, loss_aggregation="sequence_mean"
    ).loss_weights(MASK, cut, 4)
    per_token = Objective(
        mask_truncated_completions=True, loss_aggregation=TokenMean()
    ).loss_weights(MASK, cut, 4)

    torch.testing.assert_close(per_sequence, torch.tensor([[0, 0, 0], [1 / 3, 0, 0], [0, 0, 0]]))
    torch.testing.assert_close(per_token, torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [0, 0, 0]]))
    assert Objective().loss_weights(MASK, cut, 4)[0, 0] > 0


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_groups_without_variance_are_in_no_denominator_if_excluded(loss_aggregation, expected):
    objective = Objective(loss_aggregation=loss_aggregation, exclude_zero_variance=True)
    more, cut = torch.cat([MASK, MASK]), torch.zeros(6, dtype=torch.bool)
    informative = torch.tensor([True] * 3 + [False] * 3)

    found = objective.loss_weights(more, cut, 4, dtype=torch.float64, informative=informative)
    counted = Objective(loss_aggregation=loss_aggregation).loss_weights(
        more, cut, 4, dtype=torch.float64, informative=informative
    )

    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, torch.cat([expected, torch.zeros_like(expected)]))
    torch.testing.assert_close(counted, torch.cat([expected, expected]) / 2)


def test_bnpo_shares_out_the_part_of_each_micro_batch():
    loss_aggregation = MicroBatchTokenMean()
    weights = Objective(loss_aggregation=loss_aggregation).loss_weights(MASK, UNCUT, 4)

    # One row of three, two tokens: each counts 1/3 * 1/2.
    torch.testing.assert_close(
        loss_aggregation.rescale_micro_batch(weights[:1], MASK[:1]),
        torch.tensor([[1 / 6, 1 / 6, 0.0]]),
    )
    # All three rows: a plain mean over three tokens.
    assert loss_aggregation.rescale_micro_batch(weights, MASK).sum().item() == pytest.approx(1.0)


def test_a_batch_without_tokens_has_no_weight():
    for loss_aggregation, _ in ROWS:
        weights = Objective(loss_aggregation=loss_aggregation).loss_weights(MASK & False, UNCUT, 4)
        assert (weights == 0).all()


@pytest.mark.parametrize(("loss_aggregation", "expected"), ROWS, ids=lambda row: str(row)[:30])
def test_tokens_of_an_environment_have_no_weight_and_are_in_no_denominator(
    loss_aggregation, expected
):
    # The same three rows with two tokens of an environment after the first column.
    said = torch.zeros(3, 2, dtype=torch.bool)
    mask = torch.cat([MASK[:, :1], said, MASK[:, 1:]], 1)
    expected = torch.tensor(expected, dtype=torch.float64)

    weights = Objective(loss_aggregation=loss_aggregation).loss_weights(
        mask, UNCUT, 4, dtype=torch.float64
    )

    torch.testing.assert_close(
        weights, torch.cat([expected[:, :1], said.double(), expected[:, 1:]], 1)
    )
