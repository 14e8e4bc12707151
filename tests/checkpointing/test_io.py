"""The CheckpointIO plugin: background writes, and reading with a fallback."""

import os
import shutil
import threading
import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_shards

from litgrpo.checkpointing import io as checkpoint_io
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.io import VerifiedCheckpointIO
from litgrpo.tensor_files import DamagedCheckpoint, read_file
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


# --- every way in which a checkpoint can be unreadable ---


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty_folder(path):
    remove(path)
    path.mkdir()


def replace_by(text):
    def change(path):
        remove(path)
        path.write_bytes(text)

    return change


def link_to(target):
    def change(path):
        remove(path)
        path.symlink_to(target)

    return change


def pipe(path):
    remove(path)
    os.mkfifo(path)


def rewrite(path, change):
    """Change the content of a file whose checksums are right."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def change_part(**parts):
    return lambda path: rewrite(path, lambda content: content.update(parts))


def keep_only_rest(path):
    for each in path.iterdir():
        if each.name != "rest.pt":
            each.unlink()


def folder_in_folder(path):
    path.unlink()
    (path / "rest.pt").mkdir(parents=True)


def other_container(path):
    """Rename the entry that holds the version of the container."""
    path.write_bytes(path.read_bytes().replace(b"version", b"vorsion"))


def rest_as_file(path):
    """Only one file of a folder was copied, under the folder's name."""
    rest = (path / "rest.pt").read_bytes()
    replace_by(rest)(path)


def file_as_rest(path):
    other = path.with_name("iteration=000001.ckpt")
    shutil.copy(other / "rest.pt", path / "rest.pt")
    rewrite(path / "rest.pt", lambda content: content.pop("files"))


SHARD = "shard-00001-model-00001-of-00001.safetensors"
DAMAGE_OF_FILES = {
    "empty": replace_by(b""),
    "cut": cut,
    "text": replace_by(b"hello"),
    "a web page": replace_by(b"<html>404</html>"),
    "a missing target": link_to("gone"),
    "a link to itself": link_to("iteration=000003.ckpt"),
    "a cycle of links": lambda path: (
        link_to("other")(path), path.with_name("other").symlink_to(path.name)
    ),
    "a device": link_to("/dev/zero"),
    "a pipe": pipe,
    "an empty folder": empty_folder,
    "a folder with another file": lambda path: (empty_folder(path), (path / "a").touch()),
    "a folder with a folder as rest.pt": folder_in_folder,
    "another container": other_container,
    "no optimizer": lambda path: rewrite(path, lambda parts: parts.pop("optimizer_states")),
    "weights that are no dict": change_part(state_dict=[1]),
    "a part of another kind": change_part(loops=3),
}  # fmt: skip
DAMAGE_OF_FOLDERS = {
    "empty": empty_folder,
    "no rest.pt": lambda path: (path / "rest.pt").unlink(),
    "no shard": lambda path: (path / SHARD).unlink(),
    "only rest.pt": keep_only_rest,
    "a cut rest.pt": lambda path: cut(path / "rest.pt"),
    "a cut shard": lambda path: cut(path / SHARD),
    "a folder as rest.pt": lambda path: empty_folder(path / "rest.pt"),
    "a folder as the shard": lambda path: empty_folder(path / SHARD),
    "a pipe as rest.pt": lambda path: pipe(path / "rest.pt"),
    "a pipe as the shard": lambda path: pipe(path / SHARD),
    "a rest.pt that is a link to itself": lambda path: link_to("rest.pt")(path / "rest.pt"),
    "a shard that is a link to nothing": lambda path: link_to("gone")(path / SHARD),
    "no list of files": file_as_rest,
    "files that are no dict": lambda path: rewrite(
        path / "rest.pt", lambda content: content.update(files=["a"])
    ),
    "a file": replace_by(b"hello"),
    "rest.pt in its place": rest_as_file,
    "a link to itself": link_to("iteration=000003.ckpt"),
}  # fmt: skip


def fall_back_from(change, folder, io, **more):
    """Damage the newest of three checkpoints, and return what is read instead of it."""
    for n in (1, 2, 3):
        io.save_checkpoint(state(iteration=n, **more), folder / f"iteration=00000{n}.ckpt")
    newest = folder / "iteration=000003.ckpt"
    change(newest)
    io.required = tuple(state())
    with pytest.raises((DamagedCheckpoint, FileNotFoundError)):
        io.load_checkpoint(newest)
    io.fall_back = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = io.load_checkpoint(newest)
    (line,) = [str(each.message) for each in caught if "not resumed" in str(each.message)]
    assert str(newest) in line
    assert "\n" not in line
    io.save_checkpoint(state(iteration=30, **more), newest)  # the run repeats what it lost
    assert io.load_checkpoint(newest)["iteration"] == 30
    io.teardown()
    return found["iteration"]


@pytest.mark.parametrize("kind", DAMAGE_OF_FILES)
def test_from_a_file_that_cannot_be_read_the_one_before_is_taken(kind, tmp_path):
    assert fall_back_from(DAMAGE_OF_FILES[kind], tmp_path, VerifiedCheckpointIO()) == 2


@pytest.mark.parametrize("kind", DAMAGE_OF_FOLDERS)
def test_from_a_folder_that_cannot_be_read_the_one_before_is_taken(kind, tmp_path, one_rank):
    mesh = init_device_mesh("cpu", (1,))
    io = VerifiedCheckpointIO()
    io.shards_for = lambda tensor: empty_shards(*tensor.shape, device_mesh=mesh)
    more = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    assert fall_back_from(DAMAGE_OF_FOLDERS[kind], tmp_path, io, more=more) == 2


def test_a_file_that_may_not_be_read_is_passed_over(tmp_path, monkeypatch):
    open_file = type(tmp_path).open

    def refuse(path, *mode):
        if path.name == "iteration=000003.ckpt" and mode == ("rb",):  # root may read every file
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *mode)

    io = VerifiedCheckpointIO()
    for n in (2, 3):
        io.save_checkpoint(state(iteration=n), tmp_path / f"iteration=00000{n}.ckpt")
    monkeypatch.setattr(type(tmp_path), "open", refuse)
    io.fall_back = True
    with pytest.warns(UserWarning, match="=000003.*Permission denied"):
        assert io.load_checkpoint(tmp_path / "iteration=000003.ckpt")["iteration"] == 2
    io.teardown()


def test_a_newest_checkpoint_that_is_gone_is_named(tmp_path):
    io = VerifiedCheckpointIO()
    io.save_checkpoint(state(iteration=2), tmp_path / "iteration=000002.ckpt")
    (tmp_path / "last.ckpt").symlink_to("iteration=000003.ckpt")
    io.fall_back = True
    with pytest.warns(UserWarning, match="not resumed from .*last.ckpt"):
        assert io.load_checkpoint(tmp_path / "iteration=000002.ckpt")["iteration"] == 2
    io.teardown()


def test_a_checkpoint_of_another_run_is_an_error_and_not_passed_over(tmp_path):
    io = VerifiedCheckpointIO()
    for n in (1, 2, 3):
        io.save_checkpoint(state(iteration=n), tmp_path / f"iteration=00000{n}.ckpt")
    read = []

    def check_fits(checkpoint):
        read.append(checkpoint["iteration"])
        raise ValueError("of another model")

    io.fall_back, io.check_fits = True, check_fits
    (tmp_path / "iteration=000003.ckpt").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="not resumed from"),
        raises_for("=000003", "=000002", "of another model", error=DamagedCheckpoint),
    ):
        io.load_checkpoint(tmp_path / "iteration=000003.ckpt")
    assert read == [2]
    io.teardown()


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
