"""What stands between the turns of a run."""

from types import SimpleNamespace

import pytest

from litgrpo.data.rendering import Chat
from litgrpo.environments import Tools
from litgrpo.modules.bridges import bridge_of
from litgrpo.modules.prompt_data import PromptData
from litgrpo.rollout.bridge import Inline
from litgrpo.rollout.chat_bridge import Template
from litgrpo.rollout.episode_settings import EpisodeSettings
from litgrpo.rollout.sampling import Sampling
from tests.rollout.chat_templates import GEMMA, QWEN, merging_tokenizer


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: to be doubled.
    """
    return 2 * number


def made(tmp_path, template, end, *, tools=True, stop=(), chat=True, **settings):
    """The bridge of a run with this chat template, whose policy ends turns with `end`."""
    tokenizer = merging_tokenizer(template)
    tokenizer.save_pretrained(tmp_path)
    environment = Tools(functions=[double]) if tools else object()
    data = PromptData(predict=["hi"], chat=chat, tokenizer=str(tmp_path))
    data.setup("predict")
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (end, *stop)}
    sampling = Sampling(stop_token_ids=[ids[name] for name in stop])
    trainer = SimpleNamespace(datamodule=data)
    module = SimpleNamespace(
        trainer=trainer, _trainer=trainer, settings=SimpleNamespace(sampling=sampling)
    )
    policy = SimpleNamespace(tokenizer=tokenizer, eos_ids=(ids[end],))
    return bridge_of(module, environment, EpisodeSettings(**settings), policy)


def test_the_chat_settings_of_the_data_stand_between_turns_too(tmp_path):
    bridge = made(tmp_path, QWEN, "<|im_end|>", chat=Chat(kwargs={"mood": "!"}))
    assert isinstance(bridge, Template)
    assert bridge.format.chat.kwargs == {"mood": "!"}
    assert bridge.ids([{"role": "tool", "content": "42"}], ended=True)


def test_a_text_stands_as_it_is_where_the_recipe_wants_it(tmp_path):
    assert isinstance(made(tmp_path, GEMMA, "<end_of_turn>", between="inline"), Inline)


def test_tools_need_a_template_that_knows_them(tmp_path):
    with pytest.raises(ValueError, match="tool_role: user"):
        made(tmp_path, GEMMA, "<end_of_turn>")
    assert made(tmp_path, GEMMA, "<end_of_turn>", tool_role="user")
    assert made(tmp_path, GEMMA, "<end_of_turn>", tools=False)


def test_the_sampling_may_name_the_template_s_end_token(tmp_path):
    with pytest.raises(ValueError, match="stop_token_ids"):
        made(tmp_path, QWEN, "<eos>")
    assert made(tmp_path, QWEN, "<eos>", stop=["<|im_end|>"])


def test_plain_prompts_have_no_chat_format_between_turns(tmp_path):
    with pytest.raises(ValueError, match=r"`data.chat: true`"):
        made(tmp_path, QWEN, "<|im_end|>", chat=False)
