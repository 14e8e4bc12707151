import torch

from litgrpo.models.shared_prefix import PromptGrid


def test_rows_of_a_prompt_stand_side_by_side_whatever_their_order():
    grid = PromptGrid(torch.tensor([2, 0, 2, 2, 0]), num_prompts=3)
    assert grid.width == 3
    cells = grid.row_of_cell.view(3, 3)
    assert cells[0, :2].tolist() == [1, 4]
    assert cells[2].tolist() == [0, 2, 3]
    assert grid.row_of_cell[grid.cell_of_row].tolist() == [0, 1, 2, 3, 4]
