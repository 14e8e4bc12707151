"""Weights in four bits under adapters (QLoRA), by bitsandbytes.

Source: QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Literal

import torch

from litgrpo.models.adapters import TRAINED, merged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = Literal["nf4", "fp4"]
# It says at every import that a kernel for one kind of processor is not there.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def loading_settings(kind: Quantization | None, compute: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is told; nothing without a quantization.

    Args:
        kind: of four-bit numbers; their scales are quantized, too.
        compute: number format that products are computed in.

    Raises:
        ValueError: bitsandbytes is not installed or does not work here.
    """
    if kind is None:
        return {}
    try:
        import bitsandbytes  # noqa: F401 (only whether it is there)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            "precision.quantize needs the package bitsandbytes: pip install 'litgrpo[qlora]' "
            f"({' '.join(str(error).split())[:100]})."
        ) from error
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": config, "device_map": "cpu"}


def keep_packing(model: PreTrainedModel) -> None:
    """Leave the four-bit weights as they were loaded.

    In eval mode bitsandbytes packs them anew for some processors, in place: products are then other
    numbers than in training, and what is dequantized from them for export is wrong.
    """
    for layer in _four_bit(model):
        layer.support_avx512bf16_for_cpu = False


def _four_bit(model: Any) -> list[Any]:
    return [each for each in model.modules() if type(each).__name__ == "Linear4bit"]


def is_quantized(model: Any) -> bool:
    """Whether some of the weights are in four bits."""
    return any("support_avx512bf16_for_cpu" in vars(each) for each in _four_bit(model))


def merged_into_dequantized(adapted: Any) -> Any:
    """A model with the weights that training saw, dequantized, plus the trained adapter.

    Not the weights from before they were quantized, which the adapter does not know, and not a
    merge that is quantized again.
    """
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    weights = get_peft_model_state_dict(adapted, adapter_name=TRAINED)
    plain = copy.deepcopy(adapted).unload().dequantize()
    config = copy.deepcopy(adapted.peft_config[TRAINED])
    again = get_peft_model(plain, config)
    set_peft_model_state_dict(again, weights)
    return merged(again)
