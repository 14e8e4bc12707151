"""Corpus metrics against the libraries, over processes, and in a validation."""

import pytest
import torch
from lightning import Trainer
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu
from torch.utils.data import DataLoader

from litgrpo.evaluation.dialogue import DialogueScores, reply_counts
from litgrpo.evaluation.settings import Evaluation
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.sampling import Sampling
from litgrpo.text.overlap import token_f1, without_articles
from litgrpo.training.grpo import GRPO
from litgrpo.types import PromptBatch
from tests.support.models import prompt_batch, tiny_policy

REPLIES = [
    "R: i have two dogs and a cat .",
    "The food is good",
    "i do not know , what about you ?",
    "",
    "hello",
]
ANSWERS = [
    ["i have two big dogs and one cat ."],
    ["food is really good here !", "the food was good ."],
    ["what do you do ? i do not work ."],
    ["yes"],
    ["hello there how are you ?"],
]
BARE = [REPLIES[0].removeprefix("R: "), *REPLIES[1:]]


def scores(replies=REPLIES, answers=ANSWERS, index=None, **settings):
    metric = DialogueScores(**settings)
    index = torch.arange(len(replies)) if index is None else index
    metric.update(index, replies, {"answers": answers})
    return metric


def test_f1_is_by_hand_after_squads_normalization():
    # The -> nothing, good == good: {food, is, good} of 3, reference {food, is, really, good, here};
    # {food, good} of {food, was, good}: 2 * 2 / (3 + 3).
    assert without_articles("The food, is good!") == "food is good"
    f1 = reply_counts(REPLIES[1], ANSWERS[1])[10]
    assert f1 == pytest.approx(max(2 * 3 / (3 + 5), 2 * 2 / (3 + 3)))


def test_corpus_numbers_are_those_of_the_libraries():
    single = [answers[:1] for answers in ANSWERS]
    report = scores(answers=single).compute()
    expected = corpus_bleu(BARE, [[answers[0] for answers in single]]).score
    assert expected > 0
    assert float(report["corpus_bleu"]) == pytest.approx(expected, rel=1e-6)
    for kind in ("rouge1", "rouge2", "rougeL"):
        judge = RougeScorer([kind])
        values = [
            judge.score(answers[0], reply)[kind].fmeasure
            for answers, reply in zip(single, BARE, strict=True)
        ]
        assert float(report[f"corpus_{kind}"]) == pytest.approx(100 * sum(values) / 5, rel=1e-5)
    values = [
        token_f1(without_articles(reply), without_articles(answers[0]))
        for answers, reply in zip(single, BARE, strict=True)
    ]
    assert float(report["corpus_f1"]) == pytest.approx(100 * sum(values) / 5, rel=1e-5)
    assert report["corpus_f1_low"] < report["corpus_f1"] < report["corpus_f1_high"]


def test_the_prefix_is_taken_away_once_and_only_if_asked():
    assert reply_counts("R: hello", "hello") == reply_counts(" hello", "hello")
    assert reply_counts("R: hello", "hello", strip="")[0] > reply_counts("hello", "hello")[0]


def test_a_prompt_that_comes_twice_counts_once_and_batches_do_not_matter():
    whole, parts = scores().compute(), DialogueScores()
    for rows in ([3, 4], [0, 1, 2], [2, 0]):
        answers = {"answers": [ANSWERS[row] for row in rows]}
        parts.update(torch.tensor(rows), [REPLIES[row] for row in rows], answers)
    for name, value in parts.compute().items():
        torch.testing.assert_close(value, whole[name])


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"no column 'replies' with the reference replies; there"):
        scores(answers=[["x"]] * 5).__class__(answers="replies").update(
            torch.tensor([0]), ["x"], {"answers": ["x"]}
        )


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_nothing_judged_is_nan():
    assert all(value.isnan() for value in DialogueScores().compute().values())


def always_one(prompts, completions):
    return [1.0] * len(prompts)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_validation_reports_them_for_the_replies_it_would_give(greedy):
    settings = Evaluation(samples=2, pass_at=[1], greedy=greedy, corpus=DialogueScores())
    grpo = GRPO("", {"one": Reward(always_one)}, max_completion_length=6, evaluation=settings)
    grpo.policy = tiny_policy("t5")
    plain = prompt_batch("a", "hello")
    columns = {"answers": [["tall"], ["hi hi"]]}
    batch = PromptBatch(plain.prompt_ids, plain.prompt_mask, plain.prompts, columns, plain.index)
    trainer = Trainer(logger=False, enable_progress_bar=False)
    (report,) = trainer.validate(grpo, DataLoader([batch], batch_size=None), verbose=False)
    sampling = Sampling(temperature=0.0 if greedy else 1.0)
    group_size = 1 if greedy else 2
    sampled = grpo.rollouter.generate(batch, "val", group_size=group_size, sampling=sampling)
    replies = sampled.completions
    expected = scores(replies[:: 1 if greedy else 2], columns["answers"]).compute()
    assert {f"val/{name}": float(value) for name, value in expected.items()}.items() <= {
        name: value for name, value in report.items() if name.startswith("val/corpus_")
    }.items()
