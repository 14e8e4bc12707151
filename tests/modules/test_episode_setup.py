import pytest
import torch
from lightning import Trainer

from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.metrics import definition
from litgrpo.environments import examples
from litgrpo.environments.base import StepResult
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.workers import EpisodeWorkers
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.modules.episode_setup import build_episode_pool, build_episodes, check_environment
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.turn_format import InlineFormat
from tests.learning.parts import rollouter_of
from tests.support.models import prompt_batch, tiny_policy
from tests.support.playing import Echo, SlowPool
from tests.support.training import loader, module

INLINE = EpisodeSettings(
    turn_format="inline", num_workers=0, max_turn_tokens=3, close_truncated_turns=True
)
OWN = {"environment": Reward()}


class Once:
    """A minimal environment."""

    def reset(self, row, seed):
        return ""

    def step(self, action):
        return StepResult("", done=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"environment": 5}, "environment is 5"),
        ({"engine": StaticEngine()}, "StaticEngine .* LocalEngine"),
        ({"environment": None}, "episode is set"),
        (
            {
                "environment": None,
                "episode": EpisodeSettings(),
                "rewards": {"environment": Reward()},
            },
            "rewards.environment without a function",
        ),
    ],
)
def test_settings_that_contradict_are_refused(given, said):
    settings = {"environment": Once(), "episode": INLINE, "engine": LocalEngine(), "rewards": {}}
    with pytest.raises(ValueError, match=said):
        check_environment(**settings | given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "there is no model.environment"),
        ({"environment": Once(), "sampling": Sampling(top_k=5)}, "top_k, top_p or min_p"),
    ],
)
def test_a_loss_of_observations_needs_some_and_all_tokens(settings, said):
    given = {"episode": INLINE} if "environment" in settings else {}
    with pytest.raises(ValueError, match=said):
        module(objective=Objective(observation_nll_coef=0.1), **given | settings)


def test_an_environment_may_be_named_by_its_path():
    found = check_environment("tests.modules.test_episode_setup.Once", INLINE, LocalEngine(), {})
    assert isinstance(found, Once)


def test_a_list_of_functions_becomes_tools_with_these_functions():
    for calculate in (examples.calculate, "litgrpo.environments.examples.calculate"):
        tools = check_environment([calculate], INLINE, LocalEngine(), {})
        assert [schema["function"]["name"] for schema in tools.tools] == ["calculate"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_reset_adds_counts_where_the_model_s_positions_end():
    grpo = module(environment=Echo((2,), "?" * 20), episode=INLINE, max_completion_length=20)
    grpo.policy = tiny_policy("gpt2", n_positions=40)
    grpo.configure_model()
    episodes = build_episodes(grpo, grpo.environment, INLINE, grpo.policy)
    batch = prompt_batch("a" * 10)
    rollouter = rollouter_of(grpo.policy, episodes=episodes, max_completion_length=20)
    said = r"A prompt has 31 tokens with what the environment adds .* 51 positions, but gpt2 has 40"
    with pytest.raises(ValueError, match=said):
        rollouter.generate(batch, "train")


def test_environments_run_in_processes_unless_they_are_to_run_here():
    assert isinstance(
        build_episode_pool(module(environment=Once(), episode=INLINE), INLINE), InProcessEpisodes
    )
    apart = build_episode_pool(
        module(environment=Once()), EpisodeSettings(timeout_s=3, num_workers=2)
    )
    assert isinstance(apart, EpisodeWorkers)
    assert (apart.timeout_s, apart.max_parallel) == (3, 2)
    apart.close()


def test_a_template_needs_data_with_a_chat_format():
    grpo = module(environment=Once())
    with pytest.raises(ValueError, match=r"episode.turn_format is template, but .* inline"):
        grpo.configure_model()


def test_a_module_learns_from_episodes_validates_and_answers_with_them(tmp_path):
    objective = Objective(observation_nll_coef=0.1)
    grpo = module(
        environment=Echo((2,)), episode=INLINE, max_completion_length=20, max_iterations=2,
        objective=objective,
    )  # fmt: skip
    trainer = Trainer(
        default_root_dir=tmp_path, logger=False, enable_checkpointing=False, max_steps=2,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batch = prompt_batch("a", "bc")
    trainer.fit(grpo, loader(batch), loader(batch, 1))
    assert isinstance(grpo.rollouter.episodes.turn_format, InlineFormat)
    metrics = trainer.callback_metrics
    names = {"env/turns", "env/reward", "env/failed_frac", "env/timeout_frac", "time/env_s"}
    assert names | {"completion/observation_frac", "policy/observation_nll"} <= metrics.keys()
    assert metrics["policy/observation_nll"] > 0
    assert all(definition(name) for name in names)
    assert metrics["env/turns"] > 1
    rows = grpo.predict_step(batch, 0)
    assert [each["role"] for each in rows[0]["messages"]][:2] == ["assistant", "user"]
    assert rows[0]["failed"] == ""
    grpo.teardown("fit")


TIMED = ("time/", "perf/")
AT_SAMPLING = {"policy/entropy", "policy/sampler_mismatch"}  # of what the engine computed


def test_when_answers_come_changes_no_weight_and_only_what_the_sampler_measured(monkeypatch):
    found = []
    for seed in (1, 2):
        pool = SlowPool(Echo((2, 40)), seed=seed, share=0.2)
        monkeypatch.setattr(
            "litgrpo.modules.episode_setup.build_episode_pool", lambda *_, pool=pool: pool
        )
        grpo = module(
            environment=Echo((2, 40)), episode=INLINE, max_completion_length=70, max_iterations=2,
            check_invariants=False, update=UpdateConfig(epochs_per_rollout=2, max_grad_norm=None),
        )  # fmt: skip
        grpo.policy.eos_ids = tuple(range(2, 60))
        runner = Trainer(
            logger=False, enable_checkpointing=False, max_epochs=-1, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        runner.fit(grpo, loader(prompt_batch("a", "bc", "hello")))
        numbers = {n: float(x) for n, x in runner.callback_metrics.items()}
        found.append((grpo.policy.state_dict(), numbers))
    (weights, numbers), (others, later) = found
    assert [n for n, weight in weights.items() if not torch.equal(others[n], weight)] == []
    same = [n for n in numbers if n not in AT_SAMPLING and not n.startswith(TIMED)]
    assert {"policy/loss", "env/reward", "optim/grad_norm", "policy/log_ratio"} <= {*same}
    assert [n for n in same if later[n] != numbers[n]] == []
    for name in AT_SAMPLING:
        assert later[name] == pytest.approx(numbers[name], abs=1e-5)
