import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning import Callback

from litgrpo.algorithms.losses import Objective
from litgrpo.callbacks.summary import Summary
from litgrpo.data.loader import BatchLoader, BatchOrder
from litgrpo.data.modules import PairData, PromptData
from litgrpo.environments.agent import Agent
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.evaluation.metrics import DialogueScores
from litgrpo.models.reference import FrozenReference
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.runner import InProcessRunner
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.training.grpo import GRPO
from litgrpo.training.optim import WarmupLinear
from litgrpo.training.sft import SFT
from litgrpo.training.update_config import UpdateConfig
from tests.support.algorithms import DISTILLING, PUBLISHED
from tests.support.models import tiny_policy
from tests.support.processes import (
    TEXTS,
    Gradients,
    in_a_process_of_one_thread,
    letters,
    trainer,
)

# Defined per rank; see docs/reference/metrics.md.
ON_A_RANK = {"policy/clip_high_frac_max", "policy/clip_low_frac_max", "policy/ratio_max"}
HELD_OUT = [
    {"prompt": "one", "answers": ["o n e"]},
    {"prompt": "two", "answers": ["t", "w", "o"]},
    {"prompt": "three", "answers": "e"},
]


def vowels(prompts, completions):
    return [sum(letter in "aeiou" for letter in text) / 6 for text in completions]


def policy(kind, seed=0):
    """Random weights; those of T5 as they usually start, so that rounding is not magnified."""
    usual = {"initializer_factor": 1.0} if kind == "t5" else {}
    return tiny_policy(kind, seed=seed, **usual)


def train(num_processes, folder, kind):
    """Two iterations of two epochs on four prompts; leaves the weights and the report."""
    grpo = GRPO(
        "",
        {"letters": Reward(letters)},
        group_size=4,
        max_completion_length=6,
        max_iterations=2,
        objective=Objective(kl_coef=0.1),
        reference="another",
        update=UpdateConfig(epochs_per_rollout=2, micro_batch_size=3),
        evaluation=Evaluation(
            num_samples=2, pass_at_k=[1], success_threshold=0.3, corpus_metrics=DialogueScores()
        ),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        reward_runner=InProcessRunner(),
    )
    grpo.policy = policy(kind)
    grpo.reference = FrozenReference(policy(kind, seed=1))
    runner = trainer(num_processes)
    runner.fit(grpo, PromptData(TEXTS, val=HELD_OUT, batch_size=4))
    runner.save_checkpoint(folder / f"{num_processes}.ckpt")
    report = {name: float(value) for name, value in runner.callback_metrics.items()}
    (folder / f"{num_processes}.json").write_text(json.dumps(report))


def take_gradients(num_processes, folder):
    """Leaves the gradients of all algorithms, in both precisions."""
    for dtype in (torch.float32, torch.float64):
        grpo = Gradients(
            "",
            {"letters": Reward(letters), "vowels": Reward(vowels, weight=0.3)},
            group_size=4,
            max_completion_length=6,
            max_iterations=1,
            objective=Objective(kl_coef=0.1),
            reference="another",
            check_invariants=False,
            reward_runner=InProcessRunner(),
            update=UpdateConfig(micro_batch_size=3, max_grad_norm=None),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        )
        grpo.policy = tiny_policy("qwen2").to(dtype)
        grpo.policy.eos_ids = tuple(range(2, 40))
        grpo.reference = FrozenReference(tiny_policy("qwen2", seed=1).to(dtype))
        grpo.file = folder / f"{num_processes} {dtype}.pt"
        trainer(num_processes).fit(grpo, PromptData(TEXTS, batch_size=4))


def accumulate(num_processes, folder):
    """One supervised step on eight pairs: alone at once, in two processes as two batches."""
    pairs = [
        {"prompt": text, "completion": "ab" * (1 + 7 * n % 11)} for n, text in enumerate(TEXTS)
    ]
    sft = SFT("", max_iterations=1, optimizer=partial(torch.optim.SGD, lr=0.5), max_grad_norm=None)
    sft.policy = tiny_policy("qwen2")
    sft.tokenizer = sft.policy.tokenizer
    runner = trainer(num_processes)
    runner.accumulate_grad_batches = num_processes
    runner.fit(sft, PairData(pairs, batch_size=8 // num_processes, group_by_length=False))
    weights = torch.cat([weight.detach().flatten() for weight in sft.policy.parameters()])
    loss = runner.callback_metrics["sft/loss"]
    if runner.is_global_zero:
        torch.save((weights, loss), folder / f"{num_processes}.pt")


def test_supervised_processes_that_accumulate_take_the_step_of_one_large_batch(tmp_path):
    in_a_process_of_one_thread(accumulate, tmp_path)
    alone, together = (torch.load(tmp_path / f"{number}.pt") for number in (1, 2))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def redraw(num_processes, folder):
    """Two iterations in which only some groups have variance; save the metrics."""
    grpo = GRPO(
        "",
        {"letters": Reward(letters_after_long_prompts)},
        group_size=4,
        max_completion_length=6,
        max_iterations=2,
        dynamic_sampling_attempts=6,
        check_invariants=False,
        reward_runner=InProcessRunner(),
    )
    grpo.policy = tiny_policy("qwen2")
    runner = trainer(num_processes)
    runner.fit(grpo, PromptData(TEXTS, batch_size=4))
    report = {name: float(value) for name, value in runner.callback_metrics.items()}
    (folder / f"{num_processes}.json").write_text(json.dumps(report))


def train_agents(num_processes, folder):
    """One iteration with agents; save the weights and the metrics."""
    grpo = GRPO(
        "",
        {"environment": Reward(weight=1.0)},
        environment=Agent("tests.support.agents.play"),
        episode=EpisodeSettings(turn_format="inline", max_turns=8, max_turn_tokens=6),
        group_size=4,
        max_completion_length=64,
        max_iterations=1,
        check_invariants=False,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    )
    grpo.policy = tiny_policy("llama")
    agents = ["talk", "branch", "once", "talk"]
    rows = [{"prompt": f"q{n}?", "agent": name} for n, name in enumerate(agents)]
    runner = trainer(num_processes)
    runner.fit(grpo, PromptData(rows, batch_size=4))
    runner.save_checkpoint(folder / f"{num_processes}.ckpt")
    report = {name: float(value) for name, value in runner.callback_metrics.items()}
    (folder / f"{num_processes}.json").write_text(json.dumps(report))


class Rates(Callback):
    """Keeps the learning rate of each optimizer step, and writes them at the end."""

    def __init__(self):
        self.used = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.used.append(optimizer.param_groups[0]["lr"])

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            Path("rates.json").write_text(json.dumps(self.used))


def warm_up(num_processes, folder):
    """Three iterations of two steps; three held-out prompts, of which two processes repeat one."""
    (folder / str(num_processes)).mkdir()
    os.chdir(folder / str(num_processes))
    grpo = GRPO(
        "",
        {"letters": Reward(letters)},
        group_size=2,
        max_completion_length=4,
        max_iterations=3,
        check_invariants=False,
        update=UpdateConfig(num_mini_batches=2),
        evaluation=Evaluation(num_samples=2, pass_at_k=[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.6),
        lr_scheduler=lambda optimizer: WarmupLinear(optimizer, warmup=2),
        reward_runner=InProcessRunner(),
    )
    grpo.policy = tiny_policy("qwen2")
    runner = trainer(num_processes)
    runner.callbacks += [Rates(), Summary()]
    runner.fit(grpo, PromptData(TEXTS, val=HELD_OUT, batch_size=4))


@pytest.mark.timeout(900)
def test_processes_count_optimizer_steps_and_held_out_prompts_as_one_does(tmp_path):
    in_a_process_of_one_thread(warm_up, tmp_path)
    for num in ("1", "2"):
        rates = json.loads((tmp_path / num / "rates.json").read_text())
        # Two steps of warm-up to 0.6, then linear to 0 after the sixth.
        assert rates == pytest.approx([0.3, 0.6, 0.6, 0.45, 0.3, 0.15])
        summary = json.loads((tmp_path / num / "summary.json").read_text())
        assert summary["after"]["n"] == len(HELD_OUT)


class Apart(PromptData):
    """The second process of two gets no prompt of the set `hard`."""

    def val_dataloader(self):
        rank, processes = self.process
        mine = {(0, 1): [[0, 1], [2]], (0, 2): [[0], [2]], (1, 2): [[1]]}[rank, processes]
        return BatchLoader(self.sets["val"], BatchOrder(lambda _: mine))


def evaluate_apart(num_processes, folder):
    """Validates on two sets, of which the second process sees one."""
    grpo = GRPO(
        "",
        {"letters": Reward(letters)},
        max_completion_length=6,
        evaluation=Evaluation(
            num_samples=2, pass_at_k=[1], success_threshold=0.3, corpus_metrics=DialogueScores()
        ),
        reward_runner=InProcessRunner(),
    )
    grpo.policy = tiny_policy("qwen2")
    runner = trainer(num_processes)
    data = Apart(val={"easy": HELD_OUT[:2], "hard": HELD_OUT[2:]})
    (report,) = runner.validate(grpo, data, verbose=False)
    (folder / f"{num_processes}.json").write_text(json.dumps(report))


@pytest.mark.timeout(900)
def test_a_set_of_which_one_process_sees_no_prompt_is_reported_by_all(tmp_path):
    in_a_process_of_one_thread(evaluate_apart, tmp_path)
    one, two = (json.loads((tmp_path / f"{num}.json").read_text()) for num in (1, 2))
    assert {"val/easy/avg@2", "val/hard/avg@2", "val/hard/reward"} <= one.keys()
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


def letters_after_long_prompts(prompts, completions):
    return [
        score if len(prompt) > 4 else 0.0
        for prompt, score in zip(prompts, letters(prompts, completions), strict=True)
    ]


@pytest.mark.timeout(900)
def test_agents_of_several_processes_train_as_those_of_one(tmp_path):
    in_a_process_of_one_thread(train_agents, tmp_path)
    one, two = (json.loads((tmp_path / f"{num}.json").read_text()) for num in (1, 2))
    compared = [name for name in one if name.startswith(("reward/", "env/", "completion/"))]
    for name in compared:
        assert two[name] == pytest.approx(one[name], abs=1e-5), name
    assert one["env/segments"] > 1
    assert one["reward/std"] > 0
    first, second = (
        torch.load(tmp_path / f"{num}.ckpt", weights_only=True)["state_dict"] for num in (1, 2)
    )
    for name, weight in first.items():
        assert torch.allclose(weight, second[name], atol=1e-5), name


@pytest.mark.timeout(900)
def test_processes_redraw_together_until_each_has_what_it_needs(tmp_path):
    in_a_process_of_one_thread(redraw, tmp_path)
    for num in (1, 2):
        report = json.loads((tmp_path / f"{num}.json").read_text())
        assert report["dynamic/filled_frac"] == 1
        assert report["dynamic/resamples"] >= 1


@pytest.mark.timeout(900)
def test_gradients_of_all_algorithms_are_those_of_one_process(tmp_path):
    in_a_process_of_one_thread(take_gradients, tmp_path)
    table = ["1 against 2 processes: norm of the difference of gradients over their norm"]
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        one, two = (torch.load(tmp_path / f"{n} {dtype}.pt", weights_only=True) for n in (1, 2))
        errors = {name: float((two[name] - one[name]).norm() / one[name].norm()) for name in one}
        table += [f"{name:<20} {dtype} {error:.1e}" for name, error in errors.items()]
        assert errors.keys() == (PUBLISHED | DISTILLING).keys() - {"bnpo"}
        assert max(errors.values()) < limit, errors
    print("", *table, sep="\n")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["qwen2", "t5"])
def test_two_processes_learn_and_report_what_one_does(kind, tmp_path):
    in_a_process_of_one_thread(train, tmp_path, kind)
    one, two = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["state_dict"] for n in (1, 2))
    start = policy(kind).state_dict()
    for name, weight in one.items():
        moved = (weight - start[name.removeprefix("policy.")]).norm()
        # T5's embeddings are large: what their last digits cannot hold is not a difference.
        rounding = 2 * torch.finfo(weight.dtype).eps * weight.norm()
        assert (two[name] - weight).norm() <= 1e-4 * moved + rounding
        assert moved > 100 * rounding
    one_report, two_report = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert two_report.keys() == one_report.keys()
    for name in one_report.keys() - ON_A_RANK:
        if not name.startswith(("time/", "perf/")):
            assert two_report[name] == pytest.approx(one_report[name], rel=1e-4, abs=1e-5), name
