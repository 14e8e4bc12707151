"""`python cli.py fit -c configs/quickstart.yaml`; see `python cli.py --help`."""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parent / "src")
)  # a clone runs its own code, installed or not

from litgrpo.program import main

if __name__ == "__main__":
    sys.exit(main())
