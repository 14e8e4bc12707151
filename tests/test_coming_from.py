"""Pages for users of other trainers: their options have a row, litgrpo's options exist."""

import json
import re
import shlex
from importlib import import_module
from inspect import signature
from pathlib import Path

import datasets
import pytest
import yaml

from litgrpo import PairData, PromptData
from litgrpo.types import PromptBatch
from tests.support.models import byte_tokenizer
from tests.support.recipes import CONFIGS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "coming_from_earlier_trainers.md"
# The three sections of the page, in its order.
A, B, C = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
SECTIONS = {"A": A, "B": B, "C": C}
# Every name that users of the three look for.
NAMES = {
    "A": """use_grpo num_completions_per_prompt generation_max_length generation_temperature
        generation_top_p generation_top_k normalize_advantages advantage_epsilon use_kl_penalty
        kl_penalty_coef output_dir num_epochs batch_size learning_rate model_path question""",
    "B": """AutoModelForSequenceClassification num_labels=1 num_generations_per_prompt
        max_new_tokens temperature top_k top_p learning_rate batch_size num_epochs
        gradient_accumulation_steps max_grad_norm warmup_steps kl_coef clip_range gamma
        logging_steps save_steps output_dir use_wandb wandb_project wandb_run_name device
        model-name final_model/ checkpoint-{step}/ from_pretrained generate""",
    "C": """reader_rl_learning use_grpo grpo_group_size grpo_kl_coeff grpo_top_k_ratio
        reference_model_path gold_score_mode f1rougebleudist name checkpoint_dir train_data
        eval_data per_gpu_batch_size""",
}
TRL_PAGE = ROOT / "docs" / "howto" / "coming_from_trl.md"
FEATURES = {
    "A": """JSON configuration; Python API; custom data set; reward functions alone; composite;
        reshape; detached advantages; KL as; clip the gradients; optimizer step; N > 1; tokenizer;
        prompt-only; rows = B * N; divisible by N; group means of 0; first three groups;
        policy loss; mean reward; mean and std of advantages; supervised; carry the configuration;
        correctness; reasoning coherence; explanation quality; older composite: quality;
        older composite: safety; older composite: diversity; older composite: coherence;
        prompts only; input-output pairs; TPU launch script; inference; guide; flow diagram;
        troubleshooting;
        Python 3.8; torch-xla; Gemma 2""",
    "B": """policy; frozen reference; reward model; tokenizer; prompt list; Hub data set; config;
        training state; progress bar; smaller batches; fewer generations; gradient checkpointing;
        mixed precision; out of memory; slow training; poor results""",
    "C": """supervised; loss of REINFORCE; advantage (r - mean) / std; advantage (r - mean) / mean;
        coefficient * (logp - ref logp); decoder target; retrieved stories;
        rewards for all k responses at once; T5 reader; JSONL; evaluation on held-out dialogues;
        experiment: conservative; experiment: exploration; experiment: pre-trained reference""",
}
# What stands before the keys of a section, so that they have something to change.
# GRPO, and supervised training where there is some.
RECIPES = {
    "A": ("reasoning_gemma2_2b.yaml", "reasoning_gemma2_2b_sft.yaml"),
    "B": ("reward_model_qwen2.5_1.5b.yaml",),
    "C": ("convai2_small.yaml", "convai2_small_sft.yaml"),
}
# On the command line, `--model.group_size 4`, or in YAML, `model.group_size: 4`.
KEY = re.compile(r"`(--[^`]+)`")
YAML_KEY = re.compile(r"`((?:model|data|trainer)\.[\w.]+): ([^`]+)`")
PATH = re.compile(r"\blitgrpo(?:\.\w+)+")
systems = pytest.mark.parametrize("system", SECTIONS)


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def spans(text: str) -> set[str]:
    """Texts between backticks, and each of their words."""
    found = re.findall(r"`([^`]+)`", text)
    return {" ".join(span.split()) for span in found} | {w for span in found for w in span.split()}


@systems
def test_every_old_name_has_a_row_of_its_own(system):
    named = {name for row in rows(SECTIONS[system]) for name in spans(row[0])}
    assert not set(NAMES[system].split()) - named


@systems
def test_every_old_feature_has_a_row(system):
    told = [row[0].replace("`", "") for row in rows(SECTIONS[system])]
    wanted = [" ".join(feature.split()) for feature in FEATURES[system].split(";")]
    assert not [feature for feature in wanted if not any(feature in row for row in told)]


@systems
def test_every_row_says_what_to_do(system):
    assert all(all(row[:2]) for row in rows(SECTIONS[system]))


@systems
def test_every_key_of_a_section_is_a_key_of_the_program(system, program, capsys):
    text = SECTIONS[system]
    given = [shlex.split(span) for span in KEY.findall(text)]
    given += [[f"--{key}", value] for key, value in YAML_KEY.findall(text)]
    given = [words for words in given if words[0] not in ("--ckpt_path", "--model.class_path")]
    assert len(given) >= 10
    classes = [words for words in given if words[0] in ("--model", "--data")]
    assert all(words[1] in CLASSES for words in classes)
    of_pairs = [words for words in given if words[0].removeprefix("--data.") in ONLY_PAIRS]
    keys = [word for words in given if words not in classes + of_pairs for word in words]
    config = config_of(program, capsys, RECIPES[system][0], keys)
    # The last of a key's values is what counts.
    last = dict(zip(keys[::2], keys[1::2], strict=True))
    assert str(config["model"]["init_args"]["group_size"]) == last["--model.group_size"]
    assert last.keys() >= {"--model.group_size", "--model.objective.kl_coef", "--run_dir"}
    if of_pairs:
        config_of(
            program, capsys, RECIPES[system][1], [word for words in of_pairs for word in words]
        )


def config_of(program, capsys, recipe: str, words: list[str]) -> dict:
    """Parse the recipe, followed by these arguments."""
    with pytest.raises(SystemExit) as stop:
        program("fit", "-c", CONFIGS / recipe, *words, "--print_config")
    shown = capsys.readouterr()
    assert (stop.value.code, shown.err) == (0, "")
    return yaml.safe_load(shown.out)


ONLY_PAIRS = signature(PairData).parameters.keys() - signature(PromptData).parameters.keys()
CLASSES = ("GRPO", "SFT", "PromptData", "PairData")


@systems
def test_everything_that_a_section_imports_is_there(system):
    for path in set(PATH.findall(SECTIONS[system])):
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name) is not None


VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"split": "train", "index": n, "question": f"What is {n} + 1?"},
    }
    for n in range(6)
]


def prompts_of(data: PromptData, monkeypatch) -> PromptBatch:
    """The training prompts, with a tokenizer of bytes whose chat format writes the roles."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    )
    monkeypatch.setattr(PromptData, "find_tokenizer", lambda *_: tokenizer)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def test_the_page_for_users_of_verl_reads_verls_file(tmp_path, monkeypatch):
    page = (TRL_PAGE.parent / "coming_from_verl.md").read_text()
    (recipe,) = re.findall(r"```yaml\n(# litgrpo.+?)```", page, re.DOTALL)
    settings = yaml.safe_load(recipe)["data"]
    (named,) = set(re.findall(r"`data.columns: ({.+?})`", page))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(VERL_ROWS).to_parquet(settings.pop("train"))
    data = PromptData(
        "train.parquet",
        columns=yaml.safe_load(named),
        **settings | {"batch_size": 6},
    )
    batch = prompts_of(data, monkeypatch)
    n = batch.prompts.index("user: What is 3 + 1?\n")
    assert batch.columns["ground_truth"][n] == "4"
    assert batch.columns["extra_info"][n]["index"] == 3
    (code,) = re.findall(r"```python\n(# my_rewards.py.+?)```", page, re.DOTALL)
    names = {"compute_score": lambda source, text, truth: float(text == truth)}
    exec(code, names)
    rewards = names["score"](batch.prompts, [str(k + 1) for k in range(6)], **batch.columns)
    assert sum(rewards) == sum(int(t) == k + 1 for k, t in enumerate(batch.columns["ground_truth"]))


def test_the_page_for_users_of_trl_reads_their_data(tmp_path, monkeypatch):
    code = next(
        each
        for each in re.findall(r"```python\n(.+?)```", TRL_PAGE.read_text(), re.DOTALL)
        if "PromptData(" in each
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path("train.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1?", "answer": str(n + 1)}) + "\n" for n in range(60))
    )
    names = {}
    # The rest of the page's listing loads a model of the Hub.
    start, stop = code.index("module ="), code.index("data = PromptData(")
    exec(code[:start] + code[stop : code.index("trainer =")], names)
    batch = prompts_of(names["data"], monkeypatch)
    assert batch.prompts[0] == f"user: {batch.columns['question'][0]}\n"
    assert names["right"](completions=batch.columns["answer"], **batch.columns) == [1.0] * 8
    assert names["data"].sets["val"].ids
