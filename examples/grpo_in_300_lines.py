"""GRPO in 300 lines: plain PyTorch and transformers, readable from top to bottom.

`python examples/grpo_in_300_lines.py` trains the small model of the quickstart on sums. Nothing is
imported from litgrpo. A test trains both with the same prompts, rewards and options, and compares
the weights after ten iterations: they are equal up to the rounding of float32
(tests/examples/test_grpo_in_300_lines.py). Left out: everything that makes a training fast, robust
or convenient.

Shapes: B prompts, G completions of each, N = B * G rows, row n belongs to prompt n // G;
P prompt length, C completion length, V vocabulary. Prompts are padded on the left, completions on
the right. Source: DeepSeekMath, arXiv:2402.03300.
"""

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

Row = dict[str, str]  # a prompt and its answer
RewardFunction = Callable[[list[str], list[str], list[str]], list[float]]


@dataclass(frozen=True)
class Options:
    """Options of a training, named as in litgrpo, with the values of its quickstart."""

    group_size: int = 8  # completions per prompt, G
    max_completion_length: int = 40  # limit on the tokens of a completion, C
    batch_size: int = 16  # prompts per iteration, B
    max_iterations: int = 250
    epochs_per_rollout: int = 1  # optimizer steps on the completions of one iteration
    clip: float = 0.2  # the probability ratio of a token is clipped to [1 - clip, 1 + clip]
    kl_coef: float = 0.0  # coefficient of the KL penalty towards the initial policy
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm
    micro_batch_size: int = 32  # rows that go through the model at once; only memory depends on it
    lr: float = 3e-4  # of AdamW; 1e-6 is usual for a pretrained model
    seed: int = 0  # of the order of the prompts, and of the sampling


@dataclass(frozen=True)
class Rollout:
    """The N completions of one iteration."""

    prompt_ids: Tensor  # [N, P] left-padded; each prompt is repeated G times
    prompt_mask: Tensor  # [N, P] True marks a token of the prompt
    completion_ids: Tensor  # [N, C] right-padded
    completion_mask: Tensor  # [N, C] True marks a generated token; the end token is one
    logprobs: Tensor  # [N, C] float32 log-probabilities of the tokens when they were sampled
    texts: list[str]  # the completions without special tokens


# --- 1. sample a group of completions for each prompt ---


def select_rows(count: int, batch_size: int, iteration: int, seed: int) -> list[int]:
    """Return the row numbers of an iteration: each epoch is a new random order of all rows."""
    epoch, batch = divmod(iteration, count // batch_size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator).tolist()
    return order[batch * batch_size : (batch + 1) * batch_size]


def draw_uniforms(rows: list[int], iteration: int, options: Options) -> Tensor:
    """Draw [N, C] float64 numbers in [0, 1), one for each token that may be sampled.

    Each completion has a separate stream (Philox, a counter-based generator), keyed by iteration,
    row and number in its group. No completion depends on what else is in the batch.
    """
    key = np.array([options.seed, 0], dtype=np.uint64)  # 0: for training
    streams = [
        np.random.Philox(key=key, counter=np.array([0, row, iteration, n], dtype=np.uint64))
        for row in rows
        for n in range(options.group_size)
    ]
    length = options.max_completion_length
    return torch.from_numpy(np.stack([np.random.Generator(s).random(length) for s in streams]))


def pad_left(prompts: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return [N, P] token ids and their mask."""
    length = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (length - len(p)) + p for p in prompts])
    mask = torch.tensor([[False] * (length - len(p)) + [True] * len(p) for p in prompts])
    return ids, mask


def positions_of(mask: Tensor) -> Tensor:
    """Return [N, T] positions: the first token of a row has 0, however it is padded."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def generate(model, tokenizer, prompts: list[str], uniforms: Tensor, group_size: int) -> Rollout:
    """Sample G completions of each prompt, token by token, with a KV cache.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        prompts: B texts.
        uniforms: [N, C] a random number for each token.
        group_size: G.
    """
    model.eval()
    prompt_ids, prompt_mask = pad_left(tokenizer(prompts)["input_ids"], tokenizer.pad_token_id)
    prompt_ids = prompt_ids.repeat_interleave(group_size, 0)
    prompt_mask = prompt_mask.repeat_interleave(group_size, 0)
    cache = DynamicCache(config=model.config)
    mask, new_ids = prompt_mask, prompt_ids
    alive = torch.ones(len(prompt_ids), dtype=torch.bool)  # rows without an end token
    ids, masks, logprobs = [], [], []
    for u in uniforms.T:
        logits = model(
            input_ids=new_ids,
            attention_mask=mask.long(),
            position_ids=positions_of(mask)[:, -new_ids.shape[1] :],
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        # The token is the first, in the order of the vocabulary, whose cumulative sum exceeds u.
        probs = logits.float().softmax(-1)
        sums = probs.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True)
        ids.append(torch.where(alive, token.squeeze(1), tokenizer.pad_token_id))
        logprobs.append(torch.where(alive, probs.gather(1, token).log().squeeze(1), 0.0))
        masks.append(alive)
        mask = torch.cat([mask, alive[:, None]], 1)
        new_ids = ids[-1][:, None]
        alive = alive & (ids[-1] != tokenizer.eos_token_id)
        if not alive.any():
            break
    completion_ids = torch.stack(ids, 1)
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    completion_mask = torch.stack(masks, 1)
    return Rollout(
        prompt_ids, prompt_mask, completion_ids, completion_mask, torch.stack(logprobs, 1), texts
    )


# --- 2. rewards become advantages ---


def group_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """Return [B, G] distances of rewards [B, G] from the group's mean, in standard deviations.

    A group of equal rewards expresses no preference and gets zeros.
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + eps)


# --- 3. the loss of each token ---


def compute_logprobs(model, rollout: Rollout, rows: Tensor) -> Tensor:
    """Return [M, C] log-probabilities of the generated tokens of these rows.

    The logits at position t predict the token at t + 1, hence the slice from P - 1.
    """
    mask = torch.cat([rollout.prompt_mask[rows], rollout.completion_mask[rows]], 1)
    ids = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], 1)
    logits = model(
        input_ids=ids, attention_mask=mask.long(), position_ids=positions_of(mask), use_cache=False
    ).logits
    logits = logits[:, rollout.prompt_ids.shape[1] - 1 : -1].float()
    chosen = rollout.completion_ids[rows, :, None]
    return logits.log_softmax(-1).gather(2, chosen).squeeze(2)


def token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    options: Options,
) -> Tensor:
    """Return the [M, C] loss of each token.

    Args:
        logprobs: [M, C] under the policy, with gradient.
        old_logprobs: [M, C] under the policy that sampled.
        ref_logprobs: [M, C] under the initial policy; None without a KL penalty.
        advantages: [M, 1] of the completion.
        options: clip and kl_coef.
    """
    # The gain is min(w A, clip(w) A) with w = p / p_old (eq. 3). The minimum removes the gradient
    # of tokens whose probability has already moved far enough in the direction of A.
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if ref_logprobs is not None:
        # k3 = p_ref / p - log(p_ref / p) - 1, times w, which makes its gradient unbiased
        # (DeepSeek-V3.2, arXiv:2512.02556).
        log_ratio = ref_logprobs - logprobs
        loss = loss + options.kl_coef * ratio * (log_ratio.exp() - log_ratio - 1)
    return loss


# --- 4. one iteration, and the training ---


def update(model, reference, optimizer, rollout: Rollout, advantages: Tensor, options: Options):
    """Take the optimizer steps of an iteration.

    Args:
        model: the policy.
        reference: the initial policy; None without a KL penalty.
        optimizer: of the policy.
        rollout: N completions.
        advantages: [N] of the completions.
        options: of the training.
    """
    model.train()
    # Every token counts the same in the loss (DAPO). Its weight is fixed before the rows are split,
    # so that the gradient does not depend on the split.
    weights = rollout.completion_mask.float() / rollout.completion_mask.sum()
    for _ in range(options.epochs_per_rollout):
        optimizer.zero_grad()
        for rows in torch.arange(len(advantages)).split(options.micro_batch_size):
            logprobs = compute_logprobs(model, rollout, rows)
            # With one step per rollout the policy is the old one: the ratio is exactly 1.
            old = rollout.logprobs[rows] if options.epochs_per_rollout > 1 else logprobs.detach()
            ref = None
            if reference is not None:
                with torch.no_grad():
                    ref = compute_logprobs(reference, rollout, rows)
            loss = token_loss(logprobs, old, ref, advantages[rows, None], options)
            # Padding has the weight 0.
            (weights[rows] * loss).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()


def train(model, tokenizer, rows: list[Row], reward: RewardFunction, options: Options) -> None:
    """Train a model by GRPO; its weights change in place.

    Args:
        model: a causal language model of transformers, without dropout.
        tokenizer: its tokenizer, with a pad token.
        rows: the prompts.
        reward: scores N completions by their prompts and answers.
        options: of the training.
    """
    reference = copy.deepcopy(model).eval() if options.kl_coef else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99))
    for iteration in range(options.max_iterations):
        numbers = select_rows(len(rows), options.batch_size, iteration, options.seed)
        uniforms = draw_uniforms(numbers, iteration, options)
        prompts = [rows[number]["prompt"] for number in numbers]
        rollout = generate(model, tokenizer, prompts, uniforms, options.group_size)
        of_rows = [rows[number] for number in numbers for _ in range(options.group_size)]
        prompts, answers = zip(*((row["prompt"], row["answer"]) for row in of_rows), strict=True)
        rewards = torch.tensor(reward(prompts, rollout.texts, answers), dtype=torch.float64)
        advantages = group_advantages(rewards.view(-1, options.group_size)).flatten().float()
        update(model, reference, optimizer, rollout, advantages, options)
        print(f"iteration {iteration + 1}: reward {rewards.mean():.3f}  {rollout.texts[0]}")


# --- 5. a task: sums, for the model of the quickstart ---


def sums() -> list[Row]:
    """Return rows of a prompt and its answer: 1,000 of the sums of two numbers below 100."""
    pairs = torch.randperm(98 * 98, generator=torch.Generator().manual_seed(1))[:1000]
    numbers = [(2 + int(pair) // 98, 2 + int(pair) % 98) for pair in pairs]
    return [{"prompt": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in numbers]


def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Return 0.8 for a correct answer in `<answer>` tags, and 0.2 for the format."""
    form = re.compile(r"<reasoning>[^<]+</reasoning><answer>([^<]+)</answer>")
    pairs = zip(map(form.fullmatch, completions), answer, strict=True)
    return [0.0 if found is None else 0.2 + 0.8 * (found[1] == gold) for found, gold in pairs]


def load(folder: str):
    """Load a model in float32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def main() -> None:
    """Train on sums: `python examples/grpo_in_300_lines.py [MODEL_FOLDER [OUTPUT_FOLDER]]`."""
    default = Path(__file__).parents[1] / "src" / "litgrpo" / "assets" / "tiny-gemma2"
    source, *outputs = sys.argv[1:] or [str(default)]
    model, tokenizer = load(source)
    train(model, tokenizer, sums(), reward, Options())
    for output in outputs:
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
