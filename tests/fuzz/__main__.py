"""`python -m tests.fuzz`: see `tests.fuzz.command`."""

import sys

from tests.fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
