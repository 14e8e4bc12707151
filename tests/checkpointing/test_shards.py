"""Checkpoints that are folders: written by two processes, read by any number, damaged."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty

from litgrpo.checkpointing.io import VerifiedCheckpointIO
from litgrpo.checkpointing.shards import (
    allocate_whole,
    hash_file,
    iterate_tensors,
    read_checkpoint,
    write_folder,
)
from litgrpo.tensor_files import DamagedCheckpoint, remove_checkpoint, write_file
from litgrpo.tensors import full_tensor
from tests.distributed.fsdp import training
from tests.support.gloo import run_by
from tests.support.raises import raises_for

pytestmark = pytest.mark.timeout(900)
SECOND = "whole/checkpoints/iteration=000002.ckpt"
FIRST_RANK, SECOND_RANK = (f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2))


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
    assert files == {FIRST_RANK, SECOND_RANK, "rest.pt"}


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
    shutil.copy(other / FIRST_RANK, checkpoint / FIRST_RANK)


def shard_everything(processes, folder, replicas):
    """Write tensors that divide unevenly, leave ranks without rows, or share memory; read them."""
    dist.init_process_group("gloo")
    shape, names = (replicas, processes // replicas), ("replicas", "shards")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = [Replicate(), Shard(0)]
    whole = {
        "uneven": torch.arange(15.0).view(5, 3),
        "for the first rank": torch.arange(2.0)[None].bfloat16(),
        "large": torch.arange(2**10),
    }
    state = {name: distribute_tensor(value, mesh, placements) for name, value in whole.items()}
    tied = DTensor.from_local(
        state["uneven"].to_local(), mesh, placements, shape=(5, 3), stride=(3, 1)
    )
    write_folder({"state_dict": state | {"tied": tied}, "a": [torch.ones(2), 7]}, folder / "a")

    def allocate(tensor):
        return empty(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)

    for shards_for in (allocate, allocate_whole):
        saved = read_checkpoint(folder / "a", shards_for=shards_for)
        assert saved["a"][0].equal(torch.ones(2))
        assert saved["a"][1] == 7
        for name, value in (whole | {"tied": whole["uneven"]}).items():
            assert full_tensor(saved["state_dict"][name]).equal(value)
    dist.destroy_process_group()


@pytest.mark.parametrize("replicas", [1, 2])
def test_shards_of_every_layout_are_read_as_they_were_written(replicas, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run_by(4, shard_everything, tmp_path, replicas)
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert sum(name.startswith("shard-00001") for name in files) == 2  # tied memory is not in one
    saved = read_checkpoint(tmp_path / "a")["state_dict"]
    assert saved["tied"].equal(torch.arange(15.0).view(5, 3))


class OtherModel(Exception):
    """Raised by a check that a checkpoint does not fit."""


KINDS = {
    "flipped": (flip(SECOND_RANK), SECOND_RANK),
    "rest": (cut, "rest.pt"),
    "missing": (lambda path: (path / SECOND_RANK).unlink(), SECOND_RANK),
    "foreign": (foreign, FIRST_RANK),
    "no rest": (lambda path: (path / "rest.pt").unlink(), "rest.pt"),
    "another file": (lambda path: os.mkfifo(path / "a.safetensors"), "a.safetensors"),
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


def change_header(checkpoint, change):
    """Change the header of a shard, in a folder whose digests fit, as somebody may write it."""
    file = checkpoint / FIRST_RANK
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    rest = torch.load(checkpoint / "rest.pt", weights_only=True)
    rest["files"][FIRST_RANK] = hash_file(file)
    torch.save(rest, checkpoint / "rest.pt")


def without_a_tensor(header):
    header.pop(next(name for name in header if name != "__metadata__"))


def of_another_size(header):
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"][0] += 10**9


def without_offsets(header):
    header["__metadata__"]["DCP_SHARDING_INFO"] = "{}"


def of_another_dtype(header):
    header[next(name for name in header if name != "__metadata__")]["dtype"] = "\x1b[2J"


@pytest.mark.parametrize(
    "change", [without_a_tensor, of_another_size, without_offsets, of_another_dtype]
)
def test_shards_that_do_not_fit_each_other_are_rejected(change, folder, tmp_path, caplog, capfd):
    checkpoint = shutil.copytree(folder / SECOND, tmp_path / "iteration=000002.ckpt")
    change_header(checkpoint, change)
    with raises_for("iteration=000002.ckpt", error=DamagedCheckpoint):
        read_checkpoint(checkpoint)
    assert "root" not in {record.name for record in caplog.records}  # torch would log a traceback
    assert capfd.readouterr() == ("", "")


def change_rest(checkpoint, **parts):
    """Change rest.pt, as somebody may write it."""
    rest = torch.load(checkpoint / "rest.pt", weights_only=True)
    torch.save(rest | parts, checkpoint / "rest.pt")
    return rest


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "..", "../..", "/proc/self/pagemap", "a/b", "", ".hidden", 1, None]
)
def test_only_plain_file_names_are_opened(name, folder, tmp_path, monkeypatch):
    checkpoint = shutil.copytree(folder / SECOND, tmp_path / "a.ckpt")
    files = change_rest(checkpoint)["files"]
    change_rest(checkpoint, files={**files, name: "0" * 64})
    monkeypatch.setattr("litgrpo.checkpointing.shards.hash_file", pytest.fail)
    with raises_for("a.ckpt", repr(name), error=DamagedCheckpoint):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [FIRST_RANK, "rest.pt"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(kind, name, folder, tmp_path):
    checkpoint = shutil.copytree(folder / SECOND, tmp_path / "a.ckpt")
    file = checkpoint / name
    file.rename(tmp_path / "outside")
    make = {"link": lambda: file.symlink_to("../outside"), "pipe": lambda: os.mkfifo(file)}
    make.get(kind, file.mkdir)()
    with raises_for("a.ckpt", name, error=DamagedCheckpoint):
        read_checkpoint(checkpoint)


def test_a_shard_larger_than_its_header_says_is_not_hashed(folder, tmp_path, monkeypatch):
    checkpoint = shutil.copytree(folder / SECOND, tmp_path / "a.ckpt")
    os.truncate(checkpoint / FIRST_RANK, 2**42)  # sparse
    monkeypatch.setattr("litgrpo.checkpointing.shards.hash_file", pytest.fail)
    with raises_for(FIRST_RANK, error=DamagedCheckpoint):
        read_checkpoint(checkpoint)


def test_shapes_of_more_values_than_the_files_have_allocate_nothing(folder, tmp_path):
    checkpoint = shutil.copytree(folder / SECOND, tmp_path / "a.ckpt")
    weights = change_rest(checkpoint)["state_dict"]
    name = next(name for name, weight in weights.items() if weight.is_meta)
    for changed in (
        {name: torch.empty(10**13, device="meta")},
        {"more": torch.empty(7, device="meta")},
        {name: torch.zeros(3)},  # no longer sharded
    ):
        change_rest(checkpoint, state_dict=weights | changed)
        with raises_for("a.ckpt", *changed, error=DamagedCheckpoint):
            read_checkpoint(checkpoint, shards_for=pytest.fail)


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({"a": torch.empty(3, device="meta")}, "'state_dict.a'"),
        ({1: torch.ones(3)}, "1"),
        ({None: torch.ones(3)}, "None"),
    ],
)
def test_a_file_with_a_weight_without_values_or_name_is_rejected(weights, name, tmp_path):
    write_file({"state_dict": {"b": torch.ones(1)} | weights}, tmp_path / "a.ckpt")
    with raises_for("a.ckpt", name, error=DamagedCheckpoint):
        read_checkpoint(tmp_path / "a.ckpt")
