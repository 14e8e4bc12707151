import json

import pytest
from lightning.pytorch import Trainer

from litgrpo.callbacks.predictions import Predictions, readable
from tests.callbacks.fitting import QUIET
from tests.support.standin import StandIn, StandInData

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def predict(folder, callback):
    settings = QUIET | dict(enable_checkpointing=False, accelerator="cpu")
    trainer = Trainer(default_root_dir=folder, callbacks=[callback], **settings)
    trainer.predict(StandIn(), StandInData(["x", "y", "z"]), return_predictions=False)


def test_every_prediction_is_printed_and_written(tmp_path, capsys):
    predict(tmp_path, Predictions())
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    # Batches of two: x and y, then z.
    assert [(row["prompt"], row["answer"]) for row in written] == [
        ("x", "0"),
        ("y", "1"),
        ("z", "0"),
    ]
    assert "prompt:    y\nanswer:    1\n" in capsys.readouterr().out


def test_an_earlier_file_is_replaced_and_the_path_is_free(tmp_path):
    path = tmp_path / "out" / "p.jsonl"
    for _ in range(2):
        predict(tmp_path, Predictions(str(path), show=False))
    assert len(path.read_text().splitlines()) == 3


def test_without_an_answer_the_whole_completion_is_shown():
    row = dict(prompt="q", completion="hm", reasoning="hm", answer=None)
    assert readable(row) == "prompt:    q\ncompletion: hm\n"


def test_an_episode_is_shown_as_a_whole():
    messages = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "<low>"}]
    row = {"prompt": "q", "completion": "7", "reasoning": "", "answer": "7", "messages": messages}
    shown = readable(row | {"turn_rewards": [0.5], "calls": {"guess": [1, 0]}, "failed": ""})
    assert "policy 1   | 7   (reward 0.5)\nuser       | <low>\n" in shown
    assert shown.endswith("guess 1 (0 failed)\n")
