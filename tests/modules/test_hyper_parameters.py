import dataclasses
import inspect
import pkgutil
import re
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import litgrpo
from litgrpo.algorithms.objective import Objective
from litgrpo.checkpointing.io import VerifiedCheckpointIO
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.hyper_parameters import (
    OPTIONS,
    NotDescribable,
    build,
    describe,
    load_trained_policy,
)
from litgrpo.modules.sft import SFT
from litgrpo.rewards.builtin.math import correctness
from litgrpo.rewards.scorer import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers.vllm import ServerEngine
from litgrpo.rollout.servers.weight_transfer import FolderTransfer
from litgrpo.tensor_files import write_file
from tests.support.raises import raises_for
from tests.support.sft import SCRATCH
from tests.support.training import batches, module

BUILTIN = "builtin:tiny-gemma2"


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "text"]},
        Objective(),
        LocalEngine(max_rows=4),
        Sampling(temperature=0.7),
        Reward(correctness, weight=0.5, kwargs={"x": 1}),
        torch.optim.AdamW,
    ],
)
def test_a_value_is_made_again_from_plain_ones(value):
    assert build(describe(value), texts=True) == value


def test_a_partial_keeps_its_arguments_and_a_lambda_is_not_plain():
    again = build(describe(partial(torch.optim.AdamW, lr=0.5)))
    assert (again.func, again.keywords) == (torch.optim.AdamW, {"lr": 0.5})
    for value in (lambda: 1, torch.nn.Linear(1, 1), {"a": [lambda: 1]}):
        with pytest.raises(NotDescribable):
            describe(value)


def save(module, path):
    """A checkpoint of a module that has changed its weights, without training it."""
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False,
        plugins=[VerifiedCheckpointIO()],
    )  # fmt: skip
    module.configure_model()
    with torch.no_grad():
        next(iter(module.policy.parameters())).add_(1)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.save_checkpoint(path)
    module.trainer = None
    return module


def equal_weights(one, other):
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    return all(a.equal(b) for a, b in pairs)


@pytest.mark.filterwarnings("ignore")
def test_grpo_is_loaded_from_its_checkpoint_alone(tmp_path):
    optimizer = partial(torch.optim.AdamW, lr=0.25)
    rewards = {"right": Reward(correctness)}
    module = GRPO(BUILTIN, rewards, group_size=3, sampling=Sampling(top_k=5), optimizer=optimizer)
    save(module, tmp_path / "a.ckpt")
    again = GRPO.load_from_checkpoint(tmp_path / "a.ckpt")
    assert equal_weights(module, again)
    assert (again.group_size, again.sampling.top_k) == (3, 5)
    assert again.optimizer.keywords == {"lr": 0.25}
    changed = GRPO.load_from_checkpoint(str(tmp_path / "a.ckpt"), group_size=4)
    assert changed.group_size == 4


@pytest.mark.filterwarnings("ignore")
def test_what_a_checkpoint_cannot_hold_is_asked_for_by_name(tmp_path):
    rewards = {"half": Reward(lambda prompts, completions: [0.5] * len(prompts))}
    module = save(GRPO(BUILTIN, rewards), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="rewards"):
        GRPO.load_from_checkpoint(tmp_path / "a.ckpt")
    assert equal_weights(module, GRPO.load_from_checkpoint(tmp_path / "a.ckpt", rewards=rewards))


@pytest.mark.filterwarnings("ignore")
def test_sft_is_loaded_with_the_tokenizer_that_it_had_fitted(tmp_path):
    module = SFT(scratch=SCRATCH)
    module.fit_tokenizer(["one two", "three four"])
    save(module, tmp_path / "a.ckpt")
    again = SFT.load_from_checkpoint(tmp_path / "a.ckpt")
    assert equal_weights(module, again)
    assert again.tokenizer.get_vocab() == module.tokenizer.get_vocab()


class WithAlpha(GRPO):
    """Has an argument of its own, and passes the others on."""

    def __init__(self, pretrained, rewards, alpha=1.0, **kwargs):
        super().__init__(pretrained, rewards, **kwargs)
        self.save_hyperparameters("alpha")


class OfOneModel(GRPO):
    """Sets arguments of its base class, which are not its own."""

    def __init__(self, alpha=1.0, **kwargs):
        super().__init__(BUILTIN, [lambda prompts, completions: completions], **kwargs)
        self.save_hyperparameters("alpha")


class Positional(SFT):
    """Passes on positional arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_a_subclass_with_kwargs_is_loaded_with_the_options_that_it_passed_on(tmp_path):
    path, sampling = tmp_path / "a.ckpt", Sampling(temperature=0.5)
    options = {"alpha": 0.5, "group_size": 2, "max_completion_length": 8, "sampling": sampling}
    for kind, args in ((WithAlpha, (BUILTIN, {"right": Reward(correctness)})), (OfOneModel, ())):
        module = save(kind(*args, **options), path)
        again = kind.load_from_checkpoint(path)
        assert equal_weights(module, again)
        assert again.hparams == module.hparams
        assert kind.load_from_checkpoint(path, group_size=3).group_size == 3
    module = save(Positional(BUILTIN, optimizer={"lr": 0.25}), path)
    assert Positional.load_from_checkpoint(path).optimizer.keywords == {"lr": 0.25}
    save(OfOneModel(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)), path)
    with raises_for(" optimizer ", "Pass optimizer"):
        OfOneModel.load_from_checkpoint(path)


def test_arguments_of_lightnings_method_are_taken_or_rejected_with_a_remedy(saved):
    assert GRPO.load_from_checkpoint(saved, strict=True, weights_only=True).policy is not None
    for name, value in {"weights_only": False, "hparams_file": "hparams.yaml"}.items():
        with raises_for(f"{name} is", "Leave it out"):
            GRPO.load_from_checkpoint(saved, **{name: value})
    path = saved.with_name("sft.ckpt")
    save(SFT(BUILTIN), path)
    path = with_parts(path, state_dict={})
    assert SFT.load_from_checkpoint(path, strict=False).policy is not None
    with pytest.raises(RuntimeError, match="Missing key"):
        SFT.load_from_checkpoint(path)


LOUD = "this"  # a module of the standard library that prints when it is imported
COMMAND = {"class_path": "os.system", "init_args": {"command": "true"}}
REWARD = "litgrpo.rewards.reward.Reward"
TOOLS = {"import_path": "litgrpo.environments.tools.Tools"}
# {argument: descriptions that name code which a checkpoint must not choose}
ATTACKS = {
    "rewards": [
        {"import_path": "os.system"},
        COMMAND,
        {"partial": {"import_path": "os.system"}, "args": ["true"], "kwargs": {}},
        {"right": {"class_path": "subprocess.Popen", "init_args": {"args": "true"}}},
        {"right": {"class_path": REWARD, "init_args": {"function": f"{LOUD}.reward"}}},
        {"right": {"class_path": REWARD, "init_args": {"function": {"import_path": LOUD}}}},
        {"right": {"class_path": REWARD, "init_args": {"kwargs": {"x": [{"y": COMMAND}]}}}},
        {"right": f"{LOUD}.reward"},
        [f"{LOUD}.reward"],
        {"right": {"partial": TOOLS, "args": [], "kwargs": {"factory": f"{LOUD}.Factory"}}},
    ],
    "objective": [
        {
            "class_path": "litgrpo.algorithms.objective.Objective",
            "init_args": {"surrogate": {"class_path": f"{LOUD}.Surrogate", "init_args": {}}},
        },
        {"import_path": "litgrpo.arguments.import_by_path"},
        {"class_path": "litgrpo.arguments.import_by_path", "init_args": {"path": LOUD}},
        {"class_path": "litgrpo.rewards.reward.Reward"},
    ],
    "precision": [
        {"class_path": "logging.FileHandler", "init_args": {"filename": "created"}},
        {
            "class_path": "litgrpo.environments.agent.subprocess.Popen",
            "init_args": {"args": "true"},
        },
    ],
    "engine": [
        {"class_path": "litgrpo.workers.process.WorkerPool", "init_args": {"size": 1}},
        {"class_path": f"{LOUD}.Engine", "init_args": {}},
        {
            "class_path": "litgrpo.rollout.servers.vllm.ServerEngine",
            "init_args": {"urls": ["http://8.8.8.8:8000"], "allow_public": True},
        },
        {
            "class_path": "litgrpo.rollout.servers.vllm.ColocatedEngine",
            "init_args": {"engine_args": {"logits_processors": [f"{LOUD}.Processor"]}},
        },
    ],
    "environment": [
        f"{LOUD}.Environment",
        {
            "class_path": "litgrpo.environments.tools.Tools",
            "init_args": {"functions": [f"{LOUD}.tool"]},
        },
        {
            "class_path": "litgrpo.environments.tools.Tools",
            "init_args": {"factory": f"{LOUD}.Factory"},
        },
        {
            "class_path": "litgrpo.environments.adapters.gymnasium_env.Gymnasium",
            "init_args": {"id": f"{LOUD}:Game-v0"},
        },
    ],
    "scoring": [{"import_path": f"{LOUD}.Runner"}, COMMAND, {"num_workers": COMMAND}],
    "optimizer": [
        {"import_path": "torch.hub.load"},
        {"import_path": "torch.optim.torch.hub.load"},
        {"partial": {"import_path": "torch.hub.load"}, "args": ["a/b", "c"], "kwargs": {}},
        {"import_path": "torch.optim.lr_scheduler.partial"},
        {"import_path": "torch.optim.swa_utils.update_bn"},
        {"partial": TOOLS, "args": [], "kwargs": {"factory": f"{LOUD}.Factory"}},
        TOOLS,
    ],
    "lr_scheduler": [
        {"import_path": "builtins.exec"},
        {"import_path": 3},
        {
            "partial": {"import_path": "litgrpo.modules.grpo.GRPO"},
            "args": [],
            "kwargs": {"rewards": {"right": f"{LOUD}.reward"}},
        },
    ],
    "seed": [COMMAND, {"class_path": "builtins.exec", "init_args": {}}],
}


def with_arguments(path, **arguments):
    """A checkpoint with other arguments, as somebody may write it."""
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"] |= arguments
    write_file(checkpoint, path.with_name("b.ckpt"))
    return path.with_name("b.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(GRPO(BUILTIN, {"right": Reward(correctness)}), path)
    return path


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.filterwarnings("ignore")
def test_code_that_a_checkpoint_names_is_neither_called_nor_imported(
    saved, name, monkeypatch, tmp_path
):
    called = []
    monkeypatch.setattr("os.system", called.append)
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: called.append(args))
    monkeypatch.setattr("torch.hub.load", lambda *args, **kwargs: called.append(args))
    monkeypatch.chdir(tmp_path)
    for attack in ATTACKS[name]:
        path = with_arguments(saved, **{name: attack})
        with raises_for(name, "load_from_checkpoint"):
            GRPO.load_from_checkpoint(path)
        assert not list(tmp_path.iterdir())
    default = inspect.signature(GRPO).parameters[name].default
    given = {"right": correctness} if name == "rewards" else default
    assert GRPO.load_from_checkpoint(path, **{name: given}).policy is not None
    assert LOUD not in sys.modules
    assert not called


def with_parts(path, **parts):
    """A checkpoint with other parts, as somebody may write it; parts that are None are left out."""
    checkpoint = torch.load(path, weights_only=True) | parts
    write_file({k: v for k, v in checkpoint.items() if v is not None}, path.with_name("c.ckpt"))
    return path.with_name("c.ckpt")


@pytest.mark.parametrize(
    ("name", "value"),
    [("state_dict", None), ("hyper_parameters", [1]), ("hyper_parameters", "x")],
)
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_the_parts_of_a_module_is_rejected(saved, name, value):
    path = with_parts(saved, **{name: value})
    for load in (GRPO.load_from_checkpoint, load_trained_policy):
        with raises_for(name):
            load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pretrained", 5),
        ("precision", 3),
        ("lora", "x"),
        ("scratch", "x"),
        ("seed", [1]),
        ("scratch", {"class_path": "litgrpo.models.loading.scratch.Scratch", "init_args": {}}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_export_rejects_arguments_of_another_type(saved, name, value):
    with pytest.raises(ValueError, match=f"{name}|tokenizer"):
        load_trained_policy(with_arguments(saved, **{name: value}))


@pytest.mark.filterwarnings("ignore")
def test_an_argument_of_the_caller_may_name_any_code(saved):
    path = with_arguments(saved, rewards={"import_path": "os.system"})
    rewards = {"length": Reward("tests.support.rewards_with_state.count_calls")}
    assert list(GRPO.load_from_checkpoint(path, rewards=rewards).scorer.functions) == ["length"]


def test_a_checkpoint_that_is_damaged_is_rejected(saved, tmp_path):
    content = bytearray(saved.read_bytes())
    content[content.index(b"hyper_parameters")] ^= 1
    (tmp_path / "changed.ckpt").write_bytes(content)
    with raises_for("changed.ckpt", "CRC"):
        GRPO.load_from_checkpoint(tmp_path / "changed.ckpt")


@pytest.mark.filterwarnings("ignore")
def test_a_plain_trainer_writes_checkpoints_that_can_be_verified_and_loaded(tmp_path):
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False,
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=1)], enable_model_summary=False,
    )  # fmt: skip
    rewards = {"repeats": Reward("litgrpo.rewards.repetition")}
    grpo = GRPO(BUILTIN, rewards, group_size=2, max_completion_length=4, max_iterations=1)
    trainer.fit(grpo, batches("1", "2"))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for path in tmp_path.glob("*.ckpt"):
        assert equal_weights(grpo, GRPO.load_from_checkpoint(path))
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


@pytest.mark.filterwarnings("ignore")
def test_loggers_and_hparams_yaml_have_the_arguments(tmp_path):
    grpo = module(max_iterations=1, check_invariants=False)
    logger = CSVLogger(tmp_path)
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(grpo, batches("a", "b"))
    logger.save()
    written = yaml.unsafe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert written["group_size"] == grpo.hparams.group_size == grpo.group_size
    assert written["objective"]["class_path"] == "litgrpo.algorithms.objective.Objective"


# --- what is reached comes from the caller ---

NEAR = "http://127.0.0.1:9"


def of(kind, /, **init_args):
    return {"class_path": f"litgrpo.{kind}", "init_args": init_args}


def reward(name, /, **kwargs):
    return {"right": of("rewards.reward.Reward", function=f"litgrpo.rewards.{name}", kwargs=kwargs)}


JUDGE = {"model": "m", "criteria": {"a": {}}}
ENGINES, TRANSFER = "rollout.servers.vllm", "rollout.servers.weight_transfer"
MCP = {"command": "touch", "args": ["created"]}
# {argument: descriptions that choose what is read, called or asked}
REACHES = {
    "engine": [
        of(f"{ENGINES}.ServerEngine", urls=[NEAR]),
        of(f"{ENGINES}.ColocatedEngine", engine_args={"download_dir": "x"}),
        of(f"{TRANSFER}.FolderTransfer", path="created"),
        of(f"{TRANSFER}.AdapterTransfer", path="created"),
        of(f"{TRANSFER}.NcclTransfer", master_address="10.0.0.9"),
    ],
    "reference": [
        NEAR,
        "/home/somebody/model",
        "somebody/model",
        of("rollout.servers.reference.ReferenceServers", urls=[NEAR]),
    ],
    "rewards": [
        reward("LLMJudge", base_url=NEAR, api_key_env="HOME", **JUDGE),
        reward("RewardModel", pretrained="/home/somebody/model"),
        reward("safety", word_file="/etc/passwd"),
        reward("safety", classifier=f"{LOUD}.classify"),
        reward("exact", anything=[{"deep": "HTTPS://127.0.0.1:9"}]),
    ],
    "environment": [
        of("environments.agent.Agent", command=["touch", "created"]),
        of("environments.agent.Agent", function=f"{LOUD}.act"),
        of("environments.tools.Tools", mcp_servers={"a": MCP}),
        of("environments.tools.Tools", mcp_servers={"a": {"url": NEAR}}),
        of(
            "environments.tools.Tools",
            factory="litgrpo.environments.examples.Search",
            kwargs={"path": "/etc/passwd"},
        ),
        of(
            "environments.task_environments.TaskEnvironments",
            environments={"a": of("environments.agent.Agent", command=["touch", "created"])},
        ),
    ],
    "source": [of("rollout.sources.stored.StoredRollouts", run_dir="/home/somebody/run")],
}


@pytest.mark.parametrize("name", REACHES)
@pytest.mark.filterwarnings("ignore")
def test_what_a_checkpoint_would_reach_is_given_by_the_caller(saved, name, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr("socket.socket.connect", lambda *args: started.append(args))
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: started.append(args))
    monkeypatch.chdir(tmp_path)
    for description in REACHES[name]:
        path = with_arguments(saved, **{name: description})
        with raises_for(f" {name} (", f"Pass {name} to load_from_checkpoint"):
            GRPO.load_from_checkpoint(path)
        assert not list(tmp_path.iterdir())
    assert not started
    assert LOUD not in sys.modules


@pytest.mark.filterwarnings("ignore")
def test_what_the_caller_gives_is_reached_and_an_export_needs_none_of_it(tmp_path):
    path, engine = tmp_path / "a.ckpt", ServerEngine([NEAR], FolderTransfer("shared"))
    module = save(GRPO(BUILTIN, {"right": Reward(correctness)}, engine=engine, seed=3), path)
    with raises_for("engine (litgrpo.rollout.servers", "Pass engine"):
        GRPO.load_from_checkpoint(path)
    again = GRPO.load_from_checkpoint(path, engine=engine)
    assert equal_weights(module, again)
    assert (again.engine, again.seed) == (engine, 3)
    exported = load_trained_policy(path).state_dict()
    assert all(exported[n].equal(w) for n, w in module.policy.state_dict().items())


SUSPICIOUS = re.compile(
    "ur[li]s?|path|folder|dir|file|address|host|port|command|server|env|api|cwd"
)


def test_no_option_that_a_file_may_set_is_an_address_or_a_path():
    packages = {name.split(".")[1] for name in OPTIONS}
    names = set()
    for package in packages:
        folder = import_module(f"litgrpo.{package}")
        for each in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            if not f"{each.name}.".startswith(OPTIONS):
                continue
            for kind in vars(import_module(each.name)).values():
                if inspect.isclass(kind) and dataclasses.is_dataclass(kind):
                    names |= {field.name for field in dataclasses.fields(kind) if field.init}
    assert {"temperature", "surrogate", "target_modules", "architecture"} <= names
    suspicious = {name for name in names if any(map(SUSPICIOUS.fullmatch, name.split("_")))}
    assert suspicious == {"adapter_path"}  # of the trained model itself


def test_no_module_of_options_imports_what_a_text_names_or_starts_a_program():
    words = re.compile("import_by_path|import_object|import_package|subprocess|urlopen|httpx")
    root = Path(litgrpo.__file__).parent
    for name in OPTIONS:
        path = root / name.removeprefix("litgrpo.").rstrip(".").replace(".", "/")
        for file in [*path.rglob("*.py"), *path.parent.glob(f"{path.name}.py")]:
            assert not words.search(file.read_text()), file
