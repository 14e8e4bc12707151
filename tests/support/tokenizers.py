"""Tokenizers that add, close and prepend, as those of pretrained models do."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
WORDS = ["yes", "no", "user", "assistant", "Question", "\n\n", "12"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BEGINS = {"single": "<bos> $A", "special_tokens": [("<bos>", 1)]}
CLOSES = {"single": "<bos> $A <eos>", "special_tokens": [("<bos>", 1), ("<eos>", 2)]}
ONLY_CLOSES = {"single": "$A <eos> <eos>", "special_tokens": [("<eos>", 2)]}
KINDS = ("byte level", "first", "always", "never", "prepend", "prefix space")


def merges_of(words):
    """Return merges that build the words from their first two characters on."""
    found = []
    for word in words:
        found += [(word[:n], word[n]) for n in range(1, len(word)) if (word[:n], word[n])]
    return list(dict.fromkeys(found))


def tokenizer_of(kind, template=CHATML, post=BEGINS):
    if kind in ("byte level", "prefix space"):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [word.replace("\n", "Ċ") for word in WORDS] + ["Ġyes", "Ġno"]
    else:
        alphabet = sorted({*map(chr, range(32, 127)), "\n", "▁"})
        words = [*WORDS, "▁yes", "▁no", "▁user"]
    merges = merges_of(words)
    vocab = dict.fromkeys([*SPECIAL, *alphabet, *(a + b for a, b in merges)])
    vocab = {token: number for number, token in enumerate(vocab)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if kind in ("byte level", "prefix space"):
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space")
        fast.decoder = decoders.ByteLevel()
    elif kind == "prepend":  # as the fast tokenizer of Llama 2
        fast.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        fast.decoder = decoders.Metaspace(prepend_scheme=kind)
    fast.post_processor = processors.TemplateProcessing(**post)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer
