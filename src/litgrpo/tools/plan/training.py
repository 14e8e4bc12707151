"""What of a recipe decides about memory: a model without numbers, an optimizer, sizes."""

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

from litgrpo.arguments import import_by_path, require
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.distributed.sharding import MIN_SHARD_SIZE, DividesWeights
from litgrpo.models.architectures import ARCHITECTURES
from litgrpo.models.loading import ASSETS, LoRA, add_adapters, resolve_pretrained
from litgrpo.models.weights import choose_attention
from litgrpo.tools.plan.division import Alone, Chips, Division, FullShard, Replicas
from litgrpo.tools.plan.memory import Blueprint, Item, Work, account, optimizer_states
from litgrpo.tools.plan.schedule import Schedule, schedule_of
from litgrpo.training.defaults import GRPO_RATES, SFT_RATES, UsualRates
from litgrpo.training.optim import DefaultAdamW
from litgrpo.training.update_config import UpdateConfig

# Where an engine samples that is not the trainer's own.
SAMPLED: dict[str, Literal["elsewhere", "colocated"]] = {
    "ServerEngine": "elsewhere",
    "ColocatedEngine": "colocated",
}


@dataclass(frozen=True)
class Training:
    """What of a recipe decides about memory.

    Args:
        config: of the model.
        reference: of the reference, where it is a model of its own.
        optimizer: builds it from weights.
        dtype: of the weights.
        compute: lower precision that is computed in, or None.
        lora: adapters, or None.
        checkpointing: activations are recomputed.
        work: sizes of an iteration; the rows of a micro-batch as far as the recipe limits them.
        strategy: of the trainer, in words.
        division: what the strategy divides, over how many devices ever.
        schedule: how often everything happens.
        judges: reward models, which are not counted.
        flash: attention keeps no scores.
        publisher: name of the class that sends weights to servers.
    """

    config: Any
    reference: Any
    optimizer: partial[torch.optim.Optimizer]
    dtype: str
    compute: str | None
    lora: LoRA | None
    checkpointing: bool
    work: Work
    strategy: str
    division: Division
    schedule: Schedule
    judges: tuple[str, ...] = ()
    flash: bool = False
    publisher: str = "Folder"

    @property
    def sharded(self) -> bool:
        """Whether several devices share the model or the rows."""
        return not isinstance(self.division, Alone)

    @property
    def divides(self) -> bool:
        """Whether several devices share the model."""
        return isinstance(self.division, Chips | FullShard)

    @property
    def may_queue(self) -> bool:
        """Whether rows of a rollout can wait for others to end: in `LocalEngine`."""
        return (
            self.work.sampled == "here" and not self.schedule.recorded and bool(self.work.rollouts)
        )

    @property
    def by_one_process(self) -> bool:
        """Whether one process cuts everything evenly over all chips."""
        return isinstance(self.division, Chips)

    def over(self, number: int) -> Division:
        """Weights and rows divided over so many devices."""
        return replace(self.division, number=number)

    def blueprint(self, dtype: str) -> Blueprint:
        """The policy without numbers."""
        adapt = None if self.lora is None else partial(add_adapters, lora=self.lora)
        return Blueprint(self.config, getattr(torch, dtype), adapt, self.flash)

    @cached_property
    def models(self) -> dict[str, Any]:
        """The policy, the reference and the policy in lower precision, all without numbers."""
        dtype, policy = getattr(torch, self.dtype), self.blueprint(self.dtype)
        return {
            "blueprint": policy,
            "states": optimizer_states(self.optimizer, policy.trained),
            "reference": self.reference and Blueprint(self.reference, dtype),
            "computed": self.compute and self.blueprint(self.compute),
        }

    def changed(self, **settings: Any) -> Training:
        """The same recipe with other settings; models are built again only for other adapters."""
        other = replace(self, **settings)
        if other.lora == self.lora:
            vars(other)["models"] = self.models
        return other

    def undivided(self, number: int) -> str | None:
        """What cannot be divided evenly over so many chips, in words; None if everything can.

        Every chip would then compute all of it, and the others nothing else.
        """
        prompts, group = [*self.work.rollouts, (0, 0)][0]
        if self.by_one_process and prompts * group % number:
            return f"{prompts * group} rows of a rollout (data.batch_size x group_size)"
        if isinstance(self.division, FullShard) and number % self.division.replicas:
            return f"{self.division.replicas} replicas"
        return None

    def account(self, number: int) -> list[Item]:
        """Everything of weight that each of so many chips holds."""
        chips = self.over(number)
        return account(work=self.work, chips=chips, checkpointing=self.checkpointing, **self.models)


def read(settings: Namespace, static_shapes: bool = True) -> Training:
    """What of a recipe decides about memory and time.

    Args:
        settings: the command line of `fit`, parsed.
        static_shapes: whether the device compiles programs of one shape each, which are padded;
            others read a prompt once for its group, and make micro-batches as large as suits.
    """
    model, data = settings.model.init_args, settings.data.init_args
    samples, supervised = "objective" in model, "scratch" in model
    require(
        samples or supervised,
        f"plan knows GRPO and SFT; the recipe has {settings.model.class_path}",
    )
    precision = model.get("precision") or Namespace(dtype="float32", gradient_checkpointing=False)
    lora = model.get("lora")
    # A strategy is given by its name or as a class.
    given = settings.trainer.strategy
    strategy = Namespace(class_path=given) if isinstance(given, str) else given
    config = architecture(model, settings.model_config)
    return Training(
        config=config,
        reference=reference(model, config, settings.model_config) if samples else None,
        optimizer=optimizer_of(model, GRPO_RATES if samples else SFT_RATES),
        dtype=precision.dtype,
        compute=precision.get("compute"),
        lora=None if lora is None else LoRA(**vars(lora)),
        checkpointing=precision.gradient_checkpointing,
        work=work_of_grpo(model, data, None if static_shapes else config)
        if samples
        else work_of_sft(data),
        strategy=strategy.class_path,
        division=division_of(strategy),
        schedule=schedule_of(settings, samples),
        judges=tuple(_judges(model.get("rewards") or {})),
        flash=not static_shapes and choose_attention(config) == "sdpa",
        publisher=publisher_of(model) if samples else "Folder",
    )


def division_of(strategy: Namespace) -> Division:
    """What a strategy divides.

    Args:
        strategy: its class path, or Lightning's name of it, and its arguments.
    """
    path, given = strategy.class_path, strategy.get("init_args", Namespace())
    kind: Any = import_by_path(path) if "." in path else object
    if issubclass(kind, DividesWeights):
        return Chips(min_shard_size=given.get("min_shard_size") or MIN_SHARD_SIZE)
    if issubclass(kind, FSDP2Strategy):
        return FullShard(replicas=given.get("replicas") or 1)
    return Replicas() if path.startswith("ddp") or "DDP" in path else Alone()


def publisher_of(model: Namespace) -> str:
    """The class that sends weights to servers, of those that `plan` knows the rate of."""
    weights = model.engine.get("init_args", Namespace()).get("weights")
    path = "" if weights is None else weights.class_path
    return "Native" if path.endswith("Native") else "Folder"


def optimizer_of(model: Namespace, usual: UsualRates) -> partial[torch.optim.Optimizer]:
    """What builds the optimizer of a recipe, at the usual learning rate where it gives none."""
    kind, given = import_by_path(model.optimizer.class_path), vars(model.optimizer.init_args)
    if kind is DefaultAdamW and given.get("lr") is None:
        given = given | {"lr": usual.of(model)[0]}
    return partial(kind, **given)


def architecture(model: Namespace, model_config: str | None) -> Any:
    """The configuration of the model that a recipe trains.

    Args:
        model: settings of GRPO or SFT.
        model_config: a config.json or its folder, instead of what `pretrained` names.

    Raises:
        ValueError: it is not known here.
    """
    from transformers import AutoConfig

    scratch = model.get("scratch")
    if scratch is not None:
        return AutoConfig.for_model(**scratch.architecture, vocab_size=scratch.vocab_size)
    if model_config is None:
        return known_config(model.pretrained)
    require(
        Path(model_config).exists(),
        f"model_config is {model_config!r}, and there is no such file or folder",
    )
    return AutoConfig.from_pretrained(model_config)


def reference(model: Namespace, config: Any, model_config: str | None) -> Any:
    """The configuration of the reference, or None where there is no model of its own.

    Args:
        model: settings of GRPO. Adapters are switched off for the reference, without a copy.
        config: of the policy.
        model_config: where that was given; it stands for the reference, too.
    """
    if not model.objective.kl_coef:
        return None
    if model.reference is not None and model_config is None:
        return known_config(model.reference)
    return config if model.get("lora") is None else None


def known_config(pretrained: str) -> Any:
    """The configuration of a model: from its folder, our list, or the hub's cache; no network.

    Raises:
        ValueError: it is in none of them.
    """
    from transformers import AutoConfig

    table = yaml.safe_load((ASSETS / "architectures.yaml").read_text(encoding="utf-8"))
    if pretrained in table:
        return AutoConfig.for_model(**table[pretrained])
    try:
        return AutoConfig.from_pretrained(resolve_pretrained(pretrained), local_files_only=True)
    except OSError as error:
        raise ValueError(
            f"the sizes of {pretrained!r} are not known here (known: {', '.join(table)}). Give "
            "its config.json or the folder of it: --model_config PATH"
        ) from error


def work_of_grpo(model: Namespace, data: Namespace, ragged: Any = None) -> Work:
    """Sizes of an iteration of GRPO.

    Args:
        model: the settings of GRPO.
        data: those of PromptData.
        ragged: the model's config where shapes may follow the rows; None: they are padded.
    """
    # By index: a namespace has a method `update`.
    update = UpdateConfig(**vars(model["update"]))
    sharing = 1
    if ragged is not None:
        known = ragged.model_type in ARCHITECTURES and model.precision.share_prompts
        sharing = (1, model.group_size)[known]
        update = update.fitted(linear_outputs(Blueprint(ragged)))
    engine = model.engine.get("init_args", Namespace())
    width = bucket(data.pad_to_multiple_of, data.max_prompt_length)
    width = bucket(engine.get("prompt_buckets") or 1, width)
    length = row_length(width, model.max_completion_length, sharing)
    rollouts = (
        (data.batch_size, model.group_size),
        (data.eval_batch_size or data.batch_size, model.evaluation.samples),
    )
    of_step = -(-data.batch_size // update.num_mini_batches) * model.group_size
    dtype = engine.get("dtype") or model.precision.get("compute") or model.precision.dtype
    return Work(
        rollouts=rollouts,
        prompt_len=width,
        completion_len=model.max_completion_length,
        micro_rows=_rows(of_step, update.micro_batch_size, update.max_tokens, length),
        length=length,
        cache_bytes=getattr(torch, dtype).itemsize,
        step_rows=of_step,
        max_rows=engine.get("max_rows"),
        sharing=sharing,
        sampled=SAMPLED.get(model.engine.class_path.rpartition(".")[2], "here"),
    )


def row_length(prompt_len: int, completion_len: int, sharing: int) -> int:
    """Tokens of a row in a micro-batch, whose prompt so many rows share."""
    return -(-prompt_len // sharing) + completion_len


def linear_outputs(blueprint: Blueprint) -> int:
    """Count the outputs of the linear layers per token; see `linear.count_linear_outputs`."""
    outputs = (len(weight) for block in blueprint.blocks for weight in block if weight.dim() > 1)
    return max(1, sum(outputs))


def work_of_sft(data: Namespace) -> Work:
    """Sizes of a step of SFT, every pair of the greatest length, from those of PairData."""
    rows = _rows(sys.maxsize, data.batch_size, data.max_tokens_per_batch, data.max_length)
    return Work((), data.max_length, data.max_length, rows, data.max_length)


def bucket(widths: int | Sequence[int], length: int) -> int:
    """The width that prompts of this length are padded to: a multiple, or one of several.

    Example:
        >>> bucket(64, 500), bucket((128, 600), 500)
        (512, 600)
    """
    if isinstance(widths, int):
        return -(-length // widths) * widths
    return min((width for width in widths if width >= length), default=max(widths))


def _rows(rows: int, most_rows: int | None, most_tokens: int | None, length: int) -> int:
    rows = min(rows, most_rows or rows)
    return min(rows, max(1, (most_tokens or rows * length) // length))


def _judges(rewards: dict[str, Any]) -> Iterator[str]:
    functions = [part.function for part in rewards.values()]
    given = [f.get("init_args", {}) for f in functions if not isinstance(f, str)]
    yield from (arguments["pretrained"] for arguments in given if "pretrained" in arguments)
