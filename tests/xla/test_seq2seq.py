"""GRPO of a T5 through XLA: its rollout and its learning step are compiled once, too."""

from pathlib import Path
from typing import Any

from tests.support.models import byte_tokenizer, tiny_model
from tests.xla.fitting import SMALL, distance, fit, same_tokens
from tests.xla.own_process import own_process

SETTINGS: dict[str, Any] = {
    "model": {
        "init_args": {
            "rewards": {"words": {"function": "tests.faults.killer.reward"}},
            "max_completion_length": 20,
            "objective": {"kl_coef": 0.05},
            "update": {"epochs_per_rollout": 2},
        }
    }
}


@own_process()
def test_a_t5_is_compiled_once_and_trains_as_on_the_cpu(tmp_path: str):
    import torch_xla

    torch_xla.device()  # autograd counts devices at its first backward pass, on the CPU here
    folder = Path(tmp_path) / "t5"
    tiny_model("t5").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    recipe = {"model": {"init_args": {"pretrained": str(folder)}}}
    wide = {"engine": {"init_args": {"prompt_buckets": 128}}}  # one width: tokens are bytes
    expected = fit("cpu", 1, SMALL, SETTINGS, recipe)
    found = fit("xla", 8, SMALL, SETTINGS, recipe, {"model": {"init_args": wide}})
    assert same_tokens(expected.rollouts[0], found.rollouts[0]) >= 0.999
    assert distance(expected.gradients, found.gradients) < 1e-4
    compiled = found.column("perf/compilations")
    assert sum(compiled[2:]) == 0, compiled
    assert all(row["perf/cpu_fallbacks"] == 0 for row in found.rows[2:])
