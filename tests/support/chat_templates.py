"""Chat templates of several model families, and a tokenizer that merges tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from litgrpo.data.rendering import Chat
from litgrpo.rollout.chat_format import ChatFormat
from litgrpo.rollout.turn_format import TemplateFormat

ASKS = "{% if add_generation_prompt %}"
# Tools in a system message, results in user messages; a later user message drops thoughts.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    f"{ASKS}<|im_start|>assistant\n{{% endif %}}"
)
FORGETS = QWEN.replace(
    "{{ m.content }}{% for c",
    "{{ m.content.split('</think>')[-1].lstrip('\n') if messages[-1].role == 'user' "
    "else m.content }}{% for c",
)
# Texts without the spaces around them; any role is written.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    f"{ASKS}<|start_header_id|>assistant<|end_header_id|>\n\n{{% endif %}}"
)
# Only alternating user and model messages.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    f"{ASKS}<start_of_turn>model\n{{% endif %}}"
)
# Messages are lists of parts.
IMAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% for part in m.content %}{{ part.text }}"
    f"{{% endfor %}}<|im_end|>\n{{% endfor %}}{ASKS}<|im_start|>assistant\n{{% endif %}}"
)
# The role token of the next message ends a turn.
NEXT_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    f"{ASKS}<|assistant|>\n{{% endif %}}"
)
# Results in later turns begin with other text than the first result.
COUNTS = QWEN.replace("{{ '\n' }}<tool", "{{ '' if loop.index0 > 2 else '!' }}<tool")
SPECIAL = (
    *("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>"),
    *("<|assistant|>", "<|tool|>"),
)
MERGES = [("Ċ", "Ċ"), ("t", "h"), ("Ċ", "3"), ("Ċ", "I"), ("1", "7"), ("Ġ", "3")]


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes, a few pairs of them (also of line breaks), and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in MERGES)]
    vocab = {token: number for number, token in enumerate(tokens)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([*SPECIAL])
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **named)
    tokenizer.chat_template = template
    return tokenizer


def spacing_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer of letters that prepends a space to every text, as SentencePiece does."""
    letters = sorted({chr(n) for n in range(32, 127)} | {"\n", "\u2581"})
    vocab = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast.decoder = decoders.Metaspace(prepend_scheme="first")
    fast.add_special_tokens([*SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def chat_format(template: str, *ends: str, **settings) -> ChatFormat:
    """Return a template's chat format; `ends` are its end tokens, by default `<|im_end|>`."""
    tokenizer = merging_tokenizer(template)
    end_ids = tokenizer.convert_tokens_to_ids([*(ends or ["<|im_end|>"])])
    chat = settings.pop("chat", Chat())
    return ChatFormat(tokenizer, chat, tuple(end_ids), **settings)


def turn_format(template: str, *ends: str, **settings) -> TemplateFormat:
    """Return the turn format of a template, without verifying it."""
    made = chat_format(template, *ends, **settings)
    return TemplateFormat(made)
