"""F12: what is wrong with a data file is one line: file, line number, field; nothing is started."""

import json
import sys
from pathlib import Path

import pytest

from litgrpo.cli.main import main

ROOT = Path(__file__).parents[2]
GOOD = [{"id": n, "question": f"What is {n}+1?", "gold": n + 1} for n in range(8)]


@pytest.fixture
def fit(monkeypatch, tmp_path, capsys):
    """Runs the quickstart on `train.jsonl`; returns exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")

    def run(content: str | bytes, *words: str) -> tuple[int, str]:
        Path("train.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
        command = ["cli.py", "fit", "-c", str(ROOT / "configs/quickstart.yaml"), *words]
        command += ["--data.columns", "{prompt: question, answer: gold}", "--data.batch_size", "2"]
        monkeypatch.setattr(sys, "argv", [*command, "--data.train", "train.jsonl"])
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err

    return run


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            lines(GOOD[:2]) + '{"question": "3?", "gold": }\n',
            "train.jsonl, line 3: not JSON: Expecting value at column 28",
        ),
        (
            lines([*GOOD[:2], {"id": 2, "question": "3?"}]),
            "train.jsonl, line 3: no field 'gold' (it has: id, question; "
            "`columns: {answer: ...}` names another)",
        ),
        (
            lines([*GOOD[:3], {"id": 1, "question": "3?", "gold": 4}]),
            "train.jsonl, line 4: field 'id' is 1, as in train.jsonl, line 2; remove one of them, "
            "or set `columns: {number: id}` if it does not identify rows",
        ),
        (
            lines(GOOD[:1]).encode() + b'{"question": "\xe9t\xe9?", "gold": 4}\n',
            "train.jsonl, line 2: not UTF-8 (byte 63 of file)",
        ),
        ("", "train.jsonl holds no rows"),
        (
            lines([*GOOD[:2], {"id": 9, "question": "  ", "gold": 4}]),
            "train.jsonl, line 3: the prompt is empty",
        ),
    ],
)
def test_a_bad_file_is_one_line(fit, content, said):
    code, err = fit(content, "--data.val", "null")
    assert code == 2
    assert err.splitlines()[-1] == f"error: {said}"
    assert not list(Path().glob("runs/quickstart/checkpoints/*"))


def test_training_problems_that_are_held_out_too_are_reported(fit):
    Path("val.jsonl").write_text(lines(GOOD[3:5]))
    code, err = fit(lines(GOOD), "--data.val", "val.jsonl", "--data.train_val_overlap", "error")
    assert code == 2
    assert err.splitlines()[-1] == (
        "error: 2 of 8 training prompts are in the validation set (train.jsonl, line 4 = val.jsonl,"
        " line 1); `train_val_overlap: drop` removes them from training"
    )
