import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer

from litgrpo import PromptData
from litgrpo.cli.parser import RecipeCLI

pytestmark = pytest.mark.filterwarnings("ignore:.*The process .* is using fork")


def test_null_on_the_command_line_takes_a_limit_off_wherever_it_stands(cli):
    words = ("--model.update.max_grad_norm", "null", "--model.engine.max_rows", "null")
    words = ("--model.max_generated_tokens", "null", *words)
    model = RecipeCLI(["-c", "grpo.yaml", *words]).recipe["model"]["init_args"]
    assert model["update"]["max_grad_norm"] is None
    assert model["engine"]["init_args"]["max_rows"] is model["max_generated_tokens"] is None


def test_null_for_a_group_of_settings_takes_back_what_a_recipe_said(cli):
    recipe = yaml.safe_load(Path("grpo.yaml").read_text())
    recipe["model"]["init_args"] |= {"episode": {"max_turns": 3}}
    Path("grpo.yaml").write_text(yaml.safe_dump(recipe))
    assert "episode is set" in cli("fit", "-c", "grpo.yaml")[2]
    groups = ("episode", "update", "sampling", "objective", "evaluation")
    words = [word for name in groups for word in (f"--model.{name}", "null")]
    code, _, err = cli("fit", "-c", "grpo.yaml", *words)
    assert (code, "nowhere" in err) == (2, True)  # what is wrong next


@pytest.mark.parametrize("content", ["", '[{"prompt": "1+1="}]'])
def test_the_name_of_a_data_file_stays_a_name(cli, content):
    # jsonargparse would read it in place of the name, because a list is a valid source, too.
    Path("train.txt").write_text(content)
    recipe = RecipeCLI(["-c", "grpo.yaml", "--data.train", "train.txt"]).recipe
    assert recipe["data"]["init_args"]["train"] == "train.txt"


def scores(folder: str) -> tuple[float, float]:
    summary = json.loads(Path(folder, "summary.json").read_text())
    return summary["before"]["avg_at_k"], summary["after"]["avg_at_k"]


def test_a_run_writes_everything_to_the_folder_named_after_its_recipe(cli):
    code, out, err = cli("fit", "-c", "recipe.yaml", "--seed_everything", "3")
    assert code == 0
    assert "4 iterations, " in out
    assert "Tip:" not in err
    assert "GPU available" not in err
    folder = Path("runs/recipe")
    written = {path.name.partition(".tfevents")[0] for path in folder.iterdir()}
    expected = {"checkpoints", "config.yaml", "events.out", "final_model", "metrics.csv", "samples"}
    assert written == expected | {"hparams.yaml", "summary.json", "evaluation", "report.html"}
    assert "runs/recipe/report.html in a browser" in out
    assert scores("runs/recipe") == (0.0, 0.1)
    steps = [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", "0", "1", "2", "3", "4", "4"]


def test_the_seed_reaches_model_and_data_unless_they_have_their_own(cli):
    cli("fit", "-c", "recipe.yaml", "--seed_everything", "3", "--data.seed", "5")
    config = yaml.safe_load(Path("runs/recipe/config.yaml").read_text())
    assert config["model"]["init_args"]["seed"] == 3
    assert config["data"]["init_args"]["seed"] == 5
    assert json.loads(Path("runs/recipe/summary.json").read_text())["seed"] == 3


def test_a_finished_run_is_not_written_over(cli, finished_run):
    Path("runs/recipe/notes.txt").write_text("mine")
    code, _, err = cli("fit", "-c", "recipe.yaml")
    assert code == 2
    assert err.startswith("error: runs/recipe already holds a run")
    assert [key for key in ("--ckpt_path last", "--run_dir", "--overwrite") if key not in err] == []
    assert cli("fit", "-c", "recipe.yaml", "--overwrite", "true")[0] == 0
    assert Path("runs/recipe.1/notes.txt").exists()
    assert len(list(Path("runs/recipe").glob("events.out*"))) == 1


def test_last_continues_the_run_with_what_the_command_line_says(cli, finished_run):
    # Stock LightningCLI would take max_iterations: 4 from the checkpoint.
    resume = ("--ckpt_path", "last", "--model.max_iterations", "6", "--model.scores", "[0.5]")
    code, out, _ = cli("fit", "-c", "recipe.yaml", *resume)
    assert code == 0
    assert "6 iterations, " in out
    assert scores("runs/recipe") == (0.0, 0.5)
    lines = Path("runs/recipe/metrics.csv").read_text().splitlines()
    steps = [line.split(",")[0] for line in lines]
    assert steps == ["step", "0", "1", "2", "3", "4", "4", "5", "6", "6"]
    assert torch.load("runs/recipe/checkpoints/last.ckpt", weights_only=True)["iteration"] == 6


def test_a_missing_last_is_an_error(cli):
    code, _, err = cli("fit", "-c", "recipe.yaml", "--ckpt_path", "last")
    assert code == 2
    assert (err.count("\n"), "--ckpt_path" in err) == (1, True)
    assert "runs/recipe/checkpoints/last.ckpt" in err
    assert not Path("runs").exists()


AUTO = ("fit", "-c", "recipe.yaml", "--auto_resume", "true")


def test_auto_resume_starts_a_run_and_continues_it(cli, caplog):
    code, out, _ = cli(*AUTO)
    assert (code, "Resuming from" in caplog.text) == (0, False)
    assert "4 iterations, " in out
    code, _, _ = cli(*AUTO, "--model.max_iterations", "6")
    assert code == 0
    assert "Resuming from iteration 4 " in caplog.text
    lines = Path("runs/recipe/metrics.csv").read_text().splitlines()
    steps = [line.split(",")[0] for line in lines]
    assert steps == ["step", "0", "1", "2", "3", "4", "4", "5", "6", "6"]


def test_auto_resume_goes_back_to_the_newest_good_checkpoint(cli, finished_run, caplog):
    Path("runs/recipe/checkpoints/iteration=000004.ckpt").write_text("damaged")
    with pytest.warns(UserWarning, match=r"not resumed from .*=000004.ckpt cannot be read"):
        code, _, _ = cli(*AUTO)
    assert code == 0
    assert "Resuming from iteration 2 " in caplog.text
    assert torch.load("runs/recipe/checkpoints/last.ckpt", weights_only=True)["iteration"] == 4
    for path in Path("runs/recipe/checkpoints").glob("iteration*"):
        path.write_text("damaged")
    with pytest.warns(UserWarning, match="not resumed from"):
        code, _, err = cli(*AUTO)
    assert code == 2
    assert "no checkpoint of this run" in err.splitlines()[-1]
    assert "--run_dir" in err.splitlines()[-1]


def test_auto_resume_starts_over_what_left_no_checkpoint(cli):
    cli("fit", "-c", "recipe.yaml", "--trainer.enable_checkpointing", "false")
    assert cli("fit", "-c", "recipe.yaml")[0] == 2
    assert cli(*AUTO)[0] == 0


def test_a_damaged_checkpoint_that_is_named_is_rejected(cli, finished_run):
    Path("runs/recipe/checkpoints/iteration=000004.ckpt").write_text("damaged")
    code, _, err = cli("fit", "-c", "recipe.yaml", "--ckpt_path", "last")
    assert code == 2
    assert err.startswith("error: runs/recipe/checkpoints/last.ckpt cannot be read: it is cut off")


def test_auto_resume_and_a_checkpoint_are_not_given_together(cli):
    code, _, err = cli(*AUTO, "--ckpt_path", "last")
    assert (code, err.count("\n")) == (2, 1)
    assert "--auto_resume" in err
    assert "--ckpt_path" in err


def test_another_runs_checkpoint_does_not_continue_into_a_taken_folder(cli, finished_run):
    shutil.copytree(finished_run, "runs/other", symlinks=True)
    foreign = ("--ckpt_path", "runs/other", "--model.max_iterations", "6")
    code, _, err = cli("fit", "-c", "recipe.yaml", *foreign)
    assert code == 2
    assert "already holds a run" in err
    assert cli("fit", "-c", "recipe.yaml", *foreign, "--run_dir", "runs/third")[0] == 0


def test_max_time_leaves_room_for_the_end(cli):
    code, out, _ = cli("fit", "-c", "recipe.yaml", "--trainer.max_time", "00:00:00:00")
    assert code == 0
    assert "1 iteration, " in out
    assert torch.load("runs/recipe/checkpoints/last.ckpt", weights_only=True)["iteration"] == 1


def test_the_other_commands_read_the_configuration_of_the_run(cli):
    cli("fit", "-c", "recipe.yaml", "--model.scores", "[0.1, 0.2]")
    of_run = ("-c", "runs/recipe/config.yaml", "--ckpt_path", "last")
    code, out, _ = cli("predict", *of_run, "--data.prompts", '["1+1=", "2+2="]')
    assert code == 0
    assert "prompt:    2+2=\nanswer:    1\n" in out
    assert len(Path("runs/recipe/predictions.jsonl").read_text().splitlines()) == 2
    code, out, _ = cli("validate", *of_run)
    assert code == 0
    assert "avg@2    0.100 [0.000, 0.200]" in out.splitlines()
    assert json.loads(Path("runs/recipe/validate.json").read_text())["avg_at_k"] == 0.1
    assert scores("runs/recipe") == (0.1, 0.2)
    of = {"checkpoint": "iteration=000004", "iteration": 4}
    assert json.loads(Path("runs/recipe/validate.json").read_text()).items() >= of.items()
    assert Path("runs/recipe/evaluation/validate-iteration=000004.jsonl").exists()


def test_a_validation_says_what_it_measures_and_replaces_none_of_another_checkpoint(
    cli, finished_run
):
    of_run = ("validate", "-c", "runs/recipe/config.yaml")
    _, out, _ = cli(*of_run, "--ckpt_path", "last")
    assert "Evaluated: iteration=000004" in out
    of_last = Path("runs/recipe/validate.json").read_text()
    _, out, _ = cli(*of_run)
    assert "Evaluated: the initial policy" in out
    assert "--ckpt_path" in out
    assert Path("runs/recipe/validate.json").read_text() == of_last
    start = json.loads(Path("runs/recipe/validate-start.json").read_text())
    assert (start["checkpoint"], start["iteration"]) == ("start", 0)


def test_loggers_can_be_added_and_switched_off(cli):
    extra = "trainer: {logger: [{class_path: CSVLogger, init_args: {save_dir: more, name: ''}}]}\n"
    Path("extra.yaml").write_text(extra)
    cli("fit", "-c", "recipe.yaml", "-c", "extra.yaml", "--tensorboard", "false")
    assert Path("more/version_0/metrics.csv").exists()
    assert Path("runs/recipe/metrics.csv").exists()
    assert not list(Path("runs/recipe").glob("events.out*"))
    cli("fit", "-c", "recipe.yaml", "--trainer.logger", "false", "--run_dir", "runs/quiet")
    assert not Path("runs/quiet/metrics.csv").exists()
    assert Path("runs/quiet/summary.json").exists()


def test_every_part_can_be_switched_off(cli):
    off = "--completions.every_n_iterations 0 --export.final false --trainer.logger false "
    off += "--evaluation_files.enabled false --trainer.enable_checkpointing false "
    off += "--trainer.enable_progress_bar false --html false"
    code, _, _ = cli("fit", "-c", "recipe.yaml", *off.split())
    assert code == 0
    written = sorted(path.name for path in Path("runs/recipe").iterdir())
    assert written == ["config.yaml", "summary.json"]


def test_a_fast_dev_run_writes_nothing(cli):
    code, _, _ = cli("fit", "-c", "recipe.yaml", "--trainer.fast_dev_run", "1")
    assert code == 0
    assert not list(Path("runs").rglob("*.*"))


def test_stock_lightning_advertises(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch.utilities.rank_zero"), "filters", [])
    Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert "Tip:" in caplog.text


def test_stock_jsonargparse_reads_a_file_in_place_of_its_name(tmp_path):
    (tmp_path / "list.json").write_text('["What is 1+1?"]')
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PromptData, "data", sub_configs=True)
    settings = parser.parse_args(["--data.train", str(tmp_path / "list.json")])
    assert settings.data.train == ["What is 1+1?"]


JUDGE = """
model:
  init_args:
    rewards:
      correct: {function: litgrpo.rewards.correctness}
      judge:
        weight: 0.0
        function:
          class_path: litgrpo.rewards.LLMJudge
          init_args:
            base_url: http://127.0.0.1:9/v1
            model: m
            criteria: {clear: {text: clarity}}
            max_retries: 0
            cache_dir: null
            api_key_env: JUDGE_KEY
            extra_body: {service_key: zyxw-5544332211, user: {Authorization: vuts-6655443322}}
"""


def test_keys_are_in_no_file_and_no_message_of_a_run(cli, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", "rqpo-7766554433")
    Path("judge.yaml").write_text(JUDGE)
    words = ("fit", "-c", "quickstart", "-c", "judge.yaml", "--run_dir", "run")
    shown = cli(*words, "--print_config")[1]
    few = ("--model.max_iterations", "1", "--data.batch_size", "2", "--model.group_size", "2")
    few += ("--trainer.limit_val_batches", "1")
    code, out, err = cli(*words, *few)
    assert code == 0, err
    written = [path.read_bytes() for path in Path("run").rglob("*") if path.is_file()]
    assert yaml.safe_load(shown)["model"]["init_args"]["rewards"]["judge"]
    assert len(written) > 10
    for secret in ("zyxw-5544", "vuts-6655", "rqpo-7766"):
        assert secret not in out + err + caplog.text + shown
        assert not any(secret.encode() in content for content in written)
    # The masked configuration cannot train by accident, and the checkpoint can still be exported.
    code, _, err = cli("fit", "-c", "run/config.yaml", "--run_dir", "again")
    assert code == 2
    assert "extra_body.service_key" in err
    assert cli("export", "run", "exported")[0] == 0
