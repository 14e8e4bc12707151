"""When the parts of a fit began and ended."""

import json

from litgrpo.callbacks.stopwatch import Stopwatch, now


def test_events_are_noted_in_order_with_both_clocks(tmp_path):
    watch = Stopwatch(str(tmp_path / "events.jsonl"))
    watch.on_validation_start(None, None)
    watch.on_validation_end(None, None)
    watch.on_train_batch_start(None)
    watch.on_train_batch_end(None)
    watch.on_train_end(None, None)
    noted = [json.loads(line) for line in watch.file.read_text().splitlines()]
    assert [each["event"] for each in noted] == [
        *("validation", "end of validation", "iteration", "end of iteration", "end of training")
    ]
    assert [each["wall"] for each in noted] == sorted(each["wall"] for each in noted)


def test_seconds_of_the_processor_grow_with_work():
    before = now()["cpu"]
    while now()["cpu"] < before + 0.02:
        sum(range(10_000))
    assert now()["wall"] > 0
