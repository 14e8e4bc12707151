"""What of a recipe decides about memory: a model without numbers, an optimizer, sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace

from litgrpo.learner.config import UpdateConfig
from litgrpo.models.loading import ASSETS, LoRA, resolve, with_adapters
from litgrpo.parallel.xla.sharding import MIN_SHARD_SIZE
from litgrpo.tools.plan.memory import Blueprint, Chips, Item, Work, account, optimizer_states

SHARDING = "XLASPMDStrategy"  # the strategy that divides weights over chips


@dataclass(frozen=True)
class Recipe:
    """What of a recipe decides about memory.

    Args:
        config: of the model.
        reference: of the reference, where it is a model of its own.
        optimizer: builds it from weights.
        optimizer_name: its class.
        dtype: of the weights.
        compute: lower precision that is computed in, or None.
        lora: adapters, or None.
        checkpointing: activations are recomputed.
        work: sizes of an iteration; the rows of a micro-batch as far as the recipe limits them.
        strategy: of the trainer, in words.
        sharded: whether it divides the model over the chips.
        min_shard_size: of that division.
        judges: reward models, which are not counted.
    """

    config: Any
    reference: Any
    optimizer: Callable[..., torch.optim.Optimizer]
    optimizer_name: str
    dtype: str
    compute: str | None
    lora: LoRA | None
    checkpointing: bool
    work: Work
    strategy: str
    sharded: bool
    min_shard_size: int
    judges: tuple[str, ...] = ()

    @cached_property
    def blueprint(self) -> Blueprint:
        """The policy without numbers."""
        return self._policy(self.dtype)

    @cached_property
    def computed_blueprint(self) -> Blueprint | None:
        """The same in the lower precision that is computed in."""
        return None if self.compute is None else self._policy(self.compute)

    def _policy(self, dtype: str) -> Blueprint:
        adapt = None if self.lora is None else partial(with_adapters, lora=self.lora)
        return Blueprint(self.config, getattr(torch, dtype), adapt)

    @cached_property
    def reference_blueprint(self) -> Blueprint | None:
        """The reference without numbers."""
        if self.reference is None:
            return None
        return Blueprint(self.reference, getattr(torch, self.dtype))

    @cached_property
    def states(self) -> Any:
        """What the optimizer keeps of each weight."""
        return optimizer_states(self.optimizer, self.blueprint.trained)

    def undivided(self, number: int) -> str | None:
        """What cannot be divided evenly over so many chips, in words; None if everything can.

        Every chip would then compute all of it, and the others nothing else.
        """
        prompts, group = self.work.rollouts[0] if self.work.rollouts else (0, 0)
        if prompts * group % number:
            return f"{prompts * group} rows of a rollout (data.batch_size x group_size)"
        return None

    def account(self, number: int) -> list[Item]:
        """Everything of weight that each of so many chips holds."""
        rows = -(-self.work.micro_rows // number) * number  # filled up to whole shares
        return account(
            self.blueprint,
            replace(self.work, micro_rows=rows),
            Chips(number, self.min_shard_size),
            states=self.states,
            reference=self.reference_blueprint,
            checkpointing=self.checkpointing,
            computed=self.computed_blueprint,
        )


def read(settings: Namespace) -> Recipe:
    """What of a recipe decides about memory.

    Args:
        settings: the command line of `fit`, parsed.
    """
    model, data = settings.model.init_args, settings.data.init_args
    precision = model.get("precision") or Namespace(dtype="float32", gradient_checkpointing=False)
    strategy = settings.trainer.strategy
    path = strategy if isinstance(strategy, str) else strategy.class_path
    own = Namespace() if isinstance(strategy, str) else strategy.get("init_args", Namespace())
    config = architecture(model, settings.model_config)
    lora = None if model.get("lora") is None else LoRA(**vars(model.lora))
    if "objective" not in model and "scratch" not in model:
        raise ValueError(f"plan knows GRPO and SFT; the recipe has {settings.model.class_path}")
    reference = None
    if "objective" in model and model.objective.kl_coef > 0:
        if model.reference is not None and settings.model_config is None:
            reference = known_config(model.reference)
        elif lora is None:
            reference = config
    optimizer = model.optimizer
    return Recipe(
        config=config,
        reference=reference,
        optimizer=partial(_imported(optimizer.class_path), **vars(optimizer.init_args)),
        optimizer_name=optimizer.class_path.rpartition(".")[2],
        dtype=precision.dtype,
        compute=precision.get("compute"),
        lora=lora,
        checkpointing=precision.gradient_checkpointing,
        work=work_of_grpo(model, data) if "objective" in model else work_of_sft(data),
        strategy=path,
        sharded=path.rpartition(".")[2] == SHARDING,
        min_shard_size=own.get("min_shard_size") or MIN_SHARD_SIZE,
        judges=tuple(_judges(model.get("rewards") or {})),
    )


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
    if not Path(model_config).exists():
        raise ValueError(f"model_config is {model_config!r}, and there is no such file or folder")
    return AutoConfig.from_pretrained(model_config)


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
        return AutoConfig.from_pretrained(resolve(pretrained), local_files_only=True)
    except OSError as error:
        raise ValueError(
            f"the sizes of {pretrained!r} are not known here (known: {', '.join(table)}). Give "
            "its config.json or the folder of it: --model_config PATH"
        ) from error


def work_of_grpo(model: Namespace, data: Namespace) -> Work:
    """Sizes of an iteration of GRPO.

    Args:
        model: settings of GRPO.
        data: settings of PromptData.
    """
    learning = UpdateConfig(**vars(model.update))
    engine = model.engine.get("init_args", Namespace())
    width = -(-data.max_prompt_len // data.pad_to_multiple) * data.pad_to_multiple
    width = bucket(engine.get("prompt_buckets") or 1, width)
    length = width + model.max_completion_len
    rollouts = (
        (data.batch_size, model.group_size),
        (data.eval_batch_size or data.batch_size, model.evaluation.samples),
    )
    of_step = -(-data.batch_size // learning.num_mini_batches) * model.group_size
    dtype = engine.get("dtype") or model.precision.get("compute") or model.precision.dtype
    return Work(
        rollouts=rollouts,
        prompt_len=width,
        completion_len=model.max_completion_len,
        micro_rows=_rows(of_step, learning.micro_batch_size, learning.max_tokens, length),
        length=length,
        cache_bytes=getattr(torch, dtype).itemsize,
    )


def work_of_sft(data: Namespace) -> Work:
    """Sizes of a step of SFT, every pair of the greatest length.

    Args:
        data: settings of PairData.
    """
    rows = _rows(sys.maxsize, data.batch_size, data.max_tokens, data.max_len)
    return Work((), data.max_len, data.max_len, rows, data.max_len)


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
    rows = rows if most_rows is None else min(rows, most_rows)
    return rows if most_tokens is None else min(rows, max(1, most_tokens // length))


def _judges(rewards: dict[str, Any]) -> Iterator[str]:
    for part in rewards.values():
        if not isinstance(part.function, str) and "pretrained" in part.function.get(
            "init_args", {}
        ):
            yield part.function.init_args.pretrained


def _imported(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)
