"""Add the simulated CUDA device when torch is imported. Python imports this file when it starts."""

import ctypes
import importlib.util
import os
import sys


class AddDevice:
    """Importer of torch: the device's library first, which torch looks for while it loads."""

    def find_spec(self, name, path=None, target=None):
        """Find torch as usual, with a loader that also adds the device."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def load_with_device(module):
            ctypes.CDLL(os.environ["CUDA_DEVICE_LIBRARY"], mode=os.RTLD_LAZY)
            load(module)
            from tests.cuda_device import device

            device.install()

        spec.loader.exec_module = load_with_device
        return spec


if "CUDA_DEVICE_LIBRARY" in os.environ:
    sys.meta_path.insert(0, AddDevice())
