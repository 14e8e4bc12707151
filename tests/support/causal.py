"""Shared by tests of models.causal."""

import torch

from litgrpo.types import TokenRows
from tests.support.models import prompt_batch

TEXTS = ("a", "what is 3+4?", "hello")


GROUP, LENGTH = 2, 7


def tokens(policy, *, dtype=torch.float32):
    """Prompts of unequal length and random completions of lengths 1 to 7."""
    prompts = prompt_batch(*TEXTS)
    generator = torch.Generator().manual_seed(3)
    rows = GROUP * len(TEXTS)
    ids = torch.randint(3, 259, (rows, LENGTH), generator=generator)
    lengths = torch.tensor([7, 1, 4, 6, 2, 5])
    mask = torch.arange(LENGTH) < lengths[:, None]
    prompt_of = torch.arange(len(TEXTS)).repeat_interleave(GROUP)
    return TokenRows(prompts.prompt_ids, prompts.prompt_mask, prompt_of, ids, mask)


def dense_logprobs(policy, asked, temperature=1.0):
    """The definition, with every logit in memory, one row at a time and nothing padded."""
    rows = []
    for row, prompt_of in enumerate(asked.prompt_of):
        prompt = asked.prompt_ids[prompt_of][asked.prompt_mask[prompt_of]][None]
        said = asked.completion_ids[row][asked.completion_mask[row]][None]
        logits = policy.dense_logits(prompt, torch.ones_like(prompt, dtype=torch.bool), said)
        logprobs = (logits[0, :-1].float() / temperature).log_softmax(-1)
        rows.append(logprobs.gather(-1, said[0][:, None]).squeeze(-1))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
