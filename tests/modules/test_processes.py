"""Two processes sample, score, learn and report what one does."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning import Callback

from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.rollouts import SaveRollouts
from litgrpo.checkpointing.resume import RngState, set_all_random_state
from litgrpo.data.loader import BatchLoader, BatchOrder
from litgrpo.data.modules import PairData, PromptData
from litgrpo.environments.agent import Agent
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.evaluation.metrics import DialogueScores
from litgrpo.learning.optim import WarmupLinear
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.loading.export import export
from litgrpo.models.reference import FrozenReference
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.sft import SFT
from litgrpo.rewards import Scoring
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.sources.base import OnPolicy
from litgrpo.rollout.sources.data_completions import DataCompletions
from litgrpo.rollout.sources.stored import StoredRollouts
from litgrpo.runs.summary import Summary
from tests.evaluation.test_golden import GOLDEN, close_to, report_of
from tests.support.algorithms import PUBLISHED
from tests.support.checkpoints import digest
from tests.support.echo import Echo
from tests.support.gloo import run_by
from tests.support.models import tiny_policy
from tests.support.processes import ALGORITHMS, TEXTS, Gradients, letters, trainer
from tests.support.vllm_stand_in import StandIn

pytestmark = pytest.mark.timeout(900)

# Defined per rank; see docs/reference/metrics.md.
ON_A_RANK = {"policy/clip_high_frac_max", "policy/clip_low_frac_max", "policy/ratio_max"}
HELD_OUT = [
    {"prompt": "one", "answers": ["o n e"]},
    {"prompt": "two", "answers": ["t", "w", "o"]},
    {"prompt": "three", "answers": "e"},
]


def vowels(prompts, completions):
    return [sum(letter in "aeiou" for letter in text) / 6 for text in completions]


def letters_after_long_prompts(prompts, completions):
    return [
        score if len(prompt) > 4 else 0.0
        for prompt, score in zip(prompts, letters(prompts, completions), strict=True)
    ]


def policy(kind="qwen2", seed=0):
    """Random weights; those of T5 as they usually start, so that rounding is not magnified."""
    usual = {"initializer_factor": 1.0} if kind == "t5" else {}
    return tiny_policy(kind, seed=seed, **usual)


def build(module=GRPO, kind="qwen2", **settings):
    defaults = {
        "rewards": {"letters": Reward(letters)},
        "group_size": 4,
        "max_completion_length": 6,
        "max_iterations": 2,
        "check_invariants": False,
        "optimizer": partial(torch.optim.SGD, lr=0.5),
        "scoring": Scoring(num_workers=0),
    }
    grpo = module("", **defaults | settings)
    grpo.policy = policy(kind)
    if settings.get("reference") == "another":
        grpo.reference = FrozenReference(policy(kind, seed=1))
    return grpo


# --- trainings that end in the weights and the metrics of one process ---

TEACHER = Objective(reward_coef=0.0, kl_coef=1.0)
TWO_EPOCHS = {
    "check_invariants": True,
    "objective": Objective(kl_coef=0.1),
    "reference": "another",
    "update": UpdateConfig(epochs_per_rollout=2, micro_batch_size=3),
    "evaluation": Evaluation(
        num_samples=2, pass_at_k=[1], success_threshold=0.3, corpus_metrics=DialogueScores()
    ),
    # Two steps of warm-up, then linear to 0 after the last of four.
    "lr_scheduler": partial(WarmupLinear, warmup=2),
}
INLINE = partial(EpisodeSettings, turn_format="inline")
TRAININGS = {
    "qwen2": TWO_EPOCHS,
    "t5": TWO_EPOCHS | {"kind": "t5", "check_invariants": False},
    # Observations are read in the decoding loop and in one forward pass.
    "episodes in workers": {
        "rewards": {"letters": Reward(letters), "environment": Reward(weight=0.3)},
        "environment": Echo((2, 40)),
        "episode": INLINE(
            num_workers=2, max_turns=3, max_turn_tokens=4, close_truncated_turns=True
        ),
        "max_completion_length": 70,
        "objective": PUBLISHED["gtpo"],
        "update": UpdateConfig(epochs_per_rollout=2, micro_batch_size=3, max_grad_norm=None),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    },
    "agents": {
        "kind": "llama",
        "rewards": {"environment": Reward(weight=1.0)},
        "environment": Agent("tests.support.agents.play"),
        "episode": INLINE(max_turns=8, max_turn_tokens=6),
        "max_completion_length": 64,
        "max_iterations": 1,
    },
    "completions of the data": {
        "objective": Objective(reward_coef=0.0, kl_coef=1.0, kl_estimator="forward_kl"),
        "reference": "another",
        "group_size": 1,
        "max_iterations": 4,
        "source": DataCompletions("solution", on_policy_frac=0.5),
    },
    "served reference": {"check_invariants": True, "objective": TEACHER, "reference": "another"},
}
ROWS = {
    "agents": [
        {"prompt": f"q{n}?", "agent": name}
        for n, name in enumerate(("talk", "branch", "once", "talk"))
    ],
    "completions of the data": [
        {"prompt": "1+1?", "solution": "2"},
        {"prompt": "what is 3+14?", "solution": "17!"},
        {"prompt": "a", "solution": "b c"},
        {"prompt": "say xyz", "solution": "xyz, and more than six"},
    ],
}


class Rates(Callback):
    """Keeps the learning rate of each optimizer step."""

    def __init__(self):
        self.used = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.used.append(optimizer.param_groups[0]["lr"])


def learn(processes, folder, name, url):
    """Train on four prompts per iteration; leaves a checkpoint, metrics and learning rates."""
    settings = TRAININGS[name]
    if name == "served reference" and processes > 1:
        settings = settings | {"reference": url}
    grpo, runner, rates = (
        build(**settings),
        trainer(processes, default_root_dir=folder / str(processes)),
        Rates(),
    )
    runner.callbacks += [rates, Summary()]
    val = HELD_OUT if "evaluation" in settings else None
    runner.fit(grpo, PromptData(ROWS.get(name, TEXTS), val=val, batch_size=4))
    runner.save_checkpoint(folder / f"{processes}.ckpt")
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    if runner.is_global_zero:
        (folder / f"{processes}.json").write_text(json.dumps([metrics, rates.used]))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Address of a server of the reference."""
    folder = tmp_path_factory.mktemp("teacher")
    export(policy(seed=1), folder)
    with StandIn(folder) as server:
        yield server.url


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_learn_and_report_what_one_does(name, teacher, tmp_path):
    for processes in (1, 2):
        run_by(processes, learn, tmp_path, name, teacher)
    one, two = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["state_dict"] for n in (1, 2))
    start = policy(TRAININGS[name].get("kind", "qwen2")).state_dict()
    for key, weight in one.items():
        moved = (weight - start[key.removeprefix("policy.")]).norm()
        # T5's embeddings are large: what their last digits cannot hold is not a difference.
        rounding = 2 * torch.finfo(weight.dtype).eps * weight.norm()
        assert (two[key] - weight).norm() <= 1e-4 * moved + rounding, key
        assert moved > 100 * rounding, key
    (metrics, rates), (others, other_rates) = (
        json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2)
    )
    assert others.keys() == metrics.keys()
    for key in metrics.keys() - ON_A_RANK:
        if not key.startswith(("time/", "perf/")):
            assert others[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5), key
    assert other_rates == rates
    if "lr_scheduler" in TRAININGS[name]:
        assert rates == pytest.approx([0.25, 0.5, 0.5, 0.25])
        for n in (1, 2):  # two processes evaluate one prompt twice, and count it once
            summary = json.loads((tmp_path / f"{n}/summary.json").read_text())
            assert summary["after"]["n"] == len(HELD_OUT)
    if name == "agents":
        assert metrics["env/segments"] > 1
        assert metrics["reward/std"] > 0


# --- gradients ---

OF_TURNS = "gigpo mt_grpo gtpo rebn simpletir otb m2po gkd dapo reinforce_pp clip_cov kl_cov"
PRECISE = {  # {rollouts: (settings, algorithms, dtype, largest relative difference)}
    "completions": (
        {"rewards": {"letters": Reward(letters), "vowels": Reward(vowels, weight=0.3)}},
        tuple(ALGORITHMS),
        torch.float64,
        1e-10,
    ),
    "episodes": (TRAININGS["episodes in workers"], tuple(OF_TURNS.split()), torch.float32, 1e-5),
}


def take_gradients(processes, folder, name):
    """Leaves the gradients of the algorithms."""
    settings, algorithms, dtype, _ = PRECISE[name]
    update = UpdateConfig(micro_batch_size=3, max_grad_norm=None)
    still = {"update": update, "optimizer": partial(torch.optim.SGD, lr=0.0)}
    settings = settings | still | {"reference": "another", "max_iterations": 1}
    settings = settings | {"objective": Objective(kl_coef=0.1)}
    grpo = build(Gradients, **settings)
    for model in (grpo.policy, grpo.reference.policy):
        model.to(dtype)
    grpo.policy.eos_ids = tuple(range(2, 60 if "environment" in settings else 40))
    grpo.algorithms = {key: ALGORITHMS[key] for key in algorithms}
    grpo.file = folder / f"{processes}.pt"
    trainer(processes).fit(grpo, PromptData(TEXTS, batch_size=4))


@pytest.mark.parametrize("name", PRECISE)
def test_gradients_of_algorithms_are_those_of_one_process(name, tmp_path):
    for processes in (1, 2):
        run_by(processes, take_gradients, tmp_path, name)
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2))
    errors = {key: float((two[key] - one[key]).norm() / one[key].norm()) for key in one}
    _, algorithms, _, limit = PRECISE[name]
    assert tuple(errors) == algorithms
    assert max(errors.values()) < limit, errors


# --- other runs ---


def accumulate(processes, folder):
    """One supervised step on eight pairs: alone at once, in two processes as two batches."""
    pairs = [
        {"prompt": text, "completion": "ab" * (1 + 7 * n % 11)} for n, text in enumerate(TEXTS)
    ]
    sft = SFT("", max_iterations=1, optimizer=partial(torch.optim.SGD, lr=0.5), max_grad_norm=None)
    sft.policy = policy()
    sft.tokenizer = sft.policy.tokenizer
    runner = trainer(processes)
    runner.accumulate_grad_batches = processes
    runner.fit(sft, PairData(pairs, batch_size=8 // processes, group_by_length=False))
    weights = torch.cat([weight.detach().flatten() for weight in sft.policy.parameters()])
    if runner.is_global_zero:
        torch.save((weights, runner.callback_metrics["sft/loss"]), folder / f"{processes}.pt")


def test_supervised_processes_that_accumulate_take_the_step_of_one_large_batch(tmp_path):
    for processes in (1, 2):
        run_by(processes, accumulate, tmp_path)
    alone, together = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


class Apart(PromptData):
    """The second process of two gets no prompt of the set `hard`."""

    def val_dataloader(self):
        rank, processes = self.rank_and_world_size
        mine = {(0, 1): [[0, 1], [2]], (0, 2): [[0], [2]], (1, 2): [[1]]}[rank, processes]
        return BatchLoader(self.sets["val"], BatchOrder(lambda _: mine))


def evaluate_apart(processes, folder):
    """Validates on two sets, of which the second process sees one."""
    runner = trainer(processes)
    data = Apart(val={"easy": HELD_OUT[:2], "hard": HELD_OUT[2:]})
    (metrics,) = runner.validate(build(evaluation=TWO_EPOCHS["evaluation"]), data, verbose=False)
    if runner.is_global_zero:
        (folder / f"{processes}.json").write_text(json.dumps(metrics))


def test_a_set_of_which_one_process_sees_no_prompt_is_reported_by_all(tmp_path):
    for processes in (1, 2):
        run_by(processes, evaluate_apart, tmp_path)
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert {"val/easy/avg@2", "val/hard/avg@2", "val/hard/reward"} <= one.keys()
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


def add_up(processes, folder):
    """Leaves reports of held-out prompts that are shared out in three ways."""
    dist.init_process_group("gloo")
    # Uneven with two prompts on both processes, one process with a single batch, one idle process.
    uneven = [[[0, 5, 2, 11], [7, 1]], [[3, 4, 6, 8], [9, 10, 5, 0]]]
    single = [[[0, 5, 2], [7, 1, 3], [4, 6, 8, 9, 10]], [[11]]]
    idle = [[list(range(12))], []]
    rank = dist.get_rank()
    reports = [report_of(batches[rank]) for batches in (uneven, single, idle)]
    torch.save(reports, folder / f"{rank}.pt")


def test_a_report_of_two_processes_is_that_of_one(tmp_path):
    run_by(2, add_up, tmp_path)
    for rank in (0, 1):
        for report, per_prompt in torch.load(tmp_path / f"{rank}.pt"):
            assert report == close_to(GOLDEN["report"])
            assert per_prompt["greedy"] == close_to(GOLDEN["per_prompt"]["greedy"])


def redraw(processes, folder):
    """Two iterations in which only some groups have variance; leaves the metrics."""
    rewards = {"letters": Reward(letters_after_long_prompts)}
    runner = trainer(processes)
    data = PromptData(TEXTS, batch_size=4)
    runner.fit(build(rewards=rewards, dynamic_sampling_attempts=6), data)
    found = {name: float(value) for name, value in runner.callback_metrics.items()}
    if runner.is_global_zero:
        (folder / "metrics.json").write_text(json.dumps(found))


def test_processes_redraw_together_until_each_has_what_it_needs(tmp_path):
    run_by(2, redraw, tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["dynamic/filled_frac"] == 1
    assert metrics["dynamic/resamples"] >= 1


def train_on_stored(processes, folder):
    """Write rollouts, and train on them; leaves both weights."""
    corrected = Objective(importance_correction=ImportanceCorrection())
    sources = {"a": OnPolicy(), "b": StoredRollouts(str(folder / "a"))}
    for name, source in sources.items():
        grpo = build(objective=corrected, source=source)
        callbacks = [SaveRollouts()] if name == "a" else []
        runner = trainer(processes, default_root_dir=folder / name, callbacks=callbacks)
        runner.fit(grpo, PromptData(TEXTS, batch_size=4, shuffle=name == "a"))
        if runner.is_global_zero:
            torch.save(grpo.policy.state_dict(), folder / f"{name}.pt")


def test_two_processes_train_on_what_two_processes_wrote(tmp_path):
    run_by(2, train_on_stored, tmp_path)
    assert len(list((tmp_path / "a" / "rollouts").iterdir())) == 4
    written, again = (torch.load(tmp_path / f"{name}.pt") for name in "ab")
    assert digest(written) == digest(again)


def save_states(processes, folder):
    """Save what the ranks put into a checkpoint."""
    dist.init_process_group("gloo")
    rank, checkpoint = dist.get_rank(), {}
    torch.manual_seed(rank)
    RngState().on_save_checkpoint(SimpleNamespace(world_size=processes), None, checkpoint)
    torch.save((torch.get_rng_state(), checkpoint["random_state"]), folder / f"{rank}.pt")


def test_a_checkpoint_holds_the_random_state_of_every_rank(tmp_path):
    run_by(2, save_states, tmp_path)
    (first, states), (second, again) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    assert len(states) == len(again) == 2
    assert not torch.equal(first, second)
    for random_state, state in zip((first, second), states, strict=True):
        set_all_random_state(state)
        assert torch.equal(torch.get_rng_state(), random_state)
