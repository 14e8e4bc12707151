"""GRPO for language models as a LightningModule, on CPU, CUDA and TPU."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
# Public names and where they are; imported when asked for, so that `import litgrpo` is fast.
PUBLIC = {
    "GRPO": "litgrpo.training.grpo",
    "SFT": "litgrpo.training.sft",
    "PromptData": "litgrpo.data.modules",
    "PairData": "litgrpo.data.modules",
    "WarmupCosine": "litgrpo.training.optim",
    "WarmupLinear": "litgrpo.training.optim",
}
__all__ = ["GRPO", "SFT", "PairData", "PromptData", "WarmupCosine", "WarmupLinear"]


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(PUBLIC[name]))[name]
