"""A process of the benchmark on a CPU, which `enable_parallelism` takes for an accelerator with one device."""

import torch

from vmonarch.eval.bench import parallel

run_rank = parallel.run_rank


def rank(index, ranks, *told):
    if ranks == 3:
        raise RuntimeError("three are too many")
    torch.accelerator.device_count = lambda: 1
    run_rank(index, ranks, *told)
