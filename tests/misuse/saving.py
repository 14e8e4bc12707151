"""Resuming, run folders, checkpoints, exports, and Lightning's options that do not work."""

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.misuse.probe import QUICK, ROOT, Probe, split

STRATEGY = f"{QUICK} --trainer.devices 2 --trainer.strategy"
SWA = "lightning.pytorch.callbacks.StochasticWeightAveraging"


def train(folder: Path, *more: str) -> None:
    """Write a finished run to `folder/run`, in a separate process."""
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    words = split(QUICK.replace("{recipe}", recipe).replace("{folder}", str(folder)))
    command = [sys.executable, str(ROOT / "cli.py"), *words, *more]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "digests.txt").write_text(digests(folder / "run"))


def digests(run: Path) -> str:
    """One line for every file of a run."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    return "".join(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)


def check_unchanged(folder: Path) -> str:
    """Check that the run is byte for byte what `train` wrote."""
    same = digests(folder / "run") == (folder / "digests.txt").read_text()
    return "" if same else "the run folder has changed"


def check_resumed(*texts: str):
    """Return a check that config.yaml or metrics.csv of the run contains these texts."""

    def check(folder: Path) -> str:
        run = folder / "run"
        found = (run / "config.yaml").read_text() + (run / "metrics.csv").read_text()
        return "".join(f"no {text!r} in the run folder; " for text in texts if text not in found)

    return check


def no_events(folder: Path) -> str:
    """Check that a failed start left no event file."""
    return "an event file is left" if list(folder.rglob("events.out*")) else ""


TWO_STARTS = """
import subprocess, sys
words = [sys.executable, {cli!r}, *{words!r}]
two = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(2)]
printed = [process.communicate()[1] for process in two]
assert sorted(process.returncode for process in two) == [0, 2], printed
lines = open("run/metrics.csv").read().splitlines()
assert [line.split(",")[0] for line in lines] == ["step", "1"], lines
print([text for text, process in zip(printed, two) if process.returncode][0])
"""


CLOSED_STDOUT = """
import subprocess, sys
words = [sys.executable, {cli!r}, *{words!r}]
process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
print("first line:", process.stdout.readline())
process.stdout.close()
print(process.stderr.read())
print("exit code", process.wait())
"""

HANGUP = """
import pathlib, signal, subprocess, sys, time
words = [sys.executable, {cli!r}, *{words!r}, "--model.max_iterations", "1000"]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below nohup it is ignored, and stays ignored
process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
while process.poll() is None and not pathlib.Path("run/metrics.csv").exists():
    time.sleep(0.05)
process.send_signal(signal.SIGHUP)
process.send_signal(signal.SIGHUP)  # a closed terminal sends two
print(process.stderr.read())
print("exit code", process.wait())
print(pathlib.Path("run/checkpoints/last.ckpt").resolve(strict=True), "last.ckpt")
"""


READ_ONLY = """
import ctypes, os, pathlib, subprocess, sys
for capability in (1, 2):  # without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, root may not, either
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
pathlib.Path("closed").mkdir(mode=0o555)
os.chdir("closed")
raise SystemExit(subprocess.run([sys.executable, {cli!r}, *{words!r}]).returncode)
"""


FULL_DISK = """
import errno, io, sys
from pathlib import Path
import litgrpo.callbacks.files as files
opened = io.open
def full(file, mode="r", *args, **kwargs):
    if "run/" in str(file) and any(letter in mode for letter in "wax"):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))
    return opened(file, mode, *args, **kwargs)
io.open = full
__import__("builtins").open = full
sys.argv = ["cli.py", *{words!r}]
from litgrpo.cli.main import main
raise SystemExit(main())
"""


def in_script(text: str, *more: str) -> str:
    """A script that starts the quick training, with further options, in separate processes."""
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    words = split(QUICK.replace("{recipe}", recipe).replace("{folder}", "."))
    return text.format(cli=str(ROOT / "cli.py"), words=[*words, *more])


PROBES = [
    Probe(
        "resume of another model",
        f"{QUICK} --model.max_iterations 2 --model.lora.rank 2 --ckpt_path last",
        ("of another model",),
        before=train,
        after=check_unchanged,
    ),
    Probe(
        "resume with another learning rate",
        f"{QUICK} --model.max_iterations 2 --model.optimizer.lr 1e-6 --ckpt_path last",
        ("-> 1e-06",),
        code=0,
        before=train,
        after=check_resumed("lr: 1.0e-06", "9.9639"),
    ),
    Probe(
        "resume with another optimizer",
        f"{QUICK} --model.max_iterations 2 --model.optimizer torch.optim.SGD"
        " --model.optimizer.lr 0.1 --ckpt_path last",
        ("optimizer is AdamW, the recipe's SGD", "starts from zero"),
        code=0,
        before=train,
    ),
    Probe(
        "two starts at once",
        "",
        ("another training is running",),
        code=0,
        script=in_script(TWO_STARTS),
    ),
    Probe(
        "two starts at once, of two processes each",
        "",
        ("another training is running",),
        code=0,
        script=in_script(TWO_STARTS, "--trainer.devices", "2", "--trainer.strategy", "ddp"),
    ),
    Probe(
        "an overwrite whose model cannot be loaded",
        f"{QUICK} --overwrite true --model.pretrained ./nowhere",
        ("nowhere", "config.json"),
        before=train,
        after=check_unchanged,
    ),
    Probe(
        "an overwrite whose data cannot be read",
        f"{QUICK} --overwrite true --data.train nowhere.jsonl",
        ("nowhere.jsonl: no such file",),
        before=train,
        after=check_unchanged,
    ),
    Probe(
        "stored rollouts of a run that wrote none",
        f"{QUICK} --model.stored_rollouts {{folder}}/other",
        ("model.stored_rollouts", "--model.save_rollouts true"),
        quick=True,
    ),
    Probe(
        "an overwrite of the stored rollouts that it trains on",
        f"{QUICK} --overwrite true --model.stored_rollouts {{folder}}/run",
        ("model.stored_rollouts", "another --run_dir"),
        before=lambda folder: train(folder, "--model.save_rollouts", "true"),
        after=check_unchanged,
    ),
    Probe("strategy fsdp", f"{STRATEGY} fsdp", ("fsdp", "FSDP2Strategy"), after=no_events),
    Probe(
        "strategy that cannot be saved",
        STRATEGY + " '{class_path: lightning.pytorch.strategies.ModelParallelStrategy}'",
        ("ModelParallelStrategy", "FSDP2Strategy"),
        after=no_events,
    ),
    Probe("strategy by class name", f"{STRATEGY} FSDPStrategy", ("FSDP2Strategy",)),
    Probe("strategy deepspeed", f"{STRATEGY} deepspeed_stage_2", ("FSDP2Strategy",)),
    Probe("strategy ddp_spawn", f"{STRATEGY} ddp_spawn", ("ddp_spawn", "ddp")),
    Probe("strategy misspelt", f"{STRATEGY} dpp", ("did you mean 'ddp'",)),
    Probe(
        "accumulate_grad_batches",
        f"{QUICK} --trainer.accumulate_grad_batches 2",
        ("model.update.micro_batch_tokens", "data.batch_size"),
    ),
    Probe(
        "gradient_clip_val",
        f"{QUICK} --trainer.gradient_clip_val 1",
        ("model.update.max_grad_norm",),
        quick=True,
    ),
    Probe("overfit_batches", f"{QUICK} --trainer.overfit_batches 1", ("data.train.limit",)),
    Probe("barebones", f"{QUICK} --trainer.barebones true", ("trainer.barebones", "--csv false")),
    Probe(
        "all devices of a CPU",
        f"{QUICK} --trainer.devices -1",
        ("trainer.devices", "number of processes"),
    ),
    Probe("no devices", f"{QUICK} --trainer.devices 0", ("devices",)),
    Probe(
        "StochasticWeightAveraging",
        QUICK + f" --trainer.callbacks {SWA} --trainer.callbacks.swa_lrs 0.1",
        ("model.lr_scheduler",),
    ),
    Probe(
        "run folder that is a file",
        f"{QUICK} --run_dir taken",
        ("run_dir is taken", "not writable"),
        files={"taken": ""},
    ),
    Probe("unwritable run folder", f"{QUICK} --run_dir /proc/run", ("run_dir", "not writable")),
    Probe(
        "a disk that is full at the start",
        "",
        ("run_dir is", "No space left on device", "free space", "--run_dir"),
        script=in_script(FULL_DISK),
        after=no_events,
    ),
    Probe(
        "no event file of a failed start",
        f"{QUICK} --data.train nowhere.jsonl",
        ("nowhere.jsonl",),
        after=no_events,
    ),
    Probe(
        "export over a folder",
        "export run out",
        ("out exists", "--force true"),
        files={"run/checkpoints/last.ckpt": "", "out/notes.txt": ""},
        quick=True,
    ),
    Probe("export of nothing", "export nowhere out", ("nowhere", "run folder")),
    Probe(
        "export to where nothing can be written",
        "export run /proc/out",
        ("/proc/out cannot be written",),
        files={"run/checkpoints/last.ckpt": ""},
    ),
    Probe(
        "resume from weights alone",
        f"{QUICK} --model.max_iterations 2 --ckpt_path last",
        ("holds only weights", "checkpoint.save_weights_only"),
        before=lambda folder: train(folder, "--checkpoint.save_weights_only", "true"),
        after=check_unchanged,
    ),
    Probe(
        "stdout closed",
        "",
        ("first line: ", "exit code 0"),
        code=0,
        script=in_script(CLOSED_STDOUT),
    ),
    Probe(
        "a folder without permission to write",
        "",
        ("run", "permission"),
        script=in_script(READ_ONLY),
    ),
    Probe("the terminal closes", "", ("exit code 129", "last.ckpt"), 0, script=in_script(HANGUP)),
]
