"""Add the simulated CUDA device when torch is imported. Python imports this file when it starts.

HIDDEN_PACKAGES: packages, separated by commas, that are not found, as if they were not installed.
"""

import ctypes
import importlib.machinery
import os
import sys

TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")


class AddDevice:
    """Importer of torch: the device's library first, which torch looks for while it loads."""

    def find_spec(self, name, path=None, target=None):
        """Find torch as usual, with a loader that also adds the device."""
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def load_with_device(module):
            for library in TORCH_LIBRARIES:  # those of this environment
                path = os.path.join(os.path.dirname(spec.origin), "lib", library)
                ctypes.CDLL(path, mode=os.RTLD_LAZY)
            ctypes.CDLL(os.environ["CUDA_DEVICE_LIBRARY"], mode=os.RTLD_LAZY)
            load(module)
            from tests.cuda_device import device

            device.install()

        spec.loader.exec_module = load_with_device
        return spec


def hide_packages(names):
    """Let Python's search of installed packages not find these."""
    find = importlib.machinery.PathFinder.find_spec

    def find_visible(name, path=None, target=None):
        return None if name.partition(".")[0] in names else find(name, path, target)

    importlib.machinery.PathFinder.find_spec = staticmethod(find_visible)


if "HIDDEN_PACKAGES" in os.environ:
    hide_packages(os.environ["HIDDEN_PACKAGES"].split(","))
if "CUDA_DEVICE_LIBRARY" in os.environ:
    sys.meta_path.insert(0, AddDevice())
