"""How logged numbers are read: unit, healthy range, and what TRL and verl call the same number."""

from __future__ import annotations

from dataclasses import dataclass

PLACE = "<"  # begins what stands for a name of the run's own; `run_files.renamed` reads those


@dataclass(frozen=True)
class Reading:
    """How a number is read.

    Args:
        unit: of the number.
        healthy: what it is like in a run that learns; "" where that says nothing.
        trl: its name in `trainer_state.json`; "" where TRL has none that means the same.
        verl: its name in verl's console log, likewise.
    """

    unit: str
    healthy: str = ""
    trl: str = ""
    verl: str = ""


def plain(name: str) -> bool:
    """Whether a foreign name stands for one number."""
    return bool(name) and PLACE not in name


# In the order of docs/metrics.md.
READINGS: dict[str, Reading] = {
    "reward/mean": Reading("reward", "rises", "reward", "critic/score/mean"),
    "reward/std": Reading("reward"),
    "reward/min": Reading("reward", "", "", "critic/score/min"),
    "reward/max": Reading("reward", "", "", "critic/score/max"),
    "reward/group_std": Reading("reward", "above 0", "reward_std"),
    "reward/zero_variance_groups_frac": Reading(
        "share", "below 0.5, unless all are right", "frac_reward_zero_std"
    ),
    "reward/failed_frac": Reading("share", "0"),
    "reward/correct_frac": Reading("share", "rises"),
    "reward/all_correct_frac": Reading("share", "below 0.85 at the start"),
    "reward/all_incorrect_frac": Reading("share", "below 0.5"),
    "reward/<part>": Reading("reward", "", "rewards/<part>/mean"),
    "reward/<part>_std": Reading("reward", "above 0", "rewards/<part>/std"),
    "reward/<part>_share": Reading("share", "none near 1 but the one that counts"),
    "reward/cosine_<part>_<part>": Reading("-1 to 1", "above -0.5"),
    "completion/len_mean": Reading(
        "tokens", "0.5 to 1.5 times its start", "completions/mean_length", "response_length/mean"
    ),
    "completion/len_min": Reading("tokens", "", "completions/min_length", "response_length/min"),
    "completion/len_max": Reading("tokens", "", "completions/max_length", "response_length/max"),
    "completion/truncated_frac": Reading(
        "share", "below 0.05", "completions/clipped_ratio", "response_length/clip_ratio"
    ),
    "completion/terminated_len_mean": Reading("tokens", "", "completions/mean_terminated_length"),
    "completion/terminated_len_min": Reading("tokens", "", "completions/min_terminated_length"),
    "completion/terminated_len_max": Reading("tokens", "", "completions/max_terminated_length"),
    "completion/correct_len_mean": Reading("tokens"),
    "completion/incorrect_len_mean": Reading("tokens"),
    "completion/eos_frac": Reading("share", "as 1 - truncated_frac"),
    "completion/unique_frac": Reading("share", "above 0.3 while it learns"),
    "completion/loop_frac": Reading("share", "as at the start"),
    "prompt/begin_tokens": Reading("tokens", "0 or 1"),
    "prompt/len_mean": Reading("tokens", "", "", "prompt_length/mean"),
    "prompt/len_min": Reading("tokens", "", "", "prompt_length/min"),
    "prompt/len_max": Reading("tokens", "", "", "prompt_length/max"),
    "time/env_s": Reading("s"),
    "env/turns": Reading("count"),
    "env/reward": Reading("reward"),
    "env/failed_frac": Reading("share", "0"),
    "env/timeout_frac": Reading("share", "0"),
    "tools/<name>_calls": Reading("count"),
    "tools/<name>_failed": Reading("count", "falls"),
    "completion/observation_frac": Reading("share"),
    "policy/loss": Reading(
        "nats", "near 0 with one step; its value says nothing", "loss", "actor/pg_loss"
    ),
    "policy/entropy": Reading(
        "nats", "falls slowly while the reward rises", "entropy", "actor/entropy"
    ),
    "policy/entropy_trained": Reading("nats"),
    "policy/kl": Reading("nats", "rises slowly", "kl", "actor/kl_loss"),
    "policy/kl_coef": Reading("1", "", "", "actor/kl_coef"),
    "policy/entropy_coef": Reading("1"),
    "policy/log_ratio": Reading("nats", "0 with one step, else near 0"),
    "policy/ratio_max": Reading("1", "1 with one step, else below 10"),
    "policy/clip_low_frac": Reading(
        "share", "0 with one step, else below 0.2", "clip_ratio/low_mean"
    ),
    "policy/clip_high_frac": Reading(
        "share", "0 with one step, else below 0.2", "clip_ratio/high_mean"
    ),
    "policy/clip_low_frac_min": Reading("share", "", "clip_ratio/low_min"),
    "policy/clip_low_frac_max": Reading("share"),
    "policy/clip_high_frac_min": Reading("share"),
    "policy/clip_high_frac_max": Reading("share", "", "clip_ratio/high_max"),
    "policy/kept_frac": Reading("share"),
    "policy/sampler_mismatch": Reading(
        "nats", "below 0.05", "sampling/sampling_logp_difference/mean"
    ),
    "policy/sampler_weight": Reading("1", "0.5 to 2", "sampling/importance_sampling_ratio/mean"),
    "policy/advantage_mean": Reading(
        "1", "0 where groups are centered", "", "critic/advantages/mean"
    ),
    "policy/advantage_std": Reading("1"),
    "optim/lr": Reading("1", "", "learning_rate", "actor/lr"),
    "optim/grad_norm": Reading("1", "within 10 times its start", "grad_norm", "actor/grad_norm"),
    "optim/clipped_frac": Reading("share", "says little with Adam"),
    "optim/update_rel": Reading("1", "1e-5 to 1e-2"),
    "optim/skipped_steps": Reading("count", "0"),
    "dynamic/resamples": Reading("count"),
    "dynamic/prompts_sampled": Reading("count"),
    "dynamic/informative_frac": Reading("share", "above 0.5"),
    "dynamic/filled_frac": Reading("share"),
    "time/step_s": Reading("s", "", "step_time", "timing_s/step"),
    "time/rollout_s": Reading("s", "", "", "timing_s/gen"),
    "time/reward_s": Reading("s", "below half of the step", "", "timing_s/reward"),
    "time/reference_s": Reading("s", "", "", "timing_s/ref"),
    "time/learn_s": Reading("s", "", "", "timing_s/update_actor"),
    "perf/tokens_per_s": Reading("tokens/s"),
    "perf/generated_tokens": Reading("tokens"),
    "perf/peak_memory_gib": Reading("GiB", "", "", "perf/max_memory_allocated_gb"),
    "data/epoch": Reading("passes", "", "epoch", "training/epoch"),
    "data/prompts_seen": Reading("count"),
    "checkpoint/size_mib": Reading("MiB"),
    "checkpoint/wait_s": Reading("s"),
    "checkpoint/write_s": Reading("s"),
    "val/<set>/avg@<k>": Reading("share", "rises", "", "val-core/<set>/acc/mean@<k>"),
    "val/<set>/pass@<k>": Reading("share"),
    "val/<set>/greedy": Reading("share"),
    "val/<set>/reward": Reading("reward", "rises with reward/mean"),
    "val/<set>/<part>": Reading("reward"),
    "val/<set>/turns": Reading("count"),
    "val/<set>/called_frac": Reading("share"),
    "val/<set>/ended_frac": Reading("share", "near 1"),
    "val/<set>/len_mean": Reading("tokens"),
    "val/<set>/distinct_1": Reading("share"),
    "val/<set>/distinct_2": Reading("share"),
    "val/<set>/start_perplexity": Reading("1"),
    "val/<set>/start_kl": Reading("nats"),
    "val/<set>/corpus_<part>": Reading("reward"),
    "sft/loss": Reading("nats"),
    "sft/perplexity": Reading("1"),
    "sft/token_accuracy": Reading("share"),
    "sft/padding_frac": Reading("share"),
    "val/<set>/loss": Reading("nats"),
    "val/<set>/perplexity": Reading("1"),
    "val/<set>/token_accuracy": Reading("share"),
}
STEP = {"step": "step"}
TRL = STEP | {each.trl: name for name, each in READINGS.items() if plain(each.trl)}
VERL = STEP | {each.verl: name for name, each in READINGS.items() if plain(each.verl)}
