import warnings

import torch

from litgrpo.distributed.precision import matmul_precision


def test_it_is_what_torch_was_told_without_its_advice_of_an_old_version(monkeypatch):
    def old():
        warnings.warn("Please use the new API settings to control TF32 behavior", stacklevel=1)
        return "high"

    assert matmul_precision() == torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert matmul_precision() == "high"
