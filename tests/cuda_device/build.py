"""Compile the simulated device for the installed torch: `python -m tests.cuda_device.build`.

The library is kept in the user's cache folder, by version of torch and a hash of the sources.
Nothing here imports torch: the library must be loaded before it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent / "cpp"
NAME = "_simulated_cuda"
# -O1: half the time of -O2; the kernels that compute are torch's.
FLAGS = ("-O1", "-g0", "-std=c++20", "-fPIC", "-DTORCH_API_INCLUDE_EXTENSION_H")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


def torch_folder() -> Path:
    """Folder of the installed torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def torch_versions() -> dict[str, str | None]:
    """Names that torch/version.py defines: `__version__`, `cuda`, ..."""
    names: dict[str, str | None] = {}
    exec((torch_folder() / "version.py").read_text(), names)
    return names


def compiler() -> str | None:
    """The system's C++ compiler, or `CXX`; None if there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def reason_to_skip() -> str | None:
    """Return why the device cannot be built here, or None if it can."""
    if sys.platform != "linux":
        return "the simulated CUDA device is built on Linux only"
    if torch_versions()["cuda"] is not None:
        return "the simulated CUDA device needs a CPU build of torch; this one is built for CUDA"
    if compiler() is None:
        return "the simulated CUDA device needs a C++ compiler (c++ or CXX)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated CUDA device needs Python's headers (python3-dev)"
    return None


def library() -> Path:
    """Path of the library for this torch, Python and source, built or not."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tag = f"torch-{torch_versions()['__version__']}-{sys.implementation.cache_tag}"
    return cache / "litgrpo" / "cuda_device" / f"{tag}-{digest.hexdigest()[:12]}" / f"{NAME}.so"


def build() -> Path:
    """Return the path of the library; compile it first if needed, in about 2 minutes.

    Raises:
        RuntimeError: it cannot be built here.
        subprocess.CalledProcessError: the compiler failed; its messages are on standard error.
    """
    target = library()
    if target.exists():
        return target
    if reason := reason_to_skip():
        raise RuntimeError(reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Test workers that start together wait for the first one.
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    torch = torch_folder()
    # -isystem: warnings of torch's headers are not of interest.
    folders = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    includes = [word for folder in folders for word in ("-isystem", str(folder))]
    includes.append(f"-I{sysconfig.get_paths()['include']}")

    def compile_one(source: Path) -> str:
        made = str(target.parent / f"{source.stem}.o")
        command = [str(compiler()), *FLAGS, *includes, "-c", str(source), "-o", made]
        subprocess.run(command, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    linked = target.with_suffix(".part")
    # Without a path to torch's libraries: the cache outlives virtual environments.
    libraries = [f"-L{torch / 'lib'}", *LIBRARIES]
    subprocess.run([str(compiler()), "-shared", *objects, *libraries, "-o", linked], check=True)
    for each in objects:
        os.unlink(each)
    linked.rename(target)


if __name__ == "__main__":
    print(build())
