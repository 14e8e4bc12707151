"""Data that the model cannot read is rejected before training."""

import pytest

from litgrpo.data.modules import PairData, PromptData
from litgrpo.modules.sft import SFT
from tests.support.models import tiny_policy
from tests.support.raises import raises_for
from tests.support.training import module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.mark.parametrize("long", ["train", "val"])
def test_prompts_beyond_learned_positions_are_rejected_before_training(long):
    texts = {"train": ["a", "b"], "val": ["c", "d"]}
    texts[long] = [*texts[long], "x" * 60]
    grpo = module("gpt2", max_completion_length=12)
    grpo.policy = tiny_policy("gpt2", n_positions=64)
    with raises_for(long, "61", "64"):
        train(grpo, PromptData(**texts, batch_size=2))
    assert grpo.iteration == 0


def test_pairs_beyond_learned_positions_are_rejected():
    rows = [{"prompt": "a" * 60, "completion": "b" * 9}] * 2
    sft = SFT("")
    sft.policy = tiny_policy("gpt2", n_positions=64)
    sft.tokenizer = sft.policy.tokenizer
    with raises_for("71", "data.max_length"):
        train(sft, PairData(rows, batch_size=2))
