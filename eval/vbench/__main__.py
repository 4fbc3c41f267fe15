"""`python -m vmonarch.eval.vbench` is `vmonarch vbench`."""

import sys

from vmonarch.cli import main

if __name__ == "__main__":
    sys.exit(main(["vbench", *sys.argv[1:]]))
