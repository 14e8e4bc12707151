"""The comparison of two trainers."""

import pytest
import torch

from tests.benchmarks.parity import flat, interval, rows_of


def test_difference_of_two_samples_has_welchs_interval():
    """Against scipy.stats.ttest_ind(equal_var=False).confidence_interval(), whose freedom is 8."""
    litgrpo, theirs = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0]
    assert interval(litgrpo, theirs) == pytest.approx((-1.0, -3.306004, 1.306004), abs=1e-5)
    assert interval([1.0, 1.0], [0.5, 0.5]) == (0.5, 0.5, 0.5)


def test_rows_are_given_without_their_padding():
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    assert rows_of(ids, mask) == [[5, 6], [7, 8, 9]]


def test_weights_are_compared_by_their_names():
    one = {"b": torch.ones(2), "a": torch.zeros(1)}
    assert flat(one).tolist() == [0.0, 1.0, 1.0]
