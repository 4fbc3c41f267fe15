"""`python -m vmonarch.finetune` is `vmonarch finetune`, for `accelerate launch -m vmonarch.finetune …`."""

import sys

from vmonarch.cli import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
