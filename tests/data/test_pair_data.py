"""PairData: prompt tokens masked, one end token, little padding, resumed exactly in a real fit."""

from itertools import chain

import pytest
from jsonargparse import ArgumentParser
from lightning import LightningDataModule

from litgrpo.data.modules import PairData, PromptData
from litgrpo.data.sources import read_rows
from tests.data.listener import Listener, SaveAt, quiet_trainer, train_and_record
from tests.support.models import byte_tokenizer

SUMS = [{"prompt": f"{a}+{b}?", "completion": f"{a + b}"} for a in range(4, 8) for b in range(4, 8)]


def ready(tmp_path, rows, stage="fit", **settings):
    """The data module as it is in a fit, with a tokenizer of bytes."""
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    data = PairData(rows, **settings, tokenizer=str(tmp_path / "bytes"))
    data.setup(stage)
    return data


def the_batch(tmp_path, rows, **settings):
    (batch,) = ready(tmp_path, rows, **settings).train_dataloader()
    return batch


def texts_of(batch):
    return byte_tokenizer().batch_decode(batch.input_ids)


def targets_of(batch):
    rows = zip(batch.input_ids, batch.loss_mask, strict=True)
    return [byte_tokenizer().decode(ids[mask]) for ids, mask in rows]


def test_completion_and_end_token_are_learned_the_prompt_is_not(tmp_path):
    batch = the_batch(tmp_path, [{"prompt": "ab", "completion": "c"}])
    a, b, c = byte_tokenizer().convert_tokens_to_ids(["a", "b", "c"])
    assert batch.input_ids.tolist() == [[1, a, b, c, 2]]
    assert batch.loss_mask.tolist() == [[False, False, False, True, True]]
    assert batch.attention_mask.all()


def test_prompts_of_pairs_that_a_template_makes_equal_are_a_warning(tmp_path):
    with pytest.warns(
        UserWarning, match="train: 15 of 16 prompts are .* template makes them equal"
    ):
        ready(tmp_path, [row | {"task": "sums"} for row in SUMS], template="{{ task }}")


def test_templates_make_prompt_and_completion(tmp_path):
    settings = dict(template="Q {{ q }} A ", completion_template="{{ steps }} so {{ a }}")
    batch = the_batch(tmp_path, [{"q": "1+1", "a": "2", "steps": "add"}], **settings)
    assert texts_of(batch) == ["<bos>Q 1+1 A add so 2<eos>"]
    assert targets_of(batch) == ["add so 2<eos>"]


def test_a_truncated_pair_keeps_its_start_and_has_no_end_token(tmp_path):
    with pytest.warns(UserWarning, match="1 of 1 .*max_length=4 .*truncated"):
        batch = the_batch(
            tmp_path,
            [{"prompt": "a", "completion": "bcdef"}],
            max_length=4,
            long_examples="truncate",
        )
    assert texts_of(batch) == ["<bos>abc"]
    assert targets_of(batch) == ["bc"]


def test_a_truncated_pair_without_anything_to_learn_is_refused(tmp_path):
    rows = [{"prompt": "abcd", "completion": "e"}]
    with (
        pytest.warns(UserWarning, match="truncated"),
        pytest.raises(ValueError, match=r"row 1: the prompt alone has 5"),
    ):
        ready(tmp_path, rows, max_length=5, long_examples="truncate")


def test_the_tokenizer_is_fitted_to_training_rows_only_and_before_use(tmp_path):
    rows, val = SUMS[:3], [{"prompt": "val?", "completion": "val"}]
    for verb in ("fit", "validate"):
        module, trainer = Listener(texts_of), quiet_trainer(tmp_path, limit_train_batches=1)
        getattr(trainer, verb)(module, PairData(rows, val=val))
        assert module.texts == [row[name] for row in rows for name in ("prompt", "completion")]
        assert module.validated == [["<bos>val?val<eos>"]]


def test_the_held_out_prompts_are_those_of_prompt_data(tmp_path):
    data = ready(tmp_path, SUMS, val_fraction=0.3)
    prompts = PromptData(SUMS, val_fraction=0.3, tokenizer=str(tmp_path / "bytes"))
    prompts.setup("validate")
    asked = {text for batch in prompts.val_dataloader() for text in batch.prompts}
    held = {
        byte_tokenizer().decode(ids[:start], skip_special_tokens=True)
        for ids, [(start, _)] in zip(data.sets["val"].ids, data.sets["val"].loss_spans, strict=True)
    }
    assert held == asked


def test_batches_keep_to_rows_and_tokens(tmp_path):
    rows = [{"prompt": "p" * (1 + n), "completion": "c"} for n in range(40)]
    by_rows = ready(tmp_path, rows, batch_size=6).train_dataloader()
    assert sorted(len(batch) for batch in by_rows) == [4] + [6] * 6
    by_tokens = list(
        ready(tmp_path, rows, batch_size=None, max_tokens_per_batch=64).train_dataloader()
    )
    assert sum(map(len, by_tokens)) == 40
    assert max(batch.input_ids.numel() for batch in by_tokens) <= 64


def test_the_order_is_one_of_its_own_per_epoch_and_seed(tmp_path):
    data = PairData(SUMS, batch_size=4)
    rows = train_and_record(tmp_path, data, texts_of, epochs=2)
    first, second = list(chain(*rows[:4])), list(chain(*rows[4:]))
    assert sorted(first) == sorted(second)
    assert first != second
    assert rows == train_and_record(tmp_path, PairData(SUMS, batch_size=4), texts_of, epochs=2)
    assert rows != train_and_record(
        tmp_path, PairData(SUMS, batch_size=4, seed=1), texts_of, epochs=2
    )


def test_a_fit_that_is_resumed_skips_and_repeats_no_pair(tmp_path):
    whole = train_and_record(tmp_path, PairData(SUMS, batch_size=4), texts_of, epochs=2)
    for cut in (1, 4, 6):
        save = SaveAt(str(tmp_path / f"{cut}.ckpt"), cut)
        data = PairData(SUMS, batch_size=4)
        before = train_and_record(tmp_path, data, texts_of, epochs=2, save=save)[:cut]
        data = PairData(SUMS, batch_size=4)
        after = train_and_record(tmp_path, data, texts_of, epochs=2, ckpt_path=save.path)
        assert before + after == whole
    for now in ({"template": "{{ prompt }}!"}, {"completion_template": "{{ completion }}!"}):
        changed = PairData(SUMS, batch_size=4, **now)
        with pytest.raises(ValueError, match="data rendered_pairs="):
            train_and_record(tmp_path, changed, texts_of, ckpt_path=save.path)


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([{"prompt": "a"}], {}, "row 1: no field 'completion'"),
        ([{"prompt": "a", "completion": ""}], {}, "row 1: the completion is empty"),
        ([{"prompt": "a", "completion": "b"}], {"stage": "validate"}, "nothing to validate on"),
        (
            [{"prompt": "a", "completion": "b"}],
            {"stage": "test"},
            "PairData is for fit and validate",
        ),
    ],
)
def test_data_that_cannot_be_used_are_refused_in_one_sentence(tmp_path, rows, settings, said):
    with pytest.raises(ValueError, match=said):
        ready(tmp_path, rows, **settings)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="batch_size and max_tokens_per_batch are both null"):
        PairData(SUMS, batch_size=None)
    with pytest.raises(ValueError, match="max_tokens_per_batch is 0"):
        PairData(SUMS, max_tokens_per_batch=0)


def test_a_recipe_parses():
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    settings = {
        "train": "python:litgrpo.data.examples.problems.demonstrations?size=5",
        "columns": {"completion": "completion"},
        "batch_size": None,
        "max_tokens_per_batch": 4096,
    }
    recipe = {"data": {"class_path": "litgrpo.PairData", "init_args": settings}}
    data = parser.instantiate(parser.parse_object(recipe)).data
    assert (data.batch_size, data.max_tokens_per_batch) == (None, 4096)


def test_conversations_are_pairs_too_and_their_texts_are_fitted_to(tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    rows = [{"messages": talk}, {"messages": talk * 2}]
    data = PairData(rows, chat=True, tokenizer=str(tmp_path / "chat"))
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert sorted(targets_of(batch)) == ["yo<eos>", "yo<eos>yo<eos>"]
    assert list(data.pair_format.plain_texts(read_rows(rows))) == ["hi", "yo"] * 3
    with pytest.raises(ValueError, match=r"no field 'completion' .* need `chat: true`"):
        ready(tmp_path, rows)
    with pytest.raises(ValueError, match="train_on_turns is 'first'; it must be one of: all, last"):
        PairData(rows, train_on_turns="first")


def test_a_mixture_of_pairs_is_resumed_where_it_stopped(tmp_path):
    for name, size in {"a": 9, "b": 3}.items():
        lines = [f"{name * (1 + n)},{n}" for n in range(size)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["prompt,completion", *lines]))

    def data(**settings):
        parts = {name: f"{tmp_path}/{name}.csv" for name in "ab"}
        return PairData(parts, task_weights={"a": 1, "b": 1}, batch_size=4, **settings)

    whole = train_and_record(tmp_path, data(), texts_of, epochs=2)
    assert [len(batch) for batch in whole] == [4] * 6
    assert sum(text.startswith("<bos>a") for batch in whole[:3] for text in batch) == 6
    save = SaveAt(str(tmp_path / "cut.ckpt"), 2)
    before = train_and_record(tmp_path, data(), texts_of, epochs=2, save=save)
    after = train_and_record(tmp_path, data(), texts_of, epochs=2, ckpt_path=save.path)
    assert before[:2] + after == whole
    with pytest.raises(ValueError, match="leave max_tokens_per_batch out"):
        train_and_record(tmp_path, data(max_tokens_per_batch=9), texts_of)
