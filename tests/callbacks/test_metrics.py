from unittest.mock import Mock

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import KLCov
from litgrpo.algorithms.terms import PositiveNLL
from litgrpo.callbacks.adaptive import EntropyTarget
from litgrpo.callbacks.iteration_metrics import StepTime
from litgrpo.callbacks.metrics import METRICS, TRL, VERL, definition, find_entry
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.data.modules import PairData, PromptData
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.sft import SFT
from litgrpo.rewards import Scoring
from litgrpo.rewards.scorer import Reward
from litgrpo.runs.summary import Summary

MODEL = "builtin:tiny-gemma2"
# Logged by other tests: a step with a NaN, a corpus of dialogues.
# Of runs with an environment; see tests/modules/test_episode_setup.py.
OF_EPISODES = {"env/turns", "env/reward", "env/failed_frac", "env/timeout_frac", "time/env_s"}
OF_EPISODES |= {"tools/<name>_calls", "tools/<name>_failed", "completion/observation_frac"}
OF_EPISODES |= {"policy/observation_nll"}
OF_EPISODES |= {"env/segments"}  # of agents; see tests/modules/test_agents.py
OF_EPISODES |= {f"val/<set>/{name}" for name in ("turns", "tool_call_frac")}
OF_EPISODES |= {f"val/<set>/greedy_{name}" for name in ("turns", "tool_call_frac")}
OF_EPISODES |= {"reward/greedy_mean"}  # of ReMax; see tests/modules/test_grpo.py
ELSEWHERE = {"optim/skipped_steps", "val/<set>/corpus_<part>"}
# Of completions of the data; see tests/rollout/sources/test_data_completions.py.
ELSEWHERE |= {"data/on_policy", "policy/data_nll"}
# Of off-policy runs; see tests/rollout/sources/test_ahead.py.
ELSEWHERE |= {"async/staleness_mean", "async/staleness_max"}
# No completion of these runs ends; see tests/callbacks/test_iteration_metrics.py.
ELSEWHERE |= {f"completion/terminated_len_{name}" for name in ("mean", "min", "max")}
# Of runs with several tasks or a curriculum; see tests/modules/test_tasks.py.
ELSEWHERE |= {name for name in METRICS if name.startswith(("task/", "curriculum/"))}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


class Names(Logger):
    """Remembers which numbers were logged."""

    name, version = "", ""

    def __init__(self):
        self.seen = set()

    def log_metrics(self, metrics, step=None):
        self.seen |= metrics.keys()

    def log_hyperparams(self, params, *_):
        pass


def letters(prompts, completions, **_):
    return [float(len(set(text))) for text in completions]


def short(prompts, completions, **_):
    return [-float(len(text)) for text in completions]


def collect_names(folder, module, data, *callbacks) -> set[str]:
    names = Names()
    trainer = Trainer(
        default_root_dir=folder,
        callbacks=[IterationCheckpoint(), *callbacks],
        logger=names,
        accelerator="cpu",
        max_epochs=-1,
        check_val_every_n_epoch=None,
        val_check_interval=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return {n for n in names.seen - {"step", "epoch"} if not n.startswith("summary/")}


def of_grpo(folder) -> set[str]:
    objective = Objective(
        kl_coef=0.1,
        entropy_coef=0.01,
        top_entropy_quantile=0.5,
        surrogate=KLCov(),
        positive_nll=PositiveNLL(min_reward=-9.0),
        kl_in_reward=KLInReward(),
        importance_correction=ImportanceCorrection(),
    )
    module = GRPO(
        MODEL,
        {"letters": Reward(letters), "short": Reward(short)},
        objective=objective,
        evaluation=Evaluation(num_samples=2, pass_at_k=[1], success_threshold=6.0),
        group_size=2,
        max_completion_length=6,
        dynamic_sampling_attempts=1,
        max_iterations=2,
        check_invariants=False,
        scoring=Scoring(num_workers=0),
    )
    return collect_names(
        folder,
        module,
        PromptData(["1+1?", "2+2?"], val=["3+3?", "4+4?"], batch_size=2),
        EntropyTarget(1.0),
    )


def of_sft(folder) -> set[str]:
    pairs = [{"prompt": "1+1?", "completion": "2"}, {"prompt": "1+2?", "completion": "3"}]
    module = SFT(MODEL, max_iterations=1)
    data = PairData(pairs, val=[{"prompt": "2+2?", "completion": "4"}], batch_size=2)
    return collect_names(folder, module, data, Summary(), StepTime())


def test_the_seconds_of_an_iteration_are_logged_by_grpo_alone():
    module = Mock()
    for outputs in ({"iteration": None}, {"loss": None}, None):
        StepTime().on_train_batch_end(Mock(), module, outputs)
    assert module.log.call_count == 2  # of supervised steps


def test_logged_metrics_are_those_of_the_table(tmp_path):
    seen_of_sft = of_sft(tmp_path / "sft")
    assert {"time/step_s", "time/evaluation_s"} < seen_of_sft
    seen = of_grpo(tmp_path / "grpo") | seen_of_sft
    assert not [name for name in seen if not definition(name)]
    assert METRICS.keys() - {find_entry(name) for name in seen} == ELSEWHERE | OF_EPISODES


def test_the_most_specific_definition_is_chosen():
    assert find_entry("reward/mean") == "reward/mean"
    assert find_entry("reward/format") == "reward/<part>"
    assert find_entry("reward/format_std") == "reward/<part>_std"
    assert find_entry("reward/cosine_a_b") == "reward/cosine_<part>_<part>"
    assert find_entry("val/hard/avg@16_high") == "val/<set>/avg@<k>"
    assert find_entry("val/greedy_turns") == "val/<set>/greedy_turns"
    assert find_entry("test/initial_kl") == "val/<set>/initial_kl"
    assert find_entry("val/loss") == "val/<set>/loss"
    assert definition("loss") == ""


def test_every_metric_has_a_unit():
    assert all(metric.unit for metric in METRICS.values())


@pytest.mark.parametrize(("kind", "table"), [("trl", TRL), ("verl", VERL)])
def test_no_two_metrics_have_the_same_name_in_another_trainer(kind, table):
    names = [getattr(metric, kind) for metric in METRICS.values()]
    assert len(table) == 1 + len([name for name in names if name and "<" not in name])
