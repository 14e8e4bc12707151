"""Definition, unit, healthy range, and TRL's and verl's name of every logged metric.

docs/reference/metrics.md shows this table, TensorBoard and the HTML report cite it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

# `<` begins a placeholder: <part> is the name of a reward function, <name> of a tool, <k> a number,
# <task> the name of a task, <set> of a validation set, which is left out if there is only one.
PLACEHOLDER = "<"


@dataclass(frozen=True)
class Metric:
    """Documentation of a logged metric.

    Args:
        text: definition.
        unit: of the number.
        healthy: typical value of a run that learns; "" if it is not informative.
        trl: name in TRL's `trainer_state.json`; "" if TRL has no equal metric.
        verl: name in verl's console log; "" if verl has no equal metric.

    Example:
        >>> METRICS["reward/mean"].trl, METRICS["reward/mean"].unit
        ('reward', 'reward')
    """

    text: str
    unit: str
    healthy: str = ""
    trl: str = ""
    verl: str = ""


# In the order of docs/reference/metrics.md. `test/` metrics are defined as those of `val/`.
METRICS: dict[str, Metric] = {
    "reward/mean": Metric(
        "Mean total reward of the batch's completions, without unscored ones.",
        unit="reward",
        healthy="rises",
        trl="reward",
        verl="critic/score/mean",
    ),
    "reward/std": Metric(
        "Standard deviation (n - 1) of the total reward over the batch.",
        unit="reward",
    ),
    "reward/min": Metric(
        "Smallest total reward of the batch.",
        unit="reward",
        verl="critic/score/min",
    ),
    "reward/max": Metric(
        "Largest total reward of the batch.",
        unit="reward",
        verl="critic/score/max",
    ),
    "reward/group_std": Metric(
        "Standard deviation (n - 1) of the total reward of a group's scored completions, averaged "
        "over groups with one.",
        unit="reward",
        healthy="above 0",
        trl="reward_std",
    ),
    "reward/zero_variance_groups_frac": Metric(
        "Fraction of groups with zero reward variance (no gradient), of those with a scored "
        "completion.",
        unit="fraction",
        healthy="below 0.5, unless all are correct",
        trl="frac_reward_zero_std",
    ),
    "reward/unscored_groups_frac": Metric(
        "Fraction of groups in which no completion has a reward (no gradient).",
        unit="fraction",
        healthy="0",
    ),
    "reward/greedy_mean": Metric(
        "Mean total reward of the greedy completions of the batch's prompts, if they are the "
        "baseline (ReMax).",
        unit="reward",
    ),
    "reward/failed_frac": Metric(
        "Fraction of unscored completions: a reward function failed, or all returned None.",
        unit="fraction",
        healthy="0",
    ),
    "reward/correct_frac": Metric(
        "Fraction of correct completions: the reward `model.evaluation.success_reward` (default: "
        "the one with the largest weight) reaches `model.evaluation.success_threshold`.",
        unit="fraction",
        healthy="rises",
    ),
    "reward/all_correct_frac": Metric(
        "Fraction of groups in which all scored completions are correct.",
        unit="fraction",
        healthy="below 0.85 at the start",
    ),
    "reward/all_incorrect_frac": Metric(
        "Fraction of groups in which none is correct.",
        unit="fraction",
        healthy="below 0.5",
    ),
    "reward/<part>": Metric(
        "Mean of one reward function, unweighted, over the completions that it scored.",
        unit="reward",
        trl="rewards/<part>/mean",
    ),
    "reward/<part>_std": Metric(
        "Standard deviation (n - 1) of one reward function over the batch.",
        unit="reward",
        healthy="above 0",
        trl="rewards/<part>/std",
    ),
    "reward/<part>_share": Metric(
        "Share of one reward function in the variance of the total within groups. Shares add up "
        "to 1; a negative share means the other rewards outweigh this one.",
        unit="fraction",
        healthy="near 1 only for the main reward",
    ),
    "reward/cosine_<part>_<part>": Metric(
        "Cosine of two components within groups, signed by their weights; negative if they "
        "conflict.",
        unit="-1 to 1",
        healthy="above -0.5",
    ),
    "task/<task>/frac": Metric(
        "Fraction of the batch's prompts that are of this task, the value of their column `task`.",
        unit="fraction",
    ),
    "task/<task>/reward": Metric(
        "Mean total reward of the scored completions of this task.",
        unit="reward",
        healthy="rises",
    ),
    "task/<task>/correct_frac": Metric(
        "Fraction of correct completions of this task, by the reward that decides there.",
        unit="fraction",
        healthy="rises",
    ),
    "task/<task>/zero_variance_groups_frac": Metric(
        "Fraction of groups of this task with zero reward variance, of those with a scored "
        "completion.",
        unit="fraction",
        healthy="below 0.5, unless all are correct",
    ),
    "task/<task>/completion_len": Metric(
        "Mean length of the completions of this task.",
        unit="tokens",
    ),
    "curriculum/measured_frac": Metric(
        "Fraction of the training prompts that had a group so far, with `data.curriculum`.",
        unit="fraction",
    ),
    "curriculum/easy_frac": Metric(
        "Fraction of the training prompts that are easy: their last group was correct.",
        unit="fraction",
    ),
    "curriculum/hard_frac": Metric(
        "Fraction of the training prompts that are hard: their last group was incorrect.",
        unit="fraction",
        healthy="falls",
    ),
    "completion/len_mean": Metric(
        "Mean tokens of a completion that the policy generated.",
        unit="tokens",
        healthy="0.5 to 1.5 times its first value",
        trl="completions/mean_length",
        verl="response_length/mean",
    ),
    "completion/len_min": Metric(
        "Fewest tokens of a completion.",
        unit="tokens",
        trl="completions/min_length",
        verl="response_length/min",
    ),
    "completion/len_max": Metric(
        "Most tokens of a completion.",
        unit="tokens",
        trl="completions/max_length",
        verl="response_length/max",
    ),
    "completion/truncated_frac": Metric(
        "Fraction of completions that the length limit cut off.",
        unit="fraction",
        healthy="below 0.05",
        trl="completions/clipped_ratio",
        verl="response_length/clip_ratio",
    ),
    "completion/terminated_len_mean": Metric(
        "Mean tokens of the completions with an end token.",
        unit="tokens",
        trl="completions/mean_terminated_length",
    ),
    "completion/terminated_len_min": Metric(
        "Fewest tokens of the completions with an end token.",
        unit="tokens",
        trl="completions/min_terminated_length",
    ),
    "completion/terminated_len_max": Metric(
        "Most tokens of the completions with an end token.",
        unit="tokens",
        trl="completions/max_terminated_length",
    ),
    "completion/correct_len_mean": Metric(
        "Mean tokens of correct completions.",
        unit="tokens",
    ),
    "completion/incorrect_len_mean": Metric(
        "Mean tokens of incorrect completions.",
        unit="tokens",
    ),
    "completion/eos_frac": Metric(
        "Fraction of completions with an end token.",
        unit="fraction",
        healthy="as 1 - truncated_frac",
    ),
    "completion/unique_frac": Metric(
        "Distinct completions of a group / group size, mean over groups.",
        unit="fraction",
        healthy="above 0.3 while it learns",
    ),
    "completion/loop_frac": Metric(
        "Fraction of completions in which the same four tokens in a row occur at least four times.",
        unit="fraction",
        healthy="as in the first iteration",
    ),
    "prompt/begin_tokens": Metric(
        "Leading begin tokens of a prompt, mean; 2 if chat template and tokenizer both add one.",
        unit="tokens",
        healthy="0 or 1",
    ),
    "prompt/len_mean": Metric(
        "Mean tokens of the batch's prompts.",
        unit="tokens",
        verl="prompt_length/mean",
    ),
    "prompt/len_min": Metric(
        "Tokens of the shortest prompt.",
        unit="tokens",
        verl="prompt_length/min",
    ),
    "prompt/len_max": Metric(
        "Tokens of the longest prompt.",
        unit="tokens",
        verl="prompt_length/max",
    ),
    "async/staleness_mean": Metric(
        "Mean age of the weights that sampled a token, in iterations (`model.update.staleness`).",
        unit="count",
        healthy="<= k",
    ),
    "async/staleness_max": Metric(
        "Largest age of the weights that sampled a token, in iterations.",
        unit="count",
        healthy="<= k",
    ),
    "time/env_s": Metric(
        "Seconds of the rollout spent in environments (reset and step).",
        unit="s",
    ),
    "env/turns": Metric(
        "Mean turns of an episode.",
        unit="count",
    ),
    "env/reward": Metric(
        "Mean sum of an episode's turn rewards, without episodes that failed or have none.",
        unit="reward",
    ),
    "env/failed_frac": Metric(
        "Fraction of episodes that failed; they do not contribute to the loss.",
        unit="fraction",
        healthy="0",
    ),
    "env/timeout_frac": Metric(
        "Fraction of episodes that failed because a step took too long.",
        unit="fraction",
        healthy="0",
    ),
    "env/segments": Metric(
        "Mean conversations of an agent that do not continue each other; only with an `Agent`.",
        unit="count",
        healthy="1 for an agent with one conversation",
    ),
    "tools/<name>_calls": Metric(
        "Mean calls of a tool in an episode.",
        unit="count",
    ),
    "tools/<name>_failed": Metric(
        "Mean failed calls of a tool in an episode.",
        unit="count",
        healthy="falls",
    ),
    "completion/observation_frac": Metric(
        "Fraction of the tokens after the prompt that are observations of the environment.",
        unit="fraction",
    ),
    "policy/loss": Metric(
        "The loss. With one on-policy optimizer step its value is near 0; its gradient is not.",
        unit="nats",
        healthy="near 0 with one step; not informative",
        trl="loss",
        verl="actor/pg_loss",
    ),
    "policy/entropy": Metric(
        "Entropy (nats per token) of the sampling distribution over all rows: mean of -log p of "
        "the sampled tokens, an unbiased estimate.",
        unit="nats",
        healthy="falls slowly while the reward rises",
        trl="entropy",
        verl="actor/entropy",
    ),
    "policy/data_nll": Metric(
        "Mean of -log p of the tokens of the data, instead of `policy/entropy`, in iterations that "
        "train on completions of the data.",
        unit="nats",
    ),
    "policy/entropy_trained": Metric(
        "Exact entropy (nats per token) over the tokens that contribute to the loss. Rows "
        "without gradient are left out, unless a KL or entropy term needs them.",
        unit="nats",
    ),
    "policy/kl": Metric(
        "Mean of the objective's KL estimator (nats per token) against the reference, if "
        "kl_coef is above 0. A kl_coef of 1e-12 measures without a penalty.",
        unit="nats",
        healthy="rises slowly",
        trl="kl",
        verl="actor/kl_loss",
    ),
    "policy/kl_in_reward": Metric(
        "Mean KL estimate per token that kl_in_reward, times its coef, subtracts from the rewards. "
        "Metrics of rewards are without it.",
        unit="nats",
        verl="actor/reward_kl_penalty",
    ),
    "policy/positive_nll": Metric(
        "Mean -log p (nats per token) of the correct completions that positive_nll imitates.",
        unit="nats",
    ),
    "policy/observation_nll": Metric(
        "Mean -log p (nats per token) of observations, if observation_nll_coef is above 0.",
        unit="nats",
    ),
    "policy/kl_coef": Metric(
        "Coefficient of the KL penalty in this iteration.",
        unit="1",
        verl="actor/kl_coef",
    ),
    "policy/entropy_coef": Metric(
        "Coefficient of the entropy bonus in this iteration, if it has a target.",
        unit="1",
    ),
    "policy/log_ratio": Metric(
        "Mean log p_now - log p_before over the tokens that contribute to the loss (nats); 0 in "
        "the first optimizer step.",
        unit="nats",
        healthy="0 with one step, else near 0",
    ),
    "policy/ratio_max": Metric(
        "Largest importance ratio of the update, mean over ranks; 1 in the first optimizer step.",
        unit="1",
        healthy="1 with one step, else below 10",
    ),
    "policy/clip_low_frac": Metric(
        "Fraction of tokens whose ratio is below the clip range while their advantage is negative.",
        unit="fraction",
        healthy="0 with one step, else below 0.2",
        trl="clip_ratio/low_mean",
    ),
    "policy/clip_high_frac": Metric(
        "Fraction of tokens whose ratio is above the clip range while their advantage is positive.",
        unit="fraction",
        healthy="0 with one step, else below 0.2",
        trl="clip_ratio/high_mean",
    ),
    "policy/clip_low_frac_min": Metric(
        "Smallest clip_low_frac of an optimizer step on a rank.",
        unit="fraction",
        trl="clip_ratio/low_min",
    ),
    "policy/clip_low_frac_max": Metric(
        "Largest clip_low_frac of an optimizer step on a rank.",
        unit="fraction",
    ),
    "policy/clip_high_frac_min": Metric(
        "Smallest clip_high_frac of an optimizer step on a rank.",
        unit="fraction",
    ),
    "policy/clip_high_frac_max": Metric(
        "Largest clip_high_frac of an optimizer step on a rank.",
        unit="fraction",
        trl="clip_ratio/high_max",
    ),
    "policy/kept_frac": Metric(
        "Fraction of tokens that contribute to the loss, if the objective masks some "
        "(top_entropy_quantile, off_policy_mask_threshold).",
        unit="fraction",
    ),
    "policy/selected_frac": Metric(
        "Fraction of tokens that the surrogate selected, if it selects some "
        "(ClipCov, KLCov, M2PO).",
        unit="fraction",
    ),
    "policy/sampler_mismatch": Metric(
        "Mean absolute difference of log p_policy and log p_sampler (nats per token) over the "
        "rows of the first optimizer step, before it.",
        unit="nats",
        healthy="below 0.05",
        trl="sampling/sampling_logp_difference/mean",
    ),
    "policy/sampler_weight": Metric(
        "Mean weight of the importance correction between sampler and trainer.",
        unit="1",
        healthy="0.5 to 2",
        trl="sampling/importance_sampling_ratio/mean",
    ),
    "policy/advantage_mean": Metric(
        "Mean advantage of a scored completion; 0 where groups are centered.",
        unit="1",
        healthy="0 if groups are centered",
        verl="critic/advantages/mean",
    ),
    "policy/advantage_std": Metric(
        "Standard deviation (n) of the advantages of scored completions.",
        unit="1",
    ),
    "optim/lr": Metric(
        "Learning rate of the first parameter group, mean over optimizer steps.",
        unit="1",
        trl="learning_rate",
        verl="actor/lr",
    ),
    "optim/grad_norm": Metric(
        "Norm of the whole gradient before clipping.",
        unit="1",
        healthy="within 10 times its first value",
        trl="grad_norm",
        verl="actor/grad_norm",
    ),
    "optim/clipped_frac": Metric(
        "Fraction of optimizer steps whose gradient was clipped to `model.update.max_grad_norm`.",
        unit="fraction",
        healthy="not informative with Adam",
    ),
    "optim/update_rel": Metric(
        "Norm of the iteration's change of the trained weights relative to their norm, on 1,024 "
        "entries of each tensor; not on devices that compile every shape.",
        unit="1",
        healthy="1e-5 to 1e-2",
    ),
    "optim/skipped_steps": Metric(
        "Optimizer steps skipped so far because of NaN or infinity.",
        unit="count",
        healthy="0",
    ),
    "dynamic/resamples": Metric(
        "Number of times that zero-variance groups were replaced by other prompts.",
        unit="count",
    ),
    "dynamic/prompts_sampled": Metric(
        "Prompts sampled in this iteration, including replaced ones.",
        unit="count",
    ),
    "dynamic/informative_frac": Metric(
        "Fraction of the first prompts whose rewards differ.",
        unit="fraction",
        healthy="above 0.5",
    ),
    "dynamic/filled_frac": Metric(
        "Fraction of prompts whose rewards differ after resampling.",
        unit="fraction",
    ),
    "time/step_s": Metric(
        "Seconds of the iteration, from its batch to its log line.",
        unit="s",
        trl="step_time",
        verl="timing_s/step",
    ),
    "time/rollout_s": Metric(
        "Seconds of generation.",
        unit="s",
        verl="timing_s/gen",
    ),
    "time/reward_s": Metric(
        "Seconds that training waited for rewards.",
        unit="s",
        healthy="below half of the step",
        verl="timing_s/reward",
    ),
    "time/logprobs_s": Metric(
        "Seconds of computing old and reference log-probabilities before the update.",
        unit="s",
        verl="timing_s/ref",
    ),
    "time/learn_s": Metric(
        "Seconds of forward and backward passes and optimizer steps.",
        unit="s",
        verl="timing_s/update_actor",
    ),
    "perf/tokens_per_s": Metric(
        "Generated tokens per second of rollout, reward, reference and learn time, all ranks.",
        unit="tokens/s",
    ),
    "perf/generated_tokens": Metric(
        "Tokens generated for training so far, all ranks.",
        unit="tokens",
    ),
    "perf/peak_memory_gib": Metric(
        "Peak memory of the device so far; on a CPU, of the process.",
        unit="GiB",
        verl="perf/max_memory_allocated_gb",
    ),
    "data/epoch": Metric(
        "Passes over the training prompts so far.",
        unit="passes",
        trl="epoch",
        verl="training/epoch",
    ),
    "data/on_policy": Metric(
        "1 if the iteration sampled its completions, 0 if it trained on those of the data. Metrics "
        "of completions and rewards then describe the data.",
        unit="1",
    ),
    "data/prompts_seen": Metric(
        "Prompts sampled for training so far: iterations x prompts of a batch.",
        unit="count",
    ),
    "checkpoint/size_mib": Metric(
        "Size of the checkpoint that was written.",
        unit="MiB",
    ),
    "checkpoint/wait_s": Metric(
        "Seconds that training waited for it.",
        unit="s",
    ),
    "checkpoint/write_s": Metric(
        "Seconds of writing it, in the background.",
        unit="s",
    ),
    "val/<set>/avg@<k>": Metric(
        "Fraction of correct completions, k sampled for each prompt, mean over prompts. Interval "
        "(_low, _high): Wilson's, clustered by prompt.",
        unit="fraction",
        healthy="rises",
        verl="val-core/<set>/acc/mean@<k>",
    ),
    "val/<set>/unscored_frac": Metric(
        "Fraction of samples that the accuracies leave out, because they have no reward; "
        "`greedy_unscored_frac`: of greedy completions.",
        unit="fraction",
        healthy="0",
    ),
    "val/<set>/pass@<k>": Metric(
        "Probability that at least one of k completions is correct, unbiased estimate; mean over "
        "prompts with at least k scored samples.",
        unit="fraction",
    ),
    "val/<set>/greedy": Metric(
        "Fraction of prompts whose greedy completion is correct; Wilson's interval.",
        unit="fraction",
    ),
    "val/<set>/reward": Metric(
        "Mean total reward of the scored samples. Interval: bootstrap over prompts (2,000 draws, "
        "seeded).",
        unit="reward",
        healthy="rises with reward/mean",
    ),
    "val/<set>/<part>": Metric(
        "Mean of one reward function over the samples that it scored.",
        unit="reward",
    ),
    "val/<set>/turns": Metric(
        "Turns of an episode, mean over samples; `greedy_turns`: of greedy episodes.",
        unit="count",
    ),
    "val/<set>/tool_call_frac": Metric(
        "Fraction of sampled episodes with a tool call; `greedy_tool_call_frac`: of greedy ones.",
        unit="fraction",
    ),
    "val/<set>/terminated_frac": Metric(
        "Fraction of samples with an end token.",
        unit="fraction",
        healthy="near 1",
    ),
    "val/<set>/len_mean": Metric(
        "Mean tokens of a sample.",
        unit="tokens",
    ),
    "val/<set>/distinct_1": Metric(
        "Distinct tokens / all tokens in the samples of a prompt, mean over prompts; falls if "
        "texts loop or become identical.",
        unit="fraction",
    ),
    "val/<set>/distinct_2": Metric(
        "Distinct pairs of neighboring tokens / all pairs in the samples of a prompt, mean over "
        "prompts.",
        unit="fraction",
    ),
    "val/<set>/initial_perplexity": Metric(
        "Perplexity of the samples under the initial policy. Well above its value before "
        "training: text that is no longer natural.",
        unit="1",
    ),
    "val/<set>/initial_kl": Metric(
        "Mean log p_now - log p_initial over sampled tokens (nats).",
        unit="nats",
    ),
    "val/<set>/corpus_<part>": Metric(
        "Score of one reply to each prompt; docs/evidence/results.md has BLEU, F1 and ROUGE.",
        unit="reward",
    ),
    "sft/loss": Metric(
        "Mean negative log-probability of a target token of the batch (nats).",
        unit="nats",
    ),
    "sft/perplexity": Metric(
        "exp of sft/loss.",
        unit="1",
    ),
    "sft/token_accuracy": Metric(
        "Fraction of target tokens that are the most likely ones.",
        unit="fraction",
    ),
    "sft/padding_frac": Metric(
        "Fraction of the batch's positions that are padding.",
        unit="fraction",
    ),
    "val/<set>/loss": Metric(
        "sft/loss over the held-out pairs.",
        unit="nats",
    ),
    "val/<set>/perplexity": Metric(
        "exp of the held-out loss.",
        unit="1",
    ),
    "val/<set>/token_accuracy": Metric(
        "sft/token_accuracy over the held-out pairs.",
        unit="fraction",
    ),
}


def _rename_table(kind: str) -> dict[str, str]:
    """{name in another trainer's log: litgrpo's}, for names without placeholders."""
    names = {getattr(metric, kind): name for name, metric in METRICS.items()}
    return {"step": "step"} | {
        other: name for other, name in names.items() if other and PLACEHOLDER not in other
    }


TRL, VERL = _rename_table("trl"), _rename_table("verl")
# {placeholder: expression}; `_low` and `_high` are the bounds of an interval.
PLACEHOLDERS = {"<part>": r"[^/]+?", "<name>": r"[^/]+?", "<k>": r"\d+", "<set>/": r"(?:[^/]+/)?"}
PLACEHOLDERS["<task>"] = r".+?"
BOUND = r"(?:_low|_high)?"


@cache
def patterns() -> dict[str, re.Pattern[str]]:
    """{name in the table: expression of the logged names that it defines}."""
    compiled = {}
    for name in METRICS:
        text = re.escape(name)
        for placeholder, expression in PLACEHOLDERS.items():
            text = text.replace(re.escape(placeholder), expression)
        if name.startswith("val/"):
            text += BOUND
        compiled[name] = re.compile(text)
    return compiled


@cache
def find_entry(name: str) -> str:
    """Name of the table's row that defines a logged metric; "" if there is none.

    Example:
        >>> find_entry("reward/format_std"), find_entry("val/easy/avg@4_low"), find_entry("a/b")
        ('reward/<part>_std', 'val/<set>/avg@<k>', '')
    """
    val_name = re.sub("^test/", "val/", name)
    matches = [row for row, pattern in patterns().items() if pattern.fullmatch(val_name)]
    # The most specific one: reward/mean is not a component called mean.
    return min(matches, key=lambda row: ("<part>" in row, -len(row)), default="")


def definition(name: str) -> str:
    """Definition of a logged metric; "" if the table does not have it."""
    entry = find_entry(name)
    return METRICS[entry].text if entry else ""


def page() -> str:
    """The table as the Markdown of docs/reference/metrics.md."""
    head = ["name", "definition", "unit", "healthy", "TRL", "verl"]
    lines = [head, ["---"] * len(head)]
    for name, metric in METRICS.items():
        others = [f"`{other}`" if other else "" for other in (metric.trl, metric.verl)]
        lines.append([f"`{name}`", metric.text, metric.unit, metric.healthy, *others])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
