"""Dynamic sampling: what is replaced, by what, how often, and that a resumed run does the same."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback

from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.turns import GTPO, MTGRPO, ReBN, Turns
from litgrpo.data.modules import PromptData
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.distributed.device import Backend, Clock
from litgrpo.learning.dynamic_sampling import (
    DynamicSampling,
    groups_with_turn_advantages,
    groups_with_variance,
    with_groups,
    with_rewards,
)
from litgrpo.types import Experience, PromptBatch, RewardTable, Rollout, RolloutLogprobs
from tests.learning.parts import rollouter_of
from tests.support.models import prompt_batch, tiny_policy
from tests.support.training import GROUP, loader, module, train
from tests.support.turns import rollout as turns_rollout
from tests.support.turns import table as turns_table

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg", "hhhhhhhh"]


def table(*groups):
    total = torch.tensor(groups, dtype=torch.float64)
    return RewardTable({"r": total}, {"r": 1.0}, total, torch.ones_like(total, dtype=torch.bool))


def said(prompts, length, token, candidates=None):
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
        candidate_ids=None
        if candidates is None
        else torch.full((rows, length, candidates), token).int(),
    )


def test_a_group_is_informative_if_its_rewards_differ_by_more_than_rounding():
    rewards = table([1, 1], [0, 1], [0.1 + 0.2, 0.3], [0, 0])
    assert groups_with_variance(rewards).tolist() == [False, True, False, False]
    rewards.valid[1, 0] = False  # one answer is left, with nothing to compare it with
    assert not groups_with_variance(rewards).any()


def test_a_group_of_equal_totals_teaches_per_turn_credit_where_turns_differ():
    """1 + 0 and 0 + 1 are equal totals, of other turns; GTPO compares turns 0 and 1, too."""
    for earned, teaches in (
        ([[1.0, 0.0], [0.0, 1.0]], (MTGRPO, GTPO, ReBN)),
        ([[1.0, 0.0], [1.0, 0.0]], (GTPO,)),
        ([[0.0, 0.0], [0.0, 0.0]], ()),
    ):
        played = turns_rollout([[0, 1], [0, 1]], earned)
        total = sum(earned[0])
        rewards = turns_table([total, total], counted=[total, total])
        assert not groups_with_variance(rewards).any()
        turns = Turns.from_rollout(played, rewards)
        for kind in (MTGRPO, GTPO, ReBN, None):
            if kind is not None:
                found = groups_with_turn_advantages(rewards, played, kind()).tolist()
                assert found == [kind in teaches]
            if kind in (MTGRPO, GTPO):
                known = Objective(kind()).token_advantages(rewards, played.loss_mask, turns=turns)
                assert bool(known.any()) == (kind in teaches)
            objective = Objective() if kind is None else Objective(kind())
            learner = FakeLearner(objective=objective)
            sampling = DynamicSampling(None, None, learner, 1, Backend(torch.device("cpu")))
            sampling.draw_prompts = refuse
            if kind in teaches:
                stats = sampling(experience_of(played, rewards), 0).stats
                assert stats["dynamic/resamples"] == 0
            else:
                with pytest.raises(LookupError):
                    sampling(experience_of(played, rewards), 0)


def refuse(count):
    """Has no other prompts."""
    raise LookupError


@dataclass
class FakeLearner:
    """Log-probabilities of a rollout are those at sampling, and twice those."""

    objective: Objective = field(default_factory=Objective)
    comm: SingleProcess = field(default_factory=SingleProcess)
    rows: list[int] = field(default_factory=list)  # of each call

    def old_and_reference_logprobs(self, rollout):
        logprobs = rollout.sampler_logprobs
        self.rows.append(len(logprobs))
        return RolloutLogprobs(old=logprobs, ref=2 * logprobs)


def experience_of(rollout, rewards):
    logprobs = FakeLearner().old_and_reference_logprobs(rollout)
    return Experience(rollout.prompts, rollout, rewards, logprobs, ((rollout, rewards),))


def test_groups_take_each_others_place_whatever_their_padding():
    old = said(prompt_batch("a", "bcd"), length=3, token=4, candidates=2)
    new = said(prompt_batch("longer", "x"), length=1, token=5, candidates=3)
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
    assert (mixed.candidate_ids >= 0).sum(-1)[:, 0].tolist() == [3, 3, 2, 2]
    assert not mixed.candidate_ids[:2, 1:].ge(0).any()


def test_mixed_rewards_keep_the_other_groups():
    old, new = table([0, 1], [1, 1]), table([2, 3], [4, 5])
    mixed = with_rewards(old, torch.tensor([1]), new, torch.tensor([0]))
    assert mixed.total.tolist() == [old.total[0].tolist(), new.total[0].tolist()]


def test_mixed_rewards_keep_what_functions_told_about_their_rows():
    old, new = table([0, 1], [1, 1]), table([2, 3], [4, 5])
    old = replace(old, extras={"why": {0: "a", 1: "b", 2: "c", 3: "d"}, "gone": {3: "x"}})
    new = replace(new, extras={"why": {1: "f"}, "added": {0: "y", 2: "z"}})
    mixed = with_rewards(old, torch.tensor([1]), new, torch.tensor([0]))
    assert mixed.extras == {"why": {0: "a", 1: "b", 3: "f"}, "gone": {}, "added": {2: "y"}}
    assert old.extras["gone"] == {3: "x"}


class Answers:
    """Rollouter and judge of one: what is found in each resampling is given.

    Args:
        found: {attempt: informative groups}; None for all.
    """

    def __init__(self, found):
        self.found = found
        self.clock = Clock()
        self.attempts = []

    def generate(self, prompts, purpose, iteration, *, attempt):
        assert (purpose, iteration) == ("train", 7)
        self.attempts.append(attempt)
        return said(prompts, length=1, token=attempt)

    def start(self, rollout, iteration):
        assert iteration == 7
        found = self.found[self.attempts[-1]]
        found = len(rollout.prompts) if found is None else found
        groups = range(len(rollout.prompts))
        rewards = table(*([0, 1] if number < found else [1, 1] for number in groups))
        return SimpleNamespace(wait=lambda: rewards)


class MorePrompts:
    """Training data that remember how many prompts they were asked for."""

    def __init__(self):
        self.counts = []

    def draw(self, count):
        self.counts.append(count)
        return prompt_batch(*(f"new {n}" for n in range(count)))


def sampling_of(found, dynamic_sampling_attempts, comm=None, static_shapes=False):
    """Dynamic sampling, and the prompts that it takes."""
    answers, source = Answers(found), MorePrompts()
    learner = FakeLearner() if comm is None else FakeLearner(comm=comm)
    device = Backend(torch.device("cpu"))
    device.static_shapes = static_shapes
    dynamic = DynamicSampling(answers, answers, learner, dynamic_sampling_attempts, device)
    dynamic.draw_prompts = source.draw
    return dynamic, source


def test_resampling_asks_for_what_is_missing_at_the_share_found_so_far():
    # The first resampling finds nothing, the second one group, the third everything.
    dynamic, source = sampling_of({1: 0, 2: 1, 3: None}, dynamic_sampling_attempts=8)
    first = said(prompt_batch(*"abcd"), length=1, token=9)
    rewards = table([0, 1], [1, 1], [0, 0], [1, 0])
    experience = dynamic(experience_of(first, rewards), 7)
    rollout, rewards, stats = experience.rollout, experience.rewards, experience.stats
    # Missing 2, found 2 of 4: ask 4. Then 2 of 8: 8, limited to 4. Then missing 1, 3 of 12: 4.
    assert source.counts == [4, 4, 4]
    assert dynamic.rollouter.attempts == [1, 2, 3]
    assert rollout.completion_ids[:, 0].tolist() == [9, 9, 2, 2, 3, 3, 9, 9]
    assert rollout.prompts.prompts == ["a", "new 0", "new 0", "d"]
    assert groups_with_variance(rewards).all()
    # New rows have their own log-probabilities.
    assert experience.logprobs.old.tolist() == rollout.sampler_logprobs.tolist()
    assert experience.logprobs.ref.tolist() == (2 * rollout.sampler_logprobs).tolist()
    assert [len(rewards.total) for _, rewards in experience.sampled] == [4, 4, 4, 4]
    assert {name: float(value) for name, value in stats.items()} == {
        "dynamic/resamples": 3,
        "dynamic/prompts_sampled": 16,
        "dynamic/informative_frac": 0.5,
        "dynamic/filled_frac": 1,
    }


@pytest.mark.parametrize(("static_shapes", "count"), [(False, 2), (True, 4)])
def test_where_shapes_are_static_as_many_prompts_are_taken_as_at_first(static_shapes, count):
    dynamic, source = sampling_of({1: None}, 1, static_shapes=static_shapes)
    first = said(prompt_batch(*"abcd"), length=1, token=9)
    rewards = table([0, 1], [1, 1], [0, 1], [1, 0])
    experience = dynamic(experience_of(first, rewards), 7)
    assert source.counts == [count]
    assert experience.rollout.prompts.prompts == ["a", "new 0", "c", "d"]
    assert experience.stats["dynamic/filled_frac"] == 1
    assert dynamic.learner.rows == [8 if static_shapes else 2]
    assert experience.logprobs.old.tolist() == experience.rollout.sampler_logprobs.tolist()


def test_all_processes_resample_while_one_of_them_misses_a_group():
    class Elsewhere(SingleProcess):
        """Another process misses two groups at first, and one after the first resampling."""

        def __init__(self):
            self.missing = [2, 4, 1, 4, 0]

        def max(self, value):
            return torch.maximum(value, torch.tensor(float(self.missing.pop(0))))

    dynamic, source = sampling_of({1: None, 2: None}, 8, comm=Elsewhere())
    first = said(prompt_batch(*"abcd"), length=1, token=9)
    experience = dynamic(experience_of(first, table(*[[0, 1]] * 4)), 7)
    assert source.counts == [4, 4]
    assert experience.rollout.completions == first.completions
    assert experience.stats["dynamic/resamples"] == 2


def test_after_the_last_resampling_the_groups_that_are_all_equal_stay():
    dynamic, _ = sampling_of({1: 0, 2: 0}, dynamic_sampling_attempts=2)
    first = said(prompt_batch("a", "b"), length=1, token=9)
    experience = dynamic(experience_of(first, table([1, 1], [0, 1])), 7)
    assert experience.rollout.completions == first.completions
    assert experience.rewards.total.tolist() == [[1, 1], [0, 1]]
    assert experience.stats["dynamic/resamples"] == 2
    assert experience.stats["dynamic/filled_frac"] == 0.5


def test_the_prompts_that_came_first_are_kept_for_the_statistics():
    dynamic, _ = sampling_of({1: None}, dynamic_sampling_attempts=8)
    first, rewards = said(prompt_batch("a", "b"), length=3, token=9), table([1, 1], [0, 1])
    experience = dynamic(experience_of(first, rewards), 7)
    assert experience.rollout.prompts.prompts == ["new 0", "b"]
    assert experience.rewards.total.tolist() == [[0, 1], [0, 1]]
    assert experience.sampled[0] == (first, rewards)
    assert experience.stats["dynamic/resamples"] == 1


def long_prompts_only(prompts, completions):
    """Completions differ after a prompt of more than four letters; else all are equally good."""
    return [
        sum(letter.isalpha() for letter in text) if len(prompt) > 4 else 0.0
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def learner(**settings):
    grpo = module(reward=long_prompts_only, dynamic_sampling_attempts=8, **settings)
    grpo.optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2)
    return grpo


def test_a_batch_is_filled_with_informative_prompts_and_the_limit_holds():
    seen = []

    class Seeing(Callback):
        def on_train_batch_end(self, trainer, module, outputs, *rest):
            seen.append(outputs["iteration"].rollout)

    grpo = learner(max_iterations=4)
    runner = train(grpo, PromptData(TEXTS, batch_size=4), callbacks=[Seeing()])
    assert len(seen) == 4
    assert runner.logged_metrics["dynamic/filled_frac"] == 1
    for rollout in seen:
        assert isinstance(rollout.prompts, PromptBatch)
        assert all(len(text) > 4 for text in rollout.prompts.prompts)
        assert len(rollout.completions) == 4 * GROUP
    capped = module(reward=long_prompts_only, dynamic_sampling_attempts=1)
    assert train(capped, PromptData(TEXTS, batch_size=4)).logged_metrics["dynamic/resamples"] <= 1


def test_metrics_of_completions_are_of_the_prompts_asked_first():
    filled, plain = learner(), module(reward=long_prompts_only)
    logged = [
        {
            name: number
            for name, number in train(grpo, PromptData(TEXTS, batch_size=4)).logged_metrics.items()
            if name.startswith(("reward/", "completion/", "prompt/", "data/"))
        }
        for grpo in (filled, plain)
    ]
    assert logged[0] == logged[1]
    assert {"reward/mean", "reward/correct_frac", "completion/unique_frac"} <= logged[0].keys()
    assert filled.generated_tokens > plain.generated_tokens


class SavedAt(Callback):
    """Saves after each iteration, as a run does."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *rest):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_resamples_the_same_prompts(stop, tmp_path):
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
    with pytest.raises(
        ValueError, match=r"dynamic_sampling_attempts is 8, .* Use litgrpo.PromptData"
    ):
        train(learner(), loader(prompt_batch("a", "b")))


def test_the_first_rollout_is_the_same_with_and_without_resampling():
    batch, rollouter = prompt_batch("a", "hello"), rollouter_of(tiny_policy("qwen2"))
    first, again, other = (
        rollouter.generate(batch, "train", 2, attempt=attempt) for attempt in (0, 0, 1)
    )
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert first.completions != other.completions


def test_training_stops_when_its_tokens_are_sampled():
    grpo = module(max_iterations=None, max_generated_tokens=100)
    train(grpo, PromptData(TEXTS, batch_size=4))
    assert 100 <= grpo.generated_tokens < 100 + 4 * GROUP * grpo.max_completion_length
