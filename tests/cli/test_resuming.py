"""Resumed and rejected starts, and the run folder after them."""

import csv
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from litgrpo.run_folder import lock_run_folder

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)
FIT = ("fit", "-c", "recipe.yaml")


def content(folder: Path) -> dict[str, str]:
    """Digest of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def reject_start(run, *words: str) -> str:
    """Return the message of a rejected start, which must not change the run folder."""
    before = content(Path("runs/recipe"))
    code, _, err = run(*FIT, *words)
    assert code == 2
    assert content(Path("runs/recipe")) == before
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def test_a_refused_resume_leaves_the_run_folder_byte_for_byte(cli, finished_run):
    other_model = ("--model", "tests.support.standin.OtherModel", "--model.max_iterations", "9")
    assert "of another model" in reject_start(cli, *other_model, "--ckpt_path", "last")
    with pytest.warns(UserWarning, match="not resumed from"):
        assert "no checkpoint of this run" in reject_start(
            cli, *other_model, "--auto_resume", "true"
        )
    assert "another training is running" in during(cli, "--ckpt_path", "last")
    accepted = cli(*FIT, "--ckpt_path", "last", "--model.max_iterations", "5")
    assert accepted[0] == 0
    assert "max_iterations: 5" in Path("runs/recipe/config.yaml").read_text()


def test_a_start_that_fails_before_training_leaves_no_event_file(cli):
    words = ("--model", "tests.support.standin.FailsToStart", "--run_dir", "runs/failed")
    with pytest.raises(RuntimeError, match="a bug"):
        cli(*FIT, *words)
    assert Path("runs/failed/config.yaml").exists()
    assert not list(Path("runs/failed").glob("events.out*"))


def test_an_overwritten_run_is_there_until_the_new_one_is_known_to_train(cli, finished_run):
    before = content(Path("runs/recipe"))
    with pytest.raises(RuntimeError, match="no weights"):
        cli(*FIT, "--model", "tests.support.standin.WithoutWeights", "--overwrite", "true")
    assert content(Path("runs/recipe")) == before
    code, _, _ = cli(*FIT, "--overwrite", "true", "--model.max_iterations", "2")
    assert code == 0
    assert not Path("runs/recipe/checkpoints/iteration=000004.ckpt").exists()
    assert len(list(Path("runs/recipe").glob("events.out*"))) == 1
    assert sorted(content(Path("runs/recipe.1")).values()) == sorted(before.values())


def during(run, *words: str) -> str:
    """Return the message of a start while another training holds the folder."""
    with lock_run_folder(Path("runs/recipe")):
        return reject_start(run, *words)


def test_a_second_start_on_a_run_folder_is_refused(cli):
    Path("runs/recipe").mkdir(parents=True)
    assert "another training is running in runs/recipe" in during(cli)
    two = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.accelerator", "cpu")
    assert "another training is running in runs/recipe" in during(cli, *two)
    assert cli(*FIT, "--trainer.fast_dev_run", "1")[0] == 0


def test_the_seed_can_stand_in_the_run_folders_name(cli):
    for seed in ("3", "4"):
        assert cli(*FIT, "--seed_everything", seed, "--run_dir", "runs/s{seed}")[0] == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["s3", "s4"]
    assert "run_dir: runs/s3" in Path("runs/s3/config.yaml").read_text()


def test_a_run_folder_that_is_a_file_is_one_sentence(cli):
    Path("taken").touch()
    code, _, err = cli(*FIT, "--run_dir", "taken")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: run_dir is taken")


def test_checkpoints_of_weights_evaluate_and_export_and_do_not_go_on(cli):
    assert cli(*FIT, "--checkpoint.save_weights_only", "true")[0] == 0
    said = reject_start(cli, "--ckpt_path", "last")
    assert "save_weights_only" in said
    of_run = ("-c", "runs/recipe/config.yaml", "--ckpt_path", "last")
    assert cli("validate", *of_run)[0] == 0
    assert cli("export", "runs/recipe", "out", "--recipe", "recipe.yaml")[0] == 0
    code, _, err = cli(*FIT, "--checkpoint.save_weights_only", "true", "--auto_resume", "true")
    assert (code, "--auto_resume" in err) == (2, True)


def test_a_resumed_run_writes_through_no_link(cli, finished_run):
    Path("other").mkdir()
    shutil.rmtree("runs/recipe/final_model")
    Path("runs/recipe/final_model").symlink_to(Path("other").absolute())
    Path("linked").symlink_to("runs/recipe")
    for words in (("--ckpt_path", "last"), ("--auto_resume", "true", "--run_dir", "linked")):
        assert "final_model" in reject_start(cli, *words, "--model.max_iterations", "6")
    Path("runs/recipe/final_model").unlink()
    words = ("--run_dir", "linked", "--ckpt_path", "last", "--model.max_iterations", "6")
    assert cli(*FIT, *words)[0] == 0
    assert Path("runs/recipe/final_model/config.json").exists()
    assert not list(Path("other").iterdir())


def refuses(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_full_disk_at_the_first_save_is_one_true_sentence(cli, monkeypatch):
    monkeypatch.setattr("litgrpo.checkpointing.io.write_file", refuses)
    with pytest.warns(UserWarning, match="checkpoint not saved"):
        code, _, _ = cli(*FIT)
    full = "[Errno 28] No space left on device"
    # Python prints the text and ends with 1.
    assert code == f"error: checkpoint not saved: {full}; there is no earlier one"


def test_a_full_disk_at_the_export_says_how_to_get_it_later(cli, monkeypatch):
    monkeypatch.setattr("litgrpo.models.loading.export.export", refuses)
    code, _, _ = cli(*FIT)
    folder = "runs/recipe/final_model"
    assert code.startswith(f"error: {folder} is not complete: [Errno 28] No space left on device")
    assert f"export runs/recipe {folder}" in code
    assert Path("runs/recipe/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize("how", [("--ckpt_path", "last"), ("--auto_resume", "true")])
def test_a_finished_run_that_is_started_again_changes_no_file(cli, finished_run, how):
    before = content(Path("runs/recipe"))
    for more in ((), ("--model.max_iterations", "3"), ("--overwrite", "true")):
        code, out, _ = cli(*FIT, *how, *more)
        assert code == 0
        assert "is complete after 4 iterations" in out
        assert content(Path("runs/recipe")) == before
    assert cli(*FIT, *how, "--model.max_iterations", "6")[0] == 0
    assert Path("runs/recipe/checkpoints/iteration=000006.ckpt").exists()
    after = content(Path("runs/recipe"))
    assert cli(*FIT, *how, "--model.max_iterations", "6")[0] == 0
    assert content(Path("runs/recipe")) == after


CHANGES = {
    "data.prompts": ("--data.prompts", "['1', '2']"),
    "data.seed": ("--data.seed", "7"),
    "model.class_path": ("--model", "tests.support.standin.OtherModel"),
}


def test_a_finished_run_of_another_recipe_is_an_error_that_names_the_option(cli, finished_run):
    for option, words in CHANGES.items():
        for how in (("--ckpt_path", "last"), ("--auto_resume", "true")):
            assert f"{option} was " in reject_start(cli, *how, *words)
    assert cli(*FIT, "--auto_resume", "true", "--trainer.enable_progress_bar", "false")[0] == 0


@pytest.mark.parametrize("lost", ["summary.json", "report.html", "final_model"])
def test_a_finished_run_writes_again_what_was_removed(cli, finished_run, lost):
    rows = Path("runs/recipe/metrics.csv").read_text()
    path = Path("runs/recipe", lost)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert cli(*FIT, "--ckpt_path", "last")[0] == 0
    assert path.exists()
    assert Path("runs/recipe/metrics.csv").read_text().count("\n") == rows.count("\n")


ENDINGS = (
    "litgrpo.runs.summary._write",
    "litgrpo.runs.summary.print_safely",
    "litgrpo.callbacks.export._write_policy",
    "litgrpo.runs.report.command.render_page",
    "litgrpo.cli.lightning_cli.LitGRPOCLI.mark_complete",
)


@pytest.mark.parametrize("where", ENDINGS)
def test_a_run_that_was_killed_at_its_end_logs_its_last_validation_once(cli, monkeypatch, where):
    resume = (*FIT, "--auto_resume", "true", "--trainer.val_check_interval", "2")
    with monkeypatch.context() as killed:
        killed.setattr(where, lambda *_, **__: os._exit(9))
        child = os.fork()
        if child == 0:
            cli(*resume)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    whole = ["0v", "1", "2", "2v", "3", "4", "4v"]
    assert cli(*resume)[0] == 0
    assert steps_of(Path("runs/recipe/metrics.csv")) == whole
    before = content(Path("runs/recipe"))
    cli(*resume)
    assert content(Path("runs/recipe")) == before


def steps_of(file: Path) -> list[str]:
    """Step of each row, followed by `v` for a validation."""
    rows = csv.DictReader(file.read_text().splitlines())
    return [row["step"] + "v" * bool(row["val/greedy"]) for row in rows]
