from pathlib import Path

import pytest
from safetensors.torch import load_file

from litgrpo.cli.export import _cannot_be_written
from tests.misuse.probe import QUICK, RECIPE

pytestmark = pytest.mark.filterwarnings("ignore:.*The process .* is using fork")


def test_a_checkpoint_exports_to_what_the_run_exported(cli):
    cli("fit", "-c", "recipe.yaml")
    code, out, _ = cli("export", "runs/recipe", "out")
    assert code == 0
    assert out == "runs/recipe/checkpoints/last.ckpt is now out, in Hugging Face format\n"
    weights = [Path(folder, "model.safetensors") for folder in ("out", "runs/recipe/final_model")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    code, _, err = cli("export", "runs/recipe")
    assert (code, err) == (2, "error: the following arguments are required: folder\n")


def test_an_existing_folder_is_replaced_by_force_only(cli):
    cli("fit", "-c", "recipe.yaml")
    Path("out").mkdir()
    code, _, err = cli("export", "runs/recipe", "out")
    said = "out exists: choose another folder, or let files of the same names be replaced with "
    assert (code, err) == (2, f"error: {said}--force true.\n")
    assert cli("export", "runs/recipe", "out", "--force", "true", "--dtype", "bfloat16")[0] == 0
    whole, half = (Path(f, "model.safetensors") for f in ("runs/recipe/final_model", "out"))
    expected = {name: tensor.bfloat16() for name, tensor in load_file(whole).items()}
    found = load_file(half)
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in found)
    # Users who may read the config may read the weights.
    assert half.stat().st_mode == Path("out/config.json").stat().st_mode


def test_errors_advise_what_export_has(cli):
    code, _, err = cli("export", "runs/none", "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "runs/none" in err
    assert ".ckpt" in err
    assert not Path("out").exists()
    cli("fit", "-c", "recipe.yaml")
    code, _, err = cli("export", "runs/recipe", "/proc/out")
    assert code == 2
    assert err.startswith("error: /proc/out cannot be written (")
    assert err.count("\n") == 1
    assert not _cannot_be_written(Path("out"))


def test_a_checkpoint_with_adapters_exports_the_adapter_of_the_run(cli):
    pytest.importorskip("peft")
    words = QUICK.format(recipe=RECIPE, folder=".") + " --model.lora.rank 2"
    assert cli(*words.split())[0] == 0
    code, out, _ = cli("export", "run", "out", "--adapter", "true")
    assert (code, out.endswith("is now out, in PEFT format\n")) == (0, True)
    names = [Path(each, "adapter_model.safetensors") for each in ("out", "run/final_adapter")]
    assert names[0].read_bytes() == names[1].read_bytes()
