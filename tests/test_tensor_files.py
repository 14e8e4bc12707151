"""A checkpoint that is read equals the one that was written, or reading it raises."""

import copy
import enum
import os
import pickle
import resource
import zipfile
from pathlib import Path

import pytest
import torch

from litgrpo.tensor_files import DamagedCheckpoint, copy_to_host, read_file, write_file
from tests.support.checkpoints import digest, state
from tests.support.raises import raises_for


def test_reading_returns_what_was_written(tmp_path):
    write_file(state(), tmp_path / "a.ckpt")
    found = read_file(tmp_path / "a.ckpt")
    assert digest(found) == digest(state())
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "a.ckpt", []
    sync = os.fsync

    def note(handle):
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), path.exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    write_file(state(), path)
    (file, named), (folder, _) = synced
    assert Path(file).parent == Path(folder) == tmp_path
    assert not named


def test_a_link_with_the_name_of_an_unfinished_checkpoint_is_replaced(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".a.ckpt.tmp").symlink_to("victim")
    write_file(state(), tmp_path / "a.ckpt")
    assert (tmp_path / "victim").read_text() == "mine"
    assert digest(read_file(tmp_path / "a.ckpt")) == digest(state())


Colour = enum.IntEnum("Colour", "RED")


@pytest.mark.parametrize("value", [len, Colour.RED, b"", {Colour.RED: 1}, [set("a"), (Colour,)]])
def test_an_object_that_could_not_be_loaded_raises_on_write(tmp_path, value):
    with raises_for("more.inner", error=TypeError):
        write_file(state(more={"inner": value}), tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_counted_by_name(tmp_path):
    path, inf = tmp_path / "a.ckpt", torch.inf
    for name, weight, count in (
        ("a", torch.tensor([[0.0, torch.nan, 1.0]]), "1 of 3"),
        ("b", torch.tensor([inf, 0.0, -inf, 1.0]).bfloat16(), "2 of 4"),
    ):
        write_file(state(state_dict=state()["state_dict"] | {name: weight}), path)
        with raises_for("a.ckpt", f"{name} has {count}", error=DamagedCheckpoint):
            read_file(path)


def test_the_error_names_the_part_that_a_run_needs(tmp_path):
    path = tmp_path / "a.ckpt"
    parts = state()
    del parts["optimizer_states"]
    write_file(parts, path)
    assert read_file(path).keys() == parts.keys()
    with raises_for("a.ckpt", "optimizer_states", "save_weights_only", error=DamagedCheckpoint):
        read_file(path, required=tuple(state()))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_off_cannot_be_read(tmp_path, share):
    path = tmp_path / "a.ckpt"
    write_file(state(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with raises_for("a.ckpt", error=DamagedCheckpoint):
        read_file(path)


def test_any_flipped_bit_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "a.ckpt"
    write_file(state(), path)
    content, known = path.read_bytes(), digest(state())
    found = 0
    entry = content.rindex(b"archive/data/0")  # of the directory at the end of the file
    for position in (*range(0, len(content), 7), *range(entry - 46, entry + 14)):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :]
        )
        try:
            assert digest(read_file(path)) == known  # a name or a padding of the container
        except DamagedCheckpoint:
            found += 1
    assert found > 50


def test_a_missing_file_is_not_reported_as_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "a.ckpt")


def test_a_full_disk_leaves_no_incomplete_file(tmp_path):
    write_file(state(), tmp_path / "good.ckpt")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file(state(more=torch.zeros(100_000)), tmp_path / "large.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["good.ckpt"]
    assert digest(read_file(tmp_path / "good.ckpt")) == digest(state())


def test_a_tokenizer_as_text_and_bytes_comes_back(tmp_path):
    tokenizer = {"tokenizer.json": '{"a": "\u00e9"}', "vocabulary": b"\x00\xff"}
    write_file(state(tokenizer=tokenizer), tmp_path / "a.ckpt")
    assert read_file(tmp_path / "a.ckpt")["tokenizer"] == tokenizer


def test_copies_on_the_host_share_no_memory_and_no_container():
    inner = {"a": [torch.zeros(2)], "b": (1, "x")}
    copied = copy_to_host(inner)
    inner["a"][0] += 1
    inner["a"].append(2)
    assert copied["b"] == (1, "x")
    assert len(copied["a"]) == 1
    assert copied["a"][0].sum() == 0


def test_tied_weights_are_in_a_file_once(tmp_path):
    table, other = torch.zeros(1000, 50), torch.ones(1000, 50)
    weights = {"embedding": table, "head": table.detach(), "other": other}
    for name, state_dict in {"tied": weights, "twice": weights | {"head": table.clone()}}.items():
        torch.save(copy_to_host(state_dict), tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in ("tied", "twice")]
    assert sizes[1] - sizes[0] >= table.nbytes
    found = torch.load(tmp_path / "tied", weights_only=True)
    assert digest(found) == digest(weights)


def bomb(path, compression):
    """A checkpoint whose entries are compressed."""
    write_file(state(), path.with_name("sound.ckpt"))
    with zipfile.ZipFile(path.with_name("sound.ckpt")) as sound, zipfile.ZipFile(path, "w") as new:
        for entry in sound.infolist():
            new.writestr(entry.filename, sound.read(entry), compression)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_file_is_rejected_before_it_is_unpacked(tmp_path, compression, monkeypatch):
    bomb(tmp_path / "a.ckpt", compression)
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("unpacked"))
    with raises_for("a.ckpt", "compressed", error=DamagedCheckpoint):
        read_file(tmp_path / "a.ckpt")


def test_entries_that_overlap_are_rejected_before_they_are_unpacked(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as file:
        file.writestr("archive/data/0", b"0" * 1000)
        again = copy.copy(file.filelist[0])
        file.filelist += [again] * 1000
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("unpacked"))
    with raises_for("a.ckpt", "bytes", error=DamagedCheckpoint):
        read_file(tmp_path / "a.ckpt")


def test_two_records_of_one_name_are_rejected_before_they_are_unpacked(tmp_path, monkeypatch):
    """`zipfile` would compare the last one twice, and torch read the first."""
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as file:
        file.writestr("archive/data/0", b"0")
        file.writestr("archive/data/1", b"1")
        file.filelist[1].filename = "archive/data/0"
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("unpacked"))
    with raises_for("a.ckpt", "one name", error=DamagedCheckpoint):
        read_file(tmp_path / "a.ckpt")


def test_checksums_are_written_even_if_a_user_switched_them_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        write_file(state(), tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert digest(read_file(tmp_path / "a.ckpt")) == digest(state())


def test_a_tensor_that_repeats_its_values_is_rejected_before_it_is_copied(tmp_path):
    checkpoint = state() | {"huge": torch.zeros(1).expand(10**12)}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with raises_for("a.ckpt", "1000000000000", error=DamagedCheckpoint):
        read_file(tmp_path / "a.ckpt")


def test_a_pickle_is_rejected_unread(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps({"state_dict": {}}))
    with raises_for("a.ckpt", "checkpoint", error=DamagedCheckpoint):
        read_file(tmp_path / "a.ckpt")
