import pytest

from litgrpo.callbacks.run_folder import (
    HEADER,
    checkpoint_file,
    delete,
    mark,
    refuse_if_taken,
    write_config,
    written,
)


def refusal(folder, **kwargs) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the sentence is compared)
        refuse_if_taken(folder, **kwargs)
    return str(error.value)


def test_a_folder_with_results_is_refused_with_the_three_ways_out(tmp_path):
    refuse_if_taken(tmp_path / "new")
    write_config(tmp_path, "")  # all that is left of a run that failed before it began
    refuse_if_taken(tmp_path)
    (tmp_path / "metrics.csv").touch()
    assert refusal(tmp_path) == (
        f"{tmp_path} already holds a run (metrics.csv): continue it with --ckpt_path last, choose "
        "another folder with --run_dir, or replace it with --overwrite true."
    )
    refuse_if_taken(tmp_path, overwrite=True)


def test_a_folder_that_only_looks_like_a_run_is_never_emptied(tmp_path):
    (tmp_path / "samples").mkdir()
    sentence = (
        f"{tmp_path} holds samples, which no run of this program wrote: choose another folder with "
        "--run_dir."
    )
    assert refusal(tmp_path) == refusal(tmp_path, overwrite=True) == sentence


def test_only_what_a_run_wrote_is_deleted(tmp_path):
    for name in (
        "checkpoints/last.ckpt",
        "samples/a.jsonl",
        "metrics.csv",
        "events.out.tfevents.1",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").write_text("mine")
    write_config(tmp_path, "")
    mark(tmp_path, "model: {}\n")  # not yet: there are results
    assert (tmp_path / "config.yaml").read_text() == HEADER
    delete([*written(tmp_path), tmp_path / "gone"])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    mark(tmp_path, "model: {}\n")
    assert (tmp_path / "config.yaml").read_text() == HEADER + "model: {}\n"


def test_a_checkpoint_is_found_by_word_file_or_folder(tmp_path):
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    assert checkpoint_file("last", tmp_path) == last
    assert checkpoint_file(str(tmp_path)) == last
    assert checkpoint_file(str(last)) == last
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*best\.ckpt: leave "):
        checkpoint_file("best", tmp_path)


def test_the_command_line_that_started_a_run_is_noted(tmp_path, monkeypatch):
    words = ["fit", "-c", "my recipe.yaml", "--data.prompts", "two\nlines"]
    monkeypatch.setattr("sys.argv", ["cli.py", *words])
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python", "cli.py", *words])
    write_config(tmp_path, "model: null\n")
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert lines[1] == (
        "# Started by: python cli.py fit -c 'my recipe.yaml' --data.prompts 'two lines'"
    )
    assert lines[2] == "model: null"


def test_without_a_command_line_nothing_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    write_config(tmp_path, "model: null\n")
    assert (tmp_path / "config.yaml").read_text().splitlines()[1:] == ["model: null"]
