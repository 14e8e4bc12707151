"""Environments that reward scripted policies, or break on a text, are faults."""

import json

import pytest
import torch

from litgrpo.audit.episodes import audit_episodes
from litgrpo.environments.base import EpisodeStart, StepResult
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.examples import NumberGame
from litgrpo.rewards import Reward, Scorer

ROWS = [{"prompt": "Guess.", "answer": str(n)} for n in (3, 7)]
SAMPLES = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
TURN_TEXTS = [[["8", "4"], ["1"]], [["9"], ["8", "7"]]]


class Paying:
    """Returns the reward `pays(action, row)` for every turn."""

    def __init__(self, pays):
        self.pays = pays

    def reset(self, row, seed):
        self.row = row
        return ""

    def step(self, action):
        return StepResult("continue", reward=self.pays(action, self.row))


def found(environment, rewards=None, turn_texts=TURN_TEXTS, samples=SAMPLES):
    scorer = Scorer(rewards or {"environment": Reward()})
    starts = [EpisodeStart(row, n, (0, 0, n, 0)) for n, row in enumerate(ROWS)]
    pool = InProcessEpisodes(environment)
    return audit_episodes(pool, environment, scorer, starts, samples, turn_texts, max_turns=3)


def line(report, policy):
    return report.tables["policy"].loc[policy]


def test_a_sound_environment_passes_and_rewarding_the_reference_answer_is_a_remark():
    report = found(Paying(lambda text, row: float(text.startswith(f"{row['answer']} <"))))
    assert report.passed, report.faults
    assert line(report, "gives the reference answer")["paid"] == 2
    assert line(report, "only talks")["mean"] == 0.0
    assert line(report, "only talks")["turns"] == 3
    assert [each for each in report.remarks if "without playing is paid on 2 of 2" in each]
    assert json.loads(json.dumps(report.as_dict()))["passed"]


@pytest.mark.parametrize(
    ("pays", "fault"),
    [
        (lambda text, row: float("think" in text), "exploit: a policy that 'only talks' earns 3 "),
        (
            lambda text, row: (len(text) == 0) / 3,
            "paid for nothing: 'gives empty turns' earn as much",
        ),
        (
            lambda text, row: float(text == "continue"),
            "exploit: a policy that 'copies the observation'",
        ),
        (lambda text, row: float(text in "89"), "exploit: a policy that 'repeats a first turn'"),
        (lambda text, row: 0.0 * int("²" in text and "²"), "breaks 2 of 2 episodes (ValueErr"),
    ],
)
def test_rewards_for_scripted_policies_and_failures_are_faults(pays, fault):
    report = found(Paying(pays))
    assert any(fault in each for each in report.faults), report.faults


def test_a_constant_reward_is_one_fault_and_no_success_a_remark():
    zeros = torch.zeros_like(SAMPLES)
    report = found(Paying(lambda text, row: 0.0), samples=zeros)
    assert report.passed
    (remark,) = report.remarks
    assert remark.startswith("no advantage: all 2 samples of each prompt earn the same (0 on aver")
    assert list(report.lines())[-1].startswith("PASS (whether correct episodes are rewarded was")
    report = found(Paying(lambda text, row: 1 / 3), samples=zeros + 1)
    (fault,) = report.faults
    assert fault.startswith("paid for nothing: 'gives empty turns', 'only talks', 'loops', ")
    assert not any("empty turns" in remark for remark in report.remarks)  # the fault says it


def test_samples_without_a_reward_are_a_fault():
    report = found(Paying(lambda text, row: 0.0), samples=SAMPLES * torch.nan)
    assert any("4 of 4 samples of the initial policy failed or have no rew" in x
               for x in report.faults)  # fmt: skip
    assert report.title.endswith("by the initial policy have no reward")


def loud(prompts, completions, turns, messages):
    return [float(len(said) == 3 and said[-1] == "") for said in turns]


def test_other_rewards_are_added_and_their_failures_named():
    report = found(NumberGame(), {"environment": Reward(), "loud": Reward(loud, weight=2.0)})
    assert line(report, "gives empty turns")["mean"] == 2.0
    assert any("exploit: a policy that 'gives empty turns'" in fault for fault in report.faults)
    broken = found(
        NumberGame(), {"environment": Reward(), "bad": Reward(lambda prompts, **_: 1 / 0)}
    )
    assert any("reward 'bad' fails" in fault for fault in broken.faults)
