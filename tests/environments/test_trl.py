"""Classes and functions for TRL's GRPOTrainer, played by TRL's loop and by litgrpo's.

`python -m tests.environments.adapters.foreign trl` runs this where TRL is installed.
"""

import asyncio
import copy
import json

import pytest
from datasets import Dataset
from transformers.utils import get_json_schema

from litgrpo.environments import Tools
from tests.support.models import byte_tokenizer, tiny_model

trl = pytest.importorskip("trl", reason="run by: python -m tests.environments.adapters.foreign trl")
pytestmark = pytest.mark.filterwarnings("ignore")


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first
        b: the second

    Returns:
        Their product.
    """
    return a * b


async def shout(text: str, times: int = 1) -> str:
    """Say a text loudly.

    Args:
        text: what to say
        times: how often
    """
    await asyncio.sleep(0)
    return text.upper() * times


class Counter:
    """A text at the start, a plain and an async tool, errors, and a separate reward."""

    def __init__(self) -> None:
        self.at = -1

    def reset(self, target: int, **row) -> str | None:
        self.at, self.target = 0, target
        return f" The target is {target}; {sorted(row)[:1]}."

    def add(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: how much

        Returns:
            Where it stands.
        """
        if self.at + step > 10:
            raise ValueError("Too far.")
        self.at += step
        return self.at

    async def where(self, unit: str = "steps") -> str:
        """Read the counter.

        Args:
            unit: a word for it
        """
        return f"{self.at} {unit}"

    def get_reward(self) -> float:
        return 1.0 - abs(self.target - self.at) / 8

    def _private(self) -> None: ...


class Doors:
    """Another one, with an async reward and no text at the start."""

    def reset(self, **row) -> None:
        self.open: list[str] = []

    def enter(self, door: str, quietly: bool = True) -> str:
        """Enter a door.

        Args:
            door: which (choices: ["red", "blue"])
            quietly: without a noise
        """
        self.open.append(door)
        return f"You are behind the {door} door. " + "\u00fc" * (not quietly)

    async def get_reward(self) -> float:
        return 0.25 * len(self.open)


def call(name: str, /, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


COUNTS = [
    [call("add", step=3), call("add", step=4) + "\n" + call("add", step=1), "It is 8."],
    [call("add", step=9), call("add", step=5), call("nothing"), call("where"), "9"],
    [call("where", unit="m"), "I give up."],
    ["No call."],
]
ROOMS = [
    [call("enter", door="red") + "\n" + call("enter", door="blue", quietly=False), "Two."],
    ["None."],
]
PRODUCTS = [
    [call("multiply", a=347, b=82), call("shout", text="28454", times=2), "28454"],
    ["I know it."],
]


def trainer_of(folder, rows: int, **given):
    """A real GRPOTrainer with a random model and Qwen3's chat template."""
    tokenizer = byte_tokenizer()
    marks = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens(marks)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = trl.chat_template_utils.qwen3_chat_template
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        num_generations=2,
        max_completion_length=3_000,
        report_to=[],
        use_cpu=True,
        bf16=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    model = tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=8_000)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "environment": "a"}])
    return trl.GRPOTrainer(
        model, args=settings, train_dataset=data, processing_class=tokenizer, **given
    )


def play_with_trl(trainer, rows: list[dict], scripts: list[list[str]], monkeypatch):
    """Play these turns with TRL's loop; return prompts, messages, rewards."""
    turns, seen = [0] * len(scripts), {}

    def says(prompt_ids, *_, **__):
        active = [n for n, script in enumerate(scripts) if turns[n] < len(script)]
        assert len(active) == len(prompt_ids), "TRL ended another episode than the script"
        texts = [scripts[n][turns[n]] + "<|im_end|>" for n in active]
        for n in active:
            turns[n] += 1
        encoded = trainer.processing_class(texts, add_special_tokens=False).input_ids
        return encoded, [[-1.0] * len(ids) for ids in encoded]

    def score(inputs, prompts, completions, completion_ids):
        table = rewards(inputs, prompts, completions, completion_ids)
        seen.update(prompts=prompts, messages=completions, rewards=table.nansum(1).tolist())
        return table

    rewards = trainer._calculate_rewards
    monkeypatch.setattr(trainer, "_generate_single_turn", says)
    monkeypatch.setattr(trainer, "_calculate_rewards", score)
    trainer._generate_and_score_completions(copy.deepcopy(rows))
    return seen


def play_here(tools: Tools, row: dict, script: list[str]):
    """Play the episode here; return prompt, observations, total reward, failed calls."""
    episode = copy.deepcopy(tools)
    added = episode.reset(row | {"prompt": row["prompt"][-1]["content"]}, 0)
    answers = [episode.step(said) for said in script]
    assert [each.done for each in answers] == [False] * (len(script) - 1) + [True]
    heard = [message for each in answers if not each.done for message in each.observation]
    failed = sum(failed for each in answers for _, failed in each.calls.values())
    return row["prompt"][-1]["content"] + added, heard, sum(each.reward for each in answers), failed


def error_free(messages: list[dict]) -> list[tuple[str, str]]:
    """(tool, what it returned); errors, which are worded in other ways, by that they are some."""
    return [
        (each["name"], "error" if "error" in each["content"] else each["content"])
        for each in messages
        if each["role"] == "tool"
    ]


def known(messages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without the names of tools that are not there: here they are all `unknown`."""
    return [("unknown" if name == "nothing" else name, text) for name, text in messages]


def assert_the_same(seen, tools: Tools, rows: list[dict], scripts: list[list[str]]) -> int:
    failures = 0
    for n, (row, script) in enumerate(zip(rows, scripts, strict=True)):
        prompt, heard, reward, failed = play_here(tools, row, script)
        failures += failed
        assert prompt == seen["prompts"][n][-1]["content"]
        assert error_free(heard) == known(error_free(seen["messages"][n]))
        assert reward == pytest.approx(seen["rewards"][n])
    return failures


def schemas(tools) -> dict:
    return {each["function"]["name"]: each for each in tools}


def rows_of(number: int, **columns) -> list[dict]:
    asked = [{"role": "user", "content": "Question"}]
    return [{"prompt": asked, "target": 8} | columns for _ in range(number)]


def test_a_class_of_tools_plays_as_in_trl(tmp_path, monkeypatch):
    rows = rows_of(len(COUNTS), hint="x")
    trainer = trainer_of(tmp_path, len(rows), environment_factory=Counter)
    seen = play_with_trl(trainer, rows, COUNTS, monkeypatch)
    tools = Tools(factory=Counter)
    failures = assert_the_same(seen, tools, rows, COUNTS)
    assert schemas(tools.tools) == schemas(map(get_json_schema, trainer.tools))
    mode = "train" if trainer.model.training else "eval"
    frequency = trainer._metrics[mode]["tools/failure_frequency"][0]
    assert frequency == pytest.approx(failures / sum(row.count("<tool_call>") for row in flat()))


def flat() -> list[str]:
    return [turn for script in COUNTS for turn in script]


def test_classes_that_a_column_names_play_as_in_trl(tmp_path, monkeypatch):
    makes = {"count": Counter, "doors": Doors}
    rows = rows_of(2, environment="count") + rows_of(2, environment="doors")
    scripts = COUNTS[:2] + ROOMS
    trainer = trainer_of(tmp_path, len(rows), environment_factory=makes, tools=[multiply])
    seen = play_with_trl(trainer, rows, scripts, monkeypatch)
    tools = Tools(functions=[multiply], factory=makes)
    assert_the_same(seen, tools, rows, scripts)
    assert schemas(tools.tools) == schemas(map(get_json_schema, trainer.tools))


def test_functions_play_as_in_trl(tmp_path, monkeypatch):
    rows = rows_of(2)

    def no_reward(completions, **_):
        return [0.0] * len(completions)

    given = {"tools": [multiply, shout], "reward_funcs": no_reward}
    trainer = trainer_of(tmp_path, len(rows), **given)
    seen = play_with_trl(trainer, rows, PRODUCTS, monkeypatch)
    tools = Tools(functions=[multiply, shout])
    assert not assert_the_same(seen, tools, rows, PRODUCTS)
    assert schemas(tools.tools) == schemas(map(get_json_schema, trainer.tools))
