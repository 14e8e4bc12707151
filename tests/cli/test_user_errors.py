"""Unreadable recipes and data, impossible requests, closed streams: mistakes from outside.

Each ends in one line that names what is wrong. Settings that a class rejects are tested with the
class; the spelling of options is tested in `test_mistakes.py`.
"""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from litgrpo.cli.console import keep_quiet
from litgrpo.cli.help import option_page
from litgrpo.cli.recipes import read_recipe, recipe_file
from litgrpo.environments.episode import check_result
from litgrpo.models.loading.load import load_policy
from litgrpo.modules.episode_setup import check_environment
from litgrpo.rewards.llm_judge import LLMJudge
from tests.support.command_line import QUICK, ROOT, error_of
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.raises import raises_for

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
# {what a recipe is: (its content, what the message has)}
RECIPES = {
    "empty": ("", ["is an empty recipe"]),
    "comments": ("# nothing\n", ["is an empty recipe"]),
    "a list": ("- model\n- data\n", ["list"]),
    "a number": ("5\n", ["int"]),
    "a text": ("just text", ["str"]),
    "a number as key": ("5: 6\n", ["is not a key"]),
    "a tab": ("model:\n\tgroup_size: 4\n", ["line 2", "indent with spaces"]),
    "an open bracket": ("model: [1, 2\ndata: {}\n", ["line 2", "close the bracket"]),
    "a colon in a text": ("data: {chat: {}}\nrun_dir: a: b\n", ["line 2", "quote"]),
    "braces in a text": ("data:\n  template: {{ prompt }}\n", ["line 2", "quote a text"]),
    "a bomb": (BOMB, ["more than 100,000 values"]),
    "brackets": ("a: " + "[" * 10_000, ["more than 64 nested"]),
    "braces": ("a: " + "{a: " * 10_000, ["more than 64 nested"]),
    "levels": ("- " * 1_000 + "x\n", ["more than 64 nested"]),
    "a list in itself": ("a: &a [*a]\n", ["contains itself"]),
    "a Python object": ("a: !!python/object:os.system {}\n", ["not valid YAML"]),
    "5,000 digits": (f"run_dir: {'9' * 5_000}\n", ["not valid YAML"]),
    "UTF-16": ("model: {}\n".encode("utf-16"), ["UTF-8"]),
    "UTF-16 without a mark": ("model: {}\n".encode("utf-16-le"), ["YAML"]),
    "bytes": (bytes(range(256)), ["UTF-8"]),
    "control characters": (b"model: \x00\x01\n", ["not valid YAML"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_an_unreadable_recipe_is_named(name, tmp_path):
    content, expected = RECIPES[name]
    file = tmp_path / "mine.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises_for("mine.yaml", *expected):
        read_recipe(str(file))


def test_an_unreadable_recipe_is_one_line(cli):
    Path("mine.yaml").write_text("model: [1\n")
    assert "mine.yaml" in error_of(cli, "fit", "-c", "quickstart", "-c", "mine.yaml")


def test_a_recipe_that_cannot_be_a_file_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    for word, text in (("here", "is a folder"), ("x" * 5_000, "cannot be a file")):
        with raises_for(text):
            recipe_file(word)
    with pytest.raises(ValueError, match="not found") as error:
        recipe_file("nothing_like_it")
    assert "did you mean" not in str(error.value)


# {options that are added to a training: what the message has}
OPTIONS = {
    f"--model.rewards {'[' * 10_000}": ["64 nested"],
    "--seed_everything -1": ["seed_everything is"],
    f"--seed_everything {10**20}": ["seed_everything is"],
    "--model.objective.kl_coef .nan": ["kl_coef is nan"],
    "--model.objective.kl_in_reward.coef 0": ["kl_in_reward.coef is 0"],
    "--model.objective grpo --model.objective.gamma 2": ["gamma is 2.0; it must be from 0 to 1"],
    "--model.objective.surrogate Clipped --model.objective.surrogate.clip_low 5": ["clip_low is 5"],
    "--model.sampling.top_p 2": ["top_p"],
    "--model.update.num_mini_batches 50": ["num_mini_batches is 50", "2 groups"],
    "--model.group_size 1000000000": ["model.group_size", "GiB"],
    "--trainer.accelerator cuda": ["trainer.accelerator is 'cuda'"],
    "--trainer.accelerator gpuu": ["trainer.accelerator is 'gpuu'", "did you mean 'gpu'"],
    "--trainer.devices 0": ["devices"],
    "--ckpt_path final_model": ["--model.pretrained final_model"],
    "--model.source StoredRollouts --model.source.run_dir other": [
        "model.source (StoredRollouts) is other",
        "--trainer.callbacks+ SaveRollouts",
    ],
    "--data.train [a,b]": ["reward 'correct' needs answer"],
    "--model.rewards {distinct_2:{function:litgrpo.rewards.correctness}}": ["distinct_2"],
    "--data.train a.jsonl --model.rewards {code:{function:litgrpo.rewards.unit_tests}}": ["got 3"],
}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options[:60])
def test_options_that_are_impossible_for_this_machine_or_data_are_one_line(
    cli, monkeypatch, options
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("final_model").mkdir()
    Path("final_model/config.json").write_text("{}")
    Path("a.jsonl").write_text('{"prompt": "Write f.", "answer": "2", "tests": 3}\n' * 2)
    words = [word.replace(":{", ": {").replace(":l", ": l") for word in options.split()]
    line = error_of(cli, *QUICK.split(), *words)
    assert not [text for text in OPTIONS[options] if text not in line]
    assert not list(Path().rglob("events.out*"))


def test_an_unreachable_server_ends_with_the_code_of_a_temporary_failure(cli):
    engine = "--model.engine ServerEngine --model.engine.wait_s 1 --model.check_invariants false"
    words = [*QUICK.split(), *engine.split(), "--model.engine.urls", "['http://127.0.0.1:9']"]
    line = error_of(cli, *words, code=75)
    assert "127.0.0.1:9" in line
    assert "model.engine.wait_s" in line


@pytest.mark.parametrize(
    ("option", "text"),
    {
        "model.lora": "--model.lora.rank",
        "model.rewards": "--model.rewards.NAME.weight",
        "data.train": "--data.train.limit",
        "data.chat": "enable_thinking",
        "model.optimizer": "weight_decay",
        "checkpoint": "--checkpoint.keep_last",
    }.items(),
)
def test_every_kind_of_option_has_help(option, text):
    for recipe in ([], ["-c", "quickstart"]):
        assert text in option_page(option, "", recipe)


def test_help_of_an_unknown_option_names_the_nearest(cli):
    assert "did you mean 'lora'" in error_of(cli, "fit", "--model.lorra.help")


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "a.bin").write_text("GGUF")
    with raises_for("a.bin", "without the ending .gguf"):
        load_policy(str(tmp_path / "a.bin"))


def test_an_environment_without_step_and_one_that_returns_a_text_are_named():
    class NoStep:
        def reset(self, row, seed):
            return ""

    with raises_for("`reset(row, seed)`"):
        check_environment(NoStep(), None, None, {})
    with raises_for("step returned str instead of StepResult", error=TypeError):
        check_result("higher")


def test_a_judge_without_its_key_names_the_variable(monkeypatch):
    monkeypatch.delenv("LITGRPO_UNSET", raising=False)
    judge = LLMJudge(
        "http://127.0.0.1:9/v1", "m", {"a": {"text": "b"}}, api_key_env="LITGRPO_UNSET"
    )
    with raises_for("LITGRPO_UNSET is not set"):
        judge.load()


REWARD = """
from litgrpo_test_beside_it import SCALE

def right(prompts, completions, log_metric, log_extra, **columns):
    log_metric("letters", sum(map(len, completions)))
    log_extra("first_letter", [text[:1] for text in completions])
    return [SCALE * len(text) for text in completions]
"""


def test_a_reward_beside_the_recipe_finds_a_module_beside_it(cli, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("recipes").mkdir()
    Path("recipes/litgrpo_test_reward.py").write_text(REWARD)
    Path("recipes/litgrpo_test_beside_it.py").write_text("SCALE = 2.0\n")
    Path("recipes/mine.yaml").write_text(
        "model: {rewards: {mine: {function: litgrpo_test_reward.right}}}\n"
    )
    assert cli(*QUICK.split(), "-c", "recipes/mine.yaml")[0] == 0
    assert "reward/letters" in Path("run/metrics.csv").read_text()
    assert "first_letter" in Path("run/samples/iteration-000001.jsonl").read_text()


def test_warnings_are_one_line_without_names_of_python(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    keep_quiet()
    text = warnings.formatwarning(UserWarning("all rewards\nare 0"), UserWarning, "a.py", 5)
    assert text == "warning: all rewards are 0\n"


def test_predictions_beyond_learned_positions_are_rejected(cli):
    tiny_model("gpt2", n_positions=64).save_pretrained("mine")
    byte_tokenizer().save_pretrained("mine")
    words = "predict --model.pretrained ./mine --trainer.accelerator cpu"
    length = ("--model.max_completion_length", "60")
    line = error_of(cli, *words.split(), *length, "--data.prompts", "What is 3+4?")
    assert "gpt2 has 64" in line
    assert "lower model.max_completion_length by" in line


def test_output_that_nobody_reads_is_no_error():
    command = [sys.executable, str(ROOT / "cli.py"), "--help"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
