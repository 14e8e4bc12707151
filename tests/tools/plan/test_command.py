"""The command, from the command line to its verdict and advice."""

import json
import re
from pathlib import Path

import pytest

from tests.support.models import tiny_model

ROOT = Path(__file__).parents[3]
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


def test_time_cost_and_sessions_are_printed(cli, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("sessions: {My lunch: {device: v5e, number: 1, hours: 0.001, source: me}}\n")
    report = str(tmp_path / "plan.json")
    words = ("plan", "-c", QUICKSTART, "--chip", "v5e", "--devices", str(mine), "--report", report)
    code, out, err = cli(*words, "--iterations", "100000")
    assert (code, err) == (0, "")
    assert "Time of 100,000 iterations, low - high" in out
    assert re.search(r"\| learning +\|.*\| 100,000 +\|", out)
    assert "\n  learning: model.update.micro_batch_tokens up\n" in out
    assert re.search(r"[\d.]+ - [\d.]+ h; [\d.]+ - [\d.]+ dollars at 1.2 per hour x 1", out)
    assert re.search(r"My lunch \(1 x v5e, 0.001 h\): too long", out)
    assert "Kaggle TPU (1 x v5e, 9 h): " in out
    found = json.loads(Path(report).read_text())
    each = {phase["name"]: phase["seconds"][1] * phase["times"] for phase in found["phases"]}
    assert found["seconds"][1] == pytest.approx(sum(each.values()))
    assert [phase["largest_term"] for phase in found["phases"] if phase["name"] == "learning"] == [
        "kernel launches"
    ]


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ([], 750),  # three passes over 4,000 prompts, 16 at a time
        (["--trainer.max_epochs", "2"], 500),
        (["--data.batch_size", "24"], 498),  # full batches: 166 in each pass
    ],
)
def test_a_run_on_this_cpu_is_planned_from_its_data(cli, options, iterations):
    words = ("plan", "-c", QUICKSTART, "--chip", "cpu", "--model.max_iterations", "null")
    code, out, _ = cli(*words, *options)
    assert code == 0
    assert "| program " in out
    assert re.search(r"up to 100 prompts of 2\d tokens", out)
    assert f"Time of {iterations} iterations" in out
    assert "price of cpu is unknown" in out


def test_the_proposed_change_fits_and_an_impossible_fit_is_reported(cli):
    rates = {"kind": "cuda", "bandwidth_gb_s": 1, "link_gb_s": 1, "usd_per_hour": None}
    rates |= {"tflops": {"float32": 0.1}, "source": "made up"}
    made = {"small": rates | {"memory_gb": 0.1}, "tiny": rates | {"memory_gb": 0.0005}}
    Path("mine.yaml").write_text(json.dumps({"devices": made}))
    words = ("plan", "-c", QUICKSTART, "--devices", "mine.yaml", "--data.max_prompt_length", "32")
    words += ("--val_prompts", "10", "--data.eval_batch_size", "16", "--fit")
    code, out, _ = cli(*words, "--chip", "small")
    assert code == 0
    assert "DOES NOT FIT" in out
    *_, proposed, render_verdict = out.strip().splitlines()
    assert "--model.update.micro_batch_size" in proposed
    assert render_verdict.startswith("  FITS: ")
    code, again, _ = cli(*words, "--chip", "small", *proposed.split()[1:])
    assert code == 0
    assert render_verdict.strip() in again
    assert "With " not in again
    code, out, _ = cli(*words, "--chip", "tiny")
    assert code == 1
    assert "No known change" in out


def test_on_one_device_the_quickstart_fits_and_gemma_does_not(cli):
    code, out, _ = cli("plan", "-c", QUICKSTART)
    assert code == 0
    assert "647,808 numbers" in out
    assert "Each of 1 x cpu " in out  # this machine
    code, out, _ = cli("plan", "-c", GEMMA, "--chip", "v5e")
    assert code == 1
    assert "-c configs/hardware/tpu_spmd.yaml" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "Optimizer AdamW, lr 0.0003, "),
        (("--model.optimizer", "litgrpo.training.optim.DefaultAdamW"), "AdamW, lr 0.0003, "),
        (("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.5"), "SGD, lr 0.5, "),
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
        (["--samplers", "2"], "samplers is 2"),
        (["--devices", "nowhere"], "devices is 'nowhere'"),
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--iterations", "0"], "iterations is 0"),
        (["--val_prompts", "-1"], "val_prompts is -1"),
        (["--measure", "--chip", "h100"], "measure"),
    ],
)
def test_bad_options_are_errors_that_name_them(cli, words, text):
    code, out, err = cli("plan", "-c", QUICKSTART, *words)
    assert (code, out) == (2, "")
    assert text in err
    assert len(err.splitlines()) == 1


def test_a_plan_that_cannot_be_split_evenly_does_not_fit(cli):
    fsdp = str(CONFIGS / "hardware" / "fsdp2.yaml")
    words = ["--chip", "h100", "--chips", "5", "--trainer.strategy.replicas", "2"]
    code, out, _ = cli("plan", "-c", QUICKSTART, "-c", fsdp, *words)
    assert code == 1
    assert "WOULD FIT: " in out
    assert "BUT 2 replicas" in out
