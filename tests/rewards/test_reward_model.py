import logging

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from litgrpo.rewards import Reward, RewardFailure, Scorer
from litgrpo.rewards.reward_model import RewardModel, column_of, load_judges, own_limit
from tests.rewards.classifiers import CHAT, SIZES, judge_tokenizer, write_classifier
from tests.support.models import tiny_model
from tests.support.raises import raises_for

PROMPTS = ["Why is the sky blue?", "2+2", "2+2", "a long question " * 6]
TEXTS = ["because of the light", "4", "", "a long answer, too " * 4]


def one_by_one(folder: str, inputs) -> torch.Tensor:
    """Plain transformers: [N, labels], each row alone, so that nothing is padded."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([model(**row).logits for row in inputs])


def texts_as(input_format: str, tokenizer):
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        if input_format == "chat":
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            yield tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=True)
        else:
            given = (prompt, text) if input_format == "pair" else (prompt + text,)
            yield tokenizer(*given, return_tensors="pt")


# Only BERT's tokenizer has a separator; it and Gemma 2 always have a padding token.
CASES = [
    (architecture, input_format, pad)
    for architecture in SIZES
    for input_format in ("chat", "pair" if architecture == "bert" else "text")
    for pad in (True, False)
    if (pad or architecture not in ("bert", "gemma2"))
]


@pytest.mark.parametrize(("architecture", "input_format", "pad"), CASES)
def test_scores_in_batches_are_those_of_plain_transformers_one_by_one(
    architecture, input_format, pad, tmp_path
):
    chat = CHAT if input_format == "chat" else None
    folder = write_classifier(tmp_path, architecture, chat=chat, pad=pad)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = one_by_one(folder, texts_as(input_format, tokenizer))[:, 0]
    assert expected.std() > 0.1  # the texts matter
    for max_batch_tokens in (1, 200, 100_000):
        scores = RewardModel(folder, max_batch_tokens=max_batch_tokens)(PROMPTS, TEXTS)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


def test_an_end_token_as_padding_token_reads_the_score_where_plain_transformers_does(tmp_path):
    folder = write_classifier(tmp_path, "llama", chat=CHAT + "<eos>")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = 2
    model.save_pretrained(folder)
    inputs = texts_as("chat", AutoTokenizer.from_pretrained(folder))
    expected = one_by_one(folder, inputs)[:, 0]
    torch.testing.assert_close(RewardModel(folder)(PROMPTS, TEXTS), expected, rtol=1e-4, atol=1e-5)


def test_the_conversation_is_judged_and_not_the_policys_rendering_of_it(tmp_path):
    judge = RewardModel(write_classifier(tmp_path, chat=CHAT))
    conversation = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    rendered = [f"<|user|>{prompt}<|assistant|>" for prompt in PROMPTS]
    scores = judge(rendered, TEXTS, conversation=conversation)
    assert torch.equal(scores, judge(PROMPTS, TEXTS))
    assert not torch.equal(scores, judge(rendered, TEXTS))
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert torch.equal(scores, judge(conversation, messages))


@pytest.mark.parametrize(
    ("architecture", "input_format"), [("llama", "chat"), ("llama", "text"), ("bert", "pair")]
)
def test_special_tokens_that_the_answer_spells_are_plain_text(architecture, input_format, tmp_path):
    chat = CHAT if input_format == "chat" else None
    folder = write_classifier(tmp_path, architecture, chat=chat)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    judge = RewardModel(folder)
    judge.load()
    asked, special = [{"role": "user", "content": "2+2"}], set(tokenizer.all_special_ids)
    expected = [n for n in judge.input.encode(asked, "4")["input_ids"] if n in special]
    for token in tokenizer.all_special_tokens:
        encoded = judge.input.encode(asked, f"4{token} right{token}")
        assert [n for n in encoded["input_ids"] if n in special] == expected
        assert {len(each) for each in encoded.values()} == {len(encoded["input_ids"])}
    assert judge(["2+2"] * 2, ["4", f"4{token}"]).isfinite().all()


def test_a_template_that_refuses_the_messages_is_named(tmp_path):
    refusing = "{{ raise_exception('no system messages') }}"
    judge = RewardModel(write_classifier(tmp_path, chat=refusing))
    with pytest.raises(ValueError, match="no system messages"):
        judge(PROMPTS, TEXTS)


def test_two_labels_need_a_choice(tmp_path):
    folder = write_classifier(tmp_path, labels=("bad", "good"))
    with pytest.raises(ValueError, match=r"2 labels \(0: bad, 1: good\).*choose one with `label`"):
        RewardModel(folder).load()
    with pytest.raises(ValueError, match=r"no label 'best'; it has 0: bad, 1: good"):
        RewardModel(folder, label="best").load()
    logits = one_by_one(folder, texts_as("text", judge_tokenizer("llama")))
    for label in ("good", 1):
        scores = RewardModel(folder, label=label)(PROMPTS, TEXTS)
        torch.testing.assert_close(scores, logits[:, 1], rtol=1e-4, atol=1e-5)
    scores = RewardModel(folder, label="good", output="probability")(PROMPTS, TEXTS)
    torch.testing.assert_close(scores, logits.softmax(1)[:, 1], rtol=1e-4, atol=1e-5)


def test_a_probability_of_labels_that_do_not_exclude_each_other_is_a_sigmoid(tmp_path):
    folder = write_classifier(
        tmp_path, labels=("rude", "false"), problem_type="multi_label_classification"
    )
    logits = one_by_one(folder, texts_as("text", judge_tokenizer("llama")))
    scores = RewardModel(folder, label="rude", output="probability")(PROMPTS, TEXTS)
    torch.testing.assert_close(scores, logits.sigmoid()[:, 0], rtol=1e-4, atol=1e-5)


def test_a_label_goes_by_name_or_number():
    assert column_of(None, {0: "LABEL_0"}, "m") == 0
    assert column_of("1", {0: "0", 1: "1"}, "m") == 1


@pytest.fixture
def judge_of_160(tmp_path) -> RewardModel:
    return RewardModel(write_classifier(tmp_path, chat=CHAT, max_position_embeddings=160))


def test_input_over_the_limit_loses_the_start_of_the_prompt(judge_of_160, caplog):
    asked = "x" * 500 + "the end matters"
    with caplog.at_level(logging.WARNING):
        scores = judge_of_160([asked, "short"], ["ok", "ok"])
    # <bos>[user]...[assistant]ok is 160 tokens of one byte each, the begin token included.
    left = 160 - len("_[user][assistant]ok")
    assert torch.equal(scores, judge_of_160([asked[-left:], "short"], ["ok", "ok"]))
    assert judge_of_160.input.over_limit == {"lost the start of the prompt": 1}
    assert "1 inputs were over its limit of 160 tokens" in caplog.text


def test_system_messages_stay_and_earlier_messages_go_first(judge_of_160):
    def encode_question(*lengths: int):
        roles = ("system", "user", "assistant", "user")
        return [
            {"role": role, "content": role[0] * n} for role, n in zip(roles, lengths, strict=True)
        ]

    given, left = encode_question(20, 40, 90, 30), encode_question(20, 0, 0, 30)
    room = 160 - len("_[system][user][assistant][user][assistant]ok") - 50
    left[2]["content"] = "a" * room
    scores = judge_of_160([given, left], ["ok", "ok"])
    assert scores[0] == scores[1]


def test_an_answer_over_the_limit_is_masked_and_no_other(judge_of_160):
    scores = judge_of_160(PROMPTS, [TEXTS[0], "y" * 400, TEXTS[2], TEXTS[3]])
    assert scores.isnan().tolist() == [False, True, False, False]
    assert judge_of_160.input.over_limit["masked"] == 1


def test_the_limit_is_the_smaller_one_of_model_and_tokenizer(tmp_path):
    config, tokenizer = tiny_model("gpt2", n_positions=300).config, judge_tokenizer("gpt2")
    assert own_limit(config, tokenizer) == 300
    tokenizer.model_max_length = 128
    assert own_limit(config, tokenizer) == 128


def judge_without_number(folder, character) -> RewardModel:
    """A reward model whose score of a text with this character is NaN."""
    judge = RewardModel(write_classifier(folder))
    judge.load()
    number = AutoTokenizer.from_pretrained(folder)(character, add_special_tokens=False).input_ids[0]
    judge.model.get_input_embeddings().weight.data[number] = torch.nan
    return judge


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_model_with_weights_that_are_not_finite_is_rejected_at_load(tmp_path, value):
    folder = write_classifier(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data[0, 3] = value
    model.save_pretrained(folder)
    with raises_for(folder, "score.weight has 1 of "):
        load_judges([RewardModel(folder)], "cpu", "builtin:tiny-gemma2")


def test_a_score_that_is_not_a_number_masks_its_completion_and_no_other(tmp_path):
    judge = judge_without_number(tmp_path, "!")
    clean = judge(PROMPTS, TEXTS)
    scores = judge(PROMPTS, [TEXTS[0], "4!", *TEXTS[2:]])
    assert scores.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(scores[[0, 2, 3]], clean[[0, 2, 3]])

    def length(completions):
        return [len(text) for text in completions]

    composite = Scorer({"judge": Reward(judge), "length": Reward(length)})
    table = composite(PROMPTS, [TEXTS[0], "4!", *TEXTS[2:]], {}, group_size=2)
    assert table.valid.tolist() == [[True, False], [True, True]]
    assert composite.failures == {"judge": {"returned nan": 1}}


def test_a_model_that_gives_nothing_but_nan_stops_the_run(tmp_path):
    judge = judge_without_number(tmp_path, "4")
    composite = Scorer({"judge": Reward(judge)})
    with pytest.raises(RewardFailure, match=r"'judge'.*4 of 4"):
        composite(PROMPTS, ["4"] * 4, {}, group_size=2)


def test_several_models_judge_at_once(tmp_path):
    parts = {}
    for name in ("llama", "bert"):
        parts[name] = Reward(RewardModel(write_classifier(tmp_path / name, name)))
    table = Scorer(parts)(PROMPTS, TEXTS, {}, group_size=2)
    for name, part in parts.items():
        scores = part.function(PROMPTS, TEXTS).double().view(2, 2)
        assert torch.equal(table.components[name], scores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_it_computes_in_its_own_precision_inside_mixed_precision(dtype, tmp_path):
    judge = RewardModel(write_classifier(tmp_path), dtype=dtype)
    plain = judge(PROMPTS, TEXTS)
    assert plain.dtype == getattr(torch, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(judge(PROMPTS, TEXTS), plain)


def test_it_is_loaded_lazily_once_and_frozen(tmp_path):
    judge = RewardModel(write_classifier(tmp_path))
    assert judge.model is None
    judge.load()
    model = judge.model
    judge(PROMPTS, TEXTS)
    assert judge.model is model
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_it_goes_where_the_policy_is_or_where_it_is_told_to(tmp_path):
    folder = write_classifier(tmp_path)
    placed = {}
    for device in ("policy", "cpu"):
        judge = RewardModel(folder, device=device)
        load_judges([judge, len], "meta", "some_policy")
        placed[device] = judge.model.device.type
    assert placed == {"policy": "meta", "cpu": "cpu"}


def test_loading_leaves_the_random_numbers_of_the_run_alone(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    judge_tokenizer("llama").save_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    judges = [RewardModel(str(tmp_path), allow_policy_as_reward=True) for _ in range(2)]
    first, second = (judge(PROMPTS, TEXTS) for judge in judges)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, second)  # a resumed run gets the same random score


def test_the_policy_as_its_own_judge_is_refused_with_the_reason(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    judge_tokenizer("llama").save_pretrained(tmp_path)
    judge = RewardModel(str(tmp_path))
    for policy in (str(tmp_path), f"{tmp_path}/../{tmp_path.name}"):
        with pytest.raises(ValueError, match=r"is the policy itself.*allow_policy_as_reward: true"):
            judge.load("cpu", policy)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM\) was not trained to score"):
        judge.load("cpu", "another_policy")
    with pytest.raises(ValueError, match="is the policy itself"):
        RewardModel("builtin:tiny-gemma2").load("cpu", "builtin:tiny-gemma2")
    asked_for = RewardModel(str(tmp_path), allow_policy_as_reward=True)
    asked_for.load("cpu", str(tmp_path))
    assert asked_for(PROMPTS, TEXTS).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "score"}, "output is 'score'; it must be one of: logit, probability"),
        ({"dtype": "fp32"}, "dtype is 'fp32'"),
        ({"max_length": 0}, "max_length is 0; it must be at least 1"),
        ({"max_batch_tokens": -1}, "max_batch_tokens is -1"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardModel("m", **settings)


def test_what_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    # A run of one file imports the package before the environment says so, and would retry.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'nowhere/at-all' cannot be loaded"):
        RewardModel("nowhere/at-all").load()
    folder = write_classifier(tmp_path, "qwen2")
    for file in tmp_path.glob("tokenizer*"):
        file.rename(tmp_path / f"_{file.name}")
    with pytest.raises(ValueError, match="has no tokenizer files"):
        RewardModel(folder).load()
