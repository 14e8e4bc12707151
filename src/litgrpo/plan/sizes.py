"""Sizes of a recipe: its model without data, its optimizer, rows and lengths of an iteration."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import instantiate_module

from litgrpo import PUBLIC
from litgrpo.algorithms.objective import Objective
from litgrpo.arguments import as_list, import_by_path, require
from litgrpo.callbacks.adaptive import ReferenceSync
from litgrpo.cli.parser import build_data
from litgrpo.data.pairs import PairSet
from litgrpo.data.prompts import PromptSet
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.distributed.sharding import MIN_SHARD_SIZE, DividesWeights
from litgrpo.instantiate import instantiate_class
from litgrpo.learning.optim import DefaultAdamW
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.architectures import ARCHITECTURES
from litgrpo.models.loading.load import ASSETS, LoRA, add_adapters, resolve_pretrained
from litgrpo.models.reference import round_linears
from litgrpo.models.weights import choose_attention
from litgrpo.modules.run_setup import GRPO_RATES, SFT_RATES, DefaultRates
from litgrpo.plan.memory import (
    IterationSizes,
    MemoryItem,
    MetaModel,
    OptimizerState,
    count_memory,
    step_optimizer,
)
from litgrpo.plan.sharding import (
    DDPSharding,
    FSDPSharding,
    Sharding,
    SingleDevice,
    XLASharding,
)
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.servers.reference import SERVER_SCHEMES

# {trainer.precision: dtype of matrix products}, with Lightning's short names.
AUTOCAST = {"bf16-mixed": "bfloat16", "bf16": "bfloat16", "16-mixed": "float16", "16": "float16"}


@dataclass(frozen=True)
class RecipeModels:
    """Models of a recipe, all on the meta device.

    Args:
        policy: in the precision of its weights.
        optimizer: builds the optimizer from weights.
        reference: the reference model; None without a separate one.
        compute: the policy in a lower compute precision; None without one.
    """

    policy: MetaModel
    optimizer: partial[torch.optim.Optimizer]
    reference: MetaModel | None = None
    compute: MetaModel | None = None

    @cached_property
    def states(self) -> OptimizerState | None:
        """Optimizer state; None if it cannot be counted."""
        return step_optimizer(self.optimizer, self.policy.trained)


@dataclass(frozen=True)
class RecipeSizes:
    """Everything in a recipe that decides about memory.

    Args:
        models: models without data.
        lora: adapters; None without them.
        checkpointing: recompute activations in the backward pass.
        work: sizes of an iteration.
        strategy: class path or name of the trainer's strategy.
        sharding: what the strategy shards.
        can_queue: rows of a rollout can wait for a free slot: the engine has `max_rows`.
        reward_models: names of reward models, whose memory is not counted.
    """

    models: RecipeModels
    lora: LoRA | None
    checkpointing: bool
    work: IterationSizes
    strategy: str
    sharding: Sharding
    can_queue: bool = False
    reward_models: tuple[str, ...] = ()

    @property
    def distributed(self) -> bool:
        """True if several devices share the model or the rows."""
        return not isinstance(self.sharding, SingleDevice)

    @property
    def single_process(self) -> bool:
        """True if one process splits everything evenly over all devices."""
        return isinstance(self.sharding, XLASharding)

    def with_lora(self, lora: LoRA) -> RecipeSizes:
        """Return the recipe with adapters, whose base model is the reference."""
        adapt = partial(add_adapters, lora=lora)
        policy = replace(self.models.policy, adapt=adapt)
        compute = self.models.compute and replace(self.models.compute, adapt=adapt)
        models = RecipeModels(policy, self.models.optimizer, compute=compute)
        return replace(self, lora=lora, models=models)

    def uneven_split(self, number: int) -> str | None:
        """Describe what cannot be split evenly over `number` devices; None if everything can.

        Under SPMD every chip would then compute all rows.
        """
        if self.single_process and self.work.rollouts:
            prompts, group = self.work.rollouts[0]
            if prompts * group % number:
                return f"{prompts * group} rows of a rollout (data.batch_size x group_size)"
        if isinstance(self.sharding, FSDPSharding) and number % self.sharding.replicas:
            return f"{self.sharding.replicas} replicas"
        return None

    def count_memory(self, number: int) -> list[MemoryItem]:
        """List everything large in the memory of each of `number` devices."""
        return count_memory(
            self.models.policy,
            self.work,
            replace(self.sharding, number=number),
            states=self.models.states,
            reference=self.models.reference,
            checkpointing=self.checkpointing,
            compute=self.models.compute,
        )


def read_sizes(settings: Namespace, static_shapes: bool = True) -> RecipeSizes:
    """Read the sizes of a recipe.

    Args:
        settings: the command line of `fit`, parsed.
        static_shapes: the device compiles programs of one shape, so batches are padded. Other
            devices compute a prompt once per group and fit micro-batches to their rows.
    """
    model, data = settings.model.init_args, settings.data.init_args
    is_grpo, is_sft = "objective" in model, "scratch" in model
    require(
        is_grpo or is_sft,
        f"plan supports GRPO and SFT, got model {settings.model.class_path}",
    )
    strategy = settings.trainer.strategy
    if isinstance(strategy, str):
        strategy = Namespace(class_path=strategy)
    sharding = read_sharding(strategy)
    models = build_models(settings, sharding, static_shapes)
    if is_grpo:
        work = grpo_sizes(
            model,
            data,
            None if static_shapes else models.policy.config,
            None if models.compute is None else models.compute.dtype,
        )
    else:
        work = sft_sizes(model, data)
    precision, lora = model.get("precision"), model.get("lora")
    return RecipeSizes(
        models=models,
        lora=None if lora is None else LoRA(**vars(lora)),
        checkpointing=precision is not None and precision.gradient_checkpointing,
        work=work,
        strategy=strategy.class_path,
        sharding=sharding,
        can_queue=is_grpo and "max_rows" in read_engine(model)[1],
        reward_models=tuple(_find_reward_models(model.get("rewards") or {})),
    )


def read_engine(model: Namespace) -> tuple[type[RolloutEngine], Namespace]:
    """Return the class of the engine of GRPO, which says what it is, and its options."""
    return import_by_path(model.engine.class_path), model.engine.get("init_args", Namespace())


def build_models(settings: Namespace, sharding: Sharding, static_shapes: bool) -> RecipeModels:
    """Build the models of a recipe on the meta device, each when it is first used.

    Args:
        settings: the command line of `fit`, parsed.
        sharding: over devices; whole weights of a reference take its compute precision.
        static_shapes: see `read_sizes`.
    """
    model = settings.model.init_args
    precision = model.get("precision") or Namespace(dtype="float32")
    config = read_model_config(model, settings.model_config)
    lora = model.get("lora")
    policy = MetaModel(
        config,
        getattr(torch, precision.dtype),
        adapt=None if lora is None else partial(add_adapters, lora=LoRA(**vars(lora))),
        flash=not static_shapes and choose_attention(config) == "sdpa",
    )
    # The model's own option has precedence over the trainer's.
    autocast = precision.get("autocast_dtype") or AUTOCAST.get(str(settings.trainer.precision))
    compute = None if autocast is None else replace(policy, dtype=getattr(torch, autocast))
    if "objective" not in model:
        return RecipeModels(policy, read_optimizer(model, SFT_RATES), compute=compute)
    reference = read_reference(model, config, settings.model_config)
    if reference is not None:
        reference = MetaModel(reference, policy.dtype)
        # The policy's weights are mixed into a reference that moves, in their own precision.
        moves = moves_reference(settings.trainer)
        if compute is not None and isinstance(sharding, DDPSharding) and not moves:
            round_linears(reference.bare_model, compute.dtype)
    return RecipeModels(policy, read_optimizer(model, GRPO_RATES), reference, compute)


def moves_reference(trainer: Namespace) -> bool:
    """Return True if a callback of the recipe moves the weights of the reference."""
    classes = [import_by_path(callback.class_path) for callback in as_list(trainer.callbacks)]
    return ReferenceSync in classes


def read_sharding(strategy: Namespace) -> Sharding:
    """Return what a strategy shards."""
    path, options = strategy.class_path, strategy.get("init_args", Namespace())
    kind: Any = import_by_path(path) if "." in path else object
    if issubclass(kind, DividesWeights):
        return XLASharding(min_shard_size=options.get("min_shard_size") or MIN_SHARD_SIZE)
    if issubclass(kind, FSDP2Strategy):
        return FSDPSharding(replicas=options.get("replicas") or 1)
    if path.startswith("ddp") or "DDP" in path:
        return DDPSharding()
    return SingleDevice()


def read_optimizer(model: Namespace, rates: DefaultRates) -> partial[torch.optim.Optimizer]:
    """Return the function that builds the optimizer, with the default learning rate filled in."""
    kind, options = import_by_path(model.optimizer.class_path), vars(model.optimizer.init_args)
    if kind is DefaultAdamW and options.get("lr") is None:
        options = options | {"lr": rates.select(model)[0]}
    return partial(kind, **options)


def read_model_config(model: Namespace, model_config: str | None) -> Any:
    """Return the transformers config of the model that a recipe trains.

    Args:
        model: settings of GRPO or SFT.
        model_config: a config.json or its folder, instead of `pretrained`.

    Raises:
        ValueError: the config is not on this machine.
    """
    from transformers import AutoConfig

    scratch = model.get("scratch")
    if scratch is not None:
        return AutoConfig.for_model(**scratch.architecture, vocab_size=scratch.vocab_size)
    if model_config is None:
        return load_config(model.pretrained)
    require(
        Path(model_config).exists(),
        f"model_config is {model_config!r}, but there is no such file or folder",
    )
    return AutoConfig.from_pretrained(model_config, trust_remote_code=False)


def read_reference(model: Namespace, config: Any, model_config: str | None) -> Any:
    """Return the config of the reference; None without a separate model.

    Args:
        model: settings of GRPO. With LoRA the reference is the policy without adapters.
        config: config of the policy.
        model_config: see `read_model_config`; if given, also used for the reference.
    """
    if not needs_reference(model):
        return None
    if model.reference is not None and model_config is None:
        return load_config(model.reference)
    return config if model.get("lora") is None else None


def needs_reference(model: Namespace) -> bool:
    """Return True if the trainer computes log-probabilities under a reference, not servers."""
    reference = model.reference
    served = isinstance(reference, Namespace) or (reference or "").startswith(SERVER_SCHEMES)
    settings = {
        "class_path": f"{PUBLIC['Objective']}.Objective",
        "init_args": model.objective.as_dict(),
    }
    objective: Objective = instantiate_class(settings, "model.objective")
    return not served and objective.needs_reference


def load_config(pretrained: str) -> Any:
    """Load a model's config from its folder, litgrpo's list, or the hub's cache; no network.

    Raises:
        ValueError: it is in none of them.
    """
    from transformers import AutoConfig

    table = yaml.safe_load((ASSETS / "architectures.yaml").read_text(encoding="utf-8"))
    if pretrained in table:
        return AutoConfig.for_model(**table[pretrained])
    try:
        return AutoConfig.from_pretrained(
            resolve_pretrained(pretrained), local_files_only=True, trust_remote_code=False
        )
    except OSError as error:
        raise ValueError(
            f"the config of {pretrained!r} is not on this machine (known: {', '.join(table)}). "
            "Give its config.json or the folder of it: --model_config PATH"
        ) from error


def grpo_sizes(
    model: Namespace, data: Namespace, ragged: Any = None, autocast: torch.dtype | None = None
) -> IterationSizes:
    """Return the sizes of an iteration of GRPO.

    Args:
        model: settings of GRPO.
        data: settings of PromptData.
        ragged: config of the model if batches need no padding; None if they are padded.
        autocast: dtype of matrix products, if lower than that of the weights.
    """
    # By index: a namespace has a method `update`.
    update = UpdateConfig(**vars(model["update"]))
    sharing = 1
    if ragged is not None:
        if ragged.model_type in ARCHITECTURES and model.precision.share_prompts:
            sharing = model.group_size
        update = update.resolve_auto(linear_outputs(MetaModel(ragged)))
    kind, engine = read_engine(model)
    prompt_len = pad_length(data.pad_to_multiple_of, data.max_prompt_length)
    prompt_len = pad_length(engine.get("prompt_buckets") or 1, prompt_len)
    length = row_length(prompt_len, model.max_completion_length, sharing)
    rollouts = (
        (data.batch_size, model.group_size),
        (data.eval_batch_size or data.batch_size, model.evaluation.num_samples),
    )
    step_rows = -(-data.batch_size // update.num_mini_batches) * model.group_size
    dtype = autocast or getattr(torch, model.precision.dtype)
    if engine.get("dtype"):
        dtype = getattr(torch, engine.dtype)
    return IterationSizes(
        rollouts=rollouts,
        prompt_len=prompt_len,
        completion_len=model.max_completion_length,
        micro_rows=_limit_rows(step_rows, update.micro_batch_size, update.max_tokens, length),
        length=length,
        cache_bytes=dtype.itemsize,
        step_rows=step_rows,
        max_rows=engine.get("max_rows"),
        prompt_sharing=sharing,
        sampling=kind.samples_in,
    )


def row_length(prompt_len: int, completion_len: int, sharing: int) -> int:
    """Return the tokens per row of a micro-batch whose prompts are shared by `sharing` rows."""
    return -(-prompt_len // sharing) + completion_len


def linear_outputs(model: MetaModel) -> int:
    """Count the outputs of all linear layers per token; see `kernels.linear.outputs`."""
    outputs = (len(weight) for block in model.blocks for weight in block if weight.dim() > 1)
    return max(1, sum(outputs))


def sft_sizes(model: Namespace, data: Namespace) -> IterationSizes:
    """Return the sizes of a step of SFT in which every pair has the maximum length."""
    rows = _limit_rows(sys.maxsize, data.batch_size, data.max_tokens_per_batch, data.max_length)
    rows = min(rows, model.micro_batch_size or rows)
    return IterationSizes((), data.max_length, data.max_length, rows, data.max_length)


def pad_length(widths: int | Sequence[int], length: int) -> int:
    """Return the padded length of prompts: a multiple, or one of several.

    Example:
        >>> pad_length(64, 500), pad_length((128, 600), 500)
        (512, 600)
    """
    if isinstance(widths, int):
        return -(-length // widths) * widths
    return min((width for width in widths if width >= length), default=max(widths))


def _limit_rows(rows: int, max_rows: int | None, max_tokens: int | None, length: int) -> int:
    if max_rows:
        rows = min(rows, max_rows)
    if max_tokens:
        rows = min(rows, max(1, max_tokens // length))
    return rows


def _find_reward_models(rewards: dict[str, Any]) -> Iterator[str]:
    for reward in rewards.values():
        if not isinstance(reward.function, str):
            arguments = reward.function.get("init_args", {})
            if "pretrained" in arguments:
                yield arguments["pretrained"]


# --- from the data of a recipe, if it is on this machine ---


def load_data(settings: Namespace) -> Any:
    """Tokenize the data of a recipe.

    Returns:
        The data module, set up for `fit`.

    Raises:
        ValueError: the data or the model's tokenizer are not on this machine.
    """
    model = settings.model
    module = instantiate_module(
        LightningModule, {"_class_path": model.class_path, **model.init_args.as_dict()}
    )
    data = build_data(settings.data.as_dict())
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.setup("fit")
    return data


def apply_data(rows: PromptSet | PairSet, recipe: RecipeSizes) -> RecipeSizes:
    """Replace the limits of a recipe by the length of its longest row."""
    work = recipe.work
    longest = min(rows.max_tokens, work.prompt_len)
    if work.rollouts:
        length = row_length(longest, work.completion_len, work.prompt_sharing)
        # A micro-batch keeps its number of tokens: more rows if they are shorter.
        micro_rows = min(work.step_rows, work.micro_rows * work.length // length)
        work = replace(work, prompt_len=longest, length=length, micro_rows=micro_rows)
    else:
        work = replace(work, prompt_len=longest, completion_len=longest, length=longest)
    return replace(recipe, work=work)
