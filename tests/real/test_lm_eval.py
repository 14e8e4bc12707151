"""lm-evaluation-harness reads what `export` writes, and scores it as the original is scored."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from litgrpo.models.loading.export import export
from litgrpo.models.loading.gguf import find_package_file
from litgrpo.models.loading.load import load_policy
from tests.support.smollm2 import MODEL, NEEDED

LACKING = [name for name in (*NEEDED, "lm_eval") if find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {LACKING}; see .ci/nightly real"),
    pytest.mark.filterwarnings("default"),  # those of other libraries
]
NUM = 40


def rows() -> list[dict]:
    """Sums of two digits, each with four numbers to choose from."""
    pairs = [(a, b) for a in range(1, 9) for b in range(1, 9)][:NUM]
    return [
        {
            "question": f"Question: What is {a} plus {b}?\nAnswer:",
            "choices": [f" {a + b + d}" for d in (0, 1, 2, 3)],
            "gold": 0,
        }
        for a, b in pairs
    ]


def test_lm_eval_scores_an_export_like_the_original(tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data, task = tmp_path / "sums.jsonl", tmp_path / "tasks" / "sums.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    task.parent.mkdir()
    task.write_text((Path(__file__).parent / "sums.yaml").read_text().replace("DATA", str(data)))
    export(load_policy(MODEL), tmp_path / "model")
    file = find_package_file(MODEL)
    found = []
    for where in (
        {"pretrained": str(tmp_path / "model")},
        {"pretrained": str(file.parent), "gguf_file": file.name},
    ):
        report = simple_evaluate(
            model="hf",
            model_args=where | {"dtype": "float32", "device": "cpu"},
            tasks=["litgrpo_sums"],
            task_manager=TaskManager(include_path=str(task.parent), include_defaults=False),
            batch_size=8,
            log_samples=False,
        )
        found.append(report["results"]["litgrpo_sums"]["acc,none"])
    assert found[0] == found[1]
    assert found[0] > 0.25  # chance
