from pathlib import Path

import pytest

from tests.cli.running import cli  # noqa: F401 (a fixture)
from tests.misuse.probe import QUICK, RECIPE

pytestmark = pytest.mark.filterwarnings("ignore:.*The process .* is using fork")


def test_a_checkpoint_exports_to_what_the_run_exported(cli):  # noqa: F811
    cli("fit", "-c", "recipe.yaml")
    code, out, _ = cli("export", "runs/recipe", "out")
    assert code == 0
    assert out == "runs/recipe/checkpoints/last.ckpt is now out, in Hugging Face format\n"
    weights = [Path(folder, "model.safetensors") for folder in ("out", "runs/recipe/final_model")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    code, _, err = cli("export", "runs/recipe")
    assert (code, err) == (2, "error: missing: folder\n")


def test_a_checkpoint_with_adapters_exports_the_adapter_of_the_run(cli):  # noqa: F811
    pytest.importorskip("peft")
    words = QUICK.format(recipe=RECIPE, folder=".") + " --model.lora.rank 2"
    assert cli(*words.split())[0] == 0
    code, out, _ = cli("export", "run", "out", "--adapter", "true")
    assert (code, out.endswith("is now out, in PEFT's format\n")) == (0, True)
    names = [
        Path(each, "adapter_model.safetensors") for each in ("out", "run/final_adapter")
    ]
    assert names[0].read_bytes() == names[1].read_bytes()
