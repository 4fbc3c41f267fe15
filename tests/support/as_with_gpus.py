"""`vmonarch finetune` of processes of a CPU that spread their weights, which accelerate does on GPUs alone.

It is run once for all words up to each `--then`.
"""

import itertools
import os
import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from vmonarch.cli import main

os.environ |= {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "WanTransformerBlock",
    # As `accelerate launch` has it by default: the weights are spread by the state dict.
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
# diffusers asks which GPU a rank that shares clips has.
torch.accelerator.device_count = lambda: 1
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
words = (list(group) for then, group in itertools.groupby(sys.argv[1:], "--then".__eq__) if not then)
sys.exit(max(main(["finetune", "--debug", *run]) for run in words))
