"""Data-parallel training of the embedded model: the same command under `torchrun` or `accelerate launch`.

Every process draws its own clips and averages its gradients with the others', so that all keep the same weights. One
process alone does nothing of this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from vmonarch.pipelines.processes import leaving_group


def rank() -> int:
    """Number of this process, 0 if there is but one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def process_group(device: str) -> Iterator[str]:
    """Join the processes that a launcher started (`WORLD_SIZE` tells), if any; yields this process's device.

    Raises:
        ValueError: several processes on a device of a kind that is neither cuda nor cpu.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu to train with several processes, got {device}")
    if kind == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    with leaving_group():
        yield device


def own_seed(seed: int) -> int:
    """A seed of this process's own, from one that all share; `seed` itself for a process alone."""
    return seed * world_size() + rank()


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its mean over the processes."""
    if world_size() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def first_process_says(value: float, device: str) -> float:
    """The first process's `value` on all of them, so that clocks that differ lead to the same decision."""
    if world_size() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(shared, src=0)
    return shared.item()


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Let the first process go through the block before the others, who then find what it wrote."""
    if world_size() > 1 and rank() > 0:
        dist.barrier()
    yield
    if world_size() > 1 and rank() == 0:
        dist.barrier()
