"""Sizes of a recipe: its model without data, its optimizer, rows and lengths of an iteration."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import instantiate_module

from litgrpo.arguments import import_by_path, require
from litgrpo.data.pairs import PairSet
from litgrpo.data.prompts import PromptSet
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.distributed.sharding import MIN_SHARD_SIZE, DividesWeights
from litgrpo.models.architectures import ARCHITECTURES
from litgrpo.models.loading import ASSETS, LoRA, add_adapters, resolve_pretrained
from litgrpo.models.reference import round_linears
from litgrpo.models.weights import choose_attention
from litgrpo.tools.plan.memory import (
    IterationSizes,
    MemoryItem,
    MetaModel,
    OptimizerState,
    count_memory,
    step_optimizer,
)
from litgrpo.tools.plan.schedule import Schedule, needs_reference, read_schedule
from litgrpo.tools.plan.sharding import (
    DDPSharding,
    FSDPSharding,
    Sharding,
    SingleDevice,
    XLASharding,
)
from litgrpo.training.optim import DefaultAdamW
from litgrpo.training.run_setup import GRPO_RATES, SFT_RATES, DefaultRates
from litgrpo.training.update_config import UpdateConfig

# Engines that do not generate with the trainer's own model.
SAMPLING: dict[str, Literal["servers", "colocated"]] = {
    "ServerEngine": "servers",
    "ColocatedEngine": "colocated",
}
# {trainer.precision: dtype of matrix products}, with Lightning's short names.
AUTOCAST = {"bf16-mixed": "bfloat16", "bf16": "bfloat16", "16-mixed": "float16", "16": "float16"}


@dataclass(frozen=True)
class RecipeModels:
    """Models of a recipe, all on the meta device.

    Args:
        policy: in the precision of its weights.
        states: optimizer state; None if it cannot be counted.
        reference: the reference model; None without a separate one.
        compute: the policy in a lower compute precision; None without one.

    Example:
        recipe.models.policy.cache_numbers  # numbers per token in the KV cache
    """

    policy: MetaModel
    states: OptimizerState | None
    reference: MetaModel | None
    compute: MetaModel | None


@dataclass(frozen=True)
class RecipeSizes:
    """Everything in a recipe that decides about memory and time.

    Args:
        config: transformers config of the model.
        reference: config of the reference model; None without a separate one.
        optimizer: builds the optimizer from weights.
        dtype: precision of the weights.
        compute: lower compute precision; None without one.
        lora: adapters; None without them.
        checkpointing: recompute activations in the backward pass.
        work: sizes of an iteration.
        strategy: class path or name of the trainer's strategy.
        sharding: what the strategy shards.
        schedule: numbers of iterations, evaluations and checkpoints.
        reward_models: names of reward models, whose memory is not counted.
        flash: attention saves no scores.
        publisher: class that sends weights to servers.
        moves_reference: the policy's weights are mixed into the reference.

    Example:
        recipe = read_sizes(PlanCLI(["-c", "configs/quickstart.yaml"]).config)
        recipe.work.rollouts  # ((16, 8), (100, 4)): prompts and completions of each
    """

    config: Any
    reference: Any
    optimizer: partial[torch.optim.Optimizer]
    dtype: str
    compute: str | None
    lora: LoRA | None
    checkpointing: bool
    work: IterationSizes
    strategy: str
    sharding: Sharding
    schedule: Schedule
    reward_models: tuple[str, ...] = ()
    flash: bool = False
    publisher: str = "FolderTransfer"
    moves_reference: bool = False

    @property
    def distributed(self) -> bool:
        """True if several devices share the model or the rows."""
        return not isinstance(self.sharding, SingleDevice)

    @property
    def shards_model(self) -> bool:
        """True if several devices share the model."""
        return isinstance(self.sharding, XLASharding | FSDPSharding)

    @property
    def can_queue(self) -> bool:
        """True if rows of a rollout can queue for a free slot, as in `LocalEngine`."""
        in_trainer = self.work.sampling == "trainer" and bool(self.work.rollouts)
        return in_trainer and not self.schedule.replays_graph

    @property
    def single_process(self) -> bool:
        """True if one process splits everything evenly over all devices."""
        return isinstance(self.sharding, XLASharding)

    def shard_over(self, number: int) -> Sharding:
        """Return the sharding over `number` devices."""
        return replace(self.sharding, number=number)

    @cached_property
    def models(self) -> RecipeModels:
        """Models of the recipe; building them takes seconds."""
        policy = self._meta_policy(self.dtype)
        reference = None
        if self.reference is not None:
            reference = MetaModel(self.reference, getattr(torch, self.dtype))
            if self.compute and not self.shards_model and not self.moves_reference:
                round_linears(reference.bare_model, getattr(torch, self.compute))
        return RecipeModels(
            policy=policy,
            states=step_optimizer(self.optimizer, policy.trained),
            reference=reference,
            compute=self._meta_policy(self.compute) if self.compute else None,
        )

    def _meta_policy(self, dtype: str) -> MetaModel:
        adapt = None if self.lora is None else partial(add_adapters, lora=self.lora)
        return MetaModel(self.config, getattr(torch, dtype), adapt, self.flash)

    def with_settings(self, **settings: Any) -> RecipeSizes:
        """Return the recipe with other settings; models are built again only for other adapters."""
        other = replace(self, **settings)
        if other.lora == self.lora:
            # Sets the value that cached_property would compute.
            object.__setattr__(other, "models", self.models)
        return other

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
            self.shard_over(number),
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
    precision = model.get("precision") or Namespace(dtype="float32", gradient_checkpointing=False)
    lora = model.get("lora")
    strategy = settings.trainer.strategy
    if isinstance(strategy, str):
        strategy = Namespace(class_path=strategy)
    config = read_model_config(model, settings.model_config)
    common: dict[str, Any] = dict(  # noqa: C408 (keywords)
        config=config,
        dtype=precision.dtype,
        compute=read_autocast(settings, precision),
        lora=None if lora is None else LoRA(**vars(lora)),
        checkpointing=precision.gradient_checkpointing,
        strategy=strategy.class_path,
        sharding=read_sharding(strategy),
        schedule=read_schedule(settings, is_grpo),
        reward_models=tuple(_find_reward_models(model.get("rewards") or {})),
        flash=not static_shapes and choose_attention(config) == "sdpa",
    )
    if is_sft:
        return RecipeSizes(
            reference=None,
            optimizer=read_optimizer(model, SFT_RATES),
            work=sft_sizes(data),
            **common,
        )
    return RecipeSizes(
        reference=read_reference(model, config, settings.model_config),
        optimizer=read_optimizer(model, GRPO_RATES),
        work=grpo_sizes(model, data, None if static_shapes else config, common["compute"]),
        publisher=read_publisher(model),
        moves_reference=bool((model.get("controllers") or {}).get("reference")),
        **common,
    )


def read_sharding(strategy: Namespace) -> Sharding:
    """Return what a strategy shards.

    Args:
        strategy: its class path, or Lightning's name of it, and its arguments.
    """
    path, given = strategy.class_path, strategy.get("init_args", Namespace())
    kind: Any = import_by_path(path) if "." in path else object
    if issubclass(kind, DividesWeights):
        return XLASharding(min_shard_size=given.get("min_shard_size") or MIN_SHARD_SIZE)
    if issubclass(kind, FSDP2Strategy):
        return FSDPSharding(replicas=given.get("replicas") or 1)
    if path.startswith("ddp") or "DDP" in path:
        return DDPSharding()
    return SingleDevice()


def read_publisher(model: Namespace) -> str:
    """Return the class that sends weights to servers, of those with a known rate."""
    transfer = model.engine.get("init_args", Namespace()).get("weight_transfer")
    path = "" if transfer is None else transfer.class_path
    name = path.rpartition(".")[2]
    return name if name == "NcclTransfer" else "FolderTransfer"


def read_optimizer(model: Namespace, rates: DefaultRates) -> partial[torch.optim.Optimizer]:
    """Return the function that builds the optimizer, with the default learning rate filled in."""
    kind, given = import_by_path(model.optimizer.class_path), vars(model.optimizer.init_args)
    if kind is DefaultAdamW and given.get("lr") is None:
        given = given | {"lr": rates.select(model)[0]}
    return partial(kind, **given)


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


def read_autocast(settings: Namespace, precision: Namespace) -> str | None:
    """Return the dtype of matrix products, if lower than that of the weights; None without one.

    Args:
        settings: the command line of `fit`, parsed.
        precision: settings of the model; its dtype has precedence over the trainer's.
    """
    return precision.get("autocast_dtype") or AUTOCAST.get(str(settings.trainer.precision))


def grpo_sizes(
    model: Namespace, data: Namespace, ragged: Any = None, autocast: str | None = None
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
    engine = model.engine.get("init_args", Namespace())
    prompt_len = pad_length(data.pad_to_multiple_of, data.max_prompt_length)
    prompt_len = pad_length(engine.get("prompt_buckets") or 1, prompt_len)
    length = row_length(prompt_len, model.max_completion_length, sharing)
    rollouts = (
        (data.batch_size, model.group_size),
        (data.eval_batch_size or data.batch_size, model.evaluation.num_samples),
    )
    step_rows = -(-data.batch_size // update.num_mini_batches) * model.group_size
    dtype = engine.get("dtype") or autocast or model.precision.dtype
    return IterationSizes(
        rollouts=rollouts,
        prompt_len=prompt_len,
        completion_len=model.max_completion_length,
        micro_rows=_limit_rows(step_rows, update.micro_batch_size, update.max_tokens, length),
        length=length,
        cache_bytes=getattr(torch, dtype).itemsize,
        step_rows=step_rows,
        max_rows=engine.get("max_rows"),
        prompt_sharing=sharing,
        sampling=SAMPLING.get(model.engine.class_path.rpartition(".")[2], "trainer"),
    )


def row_length(prompt_len: int, completion_len: int, sharing: int) -> int:
    """Return the tokens per row of a micro-batch whose prompts are shared by `sharing` rows."""
    return -(-prompt_len // sharing) + completion_len


def linear_outputs(model: MetaModel) -> int:
    """Count the outputs of all linear layers per token; see `kernels.linear.outputs`."""
    outputs = (len(weight) for block in model.blocks for weight in block if weight.dim() > 1)
    return max(1, sum(outputs))


def sft_sizes(data: Namespace) -> IterationSizes:
    """Return the sizes of a step of SFT in which every pair has the maximum length."""
    rows = _limit_rows(sys.maxsize, data.batch_size, data.max_tokens_per_batch, data.max_length)
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


def load_data(settings: Namespace) -> dict[str, Any]:
    """Tokenize the data of a recipe.

    Args:
        settings: the command line of `fit`, parsed.

    Returns:
        {"train", "val": tokenized rows}.

    Raises:
        ValueError: the data or the model's tokenizer are not on this machine.
    """
    node, given = settings.model, settings.data
    module = instantiate_module(
        LightningModule, {"_class_path": node.class_path, **node.init_args.as_dict()}
    )
    data = import_by_path(given.class_path)(**given.init_args.as_dict())
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.setup("fit")
    sets: dict[str, Any] = data.sets
    return sets


def apply_data(sets: dict[str, Any], recipe: RecipeSizes) -> RecipeSizes:
    """Replace the limits of a recipe by the lengths and the number of its rows.

    Args:
        sets: from `load_data`.
        recipe: sizes of the recipe.
    """
    rows = sets["train"]
    require(
        isinstance(rows, PromptSet | PairSet),
        "the lengths of the training rows are unknown, as they are streamed (streaming: true): "
        "give --read_data false",
    )
    lengths = [len(ids) for ids in rows.ids]
    work, schedule = recipe.work, recipe.schedule
    longest = min(max(lengths), work.prompt_len)
    if schedule.is_sft:
        work = replace(work, prompt_len=longest, completion_len=longest, length=longest)
        batch_size = work.micro_rows
    else:
        length = row_length(longest, work.completion_len, work.prompt_sharing)
        # A micro-batch keeps its number of tokens: more rows if they are shorter.
        micro_rows = min(work.step_rows, work.micro_rows * work.length // length)
        work = replace(work, prompt_len=longest, length=length, micro_rows=micro_rows)
        batch_size = work.rollouts[0][0]
    iterations = schedule.iterations
    if schedule.open_ended:
        iterations = schedule.epochs * (len(lengths) // batch_size)  # full batches
    schedule = replace(
        schedule,
        val_prompts=len(sets.get("val", ())) or schedule.val_prompts,
        iterations=iterations,
        open_ended=False,
    )
    return recipe.with_settings(work=work, schedule=schedule)
