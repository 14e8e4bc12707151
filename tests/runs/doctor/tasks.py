"""Four tiny tasks on letters, and models that imitate noisy demonstrations of them."""

import random
import string
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from tests.support.models import byte_tokenizer, tiny_model

LETTERS = string.ascii_lowercase[:8]
PROMPT_TOKENS = 5  # the begin token, three letters, a colon
HELD_OUT = 100
EOS, PAD = 2, 0
MODELS = Path("runs/doctor/models")

Row = dict[str, str]


def shift_letters(word: str) -> str:
    """Replace each letter by its successor; a follows h."""
    return "".join(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in word)


TASKS = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "rotate": lambda word: word[1:] + word[0],
    "shift": shift_letters,
}
# Thresholds were fixed on the first two tasks and measured once on the others.
DEV, UNSEEN = ("copy", "reverse"), ("rotate", "shift")


@dataclass(frozen=True)
class Demonstrator:
    """Settings of demonstrations.

    Args:
        wrong_frac: fraction of incorrect letters.
        bare_frac: fraction of demonstrations without parentheses.
        ends: whether a demonstration has an end token.
    """

    wrong_frac: float = 0.25
    bare_frac: float = 0.3
    ends: bool = True


DEMONSTRATORS = {
    "noisy": Demonstrator(),
    "perfect": Demonstrator(0.0, 0.0),
    "weak": Demonstrator(0.45, 0.5),
    "endless": Demonstrator(ends=False),
}


def words() -> list[str]:
    """Return all words of three letters, in one random order."""
    found = ["".join(letters) for letters in product(LETTERS, repeat=3)]
    random.Random(0).shuffle(found)
    return found


def rows(task: str, length: int = 3) -> list[Row]:
    """Return training prompts and answers; longer words are drawn at random."""
    train = words()[HELD_OUT:]
    if length != 3:
        rng = random.Random(length)
        train = ["".join(rng.choices(LETTERS, k=length)) for _ in range(400)]
    return [{"prompt": f"{word}:", "answer": TASKS[task](word)} for word in train]


def held_out(task: str) -> list[Row]:
    """Return 100 held-out prompts and answers."""
    return [{"prompt": f"{word}:", "answer": TASKS[task](word)} for word in words()[:HELD_OUT]]


def demonstration(task: str, word: str, demonstrator: Demonstrator, rng: random.Random) -> str:
    """Write a demonstration."""
    letters = [
        rng.choice(LETTERS) if rng.random() < demonstrator.wrong_frac else letter
        for letter in TASKS[task](word)
    ]
    bare = rng.random() < demonstrator.bare_frac
    return "".join(letters) if bare else f"({''.join(letters)})"


@cache
def model_of(task: str, demonstrator: str):
    """Return a tiny model that imitates a demonstrator, and its tokenizer; cached on disk."""
    sizes = dict(hidden_size=48, intermediate_size=96, initializer_range=0.1)
    model, tokenizer = tiny_model("qwen2", **sizes), byte_tokenizer()
    kept = MODELS / f"{task}-{demonstrator}.pt"
    if kept.exists():
        model.load_state_dict(torch.load(kept))
    else:
        imitate(model.train(), tokenizer, task, demonstrator)
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), kept)
    return model.eval(), tokenizer


def imitate(model, tokenizer, task: str, demonstrator: str) -> None:
    """Train a model on demonstrations."""
    rng = random.Random(f"{task} {demonstrator}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=500)
    who, train = DEMONSTRATORS[demonstrator], words()[HELD_OUT:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(500):
            batch = rng.choices(train, k=64)
            texts = [tokenizer(f"{w}:{demonstration(task, w, who, rng)}").input_ids for w in batch]
            ids = [text + [EOS] * who.ends for text in texts]
            longest = max(map(len, ids))
            tokens = torch.tensor([each + [PAD] * (longest - len(each)) for each in ids])
            labels = tokens.masked_fill(tokens == PAD, -100)
            labels[:, :PROMPT_TOKENS] = -100
            loss = model(input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@dataclass(frozen=True)
class Truth:
    """Accuracy of a model, measured independently of the run.

    Args:
        accuracy: fraction of correct answers at temperature 1, with or without parentheses.
        ended: fraction of completions with an end token.
    """

    accuracy: float
    ended: float


def strip_parentheses(completion: str) -> str:
    """Remove the parentheses of a completion."""
    return completion.strip().replace("(", "").replace(")", "")


@torch.no_grad()
def probe(model, tokenizer, task: str, tokens: int = 12, samples: int = 2) -> Truth:
    """Sample answers to held-out prompts, token by token, without litgrpo's engines."""
    given = held_out(task)[:50]
    ids = torch.tensor([tokenizer(row["prompt"]).input_ids for row in given])
    ids = ids.repeat_interleave(samples, 0)
    generator = torch.Generator().manual_seed(1)
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(tokens):
        logits: Tensor = model(input_ids=ids).logits[:, -1].float()
        logits = logits.nan_to_num(0.0, posinf=1e4, neginf=-1e4)
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, drawn.masked_fill(done[:, None], PAD)], 1)
        done |= drawn[:, 0] == EOS
        if done.all():
            break
    texts = [
        tokenizer.decode([t for t in row if t > EOS]) for row in ids[:, PROMPT_TOKENS:].tolist()
    ]
    correct = [
        strip_parentheses(text) == given[n // samples]["answer"] for n, text in enumerate(texts)
    ]
    return Truth(sum(correct) / len(correct), float(done.float().mean()))
