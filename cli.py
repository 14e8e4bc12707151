"""`python cli.py fit -c configs/quickstart.yaml`; see `python cli.py --help`."""

import sys
from importlib.util import find_spec
from pathlib import Path

# A clone runs its own code, installed or not.
sys.path.insert(0, str(Path(__file__).parent / "src"))

if __name__ == "__main__":
    missing = [name for name in ("torch", "lightning", "yaml") if find_spec(name) is None]
    if missing:
        advice = "Install first: pip install -r requirements.txt"
        print(f"error: No module named {missing[0]!r}. {advice}", file=sys.stderr)
        sys.exit(2)
    from litgrpo.cli.main import run_program

    run_program()
