"""`vmonarch finetune` of processes of a CPU that spread their weights, which accelerate does on GPUs alone.

It is run once for all words up to each `--then`.
"""

import itertools
import os
import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from vmonarch.cli import main
from vmonarch.finetune.trainer import Trainer

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
# compile=true then names blocks, and takes no time.
torch._dynamo.config.disable = True
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
losses = Trainer._losses


def checked(trainer, *args, **kwargs):
    """In every micro-batch: none of those before has left gradients of whole weights."""
    modules = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules if (group := module._get_fsdp_state()._fsdp_param_group) is not None]
    assert groups
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        whole = getattr(parameter, "_unsharded_param", None)
        assert parameter.unsharded_accumulated_grad is None and (whole is None or whole.grad is None)
    return losses(trainer, *args, **kwargs)


Trainer._losses = checked
words = (list(group) for then, group in itertools.groupby(sys.argv[1:], "--then".__eq__) if not then)
sys.exit(max(main(["finetune", "--debug", *run]) for run in words))
