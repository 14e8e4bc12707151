from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger

from litgrpo.algorithms.losses import Objective
from litgrpo.rewards.builtin.math import correctness
from litgrpo.rewards.scorer import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.training.grpo import GRPO
from litgrpo.training.hyper_parameters import NotDescribable, build, describe
from litgrpo.training.sft import SFT
from tests.support.raises import raises_for
from tests.support.sft import SCRATCH
from tests.support.training import batches, module

BUILTIN = "builtin:tiny-gemma2"


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "text"]},
        Objective(),
        LocalEngine(max_rows=4),
        Sampling(temperature=0.7),
        Reward(correctness, weight=0.5, kwargs={"x": 1}),
        torch.optim.AdamW,
    ],
)
def test_a_value_is_made_again_from_plain_ones(value):
    assert build(describe(value)) == value


def test_a_partial_keeps_its_arguments_and_a_lambda_is_not_plain():
    again = build(describe(partial(torch.optim.AdamW, lr=0.5)))
    assert (again.func, again.keywords) == (torch.optim.AdamW, {"lr": 0.5})
    for value in (lambda: 1, torch.nn.Linear(1, 1), {"a": [lambda: 1]}):
        with pytest.raises(NotDescribable):
            describe(value)


def save(module, path):
    """A checkpoint of a module that has changed its weights, without training it."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module.configure_model()
    with torch.no_grad():
        next(iter(module.policy.parameters())).add_(1)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.save_checkpoint(path)
    module.trainer = None
    return module


def equal_weights(one, other):
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    return all(a.equal(b) for a, b in pairs)


@pytest.mark.filterwarnings("ignore")
def test_grpo_is_loaded_from_its_checkpoint_alone(tmp_path):
    optimizer = partial(torch.optim.AdamW, lr=0.25)
    rewards = {"right": Reward(correctness)}
    module = GRPO(BUILTIN, rewards, group_size=3, sampling=Sampling(top_k=5), optimizer=optimizer)
    save(module, tmp_path / "a.ckpt")
    again = GRPO.load_from_checkpoint(tmp_path / "a.ckpt")
    assert equal_weights(module, again)
    assert (again.group_size, again.sampling.top_k) == (3, 5)
    assert again.optimizer.keywords == {"lr": 0.25}
    changed = GRPO.load_from_checkpoint(str(tmp_path / "a.ckpt"), group_size=4)
    assert changed.group_size == 4


@pytest.mark.filterwarnings("ignore")
def test_what_a_checkpoint_cannot_hold_is_asked_for_by_name(tmp_path):
    rewards = {"half": Reward(lambda prompts, completions: [0.5] * len(prompts))}
    module = save(GRPO(BUILTIN, rewards), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="rewards"):
        GRPO.load_from_checkpoint(tmp_path / "a.ckpt")
    assert equal_weights(module, GRPO.load_from_checkpoint(tmp_path / "a.ckpt", rewards=rewards))


@pytest.mark.filterwarnings("ignore")
def test_sft_is_loaded_with_the_tokenizer_that_it_had_fitted(tmp_path):
    module = SFT(scratch=SCRATCH)
    module.fit_tokenizer(["one two", "three four"])
    save(module, tmp_path / "a.ckpt")
    again = SFT.load_from_checkpoint(tmp_path / "a.ckpt")
    assert equal_weights(module, again)
    assert again.tokenizer.get_vocab() == module.tokenizer.get_vocab()


@pytest.mark.filterwarnings("ignore")
def test_code_that_a_checkpoint_names_is_never_called(tmp_path, monkeypatch):
    module = save(GRPO(BUILTIN, {"right": Reward(correctness)}), tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    called = []
    monkeypatch.setattr("os.system", called.append)
    for attack in (
        {"import_path": "os.system"},
        {"class_path": "os.system", "init_args": {"command": "true"}},
        {"partial": {"import_path": "os.system"}, "args": ["true"], "kwargs": {}},
        {"right": {"class_path": "subprocess.Popen", "init_args": {"args": "true"}}},
    ):
        checkpoint["hyper_parameters"]["rewards"] = attack
        torch.save(checkpoint, tmp_path / "attack.ckpt")
        with raises_for("rewards", "load_from_checkpoint"):
            GRPO.load_from_checkpoint(tmp_path / "attack.ckpt")
        rewards = {"right": Reward(correctness)}
        assert equal_weights(
            module, GRPO.load_from_checkpoint(tmp_path / "attack.ckpt", rewards=rewards)
        )
    checkpoint["hyper_parameters"] |= {"_instantiator": "os.system", "rewards": {}}
    torch.save(checkpoint, tmp_path / "attack.ckpt")
    GRPO.load_from_checkpoint(tmp_path / "attack.ckpt", rewards=rewards)
    assert not called


@pytest.mark.filterwarnings("ignore")
def test_loggers_and_hparams_yaml_have_the_arguments(tmp_path):
    grpo = module(max_iterations=1, check_invariants=False)
    logger = CSVLogger(tmp_path)
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(grpo, batches("a", "b"))
    logger.save()
    written = yaml.unsafe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert written["group_size"] == grpo.hparams.group_size == grpo.group_size
    assert written["objective"]["class_path"] == "litgrpo.algorithms.losses.Objective"
