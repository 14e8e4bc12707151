from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from jsonargparse import ArgumentParser

from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.interface import Environment, Requests, RolloutEngine, SingleTurn
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.types import Rollout
from tests.conftest import prompt_batch, tiny_policy
from tests.learner.parts import GROUP, LENGTH, learner_of, rewards_of, rollouter_of


class Plain(RolloutEngine):
    """The least that an engine must define."""

    def generate(self, requests):
        return LocalEngine().generate(requests)


def requests_for(num_prompts=2, group_size=3, length=4):
    prompts = prompt_batch(*"ab"[:num_prompts])
    uniforms = torch.zeros(num_prompts * group_size, length, dtype=torch.float64)
    return Requests(tiny_policy("qwen2"), prompts, group_size, uniforms, Sampling())


def test_an_engine_needs_no_more_than_generate():
    engine, requests = Plain(), requests_for()
    engine.sync_weights(requests.policy, 0)
    assert engine.exact
    assert not engine.static_shapes
    assert engine.row_limit is None
    assert len(engine.generate(requests).completion_ids) == requests.num_rows == 6


def test_generate_must_be_defined():
    with pytest.raises(TypeError, match="abstract"):
        RolloutEngine()


def test_requests_stay_as_they_are():
    with pytest.raises(FrozenInstanceError):
        requests_for().group_size = 1


@pytest.mark.parametrize(
    ("engine", "exact", "static_shapes", "row_limit"),
    [
        (LocalEngine(), True, False, None),
        (LocalEngine(max_rows=6), True, False, 6),
        (LocalEngine(dtype="bfloat16"), False, False, None),
        (StaticEngine(), True, True, None),
    ],
)
def test_engines_say_what_they_can(engine, exact, static_shapes, row_limit):
    said = (engine.exact, engine.static_shapes, engine.row_limit)
    assert said == (exact, static_shapes, row_limit)


def test_a_recipe_names_an_engine_by_its_class_path():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(RolloutEngine, "engine")
    path = "litgrpo.rollout.engines.local.LocalEngine"
    given = {"engine": {"class_path": path, "init_args": {"max_rows": 8}}}
    assert parser.instantiate(parser.parse_object(given)).engine == LocalEngine(max_rows=8)


ANSWER = [80, 81]


class Interrupting(Environment):
    """Says two tokens after the first one of each completion; what is too long is cut off."""

    def play(self, engine, requests):
        turn = engine.generate(requests)
        spoken = turn.completion_ids.new_tensor([ANSWER] * requests.num_rows)

        def with_answer(values, answer):
            return torch.cat([values[:, :1], answer, values[:, 1:]], 1)[:, :LENGTH]

        nothing = torch.zeros_like(spoken)
        return replace(
            turn,
            completion_ids=with_answer(turn.completion_ids, spoken),
            completion_mask=with_answer(turn.completion_mask, ~nothing.bool()),
            loss_mask=with_answer(turn.completion_mask, nothing.bool()),
            sampler_logprobs=with_answer(turn.sampler_logprobs, nothing.float()),
        )


def played(environment, **settings) -> tuple:
    policy = tiny_policy("qwen2")
    rollouter = rollouter_of(policy, environment=environment, **settings)
    return policy, rollouter.generate(prompt_batch("a", "hello there"), "train")


def test_a_single_turn_is_what_the_engine_says():
    policy, prompts = tiny_policy("qwen2"), prompt_batch("a", "hello there")
    uniforms = draw_uniforms(0, "train", 0, prompts.index, GROUP, LENGTH)
    requests = Requests(policy, prompts, GROUP, uniforms, Sampling())
    plain, found = LocalEngine().generate(requests), SingleTurn().play(LocalEngine(), requests)
    assert torch.equal(found.completion_ids, plain.completion_ids)
    assert found.loss_mask is found.completion_mask


def test_what_an_environment_said_is_in_the_text_and_not_counted_as_sampled():
    _, plain = played(SingleTurn())
    _, rollout = played(Interrupting())
    assert isinstance(rollout, Rollout)
    assert (rollout.completion_ids[:, 1:3] == torch.tensor(ANSWER)).all()
    assert rollout.completion_mask[:, 1:3].all()
    assert not rollout.loss_mask[:, 1:3].any()
    assert not rollout.sampler_logprobs[:, 1:3].any()
    assert torch.equal(rollout.lengths, plain.lengths.clamp(max=LENGTH - 2))
    said = [text[1:] for text in rollout.completions]
    assert all(len(ids) >= 3 for ids in rollout.token_lists())
    assert said != [text[1:] for text in plain.completions]


def test_the_tokens_of_the_policy_are_sampled_anew_and_counted_alone():
    policy = tiny_policy("qwen2")
    rollouter = rollouter_of(policy, environment=Interrupting())
    rollout = rollouter.generate(prompt_batch("a"), "train")
    assert rollouter.take_sampled_tokens() == int(rollout.loss_mask.sum())
    assert rollouter.take_sampled_tokens() == 0


def test_nothing_that_the_environment_said_is_learned_from_but_it_is_read():
    policy, rollout = played(Interrupting())
    learner = learner_of(policy)
    logprobs = learner.old_and_reference_logprobs(rollout)
    experience = learner.experience(rollout, rewards_of(rollout), logprobs)
    said = rollout.completion_mask & ~rollout.loss_mask
    assert said.any()
    assert not experience.weights[said].any()
    assert not experience.advantages[said].any()
    # Later tokens are predicted after what was said: another answer changes them.
    other = rollout.completion_ids.masked_fill(said, 99)
    with torch.no_grad():
        read = learner.logprobs(experience.tokens).logprobs
        changed = learner.logprobs(replace(experience.tokens, completion_ids=other)).logprobs
    after = rollout.loss_mask.clone()
    after[:, 0] = False
    assert torch.equal(read[:, 0], changed[:, 0])
    assert (read - changed)[after].abs().max() > 1e-3
