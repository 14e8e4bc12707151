import os
import signal
import time
from pathlib import Path

import pytest

from litgrpo.callbacks.run_lock import LOCK, held


def test_a_second_training_is_refused_and_the_folder_is_as_it_was(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with held(tmp_path):
        with pytest.raises(ValueError, match="another training is running"), held(tmp_path):
            raise AssertionError
        with pytest.raises(ValueError, match="another training"), held(tmp_path, patience_s=0.1):
            raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with held(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_a_folder_in_which_nothing_was_written_goes_away_again(tmp_path):
    with held(tmp_path / "runs" / "new"):
        pass
    assert not (tmp_path / "runs" / "new").exists()
    with held(tmp_path / "kept"):
        (tmp_path / "kept" / "file").touch()
    assert (tmp_path / "kept" / "file").exists()


def holding_child(folder, forks: bool) -> int:
    """A process that holds the folder until it is killed; a fork of it outlives it."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        with held(folder):
            if forks and os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.write(writing, b"!")
            time.sleep(20)
        os._exit(0)
    os.read(reading, 1)
    return child


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_process_does_not_block_the_next_and_neither_do_its_forks(tmp_path, forks):
    child = holding_child(tmp_path, forks)
    with pytest.raises(ValueError, match="another training"), held(tmp_path):
        raise AssertionError
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()  # what it left
    with held(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ValueError, match="where nothing can be written"), held(folder):
            raise AssertionError
