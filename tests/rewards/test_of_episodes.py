import pytest
import torch

from litgrpo.environments.base import StepResult
from litgrpo.rewards.parts import Reward
from litgrpo.rewards.runner.in_process import InProcessRunner
from litgrpo.rewards.scorer import Scorer
from tests.rollout.playing import Echo, episodes_of
from tests.support.models import prompt_batch, tiny_policy
from tests.training.parts import rollouter_of


class Breaking(Echo):
    """Fails where the prompt is `b`; abstains in its second turn."""

    def step(self, said):
        if self.opening == "" and self.row["prompt"] == "b":
            raise RuntimeError("away")
        heard = super().step(said)
        return heard if len(self.turns) != 2 else StepResult(heard.said, reward=None)

    def reset(self, row, seed):
        self.row = row
        return super().reset(row, seed)


def played(environment, purpose="val"):
    policy = tiny_policy("qwen2")
    rollouter = rollouter_of(policy, episodes=episodes_of(environment), max_completion_length=60)
    return rollouter.generate(prompt_batch("a", "b", "cc"), purpose)


def scored(rollout, reward_format="text", **parts):
    scorer = Scorer(parts, reward_format, runner=InProcessRunner())
    return scorer.start(rollout).wait()


def test_failed_episodes_have_no_reward_and_are_no_valid_rows():
    rollout = played(Breaking())
    assert all(each.failed.startswith("RuntimeError: away") for each in rollout.episodes[4:8])
    always = Reward(lambda prompts, completions: [1.0] * len(prompts))
    table = scored(rollout, environment=Reward(), other=always)
    assert table.valid.tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert table.parts["environment"][1].isnan().all()
    assert table.parts["other"][1].isnan().all()
    assert (table.total[1] == 0).all()
    turns = len(rollout.episodes[0].spoken)
    assert turns == 3
    assert table.parts["environment"][0, 0] == 1 + 3
    assert torch.equal(rollout.turn_rewards[0].isnan(), torch.tensor([False, True, False]))


def test_functions_read_the_last_turn_and_may_ask_for_the_rest():
    rollout, seen = played(Echo()), {}

    def look(prompts, completions, messages, turns, completion_ids, turn_rewards):
        seen.update(locals())
        return [0.0] * len(prompts)

    scored(rollout, look=Reward(look))
    decode = tiny_policy("qwen2").tokenizer.decode
    for row, played_ in enumerate(rollout.episodes):
        assert seen["turns"][row] == played_.spoken
        assert len(seen["messages"][row]) == 2 * len(played_.spoken) - 1
        assert seen["completions"][row] == decode(
            seen["completion_ids"][row], skip_special_tokens=True
        )
        last = rollout.turns[row] == rollout.turns[row].max()
        assert seen["completion_ids"][row] == rollout.completion_ids[row][last].tolist()
        assert "xxx" not in seen["completions"][row]
        assert len(seen["turn_rewards"][row]) == len(played_.spoken)


def test_chat_functions_are_given_who_said_what():
    rollout, seen = played(Echo()), []

    def look(prompts, completions):
        seen.extend(completions)
        return [0.0] * len(prompts)

    scored(rollout, "chat", look=Reward(look))
    assert [each["role"] for each in seen[0]] == ["assistant", "user"] * 2 + ["assistant"]


def test_a_reward_without_a_function_must_be_the_environments():
    with pytest.raises(ValueError, match="reward 'other' has no function; name one"):
        scored(None, other=Reward())
