"""A model that exists in Python already, where a name or a folder is expected."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from typing import Any

from litgrpo.arguments import require
from litgrpo.models.loading import load_tokenizer


def as_folder(pretrained: Any) -> Any:
    """A name or folder as it is; of a model at hand, a temporary folder that holds it.

    The policy, its reference and the start that an evaluation refers to are each loaded from
    there: the given model is not trained, and no later change of it matters. The folder goes away
    with the process.

    Args:
        pretrained: None, hub id or folder; or a `PreTrainedModel` that was loaded from one with a
            tokenizer; or `(model, tokenizer)`.

    Raises:
        ValueError: anything else, or there is no tokenizer.
    """
    if pretrained is None or isinstance(pretrained, str):
        return pretrained
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    model, tokenizer = pretrained if isinstance(pretrained, tuple) else (pretrained, None)
    require(
        isinstance(model, PreTrainedModel),
        f"pretrained is a {type(model).__name__}; it can be a hub id, a folder, a PreTrainedModel "
        "or (model, tokenizer). A PeftModel is merged first: model.merge_and_unload().",
    )
    if tokenizer is None:
        require(
            bool(model.name_or_path),
            f"pretrained is a {type(model).__name__} without a tokenizer: give "
            "pretrained=(model, tokenizer).",
        )
        tokenizer = load_tokenizer(model.name_or_path)
    require(
        isinstance(tokenizer, PreTrainedTokenizerBase),
        f"the tokenizer of pretrained is a {type(tokenizer).__name__}, none of transformers'.",
    )
    folder = tempfile.mkdtemp(prefix="litgrpo-model-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
