import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.benchmarks import published
from tests.support.recipes import CONFIGS, read, small

RECIPE = "gsm8k_qwen2.5_0.5b"


def test_one_command_trains_tests_and_shows_the_published_numbers(
    monkeypatch, tmp_path, capsys, program, gsm8k, models
):
    models = models | {"judge": ""}
    overlay = tmp_path / "small.yaml"
    overlay.write_text(yaml.safe_dump(small(read(f"{RECIPE}.yaml"), models, gsm8k)))
    words = ["-c", str(CONFIGS / f"{RECIPE}.yaml"), "--folder", str(tmp_path / "runs")]
    further = ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]

    def here(command: list[str], check: bool, cwd: Path) -> None:
        assert check
        assert program(*command[2:], "-c", overlay, *further) == 0

    monkeypatch.setattr(subprocess, "run", here)
    monkeypatch.setattr(sys, "argv", ["published", *words])
    published.main()
    said = capsys.readouterr().out
    assert "| litgrpo, start | 0" in said
    assert "| litgrpo, after GRPO | 0" in said
    assert "| published by verl: GRPO, LoRA | | 0.543 |" in said


def test_several_devices_are_given_to_the_trainer():
    command = published.commands(Path("a.yaml"), Path("runs"), 4, ["--seed_everything", "1"])[1]
    assert command[command.index("--trainer.devices") + 1] == "4"
    assert command[command.index("--trainer.strategy") + 1] == "ddp"
    assert command[-4:-2] == ["--seed_everything", "1"]


def test_a_recipe_of_which_nothing_is_known_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["published", "-c", "quickstart.yaml"])
    with pytest.raises(SystemExit) as stop:
        published.main()
    assert stop.value.code == 2
    assert "nothing is known of quickstart" in capsys.readouterr().err


def test_every_recipe_with_a_published_number_is_there():
    assert {f"{name}.yaml" for name in published.PUBLISHED} <= {p.name for p in CONFIGS.iterdir()}
