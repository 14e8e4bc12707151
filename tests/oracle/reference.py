"""Values and gradients that TRL 1.16.0 computed on fixed inputs, with torch 2.13.0 for CPUs.

`trl.json` holds the settings of each case and the names of its arrays in `trl.npz`:

- `loss`: `_compute_loss` of one micro-batch in float64, with its gradients by the log-probabilities
  and entropies, [8, 12]. The inputs are the arrays under `in/`.
- `advantages`: two groups of four rows, float32.
- `head`: log-probabilities and entropies of logits `h @ W.T + b`, with soft-capping and
  temperature.
- `model`: a two-layer Qwen2 with its weights, and the gradients of all parameters, float32.
- `importance`: weights that correct for the sampler; `truncation`: masks of truncated completions.

`gsm8k.jsonl` holds rows of GSM8K's training set (MIT licence, `gsm8k.LICENSE`): every 75th row, and
rows whose answer is not written in digits only, such as "1,080".

Padding positions of the arrays hold arbitrary values, so that a missing mask changes a
result.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = Path(__file__).parent
CASES: dict[str, Any] = json.loads((_FOLDER / "trl.json").read_text(encoding="utf-8"))
GSM8K: list[dict[str, str]] = [
    json.loads(line) for line in (_FOLDER / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
]
with np.load(_FOLDER / "trl.npz") as _file:
    ARRAYS: dict[str, np.ndarray] = dict(_file)
