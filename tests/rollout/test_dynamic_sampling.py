"""Dynamic sampling: what is replaced, by what, how often, and that a resumed run does the same."""

import pytest
import torch
from lightning import Callback

from litgrpo.data.prompts import PromptData
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.scorer import Reward
from litgrpo.rollout.dynamic_sampling import informative, redrawn, with_groups
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import PromptBatch, RewardTable, Rollout
from tests.conftest import prompt_batch, tiny_policy
from tests.modules.test_grpo import GROUP, loader, module, train

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg", "hhhhhhhh"]


def table(*groups):
    total = torch.tensor(groups, dtype=torch.float64)
    return RewardTable({"r": total}, {"r": 1.0}, total, torch.ones_like(total, dtype=torch.bool))


def said(prompts, length, token, support=None):
    """A rollout of two completions of each prompt, of one length and token."""
    rows = 2 * len(prompts)
    ids = torch.full((rows, length), token)
    return Rollout(
        prompts=prompts,
        group_size=2,
        completion_ids=ids,
        completion_mask=torch.ones_like(ids, dtype=torch.bool),
        sampler_logprobs=torch.full((rows, length), -float(token)),
        truncated=torch.zeros(rows, dtype=torch.bool),
        completions=[f"{token}{row}" for row in range(rows)],
        support=None if support is None else torch.full((rows, length, support), token).int(),
    )


def test_a_group_is_informative_if_its_rewards_differ_by_more_than_rounding():
    rewards = table([1, 1], [0, 1], [0.1 + 0.2, 0.3], [0, 0])
    assert informative(rewards).tolist() == [False, True, False, False]
    rewards.valid[1, 0] = False  # one answer is left, with nothing to compare it with
    assert not informative(rewards).any()


def test_groups_take_each_others_place_whatever_their_padding():
    old = said(prompt_batch("a", "bcd"), length=3, token=4, support=2)
    new = said(prompt_batch("longer", "x"), length=1, token=5, support=3)
    mixed = with_groups(old, torch.tensor([0]), new, torch.tensor([1]))
    assert mixed.prompts.prompts == ["x", "bcd"]
    assert [int(n) for n in mixed.prompts.prompt_mask.sum(1)] == [
        int(new.prompts.prompt_mask[1].sum()),
        int(old.prompts.prompt_mask[1].sum()),
    ]
    for row, (source, of) in enumerate([(new, 1), (old, 1)]):
        ours, theirs = mixed.prompts, source.prompts
        assert torch.equal(
            ours.prompt_ids[row][ours.prompt_mask[row]],
            theirs.prompt_ids[of][theirs.prompt_mask[of]],
        )
        assert ours.index[row] == theirs.index[of]
    assert mixed.lengths.tolist() == [1, 1, 3, 3]
    assert mixed.completions == ["52", "53", "42", "43"]
    assert mixed.sampler_logprobs[:, 0].tolist() == [-5, -5, -4, -4]
    assert (mixed.support >= 0).sum(-1)[:, 0].tolist() == [3, 3, 2, 2]
    assert not mixed.support[:2, 1:].ge(0).any()


def test_redraws_ask_for_what_is_missing_at_the_share_found_so_far():
    counts = []

    def more(count):
        counts.append(count)
        return prompt_batch(*(f"new {n}" for n in range(count)))

    def ask(prompts, attempt):
        # The first redraw finds nothing, the second one group, the third everything.
        found = {1: 0, 2: 1, 3: len(prompts)}[attempt]
        groups = [[0, 1] if number < found else [1, 1] for number in range(len(prompts))]
        return said(prompts, length=1, token=attempt), table(*groups)

    first = said(prompt_batch(*"abcd"), length=1, token=9)
    rewards = table([0, 1], [1, 1], [0, 0], [1, 0])
    rollout, rewards, stats = redrawn(
        first, rewards, more=more, ask=ask, most=lambda number: number, max_resamples=8
    )
    # Missing 2, found 2 of 4: ask 4. Then 2 of 8: 8, but 4 at most. Then missing 1, 3 of 12: 4.
    assert counts == [4, 4, 4]
    assert rollout.completion_ids[:, 0].tolist() == [9, 9, 2, 2, 3, 3, 9, 9]
    assert rollout.prompts.prompts == ["a", "new 0", "new 0", "d"]
    assert informative(rewards).all()
    assert {name: float(value) for name, value in stats.items()} == {
        "dynamic/resamples": 3,
        "dynamic/prompts_asked": 16,
        "dynamic/informative_frac": 0.5,
        "dynamic/filled_frac": 1,
    }


def test_after_the_last_redraw_the_groups_that_teach_nothing_stay():
    first = said(prompt_batch("a", "b"), length=1, token=9)
    rollout, rewards, stats = redrawn(
        first,
        table([1, 1], [0, 1]),
        more=lambda count: prompt_batch(*"xy"[:count]),
        ask=lambda prompts, _: (said(prompts, 1, 3), table(*[[0, 0]] * len(prompts))),
        most=lambda number: number,
        max_resamples=2,
    )
    assert rollout.completions == first.completions
    assert rewards.total.tolist() == [[1, 1], [0, 1]]
    assert stats["dynamic/resamples"] == 2
    assert stats["dynamic/filled_frac"] == 0.5


def long_prompts_only(prompts, completions):
    """Completions differ after a prompt of more than four letters; else all are equally good."""
    return [
        sum(letter.isalpha() for letter in text) if len(prompt) > 4 else 0.0
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def learner(**settings):
    grpo = module(reward=long_prompts_only, max_resamples=8, **settings)
    grpo.optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2)
    return grpo


def test_a_batch_is_filled_with_prompts_that_teach_and_the_cap_holds():
    seen = []
    grpo = learner(max_iterations=4)
    collect = grpo.collect
    grpo.collect = lambda rollout, *rest: seen.append(rollout) or collect(rollout, *rest)
    runner = train(grpo, PromptData(TEXTS, batch_size=4))
    seen = seen[1:]  # the first was that of the check at the start
    assert len(seen) == 4
    assert runner.logged_metrics["dynamic/filled_frac"] == 1
    for rollout in seen:
        assert isinstance(rollout.prompts, PromptBatch)
        assert all(len(text) > 4 for text in rollout.prompts.prompts)
        assert len(rollout.completions) == 4 * GROUP
    capped = module(reward=long_prompts_only, max_resamples=1)
    assert train(capped, PromptData(TEXTS, batch_size=4)).logged_metrics["dynamic/resamples"] <= 1


def test_the_reward_is_that_of_the_prompts_asked_first():
    filled, plain = learner(), module(reward=long_prompts_only)
    logged = [
        train(grpo, PromptData(TEXTS, batch_size=4)).logged_metrics["reward/mean"]
        for grpo in (filled, plain)
    ]
    assert logged[0] == logged[1]
    assert filled.generated_tokens > plain.generated_tokens


class SavedAt(Callback):
    """Saves after each iteration, as a run does."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *rest):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_redraws_the_same_prompts(stop, tmp_path):
    whole = learner(max_iterations=5)
    train(whole, PromptData(TEXTS, batch_size=4))
    saved = SavedAt(tmp_path / "stopped.ckpt")
    train(learner(max_iterations=stop), PromptData(TEXTS, batch_size=4), callbacks=[saved])
    second = learner(max_iterations=5)
    train(second, PromptData(TEXTS, batch_size=4), ckpt=tmp_path / "stopped.ckpt")
    assert second.generated_tokens == whole.generated_tokens
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_data_that_cannot_give_more_prompts_are_refused():
    with pytest.raises(ValueError, match=r"max_resamples is 8, .* Use litgrpo.data.prompts"):
        train(learner(), loader(prompt_batch("a", "b")))


def test_the_first_draw_is_the_same_with_and_without_redraws():
    batch = prompt_batch("a", "hello")
    grpo = GRPO("", {"r": Reward(long_prompts_only)}, group_size=2, max_completion_len=4)
    grpo.policy = tiny_policy("qwen2")
    drawn = [grpo.generate(batch, "train", 2, Sampling(), attempt) for attempt in (0, 0, 1)]
    assert torch.equal(drawn[0].completion_ids, drawn[1].completion_ids)
    assert drawn[0].completions != drawn[2].completions


def test_training_stops_when_its_tokens_are_sampled():
    grpo = module(max_iterations=None, max_generated_tokens=100)
    train(grpo, PromptData(TEXTS, batch_size=4))
    assert 100 <= grpo.generated_tokens < 100 + 4 * GROUP * grpo.max_completion_len
