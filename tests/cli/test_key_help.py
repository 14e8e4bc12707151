from pathlib import Path

import pytest

from litgrpo.cli.key_help import asked, class_named, keys_of, roots_of, subclasses
from litgrpo.models.loading import LoRA
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.training.grpo import GRPO
from litgrpo.training.sft import SFT
from tests.cli.running import cli  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model", "--model.group_size: int = 8"),
        ("model.lora", "--model.lora.rank: int = 16"),
        ("model.rewards", "--model.rewards.weight: float = 1.0"),
        ("model.rewards.correct", "--model.rewards.correct.kwargs: dict[str, Any] = {}"),
        ("model.controllers.kl", "--model.controllers.kl.target: float"),
        ("model.objective.surrogate", "clip_low: float = 0.2"),
        ("model.objective.kl", "litgrpo.algorithms.kl.k1"),
        ("model.engine", "StaticEngine:"),
        ("model.engine.max_rows", "--model.engine.max_rows: int | null = null"),
        ("model.optimizer", "--model.optimizer.weight_decay: float = 0.01"),
        ("model.lr_scheduler", "WarmupCosine:"),
        ("model.group_size", "completions of each prompt"),
        ("data.train", "--data.train.limit: int | null = null"),
        ("data.chat", "enable_thinking"),
        ("trainer.devices", "The devices to use"),
        ("checkpoint", "--checkpoint.keep_last: int = 2"),
    ],
)
def test_every_group_of_keys_has_help(cli, key, said):  # noqa: F811
    code, out, err = cli("fit", f"--{key}.help")
    assert (code, err) == (0, "")
    assert said in out


def test_a_class_can_be_asked_for(cli):  # noqa: F811
    assert "--model.engine.dtype" not in cli("fit", "--model.engine.help", "StaticEngine")[1]
    assert "--model.scratch: Scratch" in cli("fit", "--model.help", "SFT")[1]
    assert "--model.lr_scheduler.warmup" in cli("fit", "--model.lr_scheduler.help=WarmupLinear")[1]


def test_help_follows_the_recipe(cli):  # noqa: F811
    Path("sft.yaml").write_text("model: {class_path: litgrpo.SFT}\ndata: {class_path: PairData}\n")
    assert "--model.max_grad_norm" in cli("fit", "-c", "sft.yaml", "--model.help")[1]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.lorra", "there is no key 'model.lorra' (did you mean 'lora'?): it has pretrained,"),
        ("modle", "there is no key 'modle' (did you mean 'model'?)"),
        ("model.group_size.x", "it has no keys of its own"),
    ],
)
def test_a_wrong_key_is_refused_in_one_line(cli, key, said):  # noqa: F811
    code, _, err = cli("fit", f"--{key}.help")
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_wrong_class_is_refused_in_one_line(cli):  # noqa: F811
    code, _, err = cli("fit", "--model.engine.help", "StaticEngin")
    assert (code, err) == (
        2,
        "error: there is no class 'StaticEngin' (did you mean 'StaticEngine'?)\n",
    )


def test_the_question_is_found_wherever_it_stands():
    assert asked(["-c", "a.yaml", "--model.lora.help", "-x"]) == ("model.lora", "")
    assert asked(["--model.help", "SFT"]) == ("model", "SFT")
    assert asked(["--model.lora.rank", "3"]) is None


def test_classes_come_from_the_command_line_or_are_ours():
    assert roots_of([], {})["model"] is GRPO
    assert roots_of(["--model", "SFT"], {})["model"] is SFT
    assert class_named("litgrpo.GRPO", [object]) is GRPO


def test_keys_are_a_classs_arguments():
    assert [key.name for key in keys_of(LoRA, "model.lora")][:2] == [
        "model.lora.rank",
        "model.lora.alpha",
    ]
    assert RolloutEngine not in subclasses(RolloutEngine)
