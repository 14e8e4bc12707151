"""The CheckpointIO plugin: background writes, and reading with a fallback."""

import threading

import pytest
import torch
from lightning.pytorch import Trainer

from litgrpo.checkpointing import io as checkpoint_io
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.files import DamagedCheckpoint, read_file
from litgrpo.checkpointing.io import VerifiedCheckpointIO
from tests.support.checkpoints import state
from tests.support.raises import raises_for


def test_with_fall_back_the_newest_sound_file_is_read(tmp_path, recwarn):
    io = VerifiedCheckpointIO()
    for n in (1, 2, 3):
        io.save_checkpoint(state(iteration=n), tmp_path / f"iteration=00000{n}.ckpt")
    newest = tmp_path / "iteration=000003.ckpt"
    newest.write_bytes(b"")
    with pytest.raises(DamagedCheckpoint):
        io.load_checkpoint(newest)
    io.fall_back = True
    assert io.load_checkpoint(newest)["iteration"] == 2
    assert io.loaded_from == tmp_path / "iteration=000002.ckpt"
    assert "not resumed from" in str(recwarn[0].message)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with raises_for("=000003", "=000001", error=DamagedCheckpoint):
        io.load_checkpoint(newest)
    io.teardown()


def test_a_save_holds_the_values_at_its_call(tmp_path):
    io, weight = VerifiedCheckpointIO(), torch.zeros(1000)
    io.save_checkpoint(state(more=weight), tmp_path / "a.ckpt", lambda path: None)
    weight += 1
    io.wait()
    io.teardown()
    assert read_file(tmp_path / "a.ckpt")["more"].sum() == 0


def test_the_end_of_the_thread_waits_for_the_pending_file(tmp_path, monkeypatch):
    write, release = checkpoint_io.write_file, threading.Event()

    def slow(checkpoint, path):
        release.wait(30)
        write(checkpoint, path)

    monkeypatch.setattr(checkpoint_io, "write_file", slow)
    io = VerifiedCheckpointIO()
    io.save_checkpoint(state(), tmp_path / "a.ckpt", lambda path: None)
    threading.Timer(0.2, release.set).start()
    io.teardown()
    assert (tmp_path / "a.ckpt").exists()


@pytest.fixture
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_size_of_a_folder_of_shards_is_in_mib(tmp_path, one_rank):
    io = VerifiedCheckpointIO()
    io.shards_for = torch.clone
    io.save_checkpoint(state(more=torch.zeros(2**18)), tmp_path / "a.ckpt", lambda path: None)
    (saved,) = io.stats
    size = sum(path.stat().st_size for path in (tmp_path / "a.ckpt").iterdir())
    assert saved.size_mib == pytest.approx(size / 2**20)
    assert saved.size_mib > 1


def test_a_trainer_takes_the_plugin_and_the_callback_uses_it():
    io, checkpoint = VerifiedCheckpointIO(), IterationCheckpoint()
    trainer = Trainer(plugins=[io], accelerator="cpu", logger=False)
    checkpoint.setup(trainer, None, "validate")
    assert trainer.strategy.checkpoint_io is checkpoint.io is io


def test_without_a_plugin_the_callback_installs_its_own():
    checkpoint = IterationCheckpoint()
    trainer = Trainer(accelerator="cpu", logger=False)
    checkpoint.setup(trainer, None, "validate")
    assert trainer.strategy.checkpoint_io is checkpoint.io


def test_lightnings_xla_strategy_accepts_the_plugin(monkeypatch):
    from lightning.pytorch.strategies import SingleDeviceXLAStrategy

    strategy = object.__new__(SingleDeviceXLAStrategy)  # torch_xla is not installed everywhere
    strategy.checkpoint_io = VerifiedCheckpointIO()
    with pytest.raises(TypeError):
        strategy.checkpoint_io = object()


def test_checkpoints_are_removed_as_files_and_as_folders(tmp_path):
    io = VerifiedCheckpointIO()
    io.save_checkpoint(state(), tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").mkdir()
    for path in sorted(tmp_path.iterdir()):
        io.remove_checkpoint(path)
    io.teardown()
    assert not list(tmp_path.iterdir())
