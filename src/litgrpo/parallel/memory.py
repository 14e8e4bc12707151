"""How a device says that its memory did not suffice, and how to give memory back to it."""

import gc

import torch

# How allocators that raise a plain RuntimeError say it: two on the CPU, one of compilers.
MESSAGES = ("can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice; each device says it in its own way."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in MESSAGES)


def free_memory() -> None:
    """Give cached memory back to the device, after the tensors that filled it are gone."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA has not been used
