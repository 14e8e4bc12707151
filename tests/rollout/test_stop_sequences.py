"""Completions end with the token that completes a stop string, for every engine."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.stop_sequences import StopStrings
from tests.learning.parts import rollouter_of
from tests.support.by_hand import with_observations
from tests.support.models import byte_tokenizer, prompt_batch, tiny_policy
from tests.support.reference_engine import ReferenceEngine

TEXTS = ("a", "what is 3+4?", "hello", "xy")
LONG = 24
ENGINES = {
    "local": LocalEngine(),
    "few rows": LocalEngine(max_rows=4),
    "seldom": LocalEngine(sync_every_tokens=5),
    "static": StaticEngine(prompt_buckets=8, sync_every_tokens=3),
}


def strings(*stops):
    return StopStrings(stops, byte_tokenizer(), 300)


def ids_of(text):
    return byte_tokenizer()(text, add_special_tokens=False).input_ids


def rollout_of(engine, sampling, architecture="qwen2", eos=()):
    """The policy ends completions nowhere but where the sampling says, and at `eos`."""
    policy = tiny_policy(architecture)
    policy.eos_ids = (2, *eos)
    sizes = {"engine": engine, "sampling": sampling, "max_completion_length": LONG}
    rollouter = replace(rollouter_of(policy), **sizes)
    return rollouter.generate(prompt_batch(*TEXTS), "train")


def by_hand(stops, eos=()):
    """Lengths, and whether rows ended: by decoding every beginning of every long completion."""
    plain = rollout_of(ReferenceEngine(), Sampling(), eos=eos)
    lengths, ended, decode = [], [], byte_tokenizer().decode
    for ids, truncated in zip(plain.token_lists(), plain.truncated.tolist(), strict=True):
        found = (n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stops))
        length = next(found, 0)
        lengths.append(length or len(ids))
        ended.append(bool(length) or not truncated)
    return plain, lengths, ended


def stops_in(plain):
    """Pairs of characters that the random model really writes, and one character."""
    pairs = [pair for text in plain.completions for pair in re.findall("[!-~]{2}", text)[1:2]]
    return (pairs[0], pairs[1], pairs[-1], pairs[2][0])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("eos", [(), tuple(range(100, 130))], ids=["no ends", "ends"])
def test_rows_end_where_their_text_first_holds_a_stop_string(name, eos):
    stops = stops_in(rollout_of(ReferenceEngine(), Sampling()))
    plain, lengths, ended = by_hand(stops, eos)
    assert len(set(lengths)) > 3
    for engine in (ENGINES[name], ReferenceEngine()):
        rollout = rollout_of(engine, Sampling(stop=stops), eos=eos)
        assert rollout.lengths.tolist() == lengths
        assert rollout.truncated.tolist() == [not each for each in ended]
        used = max(lengths)
        mask = torch.arange(used) < torch.tensor(lengths)[:, None]
        assert torch.equal(rollout.completion_mask[:, :used], mask)
        assert torch.equal(rollout.loss_mask, rollout.completion_mask)
        expected = plain.completion_ids[:, :used].masked_fill(~mask, 0)
        assert torch.equal(rollout.completion_ids[:, :used], expected)
        logprobs = plain.sampler_logprobs[:, :used].masked_fill(~mask, 0.0)
        torch.testing.assert_close(
            rollout.sampler_logprobs[:, :used], logprobs, atol=1e-5, rtol=1e-5
        )


def test_texts_end_before_the_stop_string_or_behind_it():
    (stop, *_) = stops_in(rollout_of(ReferenceEngine(), Sampling()))
    plain = rollout_of(LocalEngine(), Sampling())
    for include in (False, True):
        sampling = Sampling(stop=stop, include_stop_str_in_output=include)
        texts = rollout_of(LocalEngine(), sampling).completions
        whole = [
            text.split(stop)[0] + stop * (stop in text) * include for text in plain.completions
        ]
        assert texts == whole
        assert any(stop in text for text in plain.completions)


@pytest.mark.parametrize("engine", [LocalEngine(), StaticEngine(prompt_buckets=8)])
def test_stop_tokens_end_a_completion_as_the_end_token_does(engine):
    ids = tuple(range(100, 130))
    stopped = rollout_of(engine, Sampling(stop_token_ids=ids))
    ended = rollout_of(engine, Sampling(), eos=ids)
    assert torch.equal(stopped.completion_ids, ended.completion_ids)
    assert torch.equal(stopped.truncated, ended.truncated)
    assert len(set(stopped.lengths.tolist())) > 1


def test_candidates_behind_a_stop_string_are_forgotten():
    stops = stops_in(rollout_of(ReferenceEngine(), Sampling(top_k=20)))
    rollout = rollout_of(LocalEngine(), Sampling(top_k=20, stop=stops))
    assert ((rollout.candidate_ids >= 0).any(-1) == rollout.completion_mask).all()


@pytest.mark.parametrize(
    "engine", [LocalEngine(), StaticEngine(prompt_buckets=8, sync_every_tokens=1)]
)
def test_nothing_is_computed_for_rows_that_have_stopped(engine, monkeypatch):
    """A stop string that every row says at once ends the rollout."""
    letters = {chr(code) for code in range(33, 127)} | {" ", "\n", "\ufffd"}
    policy = tiny_policy("qwen2")
    steps = []
    step, static_step = type(policy).decode_step, type(policy.static_decoder).decode_step
    noting = lambda real: lambda *given: (steps.append(1), real(*given))[1]  # noqa: E731
    monkeypatch.setattr(type(policy), "decode_step", noting(step))
    monkeypatch.setattr(type(policy.static_decoder), "decode_step", noting(static_step))
    rollout = rollout_of(engine, Sampling(stop=tuple(letters)))
    assert rollout.lengths.max() <= 6
    assert len(steps) <= 6


def test_the_other_samplings_end_where_training_does():
    (stop, *_) = stops_in(rollout_of(ReferenceEngine(), Sampling()))
    rollouter = rollouter_of(tiny_policy("qwen2"), sampling=Sampling(stop=stop))
    asked = rollouter.generate(prompt_batch(*TEXTS), "val", sampling=Sampling(temperature=0.5))
    assert not any(stop in text for text in asked.completions)


def test_a_stop_string_may_be_a_special_token_or_span_several_tokens():
    whole = ids_of("ab<eos>cd")
    assert strings("<eos>").length(whole) == 3
    assert strings("b<eos>c", "zz").length(whole) == 4
    assert strings("zz").length(whole) == len(whole) + 1
    assert strings("\u00e9").length(ids_of("a\u00e9b")) == 3  # two bytes, a token each


def words_tokenizer():
    """Tokens of words, which decode with a space in front if they are not the first."""
    words = ["<pad>", "\u2581a", "\u2581b", "\u2581ab", "c", "\u2581", "."]
    fast = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    fast.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>")


WORDS, BYTES = words_tokenizer(), byte_tokenizer()


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.lists(st.text("ab c.", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example([1, 2], ["a "])  # the space is that in front of the second word
def test_a_stop_string_is_found_at_the_first_token_that_shows_it(ids, stops):
    check_stops(WORDS, ids, stops)


@given(
    st.text("ab\u00e9\u20ac ", min_size=1, max_size=8),
    st.lists(st.text("ab\u00e9\u20ac ", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_stop_string_of_several_bytes_is_found_at_its_last_token(text, stops):
    check_stops(BYTES, ids_of(text), stops)


def check_stops(tokenizer, ids, stops):
    """Compare with decoding every beginning of the tokens."""
    found = StopStrings(tuple(stops), tokenizer, len(tokenizer))
    decoded = [tokenizer.decode(ids[:end]) for end in range(1, len(ids) + 1)]
    shown = [end for end, text in enumerate(decoded, 1) if any(stop in text for stop in stops)]
    assert found.length(ids) == (shown[0] if shown else len(ids) + 1)
    assert found.found(ids) == bool(shown)
    text = decoded[-1]
    places = [(text.index(stop), stop) for stop in stops if stop in text]
    place, stop = min(places, default=(len(text), ""))
    assert found.cut(text, include=False) == text[:place]
    assert found.cut(text, include=True) == text[:place] + stop


def test_a_row_that_stops_with_its_first_token_is_seen_at_once():
    watch = strings("a").watch(torch.zeros(2, 3))
    cursor, active = torch.tensor([0, 3]), torch.tensor([True, True])
    watch.note(cursor, active, torch.tensor([*ids_of("b"), *ids_of("a")]))
    assert watch.still_active(cursor + 1, active).tolist() == [True, False]


def test_texts_with_observations_are_not_cut():
    whole = rollout_of(LocalEngine(), Sampling())
    generated, row = whole.loss_mask.clone(), int(whole.lengths.argmax())
    generated[row, 1] = False
    rollout = with_observations(whole, generated)
    texts = ["xay"] * len(generated)
    expected = ["xay" if each == row else "x" for each in range(len(texts))]
    assert strings("a").cut_all(texts, rollout, include=False) == expected


def test_the_first_of_several_stop_strings_cuts_the_text():
    assert strings("c", "bc").cut("abcd", include=False) == "a"
    assert strings("c", "bc").cut("abcd", include=True) == "abc"
    assert strings("\n").cut("a\n\nb", include=True) == "a\n"
    assert strings("x").cut("abc", include=True) == "abc"


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"stop": ""}, "sampling.stop is"), ({"stop_token_ids": (-1,)}, "sampling.stop_token_ids is")],
)
def test_stops_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**settings)


def test_a_stop_token_beyond_the_vocabulary_is_refused():
    rollouter = rollouter_of(tiny_policy("qwen2"), sampling=Sampling(stop_token_ids=(5, 10**6)))
    with pytest.raises(ValueError, match=r"stop_token_ids has 1000000, but the model has \d+"):
        rollouter.generate(prompt_batch("a"), "train")
