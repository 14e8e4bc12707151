"""Small sequence classification models of random weights, written to a folder."""

from pathlib import Path

import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.support.models import ARCHITECTURES, byte_tokenizer

SIZES = {name: sizes for name, sizes in ARCHITECTURES.items() if name != "t5"} | {
    "bert": dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.3,
        pad_token_id=0,
    )
}
CHAT = (
    "<bos>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def judge_tokenizer(architecture: str, *, chat: str | None = None) -> PreTrainedTokenizerFast:
    """The byte tokenizer; BERT's puts an end token after each of two texts and numbers them."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat
    if architecture == "bert":
        pair = "<bos> $A <eos> $B:1 <eos>:1"
        special = [("<bos>", 1), ("<eos>", 2)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", pair=pair, special_tokens=special
        )
        tokenizer.sep_token = "<eos>"
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def write_classifier(
    folder: Path,
    architecture: str = "llama",
    *,
    labels: tuple[str, ...] = ("score",),
    chat: str | None = None,
    pad: bool = True,
    **sizes,
) -> str:
    """A folder that `AutoModelForSequenceClassification.from_pretrained` loads.

    Args:
        folder: where.
        architecture: of `SIZES`.
        labels: names of the labels.
        chat: the tokenizer's chat template.
        pad: whether model and tokenizer have a padding token.
        sizes: more settings of the model.
    """
    config = AutoConfig.for_model(architecture, **{"vocab_size": 259} | SIZES[architecture] | sizes)
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: number for number, name in enumerate(labels)}
    config.pad_token_id, config.bos_token_id, config.eos_token_id = (0 if pad else None), 1, 2
    tokenizer = judge_tokenizer(architecture, chat=chat)
    if not pad:
        tokenizer.pad_token = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
