import os
import signal
import time
from pathlib import Path

import pytest

from litgrpo.files import read_text, write_text
from litgrpo.run_folder import (
    HEADER,
    LOCK,
    RUN_FILES,
    check_is_free,
    check_links,
    claim_folder,
    earlier_files,
    lock_run_folder,
    resolve_checkpoint,
    set_aside,
    sort_checkpoints,
    write_config,
)
from litgrpo.runs.config import read_yaml
from litgrpo.runs.run import read_json_lines, read_metrics
from tests.support.raises import raises_for


def test_a_folder_with_results_is_rejected_with_three_remedies(tmp_path):
    check_is_free(tmp_path / "new")
    write_config(tmp_path, "")  # all that is left of a run that failed before it began
    check_is_free(tmp_path)
    (tmp_path / "metrics.csv").touch()
    with raises_for("metrics.csv", "without a checkpoint", "--run_dir", "--overwrite") as failed:
        check_is_free(tmp_path)
    assert "--ckpt_path" not in str(failed.value)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.ckpt").touch()
    with raises_for("last.ckpt", "--ckpt_path last", "--run_dir", "--overwrite"):
        check_is_free(tmp_path)
    check_is_free(tmp_path, overwrite=True)


def test_a_folder_that_litgrpo_did_not_write_is_never_emptied(tmp_path):
    (tmp_path / "samples").mkdir()
    for overwrite in (False, True):
        with raises_for("samples", "--run_dir"):
            check_is_free(tmp_path, overwrite=overwrite)


LINKS = (
    *(name.replace("*", "7") for name in RUN_FILES),
    ".lock",
    *("final_model/config.json", "final_model/model.safetensors", "final_adapter/adapter.json"),
)


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("target", ["file", "folder", "nothing", "itself"])
def test_a_link_below_the_run_folder_is_rejected_before_anything_is_written(tmp_path, name, target):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(link if target == "itself" else tmp_path / target)
    with raises_for(f"{tmp_path}/run/{name}", "--run_dir"):
        check_links(tmp_path / "run")


def test_the_run_folder_and_the_names_of_its_checkpoints_may_be_links(tmp_path):
    checkpoints = tmp_path / "real/checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "iteration=000001.ckpt").touch()
    for name in ("last.ckpt", "best.ckpt"):
        (checkpoints / name).symlink_to("iteration=000001.ckpt")
    (tmp_path / "real/mine").symlink_to("/etc")
    (tmp_path / "run").symlink_to("real")
    check_links(tmp_path / "run")
    check_links(tmp_path / "not yet there")


@pytest.mark.parametrize("name", ["metrics.csv", "report.html"])
def test_a_link_with_the_name_of_an_unfinished_file_is_replaced(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".{name}.tmp").symlink_to(victim)
    write_text(tmp_path / name, "new")
    assert (victim.read_text(), (tmp_path / name).read_text()) == ("mine", "new")
    assert not (tmp_path / name).is_symlink()


def with_a_pipe(path):
    os.mkfifo(path)


def with_a_device(path):
    path.symlink_to("/dev/zero")


def with_a_folder(path):
    path.mkdir()


def with_a_link_to_itself(path):
    path.symlink_to(path)


@pytest.mark.parametrize(
    "change", [with_a_pipe, with_a_device, with_a_folder, with_a_link_to_itself]
)
def test_what_is_not_a_file_is_read_as_empty(tmp_path, change):
    change(tmp_path / "metrics.csv")
    assert read_text(tmp_path / "metrics.csv") == ""
    assert read_metrics(tmp_path / "metrics.csv").empty
    change(tmp_path / "samples.jsonl")
    assert read_json_lines(tmp_path / "samples.jsonl") == ([], 0)
    change(tmp_path / "last.ckpt")
    assert sort_checkpoints(tmp_path) == {}


def test_a_pipe_in_place_of_the_configuration_is_not_waited_for(tmp_path):
    with_a_pipe(tmp_path / "config.yaml")
    with raises_for("config.yaml", "--run_dir"):
        check_is_free(tmp_path)


def test_a_file_of_holes_is_rejected_unread(tmp_path):
    file = tmp_path / "metrics.csv"
    file.touch()
    os.truncate(file, 2**40)
    for read in (read_text, read_metrics, read_json_lines, read_yaml):
        with raises_for("metrics.csv", "1048576 MiB", "512"):
            read(file)
    os.truncate(file, 5)
    assert read_text(file) == "\0" * 5
    file.write_bytes(b"\xff a\r\nb")
    assert read_text(file) == "\ufffd a\nb"


def test_an_overwritten_run_is_moved_aside_with_everything_in_its_folder(tmp_path, caplog):
    caplog.set_level("INFO")
    run = tmp_path / "mine"
    names = ("checkpoints/last.ckpt", "metrics.csv", "notes.txt", "samples/marked/a.jsonl")
    for number in (1, 2):
        run.mkdir(exist_ok=True)
        assert earlier_files(run) == []
        for name in (*names, LOCK):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(f"{name} {number}")
        write_config(run, "")
        claim_folder(run, "model: {}\n")  # not yet: there are results
        assert (run / "config.yaml").read_text() == HEADER
        set_aside(run, earlier_files(run))
        assert [path.name for path in run.iterdir()] == [LOCK]
        aside = tmp_path / f"mine.{number}"
        assert f"moved the earlier run to {aside}" in caplog.text
        assert all((aside / name).read_text() == f"{name} {number}" for name in names)
        claim_folder(run, "model: {}\n")
        assert (run / "config.yaml").read_text() == HEADER + "model: {}\n"
        (run / "config.yaml").unlink()


def test_a_checkpoint_is_found_by_word_file_or_folder(tmp_path):
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    assert resolve_checkpoint("last", tmp_path) == last
    assert resolve_checkpoint(str(tmp_path)) == last
    assert resolve_checkpoint(str(last)) == last
    with raises_for("ckpt_path", "best.ckpt", error=FileNotFoundError):
        resolve_checkpoint("best", tmp_path)


def test_the_command_line_is_a_comment_of_the_configuration(tmp_path, monkeypatch):
    words = ["fit", "-c", "my recipe.yaml", "--data.prompts", "two\nlines"]
    monkeypatch.setattr("sys.argv", ["cli.py", *words])
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python", "cli.py", *words])
    write_config(tmp_path, "model: null\n")
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert lines[1] == (
        "# Started by: python cli.py fit -c 'my recipe.yaml' --data.prompts 'two lines'"
    )
    assert lines[2] == "model: null"


def test_without_a_command_line_there_is_no_comment(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    write_config(tmp_path, "model: null\n")
    assert (tmp_path / "config.yaml").read_text().splitlines()[1:] == ["model: null"]


def test_a_second_training_is_rejected_and_leaves_the_folder_unchanged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with lock_run_folder(tmp_path):
        with (
            raises_for("another training"),
            lock_run_folder(tmp_path),
        ):
            raise AssertionError
        with (
            raises_for("another training"),
            lock_run_folder(tmp_path, patience_s=0.1),
        ):
            raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with lock_run_folder(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_a_new_folder_without_files_is_removed(tmp_path):
    with lock_run_folder(tmp_path / "runs" / "new"):
        pass
    assert not (tmp_path / "runs" / "new").exists()
    with lock_run_folder(tmp_path / "kept"):
        (tmp_path / "kept" / "file").touch()
    assert (tmp_path / "kept" / "file").exists()


def holding_child(folder, forks: bool) -> int:
    """A process that holds the folder until it is killed; a fork of it outlives it."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        with lock_run_folder(folder):
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
    with raises_for("another training"), lock_run_folder(tmp_path):
        raise AssertionError
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()  # what it left
    with lock_run_folder(tmp_path):
        pass


def test_a_folder_that_is_not_writable_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with (
            raises_for("run_dir"),
            lock_run_folder(folder),
        ):
            raise AssertionError
