"""What torchrun starts in `test_context_parallel_gpus.py`: the errors of two ranks, and of one that computes it all.

torchrun --nproc-per-node 2 context_parallel_gpus.py FOLDER [cuda | cpu]
"""

import json
import os
import sys
from pathlib import Path

import tiny_wan as tiny
import torch
import torch.distributed as dist
from context_parallel_worker import Alone, Rank, train

import vmonarch

# 240 tokens on each rank, two and a half frames.
GRID = (5, 8, 12)


def learnt(tiny, ranks, device, dtype, **options):
    """Output and gradients of a model, in float64."""
    model = tiny.transformer(num_attention_heads=3, attention_head_dim=64).to(device, dtype)
    vmonarch.apply(model, vmonarch.VMonarchProcessor(**options))
    ranks.enable(model)
    inputs = tiny.inputs(GRID)
    for name in ("hidden_states", "encoder_hidden_states"):
        inputs[name] = inputs[name].to(device, dtype)
    inputs["timestep"] = inputs["timestep"].to(device)
    return {name: tensor.double() for name, tensor in train(ranks, model, inputs).items()}


def main():
    device, rank = sys.argv[2], int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # diffusers takes it for granted that there is an accelerator.
        torch.accelerator.device_count = lambda: 1
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    report = {}
    exact = learnt(tiny, Alone(), device, torch.float32, implementation="torch")
    for shared in ("nothing", "heads", "frames"):
        ranks, options = (Alone(), {}) if shared == "nothing" else (Rank(device), {"parallel_by": shared})
        found = learnt(tiny, ranks, device, torch.bfloat16, **options)
        report[shared] = {
            name: ((found[name] - tensor).norm() / tensor.norm()).item() for name, tensor in exact.items()
        }
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
