"""`vmonarch finetune`, once for all words up to each `--then`, for clips that processes of a CPU share.

diffusers takes it for granted that there is an accelerator.
"""

import sys

import torch

from vmonarch.cli import main

torch.accelerator.device_count = lambda: 1
runs = [[]]
for word in sys.argv[1:]:
    if word == "--then":
        runs.append([])
    else:
        runs[-1].append(word)
sys.exit(max(main(["finetune", *words]) for words in runs))
