"""`python -m vmonarch.cli`."""

import sys

from vmonarch.cli import main

if __name__ == "__main__":
    sys.exit(main())
