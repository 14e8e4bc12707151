import ast
import warnings
from pathlib import Path

import torch

import litgrpo
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


def test_no_operator_relies_on_dtypes_that_autocast_matches_on_a_cpu_only():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    of_cpu_only = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if has_kernel(name, "AutocastCPU") and not has_kernel(name, "AutocastCUDA")
    }
    assert {"index_copy", "cat", "stack"} <= of_cpu_only
    wide, narrow = torch.ones(1), torch.ones(1, dtype=torch.bfloat16)
    for promotes_itself in (torch.cat, torch.stack):
        assert promotes_itself([narrow, wide]).dtype == torch.float32
    # Operands of these calls have one dtype: see the test of each file.
    checked = {
        "models/kernels/packed_attention.py": {"index_copy"},
        "models/packing.py": {"index_copy"},
        "models/policy.py": {"index_copy"},  # of float32
        "models/decode/fixed.py": {"index_copy"},
        "algorithms/masks.py": {"nanquantile"},  # of float32
        "models/decode/fused.py": {"view_as_complex"},  # of float32 or wider
    }
    source = Path(litgrpo.__file__).parent
    packages = "models", "algorithms", "rollout", "learning"  # compute under autocast
    for path in [
        source / "tensors.py",
        *(p for each in packages for p in (source / each).rglob("*.py")),
    ]:
        name = path.relative_to(source).as_posix()
        attributes = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        found = attributes & of_cpu_only - {"cat", "stack"}
        assert found <= checked.get(name, set()), f"{name}: give these operands of one dtype"
