"""Peak memory and time of the head: log-probs of many tokens over a large vocabulary.

    python -m tests.benchmarks.head --tokens 8192 --vocab 256000 --hidden 256

Forward and backward, in chunks and (with --dense) with every logit in memory, each in a process of
its own. Memory is the largest growth of the process; the weight and its gradient are named apart,
because any head needs them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from litgrpo.tensors import head_chunk, token_logprobs


def mib() -> float:
    """Most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(tokens: int, vocab: int, width: int, dense: bool) -> dict[str, Any]:
    """Forward and backward once, with Gemma's soft-cap of the logits."""
    weight = torch.zeros(vocab, width).normal_(std=0.02).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    before = mib()

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows @ weight.t() / 30) * 30

    chunk = tokens if dense else head_chunk(tokens, vocab)
    start = time.process_time()
    logprobs, entropy = token_logprobs(hidden, targets, head, chunk_size=chunk)
    (-logprobs.mean()).backward()
    return {
        "tokens": tokens,
        "vocab": vocab,
        "hidden": width,
        "chunk": chunk,
        "cpu_s": time.process_time() - start,
        "grew_mib": mib() - before,
        "weight_mib": weight.numel() * 4 / 2**20,
        "logits_mib": tokens * vocab * 4 / 2**20,
        "mean_logprob": float(logprobs.detach().mean()),
        "mean_entropy": float(entropy.mean()),
    }


def main() -> None:
    """Measure, each variant in a separate process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=256_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dense", action="store_true", help="every logit in memory too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turn", choices=["chunks", "dense"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        torch.manual_seed(0)
        found = measure(args.tokens, args.vocab, args.hidden, args.turn == "dense")
        print(json.dumps(found))
        return
    for turn in ("chunks", "dense") if args.dense else ("chunks",):
        command = [sys.executable, "-m", "tests.benchmarks.head", *sys.argv[1:], "--turn", turn]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(line)
        if args.json:
            print(line.strip())
            continue
        print(
            f"{turn}: {found['tokens']} tokens x {found['vocab']} logits, {found['chunk']} at a "
            f"time: {found['grew_mib']:.0f} MiB beside {2 * found['weight_mib']:.0f} of weight and "
            f"gradient; all logits would be {found['logits_mib']:.0f} MiB; {found['cpu_s']:.1f} s "
            f"of CPU; mean log-prob {found['mean_logprob']:.6f}, entropy "
            f"{found['mean_entropy']:.6f}"
        )


if __name__ == "__main__":
    main()
