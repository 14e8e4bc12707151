"""A reward model inside a module: loaded before training, where the policy is, in no checkpoint."""

import pytest
import torch
from lightning import Trainer

from litgrpo.data.modules import PromptData
from litgrpo.models.loading.export import export
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.reward_model import RewardModel
from tests.rewards.classifiers import CHAT, write_classifier
from tests.support.models import tiny_policy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    """A policy whose chat format is not the judge's."""
    folder = tmp_path_factory.mktemp("policy")
    made = tiny_policy("qwen2")
    made.tokenizer.chat_template = "<bos>{% for m in messages %}<{{ m.content }}>{% endfor %}:"
    export(made, folder)
    return str(folder)


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> str:
    return write_classifier(tmp_path_factory.mktemp("judge"), chat=CHAT)


def module(policy: str, reward) -> GRPO:
    return GRPO(
        policy, {"judge": Reward(reward)}, group_size=2, max_completion_length=4, max_iterations=1
    )


def trainer(folder, accelerator="cpu") -> Trainer:
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    settings = dict(accelerator=accelerator, devices=1, max_epochs=-1, enable_model_summary=False)
    return Trainer(default_root_dir=folder, **quiet, **settings)


def data() -> PromptData:
    return PromptData(["one", "two"], predict=["three"], batch_size=2, chat=True)


def test_a_reward_model_trains_a_policy_and_stays_out_of_its_checkpoint(policy, judge, tmp_path):
    runner = trainer(tmp_path)
    asked = []

    class Recording(RewardModel):
        def __call__(self, prompts, completions, conversation=None):
            asked.extend(zip(prompts, conversation, completions, strict=True))
            return super().__call__(prompts, completions, conversation)

    model = Recording(judge)
    before = {name: p.clone() for name, p in tiny_policy("qwen2").named_parameters()}
    grpo = module(policy, model)
    runner.fit(grpo, data())

    assert len(asked) == 4
    for prompt, conversation, _ in asked:
        said = conversation[0]["content"]
        assert said in ("one", "two")
        assert prompt == f"<bos><{said}>:"
    after = dict(grpo.policy.named_parameters())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert set(saved) == {f"policy.{name}" for name in before}
    assert not any(parameter.grad is not None for parameter in model.model.parameters())


def test_the_policy_as_its_own_judge_is_refused_before_training(policy, tmp_path):
    grpo = module(policy, RewardModel(policy))
    with pytest.raises(ValueError, match="is the policy itself"):
        trainer(tmp_path).fit(grpo, data())
    assert grpo.policy is None  # not even loaded
    asked_for = module(policy, RewardModel(policy, allow_policy_as_reward=True))
    trainer(tmp_path).fit(asked_for, data())
    assert asked_for.iteration == 1


def test_a_judge_without_a_chosen_label_is_refused_before_training(policy, tmp_path):
    folder = write_classifier(tmp_path / "judge", labels=("bad", "good"))
    with pytest.raises(ValueError, match="choose one with `label`"):
        trainer(tmp_path).fit(module(policy, RewardModel(folder)), data())


def test_answering_needs_no_judge(policy, tmp_path):
    grpo = module(policy, RewardModel(str(tmp_path / "gone")))
    answers = trainer(tmp_path).predict(grpo, data())
    assert answers[0][0]["columns"]["conversation"] == [{"role": "user", "content": "three"}]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("device", ["cpu", "policy"])
def test_a_judge_works_beside_a_policy_on_an_accelerator(device, policy, judge, tmp_path):
    model = RewardModel(judge, device=device)
    grpo = module(policy, model)
    trainer(tmp_path, "auto").fit(grpo, data())
    assert grpo.iteration == 1
    place = "cpu" if device == "cpu" else torch.accelerator.current_accelerator().type
    assert model.model.device.type == place
    texts = ["one", "two and more"], ["yes", "no"]
    on_cpu = RewardModel(judge, device="cpu")(*texts)
    torch.testing.assert_close(model(*texts), on_cpu, rtol=1e-3, atol=1e-4)
