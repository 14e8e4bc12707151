from types import SimpleNamespace

import pytest
import torch

from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.disk_use import checkpoint_bytes, say_disk_use
from tests.callbacks.fitting import fit
from tests.support.recipe_settings import Learns
from tests.support.standin import StandIn


@pytest.mark.parametrize(("save", "copies"), [("everything", 3), ("weights", 1)])
def test_what_is_said_is_what_is_written(tmp_path, caplog, save, copies):
    class Large(Learns):
        def __init__(self):
            super().__init__(1)
            self.weight = torch.nn.Parameter(torch.ones(300_000))

    Learns.gradient = torch.ones(300_000)
    try:
        fit(tmp_path, IterationCheckpoint(1, save=save), module=Large(), limit_val_batches=0)
    finally:
        Learns.gradient = torch.ones(2)
    size = copies * 4 * 300_000
    assert (tmp_path / "checkpoints/last.ckpt").stat().st_size == pytest.approx(size, rel=0.05)
    assert f"a checkpoint takes about {size / 2**20:.1f} MiB, up to 4 are there" in caplog.text


def test_tied_weights_count_once():
    module = StandIn()
    module.configure_model()
    table = module.policy.model.get_input_embeddings().weight
    trainer = SimpleNamespace(optimizers=[])
    before = checkpoint_bytes(trainer, module, weights_only=True)
    module.again = torch.nn.Parameter(table.data)
    assert checkpoint_bytes(trainer, module, weights_only=True) == before


def test_too_little_room_is_warned_of_and_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10 * 2**20))
    with pytest.warns(UserWarning, match=r"about 4\.0 MiB, up to 3 are there at once; 10\.0 MiB"):
        say_disk_use(tmp_path / "run" / "checkpoints", 4 * 2**20, 3)
    with pytest.raises(
        ValueError, match=r"10\.0 MiB are free\. Make room, choose another disk with"
    ):
        say_disk_use(tmp_path, 11 * 2**20, 3)
