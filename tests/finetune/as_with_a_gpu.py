"""`python -m vmonarch.finetune`, for clips that processes of a CPU share.

diffusers takes it for granted that there is an accelerator.
"""

import sys

import torch

from vmonarch.finetune.__main__ import main

torch.accelerator.device_count = lambda: 1
sys.exit(main())
