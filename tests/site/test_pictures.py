"""Pictures are drawn from code, and each that is drawn is shown."""

import pytest
import torch

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from litgrpo.algorithms.losses import Clipped
from tests.site import pictures

PAGE = (pictures.ROOT / "docs" / "explanation" / "iteration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_can_be_drawn_is_committed_and_is_shown(name):
    with pictures.plt.rc_context(pictures.STYLE):
        pictures.PICTURES[name]()
        assert pictures.plt.gcf().axes
        pictures.plt.close()
    assert (pictures.FOLDER / f"{name}.svg").exists()
    assert f"(pictures/{name}.svg)" in PAGE


def test_the_clip_is_that_of_the_code():
    loss = Clipped()(pictures.tokens_with(torch.tensor([0.5, 1.0, 2.0]), 1.0))
    torch.testing.assert_close(loss, torch.tensor([-0.5, -1.0, -1.2]))
