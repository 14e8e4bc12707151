"""What pays for no play, or breaks by a text, is found; a sound environment passes."""

import json

import pytest
import torch

from litgrpo.environments.base import EpisodeStart, StepResult
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.examples import NumberGame
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.runner import InProcessRunner
from litgrpo.tools.audit.episodes import audit_episodes

ROWS = [{"prompt": "Guess.", "answer": str(n)} for n in (3, 7)]
SAMPLES = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
SPOKEN = [[["8", "4"], ["1"]], [["9"], ["8", "7"]]]


class Paying:
    """Pays as told for every turn, or breaks."""

    def __init__(self, pays):
        self.pays = pays

    def reset(self, row, seed):
        self.row = row
        return ""

    def step(self, action):
        return StepResult("go on", reward=self.pays(action, self.row))


def found(environment, rewards=None, spoken=SPOKEN):
    scorer = Scorer(rewards or {"environment": Reward()}, runner=InProcessRunner(max_failed_frac=1))
    starts = [EpisodeStart(row, n, (0, 0, n, 0)) for n, row in enumerate(ROWS)]
    pool = InProcessEpisodes(environment, max_failed_frac=1.0)
    return audit_episodes(pool, environment, scorer, starts, SAMPLES, spoken, max_turns=3)


def line(report, policy):
    return next(each for each in report.lines if each.policy == policy)


def test_a_game_that_must_be_played_passes_and_the_answer_is_only_remarked():
    report = found(Paying(lambda said, row: float(said.startswith(f"{row['answer']} <"))))
    assert report.passed, report.faults
    assert line(report, "says the answer").paid == 2
    assert line(report, "only talks").mean == 0.0
    assert line(report, "only talks").turns == 3
    assert [each for each in report.remarks if "without playing is paid on 2 of 2" in each]
    assert json.loads(json.dumps(report.as_dict()))["passed"]


@pytest.mark.parametrize(
    ("pays", "fault"),
    [
        (lambda said, row: float("think" in said), "exploit: a policy that 'only talks' earns 3 "),
        (lambda said, row: (len(said) == 0) / 3, "paid for nothing: a policy that 'says nothing'"),
        (lambda said, row: float(said == "go on"), "exploit: a policy that 'copies what it hears'"),
        (lambda said, row: float(said in "89"), "exploit: a policy that 'repeats a first turn'"),
        (lambda said, row: 0.0 * int("7" * 4 in said and "x"), "breaks 2 of 2 episodes (ValueErr"),
    ],
)
def test_what_is_paid_without_play_or_breaks_is_a_fault(pays, fault):
    report = found(Paying(pays))
    assert any(fault in each for each in report.faults), report.faults


def loud(prompts, completions, turns, messages):
    return [float(len(said) == 3 and said[-1] == "") for said in turns]


def test_rewards_beside_the_environments_count_and_fail_by_name():
    report = found(NumberGame(), {"environment": Reward(), "loud": Reward(loud, weight=2.0)})
    assert line(report, "says nothing").mean == 2.0
    assert any("exploit: a policy that 'says nothing'" in fault for fault in report.faults)
    broken = found(
        NumberGame(), {"environment": Reward(), "bad": Reward(lambda prompts, **_: 1 / 0)}
    )
    assert any("reward 'bad' fails" in fault for fault in broken.faults)
