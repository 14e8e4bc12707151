"""Run a script or module on the simulated device: `python -m tests.cuda_device SCRIPT ARGS`.

Python is started again with a `sitecustomize` that adds the device as soon as torch is imported,
there and in every process that the program starts, such as the ranks of DDP.
"""

import os
import sys

from tests.cuda_device.run import environment

if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python -m tests.cuda_device (SCRIPT | -m MODULE | -c CODE) [ARGUMENT ...]")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment())
