"""Supervised training of real, tiny models, against the loss of plain transformers."""

import contextlib
import csv
import json
import logging
import shutil
import sys
from functools import partial

import pytest
import torch
import yaml
from lightning import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from litgrpo.checkpointing.resume import OptimizerOptions
from litgrpo.cli.main import main
from litgrpo.data.modules import PairData, PromptData
from litgrpo.data.pairs import PairBatch
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import LoRA, Precision
from litgrpo.modules.sft import SFT
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.raises import raises_for
from tests.support.sft import SCRATCH

ROWS = [{"prompt": f"What is {n}?", "completion": f"<answer>{n}</answer>"} for n in range(8)]
QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "limit_val_batches": 0,
}
LEARN_NOTHING = partial(torch.optim.SGD, lr=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Gemma 2 over bytes, in a folder."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("gemma2").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def batch_of(*pairs, length=0):
    """Rows of (prompt ids, completion ids), padded to at least `length`."""
    length = max([length, *(len(prompt + completion) for prompt, completion in pairs)])
    ids = torch.zeros(len(pairs), length, dtype=torch.long)
    real, targets = torch.zeros_like(ids).bool(), torch.zeros_like(ids).bool()
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt + completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        real[row, :end] = True
        targets[row, len(prompt) : end] = True
    return PairBatch(ids, real, targets)


SHORT = ([1, 70, 71], [80, 2])
LONG = ([1, 72], [81, 82, 83, 84, 85, 2])


def loader(batches):
    return DataLoader(batches, batch_size=None)


def fit(sft, batches, **settings):
    """Train on the given batches, one iteration each."""
    trainer = Trainer(**QUIET | {"max_epochs": 1} | settings)
    trainer.fit(sft, loader(batches))
    return trainer


def log_iteration(sft, batch):
    """Return the metrics of one iteration on a batch."""
    return {name: float(value) for name, value in fit(sft, [batch]).callback_metrics.items()}


def plain_loss(model, batch):
    """The loss that transformers itself computes."""
    labels = batch.input_ids.masked_fill(~batch.loss_mask, -100)
    mask = batch.attention_mask.long()
    return model(input_ids=batch.input_ids, attention_mask=mask, labels=labels).loss


def test_data_and_precisions_that_sft_cannot_use_are_rejected_with_a_remedy():
    module = SFT("builtin:tiny-gemma2", check_invariants=False)
    prompts = ["What is 1?", "What is 2?"]
    for data in (PromptData(prompts, batch_size=2), DataLoader(prompts)):
        with raises_for("PairData"):
            Trainer(**QUIET).fit(module, data)
    with raises_for("PairData"):
        Trainer(**QUIET | {"limit_val_batches": 1}).validate(module, DataLoader(prompts))
    for precision in ("bf16-true", "64-true"):
        with raises_for("trainer.precision", precision, "model.precision.dtype"):
            Trainer(**QUIET, precision=precision).fit(module, PairData(ROWS, batch_size=2))


@pytest.mark.parametrize(("iterations", "left_out"), [(3, True), (4, False)])
def test_a_resume_that_leaves_out_the_rest_of_an_epoch_is_logged(
    iterations, left_out, tmp_path, caplog
):
    def run(max_iterations, **options):
        module = SFT("builtin:tiny-gemma2", check_invariants=False, max_iterations=max_iterations)
        trainer = Trainer(**QUIET | {"max_epochs": -1}, **options)
        trainer.fit(module, PairData(ROWS, batch_size=2), ckpt_path=None if options else path)

    path = tmp_path / "last.ckpt"
    run(iterations, callbacks=[SavesAtEpochEnd(path)])
    caplog.set_level(logging.INFO, "litgrpo")
    run(5)
    assert left_out == any("IterationCheckpoint" in line for line in caplog.messages)


class SavesAtEpochEnd(Callback):
    """Saves when `ModelCheckpoint` does."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


class DecaysByEpoch(SFT):
    """Has a schedule that Lightning steps after every epoch, of four batches."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("saved", [3, 4, 5])
def test_a_schedule_of_epochs_is_resumed_at_its_epoch(saved, tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == saved:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    def run(*callbacks, ckpt_path=None):
        module = DecaysByEpoch("builtin:tiny-gemma2", check_invariants=False)
        trainer = Trainer(**QUIET | {"max_epochs": 3}, callbacks=[OptimizerOptions(), *callbacks])
        trainer.fit(module, PairData(ROWS, batch_size=2), ckpt_path=ckpt_path)
        return [*module.parameters()]

    pairs = zip(run(Saves()), run(ckpt_path=tmp_path / "a.ckpt"), strict=True)
    assert all(one.equal(other) for one, other in pairs)


def test_loss_is_that_of_transformers_over_the_completions_only(folder):
    batch = batch_of(SHORT, LONG)
    metrics = log_iteration(SFT(folder, optimizer=LEARN_NOTHING), batch)

    loss = plain_loss(tiny_model("gemma2"), batch)
    assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["sft/perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)
    assert metrics["sft/padding_frac"] == pytest.approx(3 / 16)


def test_without_a_length_it_makes_three_passes_over_its_data(folder):
    sft = SFT(folder, optimizer=LEARN_NOTHING)
    batches = DataLoader([batch_of(SHORT), batch_of(LONG)], batch_size=None)
    Trainer(**QUIET).fit(sft, batches)
    assert (sft.iteration, sft.max_iterations) == (6, 6)


def test_one_step_of_gradient_descent_is_that_of_transformers(folder):
    batch = batch_of(SHORT, LONG)
    sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=0.1), max_grad_norm=None)
    fit(sft, [batch])

    model = tiny_model("gemma2")
    plain_loss(model, batch).backward()
    for (name, old), new in zip(
        model.named_parameters(), sft.policy.model.parameters(), strict=True
    ):
        torch.testing.assert_close(new, old - 0.1 * old.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_step_of_an_encoder_decoder_model_is_that_of_transformers(tmp_path):
    tiny_model("t5").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    sft = SFT(str(tmp_path), optimizer=partial(torch.optim.SGD, lr=0.1), max_grad_norm=None)
    metrics = log_iteration(sft, batch_of(SHORT, LONG))

    model = tiny_model("t5")
    asked = {"input_ids": torch.tensor([[1, 70, 71], [1, 72, 0]])}
    asked["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    answers = torch.tensor([[80, 2, *[-100] * 4], [81, 82, 83, 84, 85, 2]])
    loss = model(**asked, labels=answers).loss
    assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    for (name, old), new in zip(
        model.named_parameters(), sft.policy.model.parameters(), strict=True
    ):
        torch.testing.assert_close(new, old - 0.1 * old.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_are_scaled_down_to_max_grad_norm(folder):
    sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=1.0), max_grad_norm=0.01)
    metrics = log_iteration(sft, batch_of(SHORT, LONG))

    pairs = zip(tiny_model("gemma2").parameters(), sft.policy.model.parameters(), strict=True)
    moved = torch.stack([(new - old).norm() for old, new in pairs]).norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)
    assert metrics["optim/grad_norm"] > 0.01


def test_padding_changes_nothing_but_its_share(folder):
    tight, loose = (
        log_iteration(SFT(folder, optimizer=LEARN_NOTHING), batch_of(SHORT, LONG, length=length))
        for length in (0, 16)
    )

    assert tight.pop("sft/padding_frac") < loose.pop("sft/padding_frac")
    assert tight == pytest.approx(loose, rel=1e-5)


def test_validation_weighs_batches_by_their_tokens(folder):
    together, apart = ([batch_of(SHORT, LONG)], [batch_of(SHORT), batch_of(LONG)])
    reports = []
    for batches in (together, apart):
        sft = SFT(folder)
        Trainer(**QUIET | {"limit_val_batches": 1.0}).validate(sft, loader(batches), verbose=False)
        reports.append(sft.evaluation_report)

    loss = plain_loss(tiny_model("gemma2"), together[0]).item()
    assert reports[0]["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert reports[0] == pytest.approx(reports[1], rel=1e-5)
    assert reports[0].keys() == {"val/loss", "val/perplexity", "val/token_accuracy"}


def test_token_accuracy_counts_most_likely_tokens(folder):
    batch = batch_of(SHORT, LONG)
    sft = SFT(folder)
    Trainer(**QUIET).test(sft, loader([batch]), verbose=False)

    logits = tiny_model("gemma2")(batch.input_ids, attention_mask=batch.attention_mask.long())
    right = logits.logits[:, :-1].argmax(-1) == batch.input_ids[:, 1:]
    expected = right[batch.loss_mask[:, 1:]].float().mean().item()
    assert sft.evaluation_report["test/token_accuracy"] == pytest.approx(expected)


def test_it_learns_pairs_by_heart_from_scratch_and_its_export_repeats_them(tmp_path):
    sft = SFT(
        scratch=SCRATCH,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        lr_scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=150),
        max_iterations=150,
    )
    Trainer(**QUIET | {"max_epochs": -1}).fit(sft, PairData(ROWS, batch_size=8))
    export(sft.policy, tmp_path)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for row in ROWS:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        said = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=True) == row["completion"]


def test_it_stops_after_max_iterations_and_logs_iterations_as_steps(folder, tmp_path):
    sft = SFT(folder, max_iterations=3)
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = fit(sft, [batch_of(SHORT)], max_epochs=-1, logger=logger)

    assert sft.iteration == trainer.global_step == 3
    with open(tmp_path / "metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]


def test_a_validation_is_logged_at_the_iteration_it_follows(folder, tmp_path):
    sft, logger = SFT(folder, max_iterations=4), CSVLogger(tmp_path, name="", version="")
    both = loader([batch_of(SHORT)] * 4)
    settings = {"limit_val_batches": 1, "val_check_interval": 2, "max_epochs": -1}
    Trainer(**QUIET | settings | {"logger": logger}).fit(sft, both, both)
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/loss")]
    assert [row["step"] for row in rows] == ["2", "4"]


def test_the_schedule_is_stepped_once_per_iteration(folder):
    halve = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=1.0), lr_scheduler=halve)
    trainer = fit(sft, [batch_of(SHORT)] * 4)

    assert trainer.callback_metrics["optim/lr"].item() == 0.5**3


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_matrix_products_have_the_precision_of_autocast_dtype(folder, dtype):
    sft = SFT(folder, precision=Precision(autocast_dtype=dtype), optimizer=LEARN_NOTHING)
    sft.configure_model()
    seen = set()
    layer = next(part for part in sft.policy.modules() if isinstance(part, torch.nn.Linear))
    layer.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    sft.check_invariants = False
    metrics = log_iteration(sft, batch_of(SHORT, LONG))
    assert seen == {torch.float32 if dtype is None else torch.bfloat16}
    loss = plain_loss(tiny_model("gemma2"), batch_of(SHORT, LONG)).item()
    assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-5 if dtype is None else 1e-2)


def test_with_lora_only_adapters_are_trained(folder):
    sft = SFT(folder, lora=LoRA(rank=2), optimizer=partial(torch.optim.SGD, lr=1.0))
    fit(sft, [batch_of(SHORT)])

    names = [name for name, value in sft.named_parameters() if value.requires_grad]
    assert names
    assert all("lora_" in name for name in names)


def test_equal_seeds_give_equal_models():
    data = PairData(ROWS, batch_size=4)
    weights = []
    for seed in (0, 0, 1):
        sft = SFT(scratch=SCRATCH, max_iterations=2, seed=seed)
        Trainer(**QUIET | {"max_epochs": -1}).fit(sft, data)
        weights.append(torch.cat([value.flatten() for value in sft.policy.parameters()]))

    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_model_is_configured_once(folder):
    sft = SFT(folder)
    sft.configure_model()
    policy = sft.policy
    sft.configure_model()

    assert sft.policy is policy


def test_exactly_one_of_pretrained_and_scratch_is_needed(folder):
    with pytest.raises(ValueError, match="exactly one"):
        SFT()
    with pytest.raises(ValueError, match="exactly one"):
        SFT(folder, scratch=SCRATCH)


def test_scratch_without_texts_for_its_tokenizer_is_refused():
    with pytest.raises(ValueError, match="call fit_tokenizer"):
        SFT(scratch=SCRATCH).configure_model()


def test_adapters_on_random_weights_are_refused():
    with pytest.raises(ValueError, match="leave lora out"):
        SFT(scratch=SCRATCH, lora=LoRA())


@pytest.mark.parametrize("name", ["max_iterations", "micro_batch_size"])
def test_less_than_one_is_refused(folder, name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        SFT(folder, **{name: 0})


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["cli.py", *words])
    assert main() == 0


def write_pairs(folder, rows):
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def scratch_folder(tmp_path_factory):
    """Recipe and run of a short training from scratch, whose training pairs are gone."""
    folder = tmp_path_factory.mktemp("scratch")
    write_pairs(folder, ROWS)
    scratch = {"architecture": SCRATCH.architecture, "vocab_size": SCRATCH.vocab_size}
    settings = {"scratch": scratch, "max_iterations": 2}
    recipe = {
        "model": {"class_path": "litgrpo.SFT", "init_args": settings},
        "data": {"class_path": "litgrpo.PairData", "init_args": {"train": "pairs.jsonl"}},
        "trainer": {"accelerator": "cpu"},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        run(monkeypatch, "fit", "-c", "tiny.yaml", "--trainer.enable_progress_bar", "false")
    (folder / "pairs.jsonl").unlink()
    return folder


@pytest.fixture
def scratch_run(scratch_folder, tmp_path, monkeypatch):
    """The run folder in a copy, below the working directory."""
    monkeypatch.chdir(shutil.copytree(scratch_folder, tmp_path / "copy", symlinks=True))
    return tmp_path / "copy" / "runs" / "tiny"


def test_a_checkpoint_from_scratch_is_exported_without_the_data(scratch_run, monkeypatch):
    run(monkeypatch, "export", str(scratch_run), "exported")

    tokenizer = AutoTokenizer.from_pretrained("exported")
    model = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    sft = SFT.load_from_checkpoint(scratch_run / "checkpoints" / "last.ckpt")
    ids = tokenizer("What is 7?<answer>7</answer>", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [sft.policy.tokenizer("What is 7?<answer>7</answer>")["input_ids"]]
    assert torch.equal(model(ids).logits, sft.policy.model.eval()(ids).logits)
    for name in ("tokenizer.json", "model.safetensors"):
        here, at_the_end = (scratch_run.parents[1] / "exported", scratch_run / "final_model")
        assert (here / name).read_bytes() == (at_the_end / name).read_bytes()


def test_a_run_is_not_resumed_with_a_model_of_another_size(scratch_run, monkeypatch, capsys):
    write_pairs(scratch_run.parents[1], ROWS)
    larger = ["--model.scratch.architecture.intermediate_size", "64"]
    words = ["fit", "-c", "tiny.yaml", *larger, "--model.max_iterations", "3"]
    monkeypatch.setattr(sys, "argv", ["cli.py", *words, "--ckpt_path", "last"])
    assert main() == 2
    assert "The checkpoint is of another model: of another shape" in capsys.readouterr().err


def test_a_validation_reads_other_pairs_with_the_tokenizer_of_the_checkpoint(
    scratch_run, monkeypatch
):
    other = [{"prompt": f"Who are {n} others", "completion": f"person {n}"} for n in range(9)]
    write_pairs(scratch_run.parents[1], other)
    texts = []
    score = SFT.score

    def note(self, batch):
        texts.append(self.tokenizer.decode(batch.input_ids[0], skip_special_tokens=True))
        return score(self, batch)

    monkeypatch.setattr(SFT, "score", note)
    words = [
        "--ckpt_path",
        "last",
        "--data.val",
        json.dumps(other[:1]),
        "--data.train_val_overlap",
        "keep",
    ]
    with pytest.warns(UserWarning, match="kept"):
        run(monkeypatch, "validate", "-c", str(scratch_run / "config.yaml"), *words)
    assert texts == ["Who are 0 othersperson 0"]


@pytest.mark.parametrize("batches", [1, 2])
def test_the_report_of_a_step_comes_with_the_batch_that_ends_it(folder, batches):
    class Noted(SFT):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(outputs["reports"])
            super().on_train_batch_end(outputs, batch, batch_idx)

    seen = []
    sft = Noted(folder, optimizer=partial(torch.optim.SGD, lr=0.5))
    fit(sft, [batch_of(SHORT)] * 2, accumulate_grad_batches=batches)
    assert [len(reports) for reports in seen] == ([1, 1] if batches == 1 else [0, 1])
    (report,) = seen[-1]
    assert (report.lr, report.skipped) == (0.5, None)


def test_a_gradient_that_is_not_finite_skips_the_step(folder):
    sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=0.5))
    sft.configure_model()
    before = [value.clone() for value in sft.policy.parameters()]
    next(sft.policy.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    fit(sft, [batch_of(SHORT)])
    assert [report.skipped for report in sft.reports] == [{}]
    assert all(map(torch.equal, before, sft.policy.parameters()))


def test_validation_sets_with_names_have_numbers_of_their_own(folder):
    """Each is what a validation on that set alone says."""
    sets = {"low": ROWS[:3], "high": ROWS[3:]}

    def losses(val):
        sft, data = SFT(folder), PairData(ROWS, val=val, batch_size=2, train_val_overlap="keep")
        with pytest.warns(UserWarning, match="kept"):
            Trainer(**QUIET | {"limit_val_batches": 1.0}).validate(sft, data, verbose=False)
        return sft.evaluation_report

    both = losses(sets)
    for name, rows in sets.items():
        alone = losses(rows)
        named = {key: both[f"val/{name}/{key.removeprefix('val/')}"] for key in alone}
        assert named == pytest.approx(alone)


def fail(*_):
    raise torch.OutOfMemoryError("a test")


class Limited(SFT):
    """Has memory for `fits` pairs at once, in its forward or its backward passes."""

    fits, fails_backward = 2, False

    def score(self, batch):
        limited = len(batch) > self.fits
        if limited and not (self.fails_backward and torch.is_grad_enabled()):
            fail()
        logprobs, correct = super().score(batch)
        if limited:
            logprobs.register_hook(fail)
        return logprobs, correct


class LimitedBackward(Limited):
    fails_backward = True


BATCHES = [batch_of(SHORT, LONG, SHORT, LONG, SHORT), batch_of(LONG, SHORT, SHORT, LONG, LONG)]


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", [SFT, Limited, LimitedBackward])
def test_parts_of_a_batch_have_its_gradient_also_if_memory_chose_them(folder, kind, batches):
    optimizer = partial(torch.optim.SGD, lr=0.5)
    whole, parts = (each(folder, optimizer=optimizer) for each in (SFT, kind))
    settings = {"accumulate_grad_batches": batches}
    numbers = fit(whole, BATCHES, **settings).callback_metrics
    if kind is SFT:
        parts.micro_batch_size = 2
        trainer = fit(parts, BATCHES, **settings)
    else:
        with pytest.warns(UserWarning, match=r"model\.micro_batch_size = 2"):
            trainer = fit(parts, BATCHES, **settings)
        assert parts.row_limit.max_rows == 2
    for one, other in zip(parts.policy.parameters(), whole.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for name, number in numbers.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(number), rel=1e-4)


ONE = ([1, 73], [86])
MEDIUM = ([1, 74, 75, 76], [87, 88, 2])
STEPS = [batch_of(SHORT, LONG), batch_of(ONE, MEDIUM)]
WHOLE = batch_of(SHORT, LONG, ONE, MEDIUM)  # 2 + 6 and 1 + 3 targets


def train_on(batches, folder, lr=0.5, **settings):
    """Weights and metrics after training on these batches."""
    sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=lr), max_grad_norm=None)
    trainer = fit(sft, batches, **settings)
    return torch.cat([p.detach().flatten() for p in sft.policy.parameters()]), trainer


def test_an_accumulated_step_is_that_of_the_large_batch(folder):
    """Also of transformers, whose loss is a mean over the tokens of its batch."""
    weights, trainer = train_on(STEPS, folder, accumulate_grad_batches=2)
    model = tiny_model("gemma2")
    loss = plain_loss(model, WHOLE)
    loss.backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights, train_on([WHOLE], folder)[0], rtol=1e-4, atol=1e-6)
    # The numbers of a step are those of all of its tokens.
    metrics = trainer.callback_metrics
    assert metrics["sft/loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["sft/padding_frac"].item() == pytest.approx(1 - (13 + 10) / (16 + 14))


def test_the_last_step_of_an_epoch_may_have_fewer_batches(folder):
    """Three batches in twos, for two epochs: steps on 2, 1, 2 and 1 of them."""
    third = batch_of(MEDIUM, SHORT)
    weights, trainer = train_on([*STEPS, third], folder, accumulate_grad_batches=2, max_epochs=2)
    assert trainer.global_step == 4
    expected, _ = train_on([WHOLE, third, WHOLE, third], folder)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"micro_batch_size": 1}, {"lora": LoRA(rank=2)}])
def test_batches_in_parts_and_adapters_accumulate_to_the_large_batch(folder, settings):
    def train(batches, every):
        torch.manual_seed(0)  # of the adapters
        sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=0.5), **settings)
        fit(sft, batches, accumulate_grad_batches=every)
        return [p for p in sft.policy.parameters() if p.requires_grad]

    for one, other in zip(train(STEPS, 2), train([WHOLE], 1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_takes_the_same_accumulated_steps(folder, tmp_path):
    batches = [*STEPS, *STEPS[::-1]]
    expected, _ = train_on(batches, folder, accumulate_grad_batches=2)
    sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=0.5), max_grad_norm=None)
    settings = {"accumulate_grad_batches": 2}
    fit(sft, batches, limit_train_batches=2, **settings).save_checkpoint(tmp_path / "one.ckpt")
    sft = SFT(folder, optimizer=partial(torch.optim.SGD, lr=0.5), max_grad_norm=None)
    trainer = Trainer(**QUIET | {"max_epochs": 2} | settings)
    trainer.fit(sft, loader(batches[2:]), ckpt_path=tmp_path / "one.ckpt")
    weights = torch.cat([p.detach().flatten() for p in sft.policy.parameters()])
    assert torch.equal(weights, expected)


@pytest.mark.filterwarnings("ignore:.*kept:UserWarning")
def test_a_validation_is_computed_in_parts_if_memory_needs_it(folder):
    reports = []
    for kind in (SFT, Limited):
        sft = kind(folder)
        data = PairData(ROWS, val=ROWS, batch_size=8, train_val_overlap="keep")
        trainer = Trainer(**QUIET | {"limit_val_batches": 1.0})
        lowers = pytest.warns(UserWarning, match="micro_batch_size")
        with lowers if kind is Limited else contextlib.nullcontext():
            trainer.validate(sft, data, verbose=False)
        assert sft.row_limit.max_rows == (2 if kind is Limited else None)
        reports.append(sft.evaluation_report)
    assert reports[1] == pytest.approx(reports[0])


def test_a_pair_that_does_not_fit_ends_the_run_with_the_remedy(folder):
    class Full(Limited):
        fits = 0

    with (
        pytest.warns(UserWarning, match="micro_batch_size"),
        pytest.raises(RuntimeError, match=r"1 row.*model\.micro_batch_size.*data\.max_length"),
    ):
        fit(Full(folder), BATCHES)


def test_a_checkpoint_keeps_the_lowered_limit(folder, tmp_path):
    sft = Limited(folder, optimizer=LEARN_NOTHING)
    with pytest.warns(UserWarning, match="micro_batch_size"):
        trainer = fit(sft, BATCHES)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    found = SFT.load_from_checkpoint(tmp_path / "last.ckpt")
    assert found.row_limit.max_rows == 2
