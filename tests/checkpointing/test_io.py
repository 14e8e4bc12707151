"""A checkpoint that is read is the one that was written, or the reader says what is wrong."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from litgrpo.checkpointing.io import CheckedIO, write
from litgrpo.checkpointing.manifest import MANIFEST, Damaged, digest, manifest_of, read
from tests.support.io import state

ROOT = Path(__file__).parents[2]


def rewritten(path, change):
    """The file with something changed behind its manifest's back."""
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)


def test_what_was_written_is_read(tmp_path):
    write(state(), tmp_path / "a.ckpt")
    found = read(tmp_path / "a.ckpt")
    assert digest(found) == digest(state())
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_what_could_not_be_loaded_again_is_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match="a checkpoint cannot hold a function"):
        write(state(extra=lambda: None), tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def _flip(checkpoint):
    checkpoint["state_dict"]["a"].view(torch.int32)[1, 1] ^= 1 << 3


def _nan(checkpoint):
    checkpoint["state_dict"]["a"][0, 1] = torch.nan
    checkpoint[MANIFEST] = manifest_of(checkpoint)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_flip, r"a\.ckpt: state_dict is damaged \(its sha256 is not the manifest's\)"),
        (lambda c: c["lr_schedulers"][0].update(last_epoch=4), "lr_schedulers is damaged"),
        (lambda c: c.pop("optimizer_states"), "optimizer_states is missing"),
        (lambda c: c.update(more=1), "more is damaged"),
        (lambda c: c.pop(MANIFEST), "has no manifest: it was not written by this program"),
        (_nan, "a has 1 of 6 values that are NaN or inf"),
    ],
)
def test_what_was_changed_is_named(tmp_path, change, said):
    path = tmp_path / "a.ckpt"
    write(state(), path)
    rewritten(path, change)
    with pytest.raises(Damaged, match=said):
        read(path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_off_cannot_be_read(tmp_path, share):
    path = tmp_path / "a.ckpt"
    write(state(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(Damaged, match="cannot be read: it is cut off, damaged or no checkpoint"):
        read(path)


def test_any_flipped_bit_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "a.ckpt"
    write(state(), path)
    content, known = path.read_bytes(), digest(state())
    found = 0
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        try:
            assert digest(read(path)) == known  # a name or a padding of the container
        except Damaged:
            found += 1
    assert found > 100


def test_a_missing_file_is_no_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "a.ckpt")


def test_with_fall_back_the_newest_good_file_is_read(tmp_path, recwarn):
    io = CheckedIO(None)
    for n in (1, 2, 3):
        io.save_checkpoint(state(iteration=n), tmp_path / f"iteration=00000{n}.ckpt")
    newest = tmp_path / "iteration=000003.ckpt"
    newest.write_bytes(b"")
    with pytest.raises(Damaged, match="cannot be read"):
        io.load_checkpoint(newest)
    io.falls_back = True
    assert io.load_checkpoint(newest)["iteration"] == 2
    assert io.loaded_from == tmp_path / "iteration=000002.ckpt"
    assert "not resumed from" in str(recwarn[0].message)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(Damaged, match=r"no checkpoint of this run is good: .*=000003.*=000001"):
        io.load_checkpoint(newest)
    io.teardown()


def test_a_save_is_of_the_moment_it_was_asked_for(tmp_path):
    io, weight = CheckedIO(None), torch.zeros(1000)
    io.save_checkpoint(state(more=weight), tmp_path / "a.ckpt", storage_options=lambda path: None)
    weight += 1
    io.wait()
    io.teardown()
    assert read(tmp_path / "a.ckpt")["more"].sum() == 0


def full_disk(folder: str) -> None:
    """Writes a good checkpoint, then one that is larger than a file may be."""
    write(state(), Path(folder) / "good.ckpt")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    write(state(more=torch.zeros(100_000)), Path(folder) / "large.ckpt")


def test_a_disk_that_refuses_leaves_no_half_file_and_says_why(tmp_path):
    code = "import sys; from tests.checkpointing.test_io import full_disk\n"
    code += "full_disk(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["good.ckpt"]
    assert digest(read(tmp_path / "good.ckpt")) == digest(state())


def test_a_tokenizer_as_text_and_bytes_comes_back(tmp_path):
    tokenizer = {"tokenizer.json": '{"a": "\u00e9"}', "vocabulary": b"\x00\xff"}
    write(state(tokenizer=tokenizer), tmp_path / "a.ckpt")
    assert read(tmp_path / "a.ckpt")["tokenizer"] == tokenizer
    with pytest.raises(TypeError, match="a checkpoint cannot hold a bytes"):
        write(state(tokenizer=b""), tmp_path / "b.ckpt")
