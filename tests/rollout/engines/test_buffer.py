import torch

from litgrpo.rollout.engines.buffer import CompletionBuffer
from litgrpo.rollout.sampling import Drawn
from tests.conftest import prompt_batch

END, PAD = 2, 0
IS_END = torch.arange(10) == END


def drawn(*tokens, candidates=None):
    candidates = None if candidates is None else torch.tensor(candidates).int()
    return Drawn(torch.tensor(tokens), -torch.tensor(tokens).double(), candidates)


def empty():
    return CompletionBuffer.empty(torch.Size([2, 4]), PAD, torch.device("cpu"))


def by_columns():
    """Row 0 says 5, 2; row 1 says 7, 8, 9."""
    buffer, rows = empty(), torch.arange(2)
    steps = [drawn(5, 7), drawn(END, 8), drawn(6, 9)]
    for column, each in enumerate(steps):
        buffer.write_column(column, rows, each, torch.tensor([END]))
    return buffer


def at_once():
    """The same, as an engine writes it after the last step."""
    buffer = empty()
    places = [torch.tensor([0, 4]), torch.tensor([1, 5]), torch.tensor([1, 6])]
    active = [torch.tensor([True, True])] * 2 + [torch.tensor([False, True])]
    steps = [drawn(5, 7), drawn(END, 8), drawn(6, 9)]
    buffer.write_steps(zip(places, active, steps, strict=True), IS_END)
    return buffer


def test_both_ways_of_writing_give_the_same_rollout():
    for buffer in (by_columns(), at_once()):
        rollout = buffer.rollout(prompt_batch("a"), group_size=2)
        assert rollout.completion_ids.tolist() == [[5, 2, 0], [7, 8, 9]]
        assert rollout.completion_mask.tolist() == [[True, True, False], [True, True, True]]
        assert rollout.sampler_logprobs.tolist() == [[-5, -2, 0], [-7, -8, -9]]
        assert rollout.truncated.tolist() == [False, True]
        assert rollout.candidate_ids is None


def test_columns_that_no_row_uses_are_cut_off_but_one_stays():
    rollout = empty().rollout(prompt_batch("a"), group_size=2)
    assert rollout.completion_ids.shape == (2, 1)
    assert not rollout.completion_mask.any()


def test_candidates_of_different_widths_are_filled_up():
    buffer, rows = empty(), torch.arange(2)
    ends = torch.tensor([END])
    buffer.write_column(0, rows, drawn(END, 7, candidates=[[END], [7]]), ends)
    buffer.write_column(1, rows, drawn(6, 8, candidates=[[6, 5], [8, 9]]), ends)
    candidates = buffer.rollout(prompt_batch("a"), group_size=2).candidate_ids
    assert candidates.tolist() == [[[END, -1], [-1, -1]], [[7, -1], [8, 9]]]
