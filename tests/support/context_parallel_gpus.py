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
from tiny_families import FAMILIES

import vmonarch

# 240 tokens on each rank, two and a half frames; of three heads the first rank has two.
GRID = (5, 8, 12)


def wan():
    return tiny.transformer(num_attention_heads=3, attention_head_dim=64), tiny.inputs(GRID)


def hunyuan():
    """Text of two lengths beside the video."""
    config = {"num_attention_heads": 3, "attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)}
    return FAMILIES["hunyuan"].make(**config), FAMILIES["hunyuan"].call(GRID)


def learnt(make, ranks, device, dtype, **options):
    """Output and gradients of a model, in float64."""
    model, inputs = make()
    model.to(device, dtype)
    vmonarch.apply(model, vmonarch.VMonarchProcessor(**options))
    ranks.enable(model)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            inputs[name] = value.to(device, dtype if value.is_floating_point() and name != "timestep" else None)
    return {name: tensor.double() for name, tensor in train(ranks, model, inputs).items()}


def errors(make, device):
    """Relative errors in bfloat16, by the number of ranks and by tensor."""
    exact = learnt(make, Alone(), device, torch.float32, implementation="torch")
    # Some gradients are nothing but rounding: those of what moves all logits of a query alike.
    least = 1e-6 * max(tensor.norm() for tensor in exact.values())
    report = {}
    for number, ranks in ((1, Alone()), (2, Rank(device))):
        found = learnt(make, ranks, device, torch.bfloat16)
        report[number] = {
            name: ((found[name] - tensor).norm() / tensor.norm()).item()
            for name, tensor in exact.items()
            if tensor.norm() > least
        }
    return report


def main():
    device, rank = sys.argv[2], int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # diffusers takes it for granted that there is an accelerator.
        torch.accelerator.device_count = lambda: 1
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    report = {"wan": errors(wan, device), "hunyuan": errors(hunyuan, device)}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
