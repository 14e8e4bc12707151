import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from litgrpo.cli.export import _cannot_be_written
from litgrpo.run_folder import COMMAND, HEADER
from litgrpo.tensor_files import write_file
from tests.support.command_line import QUICK

OWN_CLASS = ("--recipe", "runs/recipe/config.yaml")
pytestmark = pytest.mark.filterwarnings("ignore:.*The process .* is using fork")


def test_a_checkpoint_exports_to_what_the_run_exported(cli, finished_run):
    code, _, err = cli("export", "runs/recipe", "out")
    assert (code, err.count("\n")) == (2, 1)  # its class is not part of litgrpo
    assert "--recipe" in err
    assert not Path("out").exists()
    code, out, _ = cli("export", "runs/recipe", "out", *OWN_CLASS)
    assert code == 0
    assert out == "runs/recipe/checkpoints/last.ckpt is now out, in Hugging Face format\n"
    weights = [Path(folder, "model.safetensors") for folder in ("out", "runs/recipe/final_model")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    code, _, err = cli("export", "runs/recipe")
    assert (code, err) == (
        2,
        "error: missing: folder (where to write config, weights and tokenizer)\n",
    )


def test_an_existing_folder_is_replaced_by_force_only(cli, finished_run):
    Path("out").mkdir()
    code, _, err = cli("export", "runs/recipe", "out")
    said = "out exists: choose another folder, or let files of the same names be replaced with "
    assert (code, err) == (2, f"error: {said}--force true.\n")
    assert (
        cli(
            *["export", "runs/recipe", "out", "--force", "true", "--dtype", "bfloat16"], *OWN_CLASS
        )[0]
        == 0
    )
    whole, half = (Path(f, "model.safetensors") for f in ("runs/recipe/final_model", "out"))
    expected = {name: tensor.bfloat16() for name, tensor in load_file(whole).items()}
    found = load_file(half)
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in found)
    # Users who may read the config may read the weights.
    assert half.stat().st_mode == Path("out/config.json").stat().st_mode


def test_errors_advise_what_export_has(cli, finished_run):
    code, _, err = cli("export", "runs/none", "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "runs/none" in err
    assert ".ckpt" in err
    assert not Path("out").exists()
    code, _, err = cli("export", "runs/recipe", "/proc/out")
    assert code == 2
    assert err.startswith("error: /proc/out cannot be written (")
    assert err.count("\n") == 1
    assert not _cannot_be_written(Path("out"))


def test_a_checkpoint_with_adapters_exports_the_adapter_of_the_run(cli):
    pytest.importorskip("peft")
    words = QUICK + " --model.lora.rank 2"
    assert cli(*words.split())[0] == 0
    code, out, _ = cli("export", "run", "out", "--adapter", "true")
    assert (code, out.endswith("is now out, in PEFT format\n")) == (0, True)
    names = [Path(each, "adapter_model.safetensors") for each in ("out", "run/final_adapter")]
    assert names[0].read_bytes() == names[1].read_bytes()


LOUD = "this"  # a module of the standard library that prints when it is imported
# Values of options of a stranger's recipe, as in config.yaml and in checkpoints.
HOSTILE = {
    "class_path": f"{LOUD}.Module",
    "init_args": {
        "pretrained": "builtin:tiny-gemma2",
        "rewards": {
            "a": {"function": "os.system", "kwargs": {"command": "touch made"}},
            "b": {"function": {"class_path": "subprocess.Popen", "init_args": {"args": "true"}}},
            "c": [{"class_path": f"{LOUD}.Reward"}],
        },
        "scoring": {"class_path": f"{LOUD}.Runner"},
        "precision": {"class_path": "logging.FileHandler", "init_args": {"filename": "made"}},
        "environment": f"{LOUD}.Environment",
    },
}  # fmt: skip


def test_a_strangers_run_folder_runs_no_code(cli, monkeypatch):
    words = QUICK.split()
    assert cli(*words)[0] == 0
    run, last = Path("run"), Path("run/checkpoints/last.ckpt").resolve()
    checkpoint = torch.load(last, weights_only=True)
    config = {"model": HOSTILE, "data": HOSTILE, "trainer": {"callbacks": [HOSTILE, HOSTILE]}}
    text = yaml.safe_dump(config)
    checkpoint["callbacks"]["RunFolder"]["config"] = text
    checkpoint["hyper_parameters"] |= HOSTILE["init_args"] | {"precision": None}
    write_file(checkpoint, last)
    (run / "config.yaml").write_text(f"{HEADER}{COMMAND}litgrpo fit -c quickstart\n{text}")
    called = []
    monkeypatch.setattr("os.system", called.append)
    assert cli("export", "run", "out")[0] == 0
    assert cli("report", "run")[0] == 0
    assert cli("doctor", "run")[0] in (0, 1)
    predict = ("predict", *words[1:5], "--ckpt_path", "last", "--data.prompts", '["1+1?"]')
    assert cli(*predict)[0] == 0
    assert cli(*words, "--ckpt_path", "last", "--model.max_iterations", "2")[0] == 0
    for name, attack in {
        "precision": HOSTILE["init_args"]["precision"],
        "lora": {"class_path": f"{LOUD}.LoRA", "init_args": {}},
        "scratch": {"import_path": f"{LOUD}.Scratch"},
        "seed": {"class_path": "os.system", "init_args": {"command": "touch made"}},
    }.items():
        changed = checkpoint | {"hyper_parameters": checkpoint["hyper_parameters"] | {name: attack}}
        write_file(changed, Path("bad.ckpt"))
        code, _, err = cli("export", "bad.ckpt", "out2")
        assert (code, err.count("\n")) == (2, 1)
        assert name in err
    assert not Path("made").exists()
    assert LOUD not in sys.modules
    assert not called
