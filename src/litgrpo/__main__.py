"""`python -m litgrpo VERB ...`, the same as `litgrpo VERB ...`."""

import sys

from litgrpo.program import main

if __name__ == "__main__":
    sys.exit(main())
