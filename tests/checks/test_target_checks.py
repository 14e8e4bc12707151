"""The start-up check of supervised fine-tuning finds seeded bugs and raises no false alarm."""

import logging
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from litgrpo.checks.invariants import Invariant
from litgrpo.checks.target_checks import ROW_LEN, ROWS, plain_logprobs, select_short_rows
from litgrpo.data.pairs import PairBatch
from litgrpo.models import causal, generic
from litgrpo.models import t5 as seq2seq
from litgrpo.models.loading.load import LoRA, Precision, build_policy
from litgrpo.models.packing import Packing, pack_left
from litgrpo.modules import sft as training
from litgrpo.modules.sft import SFT
from tests.models.test_generic import random_policy
from tests.support.models import byte_tokenizer, tiny_model, tiny_policy

# Rows of spans of tokens; those of odd number are targets.
TALK = ([1, 70, 71], [80, 2], [90, 91, 92, 93], [81, 82, 2])
LONGER = ([1, 75], [88, 87, 86, 85, 2], [94], [84, 83, 2], [95, 96], [89, 2])
SINGLE = ([1, 72], [81, 82, 2])


def batch_of(*rows):
    length = max(sum(map(len, spans)) for spans in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    real, targets = torch.zeros_like(ids).bool(), torch.zeros_like(ids).bool()
    for row, spans in enumerate(rows):
        tokens = [token for span in spans for token in span]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        real[row, : len(tokens)] = True
        learned = [n % 2 == 1 for n, span in enumerate(spans) for _ in span]
        targets[row, : len(tokens)] = torch.tensor(learned)
    return PairBatch(ids, real, targets)


def fit(policy, batch=None, *, precision="32-true", **settings):
    sft = SFT("", max_iterations=1, optimizer=partial(torch.optim.SGD, lr=0.1), **settings)
    sft.policy = policy.train()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(**off, enable_model_summary=False, accelerator="cpu", precision=precision)
    trainer.fit(sft, DataLoader([batch or batch_of(TALK, LONGER, SINGLE)], batch_size=None))
    return sft


def all_prompts_first(patch):
    right = generic.GenericPolicy.target_hidden_states

    def target_hidden_states(self, ids, mask, target_mask):
        prompts, answers = pack_left(ids, mask & ~target_mask), pack_left(ids, target_mask)
        ids, mask = (torch.cat(parts, 1) for parts in zip(prompts, answers, strict=True))
        return right(self, ids, mask, torch.cat([prompts[1] & False, answers[1]], 1))

    patch(generic.GenericPolicy, "target_hidden_states", target_hidden_states)
    return random_policy("bloom")


def shift_by_one_in_the_packing(patch):
    right = Packing.of_rows

    def of_rows(*given):
        packing = right(*given)
        return replace(packing, predicting=(packing.predicting - 1).clamp(min=0))

    patch(Packing, "of_rows", of_rows)
    return tiny_policy("qwen2")


def shift_by_one_without_packing(patch):
    right = causal.predicting
    patch(causal, "predicting", lambda hidden, mask: right(hidden.roll(1, 1), mask))
    policy = tiny_policy("qwen2")
    policy.share_prompts = False
    return policy


def pads_attended(patch):
    def plain_logits(self, ids, keep=None):
        return self.bare_model(input_ids=ids.flip(1)).logits.flip(1)

    policy = random_policy("bloom")
    patch(
        generic.GenericPolicy,
        "target_hidden_states",
        lambda self, ids, mask, targets: generic.predicting(plain_logits(self, ids), targets),
    )
    return policy


def head_without_soft_cap(patch):
    patch(causal.CausalPolicy, "head", lambda self, h: self.bare_model.get_output_embeddings()(h))
    return tiny_policy("gemma2")


def head_without_scale(patch):
    patch(seq2seq.Seq2SeqPolicy, "head", lambda self, h: self.bare_model.get_output_embeddings()(h))
    return tiny_policy("t5")


def probabilities_at_a_temperature(patch):
    patch(training, "token_logprobs", partial(training.token_logprobs, temperature=0.7))
    return tiny_policy("llama")


def adapter_left_out(patch):
    right = causal.CausalPolicy.target_hidden_states

    def without(self, *given):
        with self.model.disable_adapter():
            return right(self, *given)

    patch(causal.CausalPolicy, "target_hidden_states", without)
    return build_policy(tiny_model("qwen2"), byte_tokenizer(), lora=LoRA(rank=2))


SEEDED = [
    all_prompts_first,
    shift_by_one_in_the_packing,
    shift_by_one_without_packing,
    pads_attended,
    head_without_soft_cap,
    head_without_scale,
    probabilities_at_a_temperature,
    adapter_left_out,
]


@pytest.mark.parametrize("bug", SEEDED)
def test_a_seeded_bug_is_found_before_training(bug, monkeypatch):
    policy = bug(monkeypatch.setattr)
    before = [weight.clone() for weight in policy.parameters()]
    batch = batch_of(SINGLE) if bug is head_without_scale else None
    with pytest.raises(ValueError, match=f"invariant .{Invariant.TARGETS}. fails"):
        fit(policy, batch)
    assert all(map(torch.equal, before, policy.parameters()))
    assert policy.training


def log_lines(caplog):
    return [r.message for r in caplog.records if r.message.startswith(("  holds", "  FAILS"))]


def dropping():
    model = tiny_model("gpt2", resid_pdrop=0.5)
    return build_policy(model, byte_tokenizer(), precision=Precision(disable_dropout=False))


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (partial(tiny_policy, "gemma2"), {}),
        (partial(tiny_policy, "qwen2"), {"precision": "bf16-mixed"}),
        (partial(tiny_policy, "qwen2"), {"micro_batch_size": 1}),
        (partial(random_policy, "mamba"), {}),
        (dropping, {}),
    ],
)
def test_no_false_alarm_and_a_line_of_the_log(build, settings, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero")
    assert fit(build(), **settings).iteration == 1
    (line,) = log_lines(caplog)
    assert line.startswith("  holds  9 ")


def test_the_flag_switches_the_check_off(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero")
    fit(tiny_policy("qwen2"), check_invariants=False)
    assert not log_lines(caplog)


def test_a_run_is_bit_identical_with_the_check_and_without():
    def run(checked):
        torch.manual_seed(3)  # of the dropout
        sft = fit(dropping(), check_invariants=checked)
        return [*sft.policy.parameters(), torch.get_rng_state()]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_target_without_a_token_before_it_is_refused():
    with pytest.raises(ValueError, match="the first token of a row is a target"):
        fit(tiny_policy("qwen2"), batch_of(([], [80, 2])))


def test_the_rows_with_most_targets_are_checked_and_cut_to_a_few_tokens_of_each_span():
    long = ([1, *range(100, 150)], [*range(50, 90), 2], [9] * 70, [8, 7, 2])
    batch = select_short_rows(batch_of(*[SINGLE] * ROWS, long, TALK))
    kept = [
        ids[real].tolist() for ids, real in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    cut = [*long[0][:32], *long[1][:32], *[9] * 32, 8, 7, 2]
    assert kept == [cut, [*chain(*TALK)], *[[*chain(*SINGLE)]] * 2]
    assert [int(mask.sum()) for mask in batch.loss_mask] == [35, 5, 3, 3]
    many = select_short_rows(batch_of(([5] * 30, [6] * 30) * 9))
    assert many.input_ids.shape == (1, ROW_LEN)


def test_the_plain_log_probabilities_are_those_of_transformers():
    batch = batch_of(TALK, SINGLE)
    model = tiny_model("llama")
    scores = model(torch.tensor([[token for span in TALK for token in span]])).logits[0]
    # The targets of TALK are its tokens 3, 4 and 9, 10, 11.
    expected = [
        scores[at - 1].log_softmax(-1)[token]
        for at, token in zip((3, 4, 9, 10, 11), (80, 2, 81, 82, 2), strict=True)
    ]
    torch.testing.assert_close(
        plain_logprobs(tiny_policy("llama"), batch)[0], torch.stack(expected)
    )
