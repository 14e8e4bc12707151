"""The command, from the command line to its verdict and advice."""

import json
import re
from pathlib import Path

import pytest

from tests.support.models import tiny_model

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
GEMMA = str(CONFIGS / "reasoning_gemma2_2b.yaml")
SPMD = str(CONFIGS / "hardware" / "tpu_spmd.yaml")


def test_gemma_2_on_eight_v5e_needs_a_smaller_micro_batch(cli, tmp_path):
    code, out, err = cli("plan", "-c", GEMMA, "-c", SPMD)
    assert (code, err) == (1, "")
    assert "DOES NOT FIT" in out
    assert "--model.update.micro_batch_size" in out
    report = str(tmp_path / "plan.json")
    words = ["-c", GEMMA, "-c", SPMD, "--model.update.micro_batch_size", "8"]
    code, out, err = cli("plan", *words, "--report", report)
    assert (code, err) == (0, "")
    assert "2,614,341,888 numbers" in out
    content = json.loads(Path(report).read_text())
    assert content["fits"]
    assert content["peak_bytes"] < 0.9 * 16e9


def test_a_run_on_this_cpu_is_planned_from_its_data(cli):
    code, out, _ = cli("plan", "-c", QUICKSTART, "--chip", "cpu")
    assert code == 0
    assert "| program " in out
    assert re.search(r"\| 100 x 2\d tokens, once per group", out)
    code, out, _ = cli("plan", "-c", QUICKSTART, "--chip", "cpu", "--read_data", "false")
    assert "| 100 x 512 tokens, once per group" in out


def test_changes_are_listed_until_one_fits(cli):
    words = ("plan", "-c", QUICKSTART, "--data.max_prompt_length", "32")
    words += ("--data.eval_batch_size", "16", "--chip", "0.1")
    code, out, _ = cli(*words)
    assert code == 1
    assert "DOES NOT FIT: " in out
    lines = [line.split() for line in out.splitlines() if line.startswith("  --")]
    assert [line[-1] for line in lines].count("fits") == 1
    changes = {line[0]: line[1] for line in lines}  # a later value replaces an earlier one
    code, out, _ = cli(*words, *(word for pair in changes.items() for word in pair))
    assert code == 0, out
    assert f"FITS: {lines[-1][2]} GB" in out


def test_on_one_device_the_quickstart_fits_and_gemma_does_not(cli):
    code, out, _ = cli("plan", "-c", QUICKSTART)
    assert code == 0
    assert "647,808 numbers" in out
    assert "Each of 1 x cpu " in out  # this machine
    code, out, _ = cli("plan", "-c", GEMMA, "--chip", "v5e")
    assert code == 1
    assert "-c configs/hardware/tpu_spmd.yaml" in out
    assert re.search(r"\| 1 +\| 75.07 +\| v5p +\|", out)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "Optimizer AdamW, lr 0.0003; "),
        (("--model.optimizer", "litgrpo.learning.optim.DefaultAdamW"), "AdamW, lr 0.0003; "),
        (("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.5"), "SGD, lr 0.5; "),
    ],
)
def test_the_optimizer_is_printed_with_its_learning_rate(cli, words, text):
    code, out, _ = cli("plan", "-c", QUICKSTART, *words)
    assert code == 0
    assert text in out


def test_lora_needs_no_reference_and_little_optimizer_state(cli):
    words = ("-c", GEMMA, "-c", SPMD, "--model.lora.rank", "16", "--chips", "4")
    code, out, _ = cli("plan", *words, "--model.update.micro_batch_size", "4")
    assert code == 0
    assert "| adapters " in out
    assert "20,766,720 numbers" in out
    assert "| reference " not in out


def test_rows_that_cannot_be_split_evenly_do_not_fit(cli):
    code, out, _ = cli("plan", "-c", QUICKSTART, "-c", SPMD, "--data.batch_size", "3")
    assert code == 0
    code, out, _ = cli(
        *("plan", "-c", QUICKSTART, "-c", SPMD, "--data.batch_size", "3", "--chips", "16")
    )
    assert code == 1
    assert "BUT 24 rows of a rollout (data.batch_size x group_size)" in out


@pytest.mark.parametrize("name", ["gsm8k_small_sft.yaml", "reasoning_gemma2_2b_sft.yaml"])
def test_supervised_recipes_have_no_rollout(cli, name):
    strategy = "litgrpo.xla.strategy.XLASPMDStrategy"
    _, out, err = cli("plan", "-c", str(CONFIGS / name), "--trainer.strategy", strategy)
    assert err == ""
    assert "| rollout " not in out
    assert "| gradients " in out


def test_an_unknown_model_needs_a_config(cli, tmp_path):
    tiny_model("qwen2").config.save_pretrained(tmp_path / "model")
    words = ["-c", QUICKSTART, "--model.pretrained", "someone/unknown"]
    code, _, err = cli("plan", *words)
    assert code == 2
    assert "--model_config" in err
    for path in (tmp_path / "model", tmp_path / "model" / "config.json"):
        code, out, _ = cli("plan", *words, "--model_config", str(path))
        assert code == 0
        assert "32,224 numbers" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chip", "h1000"], "chip is 'h1000'"),
        (["--chips", "8"], "trainer.strategy 'auto'"),
        (["--chips", "0"], "chips is 0"),
        (["--chip", "-3"], "chip is -3"),
        (["--model_config", "nowhere"], "model_config is 'nowhere'"),
        (["--model.group_sise", "4"], "did you mean 'model.group_size'?"),
    ],
)
def test_mistakes_are_one_line(cli, words, message):
    code, _, err = cli("plan", "-c", QUICKSTART, *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_an_encoder_decoder_model_is_an_error(cli):
    code, _, err = cli("plan", "-c", str(CONFIGS / "convai2_small_sft.yaml"))
    assert code == 2
    assert "t5" in err


def test_a_device_is_not_measured(cli):
    code, out, err = cli("plan", "-c", QUICKSTART, "--measure", "--chip", "h100")
    assert (code, out) == (2, "")
    assert "leave out either chip or measure" in err


@pytest.mark.parametrize(
    "words",
    [
        (GEMMA, "-c", SPMD),
        (GEMMA, "--chip", "t4"),
        (GEMMA, "--chip", "h100", "--model.precision.autocast_dtype", "bfloat16"),
        (GEMMA, "--chip", "24", "--trainer.strategy", "ddp", "--chips", "64"),
        (GEMMA, "-c", str(CONFIGS / "hardware" / "fsdp2.yaml"), "--chip", "rtx4090"),
        (GEMMA, "-c", str(CONFIGS / "hardware" / "server.yaml"), "--chip", "h100"),
        (QUICKSTART, "--data.batch_size", "512", "--model.max_completion_length", "8192"),
    ],
)
def test_the_output_fits_into_80_columns(cli, words):
    _, out, err = cli("plan", "-c", *words)
    assert (max(map(len, out.splitlines())), err) <= (80, ""), out


def test_a_plan_that_cannot_be_split_evenly_does_not_fit(cli):
    fsdp = str(CONFIGS / "hardware" / "fsdp2.yaml")
    words = ["--chip", "h100", "--chips", "5", "--trainer.strategy.replicas", "2"]
    code, out, _ = cli("plan", "-c", QUICKSTART, "-c", fsdp, *words)
    assert code == 1
    assert "WOULD FIT: " in out
    assert "BUT 2 replicas" in out
