"""PromptData: from any source to left-padded batches, resumed exactly in a real fit."""

import json
from collections import Counter
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning import LightningDataModule
from transformers.utils import chat_template_utils

from litgrpo.checkpointing.callback import check_fits
from litgrpo.data import Chat, Source, rendering
from litgrpo.data.curriculum import Curriculum
from litgrpo.data.modules import PromptData, task_names
from litgrpo.data.sources import read_rows
from tests.data.listener import Listener, SaveAt, quiet_trainer, train_and_record
from tests.support.models import byte_tokenizer

SUMS = [{"prompt": f"{a}+{b}?", "answer": a + b} for a in range(3) for b in range(4)]


def rows_of(batch):
    return batch.index.tolist()


def ready(stage, tmp_path, **settings):
    """The data module as it is in the given stage, with a tokenizer of bytes."""
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    data = PromptData(**settings, tokenizer=str(tmp_path / "bytes"))
    data.setup(stage)
    return data


def test_a_batch_is_padded_on_the_left_and_carries_every_column(tmp_path):
    rows = [{"q": "ab", "answer": 1, "hint": "x"}, {"q": "c", "answer": 2, "hint": None}]
    data = ready("test", tmp_path, test=rows, columns={"prompt": "q"}, eval_batch_size=2)
    (batch,) = data.test_dataloader()
    a, b, c = byte_tokenizer().convert_tokens_to_ids(["a", "b", "c"])
    assert batch.prompt_ids.tolist() == [[1, a, b], [0, 1, c]]
    assert batch.prompt_mask.tolist() == [[True, True, True], [False, True, True]]
    assert batch.prompts == ["ab", "c"]
    assert batch.columns == {"q": ["ab", "c"], "answer": [1, 2], "hint": ["x", None]}
    assert batch.index.tolist() == [0, 1]


def test_the_length_is_a_multiple_as_asked(tmp_path):
    data = ready("test", tmp_path, test=["abcd"], pad_to_multiple_of=4)
    assert next(iter(data.test_dataloader())).prompt_ids.shape == (1, 8)


def test_dropping_keeps_the_positions_of_the_others(tmp_path):
    with pytest.warns(UserWarning, match="1 of 3 .*dropped"):
        data = ready("test", tmp_path, test=["a", "long", "b"], max_prompt_length=3)
    assert [rows_of(batch) for batch in data.test_dataloader()] == [[0, 2]]


def test_only_the_prompt_is_tokenized_where_rows_hold_completions(tmp_path):
    data = ready("fit", tmp_path, train=[{"prompt": "a", "completion": "b"}], batch_size=1)
    (batch,) = data.train_dataloader()
    assert byte_tokenizer().batch_decode(batch.prompt_ids) == ["<bos>a"]
    assert batch.columns == {"completion": ["b"]}


def test_prompts_to_answer_need_no_answer_and_no_renaming(tmp_path):
    settings = dict(
        columns={"prompt": "question", "answer": "answer"},
        extract={"answer": r"####\s*(.+)"},
        template="Q: {{ prompt }}",
        predict="not/read.jsonl",
        prompts=["What is 3+4?"],
    )
    (batch,) = ready("predict", tmp_path, **settings).predict_dataloader()
    assert batch.prompts == ["Q: What is 3+4?"]
    assert batch.columns == {}


def test_repeated_prompts_are_counted_with_the_first_pair(tmp_path, caplog):
    with caplog.at_level("INFO"):
        ready("fit", tmp_path, train=SUMS + SUMS[:2], val=["a", "b", "a"])
    pair = "the given list, row 13 repeats the given list, row 1"
    assert f"train: 2 of 14 prompts are duplicates ({pair})" in caplog.text
    assert "val: 1 of 3 prompts are duplicates" in caplog.text


def test_the_first_listing_of_the_page_on_tasks_reads_its_files(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "tasks_and_rollouts.md").read_text()
    settings = yaml.safe_load(page.partition("```yaml")[2].partition("```")[0])["data"]
    monkeypatch.chdir(tmp_path)
    for name in ("sums", "sums_val"):
        rows = [{"question": f"{n}+1? ({name})", "answer": f"so #### {n + 1}"} for n in range(3)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("letters", "letters_val"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": f"{name}?"}) + "\n")
    data = ready("fit", tmp_path, **settings, batch_size=3)
    read = dict(zip(data.sets["val"].texts, data.sets["val"].columns["answer"], strict=True))
    assert read == {
        **{f"{n}+1? (sums_val)": str(n + 1) for n in range(3)},
        "letters_val?": None,
    }


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_set_of_a_tasks_name_inherits_what_the_task_says_of_its_columns(tmp_path, stage):
    train = {
        "sums": {"path": "t.jsonl", "columns": {"prompt": "q"}, "extract": {"answer": "#### (.+)"}},
        "letters": ["a?"],
    }
    row = {"q": "1+1?", "answer": "#### 2"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"text": "1+2?", "worked": "== 3"}) + "\n")
    own = {"columns": {"prompt": "text", "answer": "worked"}, "extract": {"answer": "== (.+)"}}
    sets = [
        ({"sums": [row]}, ["1+1?"], ["2"]),
        ({"sums": str(path)}, ["1+1?"], ["2"]),
        ({"sums": {"path": str(path)} | own}, ["1+2?"], ["3"]),  # its own come first
        ({"sums": [{"prompt": "1+1?", "answer": "#### 2"}]}, ["1+1?"], ["2"]),
        ({"letters": [{"prompt": "b?", "answer": "#### b"}]}, ["b?"], ["#### b"]),
        ({"others": [{"prompt": "b?", "answer": "#### b"}]}, ["b?"], ["#### b"]),
    ]
    name = "val" if stage == "validate" else stage
    for given, prompts, answers in sets:
        data = ready(stage, tmp_path, train=train, **{name: given})
        assert data.sets[name].texts == prompts
        assert data.sets[name].columns["answer"] == answers


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_that_only_a_template_makes_equal_are_a_warning(monkeypatch, chat):
    tokenizer = chat_tokenizer("{{ messages[-1].content }}")
    monkeypatch.setattr(PromptData, "find_tokenizer", lambda *_: tokenizer)
    rows = [{"prompt": f"{n % 5}?", "task": "sums"} for n in range(6)]
    said = "train: 5 of 6 prompts are duplicates .* 4 of them differ in the data"
    with pytest.warns(UserWarning, match=said):
        PromptData(rows, template="Do {{ task }}.", chat=chat, batch_size=2).setup("fit")


def test_validation_is_held_out_of_training_or_a_source_of_its_own(tmp_path):
    data = ready("fit", tmp_path, train=SUMS, val_fraction=0.3, batch_size=2)
    train = set(data.sets["train"].texts)
    val = {text for batch in data.val_dataloader() for text in batch.prompts}
    assert train | val == {row["prompt"] for row in SUMS}
    assert not train & val
    again = ready("validate", tmp_path, train=SUMS, val_fraction=0.3)
    assert set(again.sets["val"].texts) == val
    own = ready("validate", tmp_path, train="not/read.jsonl", val=["x"])
    assert own.sets["val"].texts == ["x"]


def test_the_model_gives_the_tokenizer_and_every_stage_runs(tmp_path):
    data = PromptData(SUMS, val=["v"], test=["t"], prompts=["p", "q"], batch_size=4)
    module, trainer = Listener(lambda batch: batch.prompts), quiet_trainer(tmp_path)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    assert module.validated == [["v"], ["t"]]
    assert trainer.predict(module, data) == [["p", "q"]]
    assert module.texts == ["p", "q"]


def test_a_fit_without_validation_data_runs(tmp_path):
    assert len(train_and_record(tmp_path, PromptData(SUMS, batch_size=4), rows_of)) == 3


def test_after_a_fit_without_validation_data_the_trainer_validates_other_data(tmp_path):
    module, trainer = Listener(rows_of), quiet_trainer(tmp_path)
    limit = trainer.limit_val_batches
    trainer.fit(module, PromptData(SUMS, batch_size=4))
    assert trainer.limit_val_batches == limit
    trainer.validate(module, PromptData(SUMS, batch_size=4, val=SUMS), verbose=False)
    assert sum(trainer.num_val_batches) > 0


def test_a_fit_goes_through_the_data_in_an_order_of_its_own_per_epoch(tmp_path):
    data = PromptData(SUMS, batch_size=4)
    rows = train_and_record(tmp_path, data, rows_of, epochs=2)
    first, second = list(chain(*rows[:3])), list(chain(*rows[3:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert first != sorted(first)


def test_unshuffled_training_data_keep_their_order(tmp_path):
    data = PromptData(SUMS, batch_size=5, shuffle=False)
    assert train_and_record(tmp_path, data, rows_of) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("kind", ["memory", "on disk", "curriculum", "tasks", "weights", "ranks"])
def test_unshuffled_rows_that_fill_no_batch_are_the_first_of_the_next_epoch(
    tmp_path, monkeypatch, kind
):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SUMS[:10]))
    train = {
        "on disk": str(file),
        "tasks": {"a": SUMS[:4], "b": SUMS[4:10]},
        "weights": {"a": SUMS[:5], "b": SUMS[5:10]},
    }
    settings = {
        "curriculum": {"curriculum": Curriculum()},
        "weights": {"task_weights": {"a": 1, "b": 1}},
    }
    monkeypatch.setattr(PromptData, "rank_and_world_size", (1, 2) if kind == "ranks" else (0, 1))
    monkeypatch.setattr("litgrpo.data.files.IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("litgrpo.data.prompts.MAX_KEPT", 3)
    rows = train_and_record(
        tmp_path,
        PromptData(
            train.get(kind, SUMS[:10]), batch_size=4, shuffle=False, **settings.get(kind, {})
        ),
        rows_of,
        epochs=5,
    )
    assert len(rows) == 10
    if kind == "ranks":
        assert rows[:4] == [[2, 3], [6, 7], [0, 1], [4, 5]]
    elif kind == "weights":  # four rows of each in an epoch
        assert rows[:4] == [[0, 5, 1, 6], [2, 7, 3, 8], [4, 9, 0, 5], [1, 6, 2, 7]]
    else:
        assert rows[:4] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    if kind != "ranks":
        assert set(Counter(chain(*rows)).values()) == {4}  # 5 epochs of 8 rows, 10 prompts


def test_a_shuffled_epoch_says_how_many_prompts_it_leaves_out(tmp_path, caplog):
    with caplog.at_level("INFO"):
        ready("fit", tmp_path, train=SUMS[:10], batch_size=4)
    assert "train: 2 of 10 prompts fill no batch of 4" in caplog.text


def test_an_unshuffled_fit_is_resumed_in_a_later_epoch(tmp_path):
    def data():
        return PromptData(SUMS[:10], batch_size=4, shuffle=False)

    whole = train_and_record(tmp_path, data(), rows_of, epochs=4)
    for cut in (1, 2, 3, 5):
        save = SaveAt(str(tmp_path / f"{cut}.ckpt"), cut)
        train_and_record(tmp_path, data(), rows_of, epochs=4, save=save)
        after = train_and_record(tmp_path, data(), rows_of, epochs=4, ckpt_path=save.path)
        assert whole[:cut] + after == whole


def test_a_fit_that_is_resumed_skips_and_repeats_no_prompt(tmp_path):
    """In an epoch, at its end, before and after its validation."""
    settings = dict(epochs=3, val_check_interval=1)
    cuts = {
        "on_train_batch_end": (1, 3, 4, 5, 8),
        "on_train_epoch_end": (3, 9),
        "on_validation_end": (2, 6, 9),
    }

    def data():
        return PromptData(SUMS, val=["v"], batch_size=4)

    whole = train_and_record(tmp_path, data(), rows_of, **settings)
    for hook, cut in ((hook, cut) for hook, some in cuts.items() for cut in some):
        save = SaveAt(str(tmp_path / f"{hook}-{cut}.ckpt"), cut, hook)
        before = train_and_record(tmp_path, data(), rows_of, save=save, **settings)
        after = train_and_record(tmp_path, data(), rows_of, ckpt_path=save.path, **settings)
        assert before[:cut] + after == whole, (hook, cut)


def test_a_fit_can_be_resumed_twice_in_one_epoch(tmp_path):
    whole = train_and_record(tmp_path, PromptData(SUMS, batch_size=2), rows_of, epochs=2)
    rows, path = [], None
    for part, cut in enumerate((2, 3, 3)):
        save = SaveAt(str(tmp_path / f"{part}.ckpt"), cut)
        data = PromptData(SUMS, batch_size=2)
        rows += train_and_record(tmp_path, data, rows_of, 2, ckpt_path=path, save=save)[:cut]
        path = save.path
    rows += train_and_record(tmp_path, PromptData(SUMS, batch_size=2), rows_of, 2, ckpt_path=path)
    assert rows == whole


def test_a_fit_with_other_data_or_another_order_is_not_resumed(tmp_path):
    save = SaveAt(str(tmp_path / "cut.ckpt"), 1)
    train_and_record(tmp_path, PromptData(SUMS, batch_size=4), rows_of, save=save)
    for now, said in [
        (PromptData(SUMS, batch_size=3), "batch_size=4, now it is 3"),
        (PromptData(SUMS, batch_size=4, seed=1), "seed=0, now it is 1"),
        (PromptData(SUMS[::-1], batch_size=4), "data prompts="),
    ]:
        with pytest.raises(ValueError, match=said):
            train_and_record(tmp_path, now, rows_of, ckpt_path=save.path)
    corrected = PromptData([row | {"answer": -1} for row in SUMS], batch_size=4)
    assert len(train_and_record(tmp_path, corrected, rows_of, ckpt_path=save.path)) == 2


DATED = (
    "{{ strftime_now('%d %b %Y %H:%M') }} {{ messages | map(attribute='content') | join }}{{ end }}"
)


def chat_tokenizer(template=DATED):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def chat_fit(tmp_path, data, template=DATED, **settings):
    """The prompts that a fit reads."""
    module = Listener(lambda batch: batch.prompts, chat_tokenizer(template))
    save = settings.pop("save", None)
    trainer = quiet_trainer(tmp_path, 2, callbacks=[save] if save else [])
    trainer.fit(module, data, **settings)
    return module.trained


def set_clock(monkeypatch, day):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 7, day, 23, 59)

    for module in (rendering, chat_template_utils):
        monkeypatch.setattr(module, "datetime", Clock)


@pytest.mark.parametrize("kept", [0, 99])
def test_a_fit_that_is_resumed_on_another_day_reads_the_date_of_its_start(
    tmp_path, monkeypatch, kept
):
    monkeypatch.setattr("litgrpo.data.prompts.MAX_KEPT", max(kept, 1))

    def data():
        return PromptData(SUMS, val=["v"], chat=True, batch_size=4)

    set_clock(monkeypatch, 25)
    whole = chat_fit(tmp_path, data())
    assert whole[0][0].startswith("25 Jul 2026 23:59 ")
    save = SaveAt(str(tmp_path / "cut.ckpt"), 2)
    chat_fit(tmp_path, data(), save=save)
    for day in (26, 25):
        set_clock(monkeypatch, day)
        resumed = data()
        assert chat_fit(tmp_path, resumed, ckpt_path=save.path) == whole[2:]
        assert resumed.sets["val"].texts == ["25 Jul 2026 23:59 v"]
    # What is rendered later, as the prompts of an agent, has the same date.
    prompt_format, tokenizer = resumed.final_format
    assert prompt_format.texts(read_rows(["x"]), tokenizer) == ["25 Jul 2026 23:59 x"]


def test_a_checkpoint_of_another_day_fits_the_same_data(tmp_path, monkeypatch):
    set_clock(monkeypatch, 25)
    save = SaveAt(str(tmp_path / "cut.ckpt"), 2)
    chat_fit(tmp_path, PromptData(SUMS, chat=True, batch_size=4), save=save)
    set_clock(monkeypatch, 26)
    data = PromptData(SUMS, chat=True, batch_size=4)
    monkeypatch.setattr(PromptData, "find_tokenizer", lambda *_: chat_tokenizer())
    data.setup("fit")
    module = Listener(None)
    check_fits(SimpleNamespace(datamodule=data), module, torch.load(save.path))
    assert data.sets["train"].texts[0].startswith("25 Jul")


def test_a_fit_whose_prompts_are_rendered_in_another_way_is_not_resumed(tmp_path):
    save = SaveAt(str(tmp_path / "cut.ckpt"), 1)
    settings = {"chat": True, "batch_size": 4}
    chat_fit(tmp_path, PromptData(SUMS, **settings), save=save)
    for now in [
        {"chat": Chat(system="Be kind.")},
        {"chat": Chat(template_kwargs={"end": "?"})},
        {"template": "{{ prompt }} Think."},
        {"template": "{{ prompt }}{{ answer }}"},
        {"reference_template": "{{ prompt }}{{ answer }}"},
        {"chat": False},
        {"chat_template": "{{ messages[-1].content }}"},
    ]:
        template = now.pop("chat_template", DATED)
        data = PromptData(SUMS, **settings | now)
        said = r"data rendered_prompts=.* restore template, chat, tools"
        with pytest.raises(ValueError, match=said):
            chat_fit(tmp_path, data, template, ckpt_path=save.path)


@pytest.mark.parametrize(
    ("settings", "stage", "said"),
    [
        ({}, "fit", "no train source; set train"),
        ({}, "test", "no test source; set test"),
        ({}, "predict", r"no predict source; set predict \(or prompts\)"),
        ({"train": ["a"]}, "validate", "nothing to validate on"),
        ({"train": ["a", ""]}, "fit", "row 2: the prompt is empty"),
        ({"train": []}, "fit", "holds no rows"),
    ],
)
def test_data_that_cannot_be_used_are_refused_in_one_sentence(tmp_path, settings, stage, said):
    with pytest.raises(ValueError, match=said):
        ready(stage, tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": ["a", "b"]}, "2 training prompts do not fill one batch of 3"),
        ({"train": list("abcd"), "val": ["a", "b"]}, "2 training prompts do not fill"),
        ({"train": ["a", "b", "long prompt"]}, "2 training prompts do not fill"),
        (
            {"train": {"easy": list("abc"), "hard": ["d"]}, "task_weights": {"easy": 9, "hard": 1}},
            "source 2 of train .* none of the 3 rows of an epoch",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(dropped|removed from training)")
def test_data_that_make_no_batch_are_refused_before_the_first_evaluation(tmp_path, settings, said):
    data = PromptData(batch_size=3, max_prompt_length=5, **{"val": ["x"]} | settings)
    module = Listener(rows_of)
    trainer = quiet_trainer(tmp_path)
    trainer.num_sanity_val_steps = -1
    with pytest.raises(ValueError, match=said):
        trainer.fit(module, data)
    assert module.validated == []


def test_a_batch_that_is_not_divisible_by_the_processes_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(PromptData, "rank_and_world_size", (0, 2))
    monkeypatch.setattr(PromptData, "find_tokenizer", lambda *_: byte_tokenizer())
    with pytest.raises(ValueError, match=r"batch_size 3 .* not divisible by 2 processes"):
        PromptData(SUMS, batch_size=3).setup("fit")


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="batch_size is 0"):
        PromptData(batch_size=0)


def test_a_recipe_parses():
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    settings = {
        "train": {"path": "gsm8k.jsonl", "limit": 100},
        "val": "gsm8k.csv",
        "test": ["What is 3+4?"],
        "predict": [{"prompt": "What is 3+4?", "level": 1}],
        "columns": {"prompt": "question"},
        "extract": {"answer": r"####\s*(.+)"},
        "chat": {"system": "Be brief."},
        "long_prompts": "error",
    }
    recipe = {"data": {"class_path": "litgrpo.PromptData", "init_args": settings}}
    data = parser.instantiate(parser.parse_object(recipe)).data
    assert data.sources["train"] == Source("gsm8k.jsonl", limit=100)
    assert data.sources["val"] == "gsm8k.csv"
    assert data.sources["test"] == ["What is 3+4?"]
    assert data.sources["predict"] == [{"prompt": "What is 3+4?", "level": 1}]
    assert data.prompt_format.chat == Chat("Be brief.")


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ([1, 2], r"row 1: is an int, expected an object .*, not 1$"),
        ([["a.jsonl"]], r"row 1: is a list, .* not \['a.jsonl'\]"),
        ([{"prompt": "a"}, None], "row 2: is a NoneType"),
        (["a.jsonl", 3], "a list is a list of rows, and 'a.jsonl' is a source"),
    ],
)
def test_a_list_of_a_recipe_that_holds_no_rows_is_named_with_the_row(train, said):
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    recipe = {"data": {"class_path": "litgrpo.PromptData", "init_args": {"train": train}}}

    def read():
        parser.instantiate(parser.parse_object(recipe)).data.setup("fit")

    with pytest.raises(ValueError, match=said):
        read()


def test_one_prompt_from_the_shell_parses():
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    given = ["--data=litgrpo.PromptData", "--data.prompts", '["What is 3+4?"]']
    data = parser.instantiate(parser.parse_args([*given, "--data.chat", "true"])).data
    assert data.sources["predict"] == [{"prompt": "What is 3+4?"}]
    assert data.prompt_format.chat == Chat()


def test_a_batch_moves_to_a_device(tmp_path):
    (batch,) = ready("test", tmp_path, test=["a"]).test_dataloader()
    assert batch.to(torch.device("meta")).prompt_ids.device.type == "meta"


def test_weights_are_shares_of_the_training_prompts(tmp_path):
    given = {"train": {"sums": SUMS, "letters": ["x", "y"]}, "batch_size": 7}
    given["task_weights"] = {"sums": 1, "letters": 1}
    data = PromptData(**given)
    first, second = train_and_record(tmp_path, data, lambda batch: batch.prompts), None
    assert sum(len(set(text) & set("xy")) for batch in first for text in batch) == 7
    # A row that is repeated within an epoch has other random numbers.
    second = train_and_record(tmp_path, PromptData(**given), rows_of)
    assert len(set(chain(*second))) == 14


def test_a_mixture_is_resumed_where_it_stopped_and_other_weights_are_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(6)))

    def data(weight=3):
        parts = {name: f"{tmp_path}/{name}.txt" for name in "ab"}
        return PromptData(parts, batch_size=4, task_weights={"a": weight, "b": 1})

    whole = train_and_record(tmp_path, data(), rows_of, epochs=2)
    for cut in (1, 3, 5):
        save = SaveAt(str(tmp_path / f"{cut}.ckpt"), cut)
        before = train_and_record(tmp_path, data(), rows_of, epochs=2, save=save)
        after = train_and_record(tmp_path, data(), rows_of, epochs=2, ckpt_path=save.path)
        assert before[:cut] + after == whole
    with pytest.raises(ValueError, match="mixture="):
        train_and_record(tmp_path, data(2), rows_of, ckpt_path=save.path)


def test_sets_with_names_come_in_batches_of_their_own(tmp_path):
    sets = {"easy": ["a", "b", "c"], "hard": ["d"]}
    data = ready("validate", tmp_path, train=["a"], val=sets, eval_batch_size=2)
    seen = [(batch.set_name, batch.prompts) for batch in data.val_dataloader()]
    assert seen == [("easy", ["a", "b"]), ("hard", ["d"]), ("easy", ["c"])]
    indices = [index for batch in data.val_dataloader() for index in rows_of(batch)]
    assert sorted(indices) == [0, 1, 2, 3]


def test_named_training_sets_are_tasks(tmp_path):
    tasks = {"easy": ["a", "b", "c"], "hard": [{"prompt": "d"}, {"prompt": "e", "task": "own"}]}
    data = ready("fit", tmp_path, train=tasks, batch_size=5)
    (batch,) = data.train_dataloader()
    found = dict(zip(batch.prompts, batch.columns["task"], strict=True))
    assert found == {"a": "easy", "b": "easy", "c": "easy", "d": "hard", "e": "own"}
    assert batch.set_name == ""  # of several sets
    assert task_names(SimpleNamespace(datamodule=data)) == ["easy", "hard", "own"]
    several = [{"prompt": "a", "task": ["x", "y"]}, {"prompt": "b", "task": 3}, {"prompt": "c"}]
    data = ready("fit", tmp_path, train=several, batch_size=3)
    assert task_names(SimpleNamespace(datamodule=data)) == ["3", "['x', 'y']"]


def test_task_weights_are_shares_of_the_batches(tmp_path):
    tasks = {"easy": ["a", "b", "c", "d"], "hard": ["x", "y"]}
    data = ready("fit", tmp_path, train=tasks, batch_size=2, task_weights={"hard": 2, "easy": 1})
    loader = data.train_dataloader()
    seen = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        seen += [text for batch in loader for text in batch.prompts]
    counts = Counter(seen)
    assert sum(counts[text] for text in "xy") == 16  # two thirds of 24
    assert counts["x"] == counts["y"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(task_weights={"easy": 1}), "no weight for 'hard'"),
        (dict(task_weights={"easy": 1, "hrd": 1}), "did you mean 'hard'"),
        (dict(task_weights={"easy": 1, "hard": 0}), "above 0"),
        (dict(train=["a"], task_weights={"easy": 1}), "name them"),
        (dict(train={"easy": {"path": "a.txt", "weight": 1}}), "has no key 'weight'"),
    ],
)
def test_weights_of_tasks_are_checked(tmp_path, settings, message):
    settings = {"train": {"easy": ["a"], "hard": ["b"]}} | settings
    with pytest.raises(ValueError, match=message):
        ready("fit", tmp_path, **settings)


def test_each_source_has_its_own_columns_and_answers(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1?", "solution": "so #### 2"}\n')
    (tmp_path / "b.jsonl").write_text('{"problem": "2+2?", "answer": "4"}\n')
    tasks = {
        "gsm": Source(
            f"{tmp_path}/a.jsonl",
            columns={"prompt": "question", "answer": "solution"},
            extract={"answer": "#### (.+)"},
        ),
        "plain": Source(f"{tmp_path}/b.jsonl", columns={"prompt": "problem"}),
    }
    data = ready("fit", tmp_path, train=tasks, batch_size=2)
    (batch,) = data.train_dataloader()
    found = dict(zip(batch.prompts, batch.columns["answer"], strict=True))
    assert found == {"1+1?": "2", "2+2?": "4"}
    with pytest.raises(ValueError, match=r"extract of .*, answer: .* groups, expected one"):
        Source("a.jsonl", extract={"answer": "x"})
    with pytest.raises(ValueError, match="no field 'question'"):
        ready("fit", tmp_path, train=Source(f"{tmp_path}/b.jsonl", columns={"prompt": "question"}))


def test_recipes_name_sets():
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    sets = {"easy": "a.csv", "hard": {"path": "b.csv", "limit": 3}}
    init_args = {"train": sets, "val": sets, "task_weights": {"easy": 2, "hard": 1}}
    recipe = {"class_path": "litgrpo.PromptData", "init_args": init_args}
    data = parser.instantiate(parser.parse_object({"data": recipe})).data
    assert data.weights == [2, 1]
    assert data.sources["val"] == {"easy": "a.csv", "hard": Source("b.csv", limit=3)}
    given = ["--data=litgrpo.PromptData", "--data.train", '["a.parquet", "b.jsonl"]']
    data = parser.instantiate(parser.parse_args(given)).data
    with pytest.raises(ValueError, match=r"'a\.parquet' is a source: give several sources names"):
        data.reader.read(data.sources["train"])


def test_the_tools_of_the_model_s_environment_stand_in_every_prompt(tmp_path):
    class Calculating(Listener):
        shown_tools = property(lambda _: [{"type": "function", "function": {"name": "double"}}])

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "shows")
    sets = {"train": ["p"], "val": ["q"], "predict": ["r"]}
    data = PromptData(**sets, chat=True, tokenizer=str(tmp_path / "shows"))
    module, trainer = Calculating(lambda batch: batch.prompts), quiet_trainer(tmp_path)
    assert trainer.predict(module, data) == [["(double)r"]]
    trainer.validate(module, data, verbose=False)
    (batch,) = data.val_dataloader()
    assert batch.prompts == ["(double)q"]
    assert tokenizer.decode(data.encode_opening(batch, 0, "!")) == "(double)q!"
