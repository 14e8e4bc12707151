"""`python cli.py fit -c configs/quickstart.yaml`; see `python cli.py --help`."""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parent / "src")
)  # a clone runs its own code, installed or not

try:
    from litgrpo.program import main
except ModuleNotFoundError as missing:
    print(f"error: {missing}. Install first: pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
