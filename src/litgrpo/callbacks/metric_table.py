"""What every logged number means: the one table, which docs/metrics.md shows and loggers cite."""

from __future__ import annotations

import re
from functools import cache

from litgrpo.callbacks.metric_readings import READINGS, Reading

# {name: definition}. <part> is the name of a reward, <k> a number, <set> the name of a set of
# validation prompts, which is left out where there is only one. `test/` is as `val/`.
METRICS: dict[str, str] = {
    "reward/mean": "Mean total reward of the batch's completions; rows that failed are left out.",
    "reward/std": "Standard deviation (n - 1) of the total reward over the batch.",
    "reward/min": "Smallest total reward of the batch.",
    "reward/max": "Largest total reward of the batch.",
    "reward/group_std": "Standard deviation (n - 1) of the total reward within a group, averaged "
    "over groups.",
    "reward/zero_variance_groups_frac": "Share of groups whose rewards are all equal: these "
    "teach nothing.",
    "reward/failed_frac": "Share of completions without a reward: a function failed or all "
    "abstained.",
    "reward/correct_frac": "Share of right completions: the reward `evaluation.success` is at "
    "least "
    "`evaluation.threshold`.",
    "reward/all_correct_frac": "Share of groups in which all completions are right.",
    "reward/all_incorrect_frac": "Share of groups in which none is.",
    "reward/<part>": "Mean of one reward function, unweighted, over the completions it judged.",
    "reward/<part>_std": "Its standard deviation (n - 1) over the batch.",
    "reward/<part>_share": "Share of it in what moves the total within groups; shares add up to 1, "
    "one is negative where the part is overruled.",
    "reward/cosine_<part>_<part>": "Cosine of two parts within groups, signed by their weights: "
    "negative where they pull against each other.",
    "completion/len_mean": "Mean tokens of a completion that the policy sampled.",
    "completion/len_min": "Fewest tokens of a completion.",
    "completion/len_max": "Most tokens of a completion.",
    "completion/truncated_frac": "Share of completions that the length limit cut off.",
    "completion/terminated_len_mean": "Mean tokens of the completions that ended by themselves; 0 "
    "where none did.",
    "completion/terminated_len_min": "Fewest tokens of those.",
    "completion/terminated_len_max": "Most tokens of those.",
    "completion/correct_len_mean": "Mean tokens of right completions; 0 where there are none.",
    "completion/incorrect_len_mean": "Mean tokens of wrong completions; 0 where there are none.",
    "completion/eos_frac": "Share of completions with an end token.",
    "completion/unique_frac": "Different completions of a group over all of it, mean over groups.",
    "completion/loop_frac": "Share of completions in which four tokens in a row stand four times.",
    "prompt/begin_tokens": "Begin tokens in front of a prompt, mean; 2 where template and "
    "tokenizer both add one.",
    "prompt/len_mean": "Mean tokens of the batch's prompts.",
    "prompt/len_min": "Tokens of the shortest.",
    "prompt/len_max": "Tokens of the longest.",
    "time/env_s": "Seconds of sampling in which environments were begun, told and waited for.",
    "env/turns": "Mean turns of an episode.",
    "env/reward": "Mean sum of an episode's turn rewards; episodes that failed are left out.",
    "env/failed_frac": "Share of episodes that failed: they teach nothing.",
    "env/timeout_frac": "Share of episodes that failed because an answer took too long.",
    "tools/<name>_calls": "Mean calls of a tool in an episode.",
    "tools/<name>_failed": "Mean calls of it that failed.",
    "completion/observation_frac": "Share of the tokens after the prompt that the environment "
    "said.",
    "policy/loss": "The loss. With one optimizer step on-policy it is near 0 in value; its "
    "gradient is not.",
    "policy/entropy": "Entropy (nats per token) of the distribution that was sampled from, all "
    "rows: mean of -log p of the sampled tokens, an unbiased estimate.",
    "policy/entropy_trained": "Exact entropy (nats per token) over the tokens that were learned "
    "from. Rows without gradient are left out, unless a KL or entropy term needs them.",
    "policy/kl": "Mean of the objective's KL estimator (nats per token) against the reference; "
    "with kl_coef above 0. A kl_coef of 1e-12 measures without penalty.",
    "policy/kl_coef": "Coefficient of the KL penalty in this iteration.",
    "policy/entropy_coef": "Coefficient of the entropy bonus in this iteration; with a target.",
    "policy/log_ratio": "Mean log p_now - log p_before over the tokens learned from (nats); 0 in "
    "the first optimizer step.",
    "policy/ratio_max": "Largest importance ratio of the update, mean over processes; 1 in the "
    "first optimizer step.",
    "policy/clip_low_frac": "Share of tokens whose ratio is below the clip range while their "
    "advantage is negative.",
    "policy/clip_high_frac": "Share of tokens whose ratio is above the clip range while their "
    "advantage is positive.",
    "policy/clip_low_frac_min": "Smallest clip_low_frac of an optimizer step (of a process).",
    "policy/clip_low_frac_max": "Largest clip_low_frac of an optimizer step (of a process).",
    "policy/clip_high_frac_min": "Smallest clip_high_frac of an optimizer step (of a process).",
    "policy/clip_high_frac_max": "Largest clip_high_frac of an optimizer step (of a process).",
    "policy/kept_frac": "Share of tokens that are learned from where the objective leaves some "
    "out (top_entropy_quantile, off_policy_mask_threshold).",
    "policy/sampler_mismatch": "Mean |log p_policy - log p_sampler| (nats per token) over the rows "
    "of the first optimizer step, before it.",
    "policy/sampler_weight": "Mean weight that corrects for the sampler.",
    "policy/advantage_mean": "Mean advantage of a completion; 0 where groups are centered.",
    "policy/advantage_std": "Standard deviation (n) of the advantages of completions.",
    "optim/lr": "Learning rate of the first parameter group, mean over optimizer steps.",
    "optim/grad_norm": "Norm of the whole gradient before it is clipped.",
    "optim/clipped_frac": "Share of optimizer steps whose gradient was scaled down to "
    "`update.max_grad_norm`.",
    "optim/update_rel": "Length of the iteration's change of the trained weights over their own, "
    "on 1,024 entries of each tensor; not on devices that compile every shape.",
    "optim/skipped_steps": "Optimizer steps skipped so far for a number that was not finite.",
    "dynamic/resamples": "How often other prompts were asked in place of equal groups.",
    "dynamic/prompts_sampled": "Prompts sampled in this iteration, replaced ones included.",
    "dynamic/informative_frac": "Share of the first prompts whose rewards differ.",
    "dynamic/filled_frac": "The same after resampling.",
    "time/step_s": "Seconds of the iteration, from its batch to its log line.",
    "time/rollout_s": "Seconds of sampling.",
    "time/reward_s": "Seconds that training waited for rewards.",
    "time/reference_s": "Seconds of log-probabilities before the update and under the reference.",
    "time/learn_s": "Seconds of forward and backward passes and optimizer steps.",
    "perf/tokens_per_s": "Sampled tokens per second of these four, all processes together.",
    "perf/generated_tokens": "Tokens sampled for training so far, by all processes.",
    "perf/peak_memory_gib": "Most memory of the device in use so far; on a CPU, of the process.",
    "data/epoch": "How often the training prompts have been seen.",
    "data/prompts_seen": "Prompts sampled for training so far: iterations times the prompts of a "
    "batch.",
    "checkpoint/size_mib": "Size of the checkpoint that was written.",
    "checkpoint/wait_s": "Seconds that training waited for it.",
    "checkpoint/write_s": "Seconds of writing it, beside the training.",
    "val/<set>/avg@<k>": "Share of right completions, k sampled for each prompt. Interval "
    "(_low, _high): Wilson's, clustered by prompt.",
    "val/<set>/pass@<k>": "Chance that one of k completions is right, estimated without bias.",
    "val/<set>/greedy": "Share of prompts whose most likely completion is right; Wilson's "
    "interval.",
    "val/<set>/reward": "Mean total reward of the sampled completions. Interval: bootstrap over "
    "prompts (2,000 draws, seeded).",
    "val/<set>/<part>": "Mean of one reward function over the samples it judged.",
    "val/<set>/turns": "Turns of an episode, mean over samples; `greedy_turns`: of the most likely "
    "ones.",
    "val/<set>/called_frac": "Share of sampled episodes in which a tool was called; "
    "`greedy_called_frac`: of the most likely ones.",
    "val/<set>/ended_frac": "Share of samples that ended by themselves.",
    "val/<set>/len_mean": "Mean tokens of a sample.",
    "val/<set>/distinct_1": "Different tokens over all tokens in the samples of a prompt, mean "
    "over prompts; falls when texts loop or become the same.",
    "val/<set>/distinct_2": "The same of pairs of neighboring tokens.",
    "val/<set>/start_perplexity": "Perplexity of the samples under the weights that training "
    "started from. Well above its value before training: text that is no longer natural.",
    "val/<set>/start_kl": "Mean log p_now - log p_start over sampled tokens (nats).",
    "val/<set>/corpus_<part>": "Score of one reply to each prompt; docs/results.md has BLEU, F1 "
    "and ROUGE.",
    "sft/loss": "Mean negative log-probability of a target token of the batch (nats).",
    "sft/perplexity": "exp of it.",
    "sft/token_accuracy": "Share of target tokens that are the most likely ones.",
    "sft/padding_frac": "Share of the batch's positions that are padding.",
    "val/<set>/loss": "sft/loss over the held-out pairs.",
    "val/<set>/perplexity": "exp of it.",
    "val/<set>/token_accuracy": "sft/token_accuracy over the held-out pairs.",
}
# What stands in a pattern for what; `_low` and `_high` are the bounds of an interval.
PLACES = {"<part>": r"[^/]+?", "<name>": r"[^/]+?", "<k>": r"\d+", "<set>/": r"(?:[^/]+/)?"}
BOUND = r"(?:_low|_high)?"


@cache
def patterns() -> dict[str, re.Pattern[str]]:
    """{name in the table: expression of the names that it stands for}."""
    found = {}
    for name in METRICS:
        text = re.escape(name)
        for place, expression in PLACES.items():
            text = text.replace(re.escape(place), expression)
        found[name] = re.compile(text + BOUND * name.startswith("val/"))
    return found


@cache
def entry(name: str) -> str:
    """The row of the table that defines a logged name; "" where none does.

    Example:
        >>> entry("reward/format_std"), entry("val/easy/avg@4_low"), entry("nothing/known")
        ('reward/<part>_std', 'val/<set>/avg@<k>', '')
    """
    plain = re.sub("^test/", "val/", name)
    fits = [row for row, pattern in patterns().items() if pattern.fullmatch(plain)]
    # The most exact one: reward/mean is no part named mean.
    return min(fits, key=lambda row: ("<part>" in row, -len(row)), default="")


def definition(name: str) -> str:
    """What a logged name means; "" where the table does not have it."""
    return METRICS.get(entry(name), "")


def page() -> str:
    """The table as the Markdown of docs/metrics.md."""
    head = ["name", "what it is", "unit", "healthy", "TRL", "verl"]
    rows = [[f"`{name}`", text, *cells_of(READINGS[name])] for name, text in METRICS.items()]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells_of(reading: Reading) -> list[str]:
    """Unit, healthy range and the names of other trainers, as cells of a table."""
    names = [f"`{name}`" if name else "" for name in (reading.trl, reading.verl)]
    return [reading.unit, reading.healthy, *names]
