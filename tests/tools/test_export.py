from pathlib import Path

import pytest

from tests.cli.running import cli  # noqa: F401 (a fixture)

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
