"""Tokenizers that add, close and prepend: prompts stay open, pieces get the tokens of the whole."""

import json

import pytest
import torch

from litgrpo.data.pairs import PairFormat, tokenize_pairs
from litgrpo.data.prompts import PromptSet
from litgrpo.data.rendering import Chat, LengthLimit, TextTemplate, build_prompt_format
from litgrpo.data.sources import read_rows
from litgrpo.data.tokenization import added_ids, encode_pieces, tokenize
from tests.support.tokenizers import BEGINS, CHATML, CLOSES, KINDS, ONLY_CLOSES, PLAIN, tokenizer_of

TALK = [
    {"role": "user", "content": "yes or no"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "no yes"},
    {"role": "assistant", "content": "no 12\n\n"},
]


def pairs_of(row, tokenizer, chat=True, limit=9999, action="error", **options):
    return tokenize_pairs(
        read_rows([row]),
        "train",
        pair_format=PairFormat(build_prompt_format(None, chat), TextTemplate("completion")),
        limit=LengthLimit("max_length", limit, action),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
        **options,
    )


def prompts_of(rows, tokenizer, chat=False, limit=9999, action="error"):
    return PromptSet(
        read_rows(rows),
        "train",
        prompt_format=build_prompt_format(None, chat),
        limit=LengthLimit("max_prompt_length", limit, action),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_has_the_tokens_of_its_whole_text(kind):
    tokenizer = tokenizer_of(kind)
    pairs = pairs_of({"messages": TALK}, tokenizer)
    whole = tokenizer.apply_chat_template(TALK, tokenize=False).removesuffix("\n")
    (expected,) = tokenize(tokenizer, [whole])
    assert pairs.ids[0] == expected
    learned = [pairs.ids[0][start:stop] for start, stop in pairs.loss_spans[0]]
    assert [tokenizer.decode(ids).strip() for ids in learned] == [
        "yes<|im_end|>",
        "no 12\n\n<|im_end|>",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_begins_with_the_tokens_of_the_prompt_in_reinforcement_learning(kind):
    tokenizer = tokenizer_of(kind)
    prompt = prompts_of([{"prompt": TALK[:3]}], tokenizer, chat=True).ids[0]
    pairs = pairs_of({"messages": TALK}, tokenizer)
    start = pairs.loss_spans[0][1][0]
    assert pairs.ids[0][:start] == prompt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [False, True, "plain"])
def test_a_completion_follows_its_prompt_without_an_added_space(kind, chat):
    tokenizer = tokenizer_of(kind, PLAIN if chat == "plain" else CHATML)
    for prompt, completion in (
        ("Question:", "yes"),
        ("Question:\n", "no 12"),
        ("Question: ", "12"),
        ("a", " yes"),
        ("a\n", "\nyes"),
        ("1", "2"),
    ):
        row = {"prompt": prompt, "completion": completion}
        pairs = pairs_of(row, tokenizer, bool(chat))
        ((start, stop),) = pairs.loss_spans[0]
        prompts = prompts_of([{"prompt": prompt}], tokenizer, bool(chat))
        assert pairs.ids[0][:start] == prompts.ids[0]
        assert pairs.ids[0][stop - 1] == tokenizer.eos_token_id
        answered = tokenizer.decode(pairs.ids[0][: stop - 1])
        assert answered.removeprefix(tokenizer.decode(prompts.ids[0])) == completion


def test_pieces_are_those_of_the_whole_unless_a_token_spans_a_boundary():
    tokenizer = tokenizer_of("first")
    for pieces in (["yes", "\n", "no"], ["", "yes"], ["<|im_start|>", "yes"], ["yes", "", "no"]):
        (ids,) = encode_pieces([pieces], tokenizer)
        (whole,) = tokenize(tokenizer, ["".join(pieces)])
        assert [token for piece in ids for token in piece] == whole
    (ids,) = encode_pieces([["ye", "s no"]], tokenizer)  # "yes" is one token
    assert tokenizer.decode(ids[1]) == "s no"


@pytest.mark.parametrize("post", [BEGINS, CLOSES, ONLY_CLOSES])
@pytest.mark.parametrize("kind", KINDS)
def test_no_prompt_ends_in_tokens_that_the_tokenizer_appends(kind, post):
    tokenizer = tokenizer_of(kind, post=post)
    begin = [tokenizer.bos_token_id] if "<bos>" in post["single"] else []
    (alone,) = tokenize(tokenizer, ["yes no"])
    assert prompts_of(["yes no"], tokenizer).ids == [[*begin, *alone]]
    pairs = pairs_of({"prompt": "yes no", "completion": "12"}, tokenizer, chat=False)
    ((start, _),) = pairs.loss_spans[0]
    assert pairs.ids[0][:start] == [*begin, *alone]
    closing = [tokenizer.eos_token_id] * post["single"].count("<eos>")
    assert added_ids(tokenizer) == (begin, closing)
    # An encoder reads them, and an environment's text is put before them.
    style = build_prompt_format(None, False)
    for_encoder = type(style)(style.template, encoder_decoder=True)
    assert for_encoder.encode(["yes no"], tokenizer) == [[*begin, *alone, *closing]]
    opened = for_encoder.encode_opening("yes", {}, "<eos>", tokenizer)
    assert opened[len(opened) - len(closing) :] == closing


def test_an_end_token_that_the_data_write_stays():
    tokenizer = tokenizer_of("byte level", post=CLOSES)
    assert prompts_of(["yes<eos>"], tokenizer).ids[0][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("chat", [False, Chat()])
def test_a_text_of_megabytes_is_found_too_long_without_being_tokenized(tmp_path, monkeypatch, chat):
    tokenizer = tokenizer_of("byte level")
    seen = []

    def count(tokenizer, texts):
        seen.extend(map(len, texts))
        return tokenize(tokenizer, texts)

    monkeypatch.setattr("litgrpo.data.rendering.tokenize", count)
    long = "yes " * 2_000_000
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("no", long, "12")))
    assert LengthLimit("max_prompt_length", 20, "drop").max_chars(tokenizer) < 1000
    with pytest.warns(UserWarning, match=r"1 of 3 rows have more than .*line 2.*dropped"):
        kept = prompts_of(str(path), tokenizer, chat, 20, "drop")
    assert kept[[0, 1]].prompts[1].count("12") == 1
    with pytest.raises(ValueError, match=r"line 2"):
        prompts_of(str(path), tokenizer, chat, 20, "error")
    assert max(seen) < 1000


@pytest.mark.parametrize("row", ["messages", "pair"])
def test_a_long_pair_is_found_too_long_without_being_tokenized(monkeypatch, row):
    tokenizer, seen = tokenizer_of("byte level"), []

    def count(tokenizer, texts):
        seen.extend(map(len, texts))
        return tokenize(tokenizer, texts)

    for module in ("rendering", "tokenization", "pairs"):
        monkeypatch.setattr(f"litgrpo.data.{module}.tokenize", count)
    long = "yes " * 1_000_000
    given = {"prompt": "no", "completion": long}
    if row == "messages":
        given = {"messages": [*TALK[:3], {"role": "assistant", "content": long}]}
    with pytest.raises(ValueError, match="row 1"):
        pairs_of(given, tokenizer, row == "messages", 60, "error")
    with pytest.warns(UserWarning, match="truncated"):
        pairs = pairs_of(given, tokenizer, row == "messages", 60, "truncate")
    assert len(pairs.ids[0]) == 60
    assert pairs[[0]].loss_mask.sum() > 1
    assert max(seen) < 5000
    assert torch.equal(pairs[[0]].attention_mask, torch.ones(1, 60, dtype=torch.bool))
