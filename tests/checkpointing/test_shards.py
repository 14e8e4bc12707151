"""Checkpoints that are folders: written by two processes, read by any number, damaged."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from litgrpo.checkpointing.io import VerifiedCheckpointIO
from litgrpo.checkpointing.shards import (
    hash_file,
    iterate_tensors,
    read_checkpoint,
)
from litgrpo.tensor_files import DamagedCheckpoint, remove_checkpoint
from tests.distributed.fsdp import training
from tests.support.gloo import run_by
from tests.support.raises import raises_for

pytestmark = pytest.mark.timeout(900)
SECOND = "whole/checkpoints/iteration=000002.ckpt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and a run of two processes with three checkpoints."""
    folder = tmp_path_factory.mktemp("shards")
    training.save_models(folder)
    run_by(2, training.train, folder, "whole")
    return folder


def weights(folder, name):
    return torch.load(folder / f"{name}.pt")


def distance(folder, name):
    """Norm of the difference of all weights from those of the unbroken run, over their norm."""
    mine, whole = weights(folder, name), weights(folder, "whole")
    off = sum(float((mine[n] - w).double().square().sum()) for n, w in whole.items())
    return (off / sum(float(w.double().square().sum()) for w in whole.values())) ** 0.5


def test_a_folder_holds_what_each_process_wrote_and_nothing_unfinished(folder):
    checkpoints = folder / "whole/checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    written = [f"iteration=00000{n}.ckpt" for n in (1, 2, 3)]
    assert names == [*written, "last.ckpt"]
    files = {path.name for path in (folder / SECOND).iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp", "rest.pt"}


def test_two_processes_resume_bit_for_bit_from_their_own_checkpoint(folder):
    run_by(2, training.train, folder, "again", SECOND)
    whole, again = weights(folder, "whole"), weights(folder, "again")
    assert all(torch.equal(again[name], each) for name, each in whole.items())


def test_one_process_resumes_from_two_and_two_from_one_up_to_rounding(folder):
    run_by(1, training.train, folder, "one", SECOND.replace("02", "01"))
    assert distance(folder, "one") < 1e-7
    run_by(2, training.train, folder, "two", SECOND.replace("whole", "one"))
    assert distance(folder, "two") < 1e-5


def damage(folder, tmp_path, change):
    """The run's checkpoints, of which the newest was changed."""
    copied = tmp_path / "checkpoints"
    shutil.copytree(folder / "whole/checkpoints", copied, symlinks=True)
    newest = copied / "iteration=000003.ckpt"
    newest.touch()
    change(newest)
    return newest


def flip(name):
    def change(checkpoint):
        content = bytearray((checkpoint / name).read_bytes())
        content[len(content) // 2] ^= 1
        (checkpoint / name).write_bytes(content)

    return change


def cut(checkpoint):
    content = (checkpoint / "rest.pt").read_bytes()
    (checkpoint / "rest.pt").write_bytes(content[: len(content) // 2])


def foreign(checkpoint):
    other = checkpoint.parent / "iteration=000002.ckpt"
    shutil.copy(other / "__0_0.distcp", checkpoint / "__0_0.distcp")


class OtherModel(Exception):
    """Raised by a check that a checkpoint does not fit."""


KINDS = {
    "flipped": (flip("__1_0.distcp"), "__1_0.distcp"),
    "metadata": (flip(".metadata"), ".metadata"),
    "rest": (cut, "rest.pt"),
    "missing": (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "foreign": (foreign, "__0_0.distcp"),
    "no rest": (lambda path: (path / "rest.pt").unlink(), "rest.pt"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_folder_is_reported_and_skipped(kind, folder, tmp_path):
    change, name = KINDS[kind]
    newest = damage(folder, tmp_path, change)
    with raises_for(name, error=(DamagedCheckpoint, FileNotFoundError)):
        read_checkpoint(newest)
    reader = VerifiedCheckpointIO()
    reader.fall_back = True
    if kind != "no rest":
        with pytest.warns(UserWarning, match=newest.name):
            found = reader.load_checkpoint(newest)
        assert found["iteration"] == 2
        assert reader.loaded_from.name == "iteration=000002.ckpt"


def test_weights_that_are_nan_raise(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch.distributed.checkpoint.load",
        lambda state, **_: [each.fill_(torch.nan) for each in state.values()],
    )
    with raises_for(SECOND, error=DamagedCheckpoint):
        read_checkpoint(folder / SECOND)


def test_a_checkpoint_of_another_model_raises_before_shards_are_read(folder, monkeypatch):
    def check_fits(checkpoint):
        assert all(each.is_meta for each in checkpoint["state_dict"].values())
        raise OtherModel

    with pytest.raises(OtherModel):
        read_checkpoint(folder / SECOND, check_fits=check_fits)


def test_removal_deletes_files_and_whole_folders(tmp_path):
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "a.ckpt/file").touch()
    (tmp_path / "b.ckpt").touch()
    remove_checkpoint(tmp_path / "a.ckpt")
    remove_checkpoint(tmp_path / "b.ckpt")
    assert not list(tmp_path.iterdir())


def test_tensors_are_named_by_their_path(tmp_path):
    value = {"a": [torch.zeros(1), {"b": torch.ones(2)}], "c": 3}
    assert [name for name, _ in iterate_tensors(value)] == ["a.0", "a.1.b"]
    file = Path(tmp_path / "x")
    file.write_bytes(b"abc")
    assert hash_file(file).startswith("ba7816bf")


class Payload:
    """Calls a function when it is unpickled."""

    def __reduce__(self):
        return os.system, ("true",)


def index_with_code(index):
    index.planner_data = Payload()


def index_with_bytes(index):
    """Values that are no tensors would be unpickled without restrictions."""
    name = next(iter(index.state_dict_metadata))
    index.state_dict_metadata[name] = BytesStorageMetadata()


def index_with_a_decoder(index):
    info = next(iter(index.storage_data.values()))
    info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize("change", [index_with_code, index_with_bytes, index_with_a_decoder])
def test_an_index_that_names_code_is_rejected(change, folder, tmp_path, monkeypatch):
    called = []
    checkpoint = shutil.copytree(folder / SECOND, tmp_path / "iteration=000002.ckpt")
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(index)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    rest = torch.load(checkpoint / "rest.pt", weights_only=True)
    rest["files"][".metadata"] = hash_file(checkpoint / ".metadata")
    torch.save(rest, checkpoint / "rest.pt")
    monkeypatch.setattr("os.system", called.append)
    with raises_for("iteration=000002.ckpt", ".metadata", error=DamagedCheckpoint):
        read_checkpoint(checkpoint)
    assert not called
