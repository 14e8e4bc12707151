"""Stored rollouts: a run that trains on them ends with the weights of the run that wrote them."""

import shutil
from dataclasses import replace

import pytest
import torch
from lightning import Trainer

from litgrpo.algorithms.advantages import Normalized, ReMax
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.turns import GiGPO
from litgrpo.callbacks.rollouts import SaveRollouts
from litgrpo.data.modules import PromptData
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.reference import FrozenReference
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.sft import SFT
from litgrpo.rewards import Scoring
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.groups import pack_rollout, unpack_rollout
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.sources.ahead import Ahead
from litgrpo.rollout.sources.stored import StoredRollouts, rollout_file
from litgrpo.run_folder import lock_run_folder
from litgrpo.tensor_files import read_file, write_file
from tests.support.checkpoints import digest
from tests.support.echo import Echo
from tests.support.models import tiny_policy
from tests.support.raises import raises_for
from tests.support.training import GROUP, LENGTH, letters

ROWS = [{"prompt": text, "n": len(text)} for text in ("a", "hello there", "what is it?", "7", "xy")]
ITERATIONS = 4  # two epochs
CORRECTED = Objective(importance_correction=ImportanceCorrection())


class Seen(GRPO):
    """Keeps the rollouts that it trained on."""

    def training_step(self, prompts, batch_idx):
        shown = super().training_step(prompts, batch_idx)
        self.seen = [*vars(self).get("seen", []), shown["iteration"].rollout]
        return shown


def run(
    folder,
    ckpt=None,
    iterations=ITERATIONS,
    data=None,
    policy=None,
    *,
    save=False,
    stored=None,
    **settings,
):
    """A finished run in `folder`, which saves its rollouts, or trains on those of a folder."""
    settings = {
        "group_size": GROUP,
        "max_completion_length": LENGTH,
        "objective": CORRECTED,
        "check_invariants": False,
        "scoring": Scoring(num_workers=0),
        "rewards": {"letters": Reward(letters)},
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    } | settings
    if stored is not None:
        settings["source"] = StoredRollouts(stored)
    grpo = Seen("", max_iterations=iterations, **settings)
    grpo.policy = policy or tiny_policy("qwen2")
    if grpo.reference_path is not None:
        grpo.reference = FrozenReference(tiny_policy("qwen2", seed=1))
    silent = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(
        **silent,
        callbacks=[SaveRollouts()] if save else [],
        accelerator="cpu",
        max_epochs=-1,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(grpo, data or PromptData(ROWS, batch_size=2), ckpt_path=ckpt)
    return grpo


def same_weights(one, other):
    return digest(dict(one.policy.state_dict())) == digest(dict(other.policy.state_dict()))


def mostly_equal(prompts, completions):
    return [float("e" in text) for text in completions]


EPISODES = {
    "environment": Echo((2, 40)),
    "episode": EpisodeSettings(
        turn_format="inline", num_workers=0, max_turns=3, max_turn_tokens=4,
        close_truncated_turns=True,
    ),
    "max_completion_length": 70,
    "rewards": {"letters": Reward(letters), "environment": Reward(weight=0.3)},
}  # fmt: skip
TWO_STEPS = UpdateConfig(num_mini_batches=2)
# {name: (settings of both runs, settings of the one that samples)}
RUNS = {
    "one turn": (
        {
            "sampling": Sampling(top_p=0.8, stop=("e", "a")),
            "objective": replace(CORRECTED, kl_coef=0.1),
            "reference": "other",
        },
        {},
    ),
    "greedy baseline": ({"objective": replace(CORRECTED, advantages=ReMax())}, {}),
    "dynamic sampling": (
        {"rewards": {"x": Reward(mostly_equal)}},
        {"dynamic_sampling_attempts": 2},
    ),
    "one-step off-policy": (
        {"update": TWO_STEPS},
        {"source": Ahead()},
    ),
    "episodes": (
        EPISODES | {"update": TWO_STEPS, "objective": replace(CORRECTED, advantages=GiGPO())},
        {},
    ),
    "episodes, dynamic sampling": (EPISODES, {"dynamic_sampling_attempts": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_stored_rollouts_is_the_run_that_wrote_them(name, tmp_path):
    both, sampling = RUNS[name]
    written = run(tmp_path / "a", save=True, **(both | sampling))
    assert len(list((tmp_path / "a" / "rollouts").iterdir())) == ITERATIONS
    # Another order of prompts and other random numbers: no training rollout is sampled.
    shuffled = PromptData(ROWS, batch_size=2, seed=3)
    given = both | {"data": shuffled, "seed": 7, "stored": str(tmp_path / "a")}
    again = run(tmp_path / "b", **given)
    assert same_weights(again, written)
    for one, other in zip(written.seen, again.seen, strict=True):
        assert other.provenance == "stored"
        same = replace(other, provenance=one.provenance)
        assert digest(pack_rollout(one)) == digest(pack_rollout(same))
    if "dynamic_sampling_attempts" in sampling:
        assert written.generated_tokens > again.generated_tokens
    else:
        assert again.generated_tokens == written.generated_tokens


def test_objectives_are_compared_on_equal_data(tmp_path):
    written = run(tmp_path / "a", save=True)
    objective = replace(CORRECTED, advantages=Normalized(scale="none"))
    other = run(tmp_path / "b", stored=str(tmp_path / "a" / "rollouts"), objective=objective)
    pairs = list(zip(written.seen, other.seen, strict=True))
    assert all(torch.equal(a.completion_ids, b.completion_ids) for a, b in pairs)
    assert not same_weights(other, written)


def test_stored_log_probabilities_are_corrected_and_never_taken_for_the_policys(tmp_path):
    several = {"update": UpdateConfig(num_mini_batches=2), "objective": Objective()}
    written = run(tmp_path / "a", save=True, **several)
    assert written.learner.reuse_sampler_logprobs
    again = run(tmp_path / "b", stored=str(tmp_path / "a"), **several)
    assert not again.learner.reuse_sampler_logprobs
    assert again.objective.importance_correction == ImportanceCorrection()
    # Equal up to rounding: the policy computes again what its sampler has computed.
    for name, weight in written.policy.state_dict().items():
        torch.testing.assert_close(again.policy.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    # The weights of another policy are far from the sampler's.
    policy = tiny_policy("qwen2", seed=1)
    far = run(tmp_path / "c", stored=str(tmp_path / "a"), policy=policy, **several)
    near = again.trainer.callback_metrics["policy/sampler_mismatch"]
    assert far.trainer.callback_metrics["policy/sampler_mismatch"] > 10 * near


def test_a_run_resumes_in_the_middle_and_ends_with_the_rollouts(tmp_path, caplog):
    run(tmp_path / "a", save=True)
    stored = {"stored": str(tmp_path / "a")}
    with caplog.at_level("INFO"):
        whole = run(tmp_path / "b", iterations=100, **stored)
    assert whole.iteration == ITERATIONS
    assert f"all {ITERATIONS} stored rollouts" in caplog.text
    first = run(tmp_path / "c", iterations=2, **stored)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = run(tmp_path / "c", ckpt=tmp_path / "two.ckpt", iterations=100, **stored)
    assert same_weights(resumed, whole)
    assert len(resumed.seen) == ITERATIONS - 2


def test_a_resumed_run_removes_the_rollouts_that_it_replaces(tmp_path):
    run(tmp_path, iterations=2, save=True).trainer.save_checkpoint(tmp_path / "two.ckpt")
    stale = [rollout_file(tmp_path / "rollouts", number, 0) for number in (3, 9)]
    for path in stale:
        path.touch()
    run(tmp_path, ckpt=tmp_path / "two.ckpt", iterations=3, save=True)
    assert stale[0].stat().st_size
    assert not stale[1].exists()


def test_every_field_of_a_rollout_is_stored(tmp_path):
    for rollout in run(tmp_path, iterations=1, **EPISODES).seen:
        found = unpack_rollout(pack_rollout(rollout), "cpu")
        assert digest(pack_rollout(found)) == digest(pack_rollout(rollout))
        assert found.episodes == rollout.episodes


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The run folder of a run of two iterations, which wrote its rollouts."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    run(folder, iterations=2, save=True)
    return folder


def rewrite(path, change):
    content = read_file(path)
    change(content)
    write_file(content, path)


def first(folder):
    return rollout_file(folder / "rollouts", 1, 0)


def truncate(folder):
    first(folder).write_bytes(first(folder).read_bytes()[:-1000])


def flip_a_bit(folder):
    content = bytearray(first(folder).read_bytes())
    place = content.index(b"model.group_size")
    content[place] ^= 1
    first(folder).write_bytes(content)


def keep_texts_only(folder):
    shutil.rmtree(folder / "rollouts")
    (folder / "samples").mkdir()
    (folder / "samples" / "iteration-000001.jsonl").write_text("{}")


def with_another_tokenizer():
    policy = tiny_policy("qwen2")
    policy.tokenizer.add_tokens(["another"])
    return policy


# {name: (change of the folder, settings, texts of the message)}
BROKEN = {
    "no folder": (shutil.rmtree, {}, ("no rollouts", "SaveRollouts")),
    "texts": (keep_texts_only, {}, ("no rollouts", "SaveRollouts", "samples")),
    "truncated": (truncate, {}, ("iteration-000001-rank-0.pt", "cut off")),
    "damaged": (flip_a_bit, {}, ("iteration-000001-rank-0.pt", "damaged")),
    "a checkpoint": (
        lambda folder: write_file({"state_dict": {}}, first(folder)), {}, ("not a rollout",)
    ),
    "another version": (
        lambda folder: rewrite(first(folder), lambda file: file["rollout"].update(rows=1)),
        {},
        ("iteration-000001-rank-0.pt", "version", "rows"),
    ),
    "a missing iteration": (
        lambda folder: first(folder).unlink(), {}, ("iteration-000001-rank-0.pt", "missing")
    ),
    "group size": (None, {"group_size": 2}, ("model.group_size 4", "this run has 2")),
    "length": (None, {"max_completion_length": 5}, ("model.max_completion_length 6", "run has 5")),
    "sampling": (
        None, {"sampling": Sampling(temperature=0.5)}, ("model.sampling.temperature 1.0", "0.5")
    ),
    "episodes": (None, EPISODES | {"max_completion_length": 6}, ("model.environment False",)),
    "another model": (None, {"policy": with_another_tokenizer}, ("tokenizer",)),
    "another number of processes": (
        lambda folder: rewrite(
            first(folder), lambda file: file["settings"].update({"processes": 2})
        ),
        {},
        ("processes 2", "this run has 1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_rollouts_that_do_not_fit_raise_a_clear_error(name, stored, tmp_path):
    change, settings, expected = BROKEN[name]
    folder = shutil.copytree(stored, tmp_path / "run")
    if change is not None:
        change(folder)
    if "policy" in settings:
        settings = {"policy": settings["policy"]()}
    with raises_for(*expected):
        run(tmp_path / "new", stored=str(folder), **settings)


def test_rollouts_that_a_training_is_writing_are_not_read(stored, tmp_path):
    with lock_run_folder(stored), raises_for("StoredRollouts", "--run_dir"):
        run(tmp_path, stored=str(stored))
    run(tmp_path, stored=str(stored), iterations=1)


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"dynamic_sampling_attempts": 2}, "dynamic_sampling_attempts"),
        (EPISODES | {"objective": replace(CORRECTED, advantages=ReMax())}, "ReMax"),
    ],
)
def test_options_that_need_sampled_rollouts_are_rejected(settings, option, tmp_path):
    with raises_for("StoredRollouts", option):
        run(tmp_path, stored="runs/demo", **settings)


def test_a_training_without_rollouts_has_none_to_save():
    sft = SFT("")
    sft.trainer = Trainer(logger=False, enable_checkpointing=False)
    with raises_for("SaveRollouts", "SFT", "Leave out"):
        SaveRollouts().on_train_start(sft.trainer, sft)


def test_a_rollout_that_cannot_be_written_costs_its_file(tmp_path):
    (tmp_path / "rollouts").touch()
    with pytest.warns(UserWarning, match="writing rollouts"):
        grpo = run(tmp_path, iterations=2, save=True)
    assert grpo.iteration == 2


CHANGES = {
    "completion_ids": [
        lambda x: x + 10**6,
        lambda x: x - 10**6,
        lambda x: x.float(),
        lambda x: x[0],
    ],
    "completion_mask": [lambda x: x.float() * 7, lambda x: x & False, lambda x: x.roll(1, 1)],
    "sampler_logprobs": [lambda x: x * 0 + 5],
    "completions": [lambda x: [1] * len(x)],
    "prompts": [lambda x: x | {"prompt_ids": x["prompt_ids"] + 10**6}],
}


@pytest.mark.filterwarnings("ignore")
def test_a_rollout_that_no_policy_sampled_is_rejected_by_name(tmp_path):
    run(tmp_path / "a", save=True, iterations=1)
    path = rollout_file(tmp_path / "a" / "rollouts", 1, 0)
    good = read_file(path)
    changed = [
        good | {"rollout": good["rollout"] | {name: change(good["rollout"][name])}}
        for name, changes in CHANGES.items()
        for change in changes
    ]
    for content in [*changed, good | {"settings": [1]}, good | {"rollout": None}]:
        write_file(content, path)
        with raises_for(path.name):
            run(tmp_path / "b", stored=str(tmp_path / "a"), iterations=1)
