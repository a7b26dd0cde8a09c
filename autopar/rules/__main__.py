"""`python -m autopar.rules`: the coverage table."""

import sys

from autopar.rules.coverage import main

if __name__ == "__main__":
    sys.exit(main())
