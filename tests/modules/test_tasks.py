"""Several tasks in one run: their own rewards, advantages, environments, metrics, a curriculum."""

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized, TaskAdvantages
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.turns import GiGPO
from litgrpo.data import PromptData
from litgrpo.data.curriculum import Curriculum
from litgrpo.environments import TaskEnvironments
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards import Scoring
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.sources.ahead import Ahead
from tests.support.echo import Echo
from tests.support.models import tiny_policy
from tests.support.training import GROUP, LENGTH, letters, train, vowels

TASKS = {"sums": ["1+1?", "2+3?", "4+4?"], "words": ["hello there", "what is it?", "xy", "7"]}


class Kept(GRPO):
    """Keeps what each iteration returned and logged."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shown, self.logged = [], []

    def training_step(self, prompts, batch_idx):
        outputs = super().training_step(prompts, batch_idx)
        self.shown.append(outputs)
        return outputs

    def on_train_batch_end(self, *_):
        self.logged.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})


REWARDS = {"vowels": Reward(vowels, tasks=["words"]), "letters": Reward(letters, tasks=["sums"])}


def run(data=None, *, rewards=None, iterations=4, ckpt=None, **settings):
    sizes = dict(group_size=GROUP, max_completion_length=LENGTH, max_iterations=iterations)
    settings = {
        "scoring": Scoring(num_workers=0),
        "check_invariants": False,
    } | settings
    grpo = Kept("", REWARDS if rewards is None else rewards, **sizes, **settings)
    grpo.policy = tiny_policy("qwen2")
    train(grpo, data or PromptData(TASKS, batch_size=3), ckpt, max_epochs=-1)
    return grpo


def test_a_reward_scores_the_rows_of_its_tasks_alone():
    for outputs in run().shown:
        rewards, rollout = outputs["iteration"].rewards, outputs["iteration"].rollout
        assert rewards.tasks == rollout.prompts.columns["task"]
        texts = [rollout.completions[n : n + GROUP] for n in range(0, 3 * GROUP, GROUP)]
        for row, task in enumerate(rewards.tasks):
            own, other = ("vowels", "letters") if task == "words" else ("letters", "vowels")
            expected = (vowels if task == "words" else letters)(None, texts[row])
            assert rewards.components[own][row].tolist() == pytest.approx(expected)
            assert rewards.components[other][row].isnan().all()
            assert rewards.total[row].tolist() == pytest.approx(expected)
        assert rewards.valid.all()


def test_a_run_of_two_tasks_equals_one_reward_that_looks_at_the_task():
    """The same weights, bit for bit: tasks change who is asked, not what is learned."""

    def both(prompts, completions, task):
        scores = zip(vowels(prompts, completions), letters(prompts, completions), task, strict=True)
        return [mine if name == "words" else other for mine, other, name in scores]

    one, two = run(), run(rewards={"both": Reward(both)})
    for name, weight in one.policy.state_dict().items():
        assert torch.equal(weight, two.policy.state_dict()[name]), name


def test_metrics_of_a_task_are_those_of_its_rows():
    grpo = run(iterations=6, evaluation=Evaluation(success_threshold=0.3))
    seen = set()
    for outputs, logged in zip(grpo.shown, grpo.logged, strict=True):
        rewards, rollout = outputs["iteration"].rewards, outputs["iteration"].rollout
        for task in TASKS:
            own = torch.tensor([name == task for name in rewards.tasks])
            shown = {k.split("/")[2]: v for k, v in logged.items() if k.startswith(f"task/{task}/")}
            if not own.any():
                continue
            seen.add(task)
            total = rewards.total[own]
            assert shown["frac"] == pytest.approx(float(own.double().mean()))
            assert shown["reward"] == pytest.approx(float(total.mean()), rel=1e-5)
            # The reward of the task decides, though the other one is listed first.
            assert shown["correct_frac"] == pytest.approx(float((total >= 0.3).double().mean()))
            lengths = rollout.lengths.view(-1, GROUP)[own].double()
            assert shown["completion_len"] == pytest.approx(float(lengths.mean()))
    assert seen == {*TASKS}


def test_each_task_has_its_own_advantages():
    objective = Objective(TaskAdvantages({"words": Normalized(scale="none")}))
    for outputs in run(objective=objective).shown:
        rewards, advantages = outputs["iteration"].rewards, outputs["iteration"].advantages
        centered = rewards.total - rewards.total.mean(1, keepdim=True)
        for row, task in enumerate(rewards.tasks):
            scale = 1.0 if task == "words" else rewards.total[row].std() + 1e-4
            torch.testing.assert_close(
                advantages[row].double(), centered[row] / scale, atol=1e-5, rtol=1e-4
            )


def test_estimators_of_turns_are_rejected_for_tasks():
    with pytest.raises(ValueError, match="GiGPO of task 'game'"):
        Objective(TaskAdvantages({"game": GiGPO()}))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"vowels": Reward(vowels, tasks=["words"])}, "no reward scores the rows .*'sums'"),
        ({"v": Reward(vowels), "l": Reward(letters, tasks=["sum"])}, "did you mean 'sums'"),
        (
            {"v": Reward(vowels), "l": Reward(letters, gate="v", tasks=["sums"])},
            None,  # the gate scores all rows
        ),
        (
            {"v": Reward(vowels, tasks=["words"]), "l": Reward(letters, gate="v")},
            "gate 'v' for",
        ),
    ],
)
def test_rewards_have_to_fit_the_tasks(rewards, message):
    if message is None:
        run(rewards=rewards, iterations=1)
        return
    with pytest.raises(ValueError, match=message):
        run(rewards=rewards, iterations=1)


def test_a_reward_of_tasks_needs_rows_with_tasks():
    with pytest.raises(ValueError, match="without a column `task`"):
        run(PromptData([{"prompt": "a", "answer": "b"}], batch_size=1), iterations=1)


def test_an_environment_plays_the_rows_of_its_task():
    settings = dict(
        environment=TaskEnvironments({"words": Echo(lengths=(1,))}),
        episode=EpisodeSettings(
            max_turns=2,
            max_turn_tokens=2,
            turn_format="inline",
            close_truncated_turns=True,
            num_workers=0,
        ),
        rewards={
            "environment": Reward(tasks=["words"]),
            "letters": Reward(letters, tasks=["sums"]),
        },
    )
    turns = {task: set() for task in TASKS}
    for outputs in run(**settings).shown:
        rollout = outputs["iteration"].rollout
        for n, episode in enumerate(rollout.episodes):
            task = rollout.prompts.columns["task"][n // GROUP]
            turns[task].add(len(episode.assistant_texts))
    assert turns["sums"] == {1}
    assert max(turns["words"]) == 2


def test_a_curriculum_learns_the_success_of_its_prompts():
    data = PromptData(TASKS, batch_size=3, curriculum=Curriculum())
    grpo = run(data, evaluation=Evaluation(success_threshold=0.3), iterations=6)
    order = grpo.trainer.train_dataloader.sampler
    expected = {}
    for outputs in grpo.shown:
        rewards, index = outputs["iteration"].rewards, outputs["iteration"].rollout.prompts.index
        correct = (rewards.total >= 0.3).double().mean(1)
        expected |= dict(zip(index.tolist(), correct.tolist(), strict=True))
    assert order.success == expected
    assert len(expected) == 7  # each prompt is measured before any is skipped
    assert grpo.logged[-1]["curriculum/measured_frac"] == 1.0


@pytest.mark.parametrize(
    "schedule",
    [{}, dict(source=Ahead()), dict(dynamic_sampling_attempts=2)],
    ids=["in turn", "staleness 1", "dynamic sampling"],
)
@pytest.mark.parametrize("cut", [3, 4])  # within an epoch, and at its end
def test_a_resumed_curriculum_ends_with_the_same_weights(tmp_path, schedule, cut):
    def settings():
        data = PromptData(TASKS, batch_size=3, curriculum=Curriculum(0.3, 0.0, 0.05, 0.05))
        return dict(
            data=data,
            evaluation=Evaluation(success_threshold=0.3),
            **schedule,
        )

    whole = run(iterations=8, **settings())
    first = run(iterations=cut, **settings())
    first.trainer.save_checkpoint(tmp_path / "cut.ckpt")
    resumed = run(iterations=8, ckpt=tmp_path / "cut.ckpt", **settings())
    assert [each["iteration"].rollout.prompts.prompts for each in whole.shown[cut:]] == [
        each["iteration"].rollout.prompts.prompts for each in resumed.shown
    ]
    for name, weight in whole.policy.state_dict().items():
        assert torch.equal(weight, resumed.policy.state_dict()[name]), name
