"""Required options, built-in recipes, open defaults and constructors that raise."""

from tests.misuse.probe import QUICK, Probe

HELPS = {
    "model.lora": "--model.lora.rank",
    "model.rewards": "--model.rewards.weight",
    "data.train": "--data.train.limit",
    "data.chat": "enable_thinking",
    "model.controllers.kl": "--model.controllers.kl.target",
    "model.optimizer": "weight_decay",
    "checkpoint": "--checkpoint.keep_last",
}
PLAIN_DATA = {"a.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'}

PROBES = [
    *(Probe(f"help of {key}", f"fit --{key}.help", (said,), code=0) for key, said in HELPS.items()),
    Probe("help of fit", "fit --help", ("--model.group_size", "--data.train"), code=0, quick=True),
    Probe("help of a wrong key", "fit --model.lorra.help", ("did you mean 'lora'",)),
    Probe("a key of plan given to fit", f"{QUICK} --chip v5e", ("plan --help",)),
    Probe("a key of another trainer", f"{QUICK} --learning_rate 1e-6", ("model.optimizer.lr",)),
    Probe(
        "a KL estimator that does not exist",
        f"{QUICK} --model.objective.kl_estimator k4",
        ("model.objective.kl_estimator",),
    ),
    Probe(
        "a recipe by a wrong name", "fit -c quikstart", ("did you mean 'quickstart'",), quick=True
    ),
    Probe(
        "recipes by name in an empty folder",
        "fit -c quickstart -c algorithms/dr_grpo --print_config",
        ("constant_length",),
        code=0,
    ),
    Probe(
        "the same key twice",
        "fit -c twice.yaml",
        ("twice.yaml, line 3", "'class_path'"),
        files={"twice.yaml": "model:\n  class_path: GRPO\n  class_path: SFT\n"},
        quick=True,
    ),
    Probe("a limit on a path", f"{QUICK} --data.train.limit 4", ("Prompts: train 4",), code=0),
    Probe(
        "temperature 0 in training",
        f"{QUICK} --model.sampling.temperature 0",
        ("sampling.temperature", "evaluation.temperature"),
    ),
    Probe("negative learning rate", f"{QUICK} --model.optimizer.lr -1", ("learning rate: -1",)),
    Probe("Muon on vectors", f"{QUICK} --model.optimizer Muon", ("Muon only supports 2D",)),
    Probe(
        "a logger whose package is missing",
        f"{QUICK} --trainer.logger CometLogger",
        ("CometLogger", "pip install"),
    ),
    Probe(
        "half of a surrogate pair",
        f"{QUICK} --data.train a.jsonl",
        ("a.jsonl, line 1", "surrogate"),
        files={"a.jsonl": '{"prompt": "\\ud83d", "answer": "2"}\n'},
    ),
    Probe(
        "a warm-up longer than the run",
        f"{QUICK} --model.lr_scheduler WarmupCosine --model.lr_scheduler.warmup 10",
        ("warms up for 10 optimizer steps, but the run has 1",),
    ),
    Probe(
        "no recipe, no optimizer, no length",
        "fit --model.pretrained builtin:tiny-gemma2 --data.train a.jsonl --data.batch_size 2"
        " --model.rewards '{right: {function: litgrpo.rewards.correctness}}'"
        " --model.max_completion_length 2 --trainer.accelerator cpu",
        ("3 epochs, 3 iterations", "Optimizer: AdamW, lr 0.0003"),
        code=0,
        files=PLAIN_DATA,
    ),
    Probe(
        "predict without a recipe",
        "predict --model.pretrained builtin:tiny-gemma2 --data.prompts '[\"What is 3+4?\"]'"
        " --model.max_completion_length 2 --trainer.accelerator cpu",
        ("What is 3+4?",),
        code=0,
    ),
    Probe(
        "a model in place of a checkpoint",
        "predict -c {recipe} --ckpt_path final_model --data.prompts '[\"a\"]'",
        ("--model.pretrained final_model",),
        files={"final_model/config.json": "{}"},
    ),
]
