import torch

from litgrpo.models.attention.scores import PromptGrid, query_scale, softcapped


def test_a_soft_cap_bounds_scores_and_none_leaves_them_alone():
    query, keys = torch.tensor([[3.0, -40.0]]), torch.tensor([[2.0, 1.0], [1.0, 0.0]])
    for cap in (None, 5.0):
        scores = softcapped((query * query_scale(0.5, cap)) @ keys.T, cap)
        plain = query @ keys.T * 0.5
        expected = plain if cap is None else cap * torch.tanh(plain / cap)
        torch.testing.assert_close(scores, expected)


def test_rows_of_a_prompt_stand_side_by_side_whatever_their_order():
    grid = PromptGrid(torch.tensor([2, 0, 2, 2, 0]), num_prompts=3)
    assert grid.width == 3
    cells = grid.row_of_cell.view(3, 3)
    assert cells[0, :2].tolist() == [1, 4]
    assert cells[2].tolist() == [0, 2, 3]
    assert grid.row_of_cell[grid.cell_of_row].tolist() == [0, 1, 2, 3, 4]
