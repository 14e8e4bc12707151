"""`python -m litgrpo COMMAND ...`, the same as `litgrpo COMMAND ...`."""

import sys

from litgrpo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
