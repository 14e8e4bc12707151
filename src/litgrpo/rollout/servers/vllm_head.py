"""The tied output head of a vLLM that runs on a CPU."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from litgrpo.models.loading.sharded_weights import INDEX, iterate_weights
from litgrpo.models.policy import Policy
from litgrpo.rollout.servers.weight_transfer import HEAD

# vLLM on a CPU multiplies with a packed copy of the output head, made when it loads this tensor. A
# folder with tied embeddings does not have the tensor, so the copy would keep the first weights.
# On a GPU the head is the tensor of the embeddings. Source: vLLM 0.32,
# `model_executor/layers/utils.py`, `dispatch_cpu_unquantized_gemm`.
HEAD_FILE = "lm_head.safetensors"


def has_head(inspection: str) -> bool:
    """Return True if vLLM's listing of a model's modules has an output head, also a tied one.

    Example:
        >>> has_head("LlamaForCausalLM()((lm_head): ParallelLMHead(num_embeddings=265))")
        True
    """
    return "(lm_head): ParallelLMHead" in inspection


def write_head(folder: Path, source: str) -> None:
    """Write the tied output head of an exported model as a separate tensor.

    Args:
        folder: exported model.
        source: name of the tensor that is the head.
    """
    if (folder / HEAD_FILE).exists():
        return
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if source not in set(opened.keys()):
                continue
            head = opened.get_tensor(source)
        partial = folder / f"{uuid.uuid4().hex}.partial"  # servers are updated in parallel
        save_file({HEAD: head}, partial, {"format": "pt"})
        index = folder / INDEX
        if index.exists():  # vLLM reads the files that it names
            content = json.loads(index.read_text())
            content["weight_map"][HEAD] = HEAD_FILE
            partial_index = partial.with_suffix(".json")
            partial_index.write_text(json.dumps(content))
            partial_index.replace(index)
        partial.chmod(file.stat().st_mode)
        partial.replace(folder / HEAD_FILE)
        return


def iterate_with_head(policy: Policy, source: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the policy's weights, and the tensor `source` also under the head's own name."""
    for name, weight in iterate_weights(policy.model):
        yield name, weight
        if name == source:
            yield HEAD, weight
