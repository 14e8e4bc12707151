"""Code of a model folder is never run, and no question asks whether it may be."""

import ast
import builtins
import json
import sys
from pathlib import Path

import pytest

import litgrpo
from litgrpo import GRPO
from litgrpo.data.tokenization import load_tokenizer as load_data_tokenizer
from litgrpo.models.loading.load import load_policy, load_tokenizer
from litgrpo.plan.sizes import load_config
from litgrpo.rewards import RewardModel
from tests.support.models import byte_tokenizer, tiny_model

SOURCE = Path(litgrpo.__file__).parent
# These classes read JSON only and have no such argument.
ONLY_JSON = {"LoraConfig", "GenerationConfig"}


def loading_calls():
    """Yield (place, call) of each `X.from_pretrained(...)` and `X.from_config(...)`."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if named and node.func.attr in ("from_pretrained", "from_config"):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node


def test_every_call_that_loads_from_a_folder_rejects_its_code():
    calls = [*loading_calls()]
    assert len(calls) > 10
    for place, call in calls:
        if ast.unparse(call.func.value) in ONLY_JSON:
            continue
        given = {each.arg: each.value for each in call.keywords}
        assert "trust_remote_code" in given, place
        assert ast.literal_eval(given["trust_remote_code"]) is False, place


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model folder whose config, model and tokenizer are code that writes a file."""
    tiny_model("llama").save_pretrained(tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nclass Mine: pass\n"
    (tmp_path / "m" / "mine.py").write_text(code)
    for name, entries in {
        "config.json": {
            "AutoConfig": "mine.Mine",
            "AutoModelForCausalLM": "mine.Mine",
            "AutoModelForSequenceClassification": "mine.Mine",
        },
        "tokenizer_config.json": {"AutoTokenizer": [None, "mine.Mine"]},
    }.items():
        path = tmp_path / "m" / name
        settings = json.loads(path.read_text()) | {"auto_map": entries}
        settings |= (
            {"tokenizer_class": "Mine"} if name.startswith("tok") else {"model_type": "mine"}
        )
        path.write_text(json.dumps(settings))

    def answer(question=""):
        raise AssertionError(f"asked: {question}")

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    yield str(tmp_path / "m")
    assert not ran.exists()


@pytest.mark.parametrize(
    "load",
    [
        load_tokenizer,
        load_data_tokenizer,
        load_policy,
        load_config,
        lambda folder: GRPO(folder, rewards=len).fit_tokenizer(),
        lambda folder: RewardModel(folder).load("cpu"),
    ],
)
def test_code_in_a_folder_is_an_error_without_a_question(folder, load):
    with pytest.raises(ValueError, match=r"(?s)\w"):
        load(folder)
