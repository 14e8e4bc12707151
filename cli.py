"""`python cli.py fit -c configs/quickstart.yaml`; see `python cli.py --help`."""

import sys

from litgrpo.program import main

if __name__ == "__main__":
    sys.exit(main())
