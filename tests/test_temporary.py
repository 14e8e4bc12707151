"""Temporary folders, also those of processes that are killed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from litgrpo.temporary import TemporaryFolder, remove_leftovers

MAKE = """
import sys, time
from litgrpo.temporary import TemporaryFolder
folder = TemporaryFolder("test")
(folder.path / "weights").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def start_process():
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_removed_at_the_end_of_its_block_and_with_its_object():
    with TemporaryFolder("test") as path:
        (path / "kept").mkdir()
    assert not path.exists()
    folder = TemporaryFolder("test")
    path = folder.path
    del folder
    assert not path.exists()


def test_a_process_that_exits_leaves_no_folder():
    process, path = start_process()
    assert path.is_dir()
    process.communicate("", timeout=60)
    assert not path.exists()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_that_makes_one(tmp_path):
    process, path = start_process()
    living, its_path = start_process()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert (path / "weights").exists()
    with TemporaryFolder("test") as mine:
        assert sorted(tmp_path.iterdir()) == sorted([mine, its_path])
        assert (its_path / "weights").exists()
    living.communicate("", timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_of_a_process_that_was_killed_at_once_is_removed(tmp_path):
    (tmp_path / "litgrpo-temporary-weights-abcd_123").mkdir()
    remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_folders_and_links_of_others_are_kept(tmp_path):
    own = tmp_path / "runs"
    own.mkdir()
    names = ["litgrpo-runs", "litgrpo-temporary-", "litgrpo-temporary-weights-my_own_folder"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "litgrpo-temporary-weights-aaaaaaaa").symlink_to(own)
    (tmp_path / "litgrpo-temporary-weights-bbbbbbbb").write_text("a file")
    before = sorted(tmp_path.iterdir())
    remove_leftovers()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the owner of a folder needs root")
def test_a_folder_of_another_user_is_kept(tmp_path):
    other = tmp_path / "litgrpo-temporary-weights-abcd_123"
    other.mkdir()
    os.chown(other, 65534, 65534)
    remove_leftovers()
    assert other.exists()
