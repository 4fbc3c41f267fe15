"""What one of three ranks does for test_frame_parallel.py: run its cases, save results, errors and bytes sent.

Argument: folder.
"""

import datetime
import gc
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from count_sent import Sent
from interpreter import faster
from torch.utils.checkpoint import checkpoint

from vmonarch import ExactBlocks
from vmonarch.kernels.distributed.api import frame_parallel_vmonarch_attention
from vmonarch.kernels.distributed.exchange import Link

RANKS = 3
# Of groups of 1, 2 and 3 ranks: how many of the 5 frames each has.
FRAMES = {1: (5,), 2: (2, 3), 3: (1, 3, 1)}
# Latent grid, batch and heads.
SIZES = ((5, 3, 5), 2, 3)
# The interpreter is slow.
TRITON_SIZES = ((5, 1, 3), 1, 2)
DIM, VALUE_DIM = 4, 6

OF_TWO = {
    "paper": dict(),
    "one-iteration": dict(num_iterations=1),
    "three-iterations": dict(num_iterations=3, exact=None),
    "coarse": dict(coarse=2, num_iterations=3),
    "entropy-gradient": dict(entropy_grad=True, exact=None),
    "strong-clamp": dict(min_mass=1.0, scale=0.9),
    "negative-scale": dict(scale=-0.4),
    "own-frame": dict(exact=ExactBlocks(band=0)),
    "band": dict(exact=ExactBlocks(band=1), entropy_grad=True, num_iterations=3),
    "band-unaware": dict(exact=ExactBlocks(band=2, aware=False)),
    "sink-column": dict(exact=ExactBlocks(columns=(0,))),
    "last-rows-aware": dict(exact=ExactBlocks(rows=(3, 4)), num_iterations=3),
    "rows-and-columns": dict(exact=ExactBlocks(rows=(1,), columns=(0, 4)), coarse=2),
    "all-exact": dict(exact=ExactBlocks(band=4)),
    "alone": dict(frames=FRAMES[1], exact=ExactBlocks(rows=(0,), columns=(2,))),
    "one-frame-at-rank-1": dict(frames=(4, 1), exact=ExactBlocks(columns=(1, 4))),
    "bfloat16": dict(dtype=torch.bfloat16, exact=ExactBlocks(band=1)),
}
OF_TWO_BY_KERNELS = {
    "kernels-paper": dict(),
    "kernels-coarse": dict(coarse=2, entropy_grad=True, num_iterations=3, exact=None),
    "kernels-band": dict(exact=ExactBlocks(band=1), scale=-0.3),
    "kernels-rows-aware": dict(exact=ExactBlocks(rows=(0, 3))),
    "kernels-columns-unaware": dict(exact=ExactBlocks(rows=(4,), columns=(0,), aware=False), num_iterations=1),
}
OF_THREE = {
    "three-ranks": dict(),
    "three-ranks-band": dict(exact=ExactBlocks(band=1)),
    "three-ranks-rows-and-columns": dict(exact=ExactBlocks(rows=(1,), columns=(0, 4)), coarse=2),
    "fewer-positions-than-ranks": dict(sizes=((5, 1, 2), 2, 3), exact=ExactBlocks(band=1)),
}


def _cases():
    """name -> (frames of each rank, sizes, dtype, options)."""
    table = {}
    for name, options in {**OF_TWO, **OF_TWO_BY_KERNELS, **OF_THREE}.items():
        options, kernels = dict(options), name in OF_TWO_BY_KERNELS
        frames = options.pop("frames", FRAMES[3 if name in OF_THREE else 2])
        sizes = options.pop("sizes", TRITON_SIZES if kernels else SIZES)
        dtype = options.pop("dtype", torch.float32 if kernels else torch.float64)
        options["implementation"] = "triton" if kernels else "torch"
        table[name] = frames, sizes, dtype, dict(options, grid=sizes[0])
    return table


CASES = _cases()
# What each of three ranks has of a sequence, and what it gets.
REGROUPED = {
    "borders": ((4, 5, 3), (5, 3, 4)),
    "past-a-neighbour": ((9, 1, 2), (2, 2, 8)),
    "back": ((2, 2, 8), (9, 1, 2)),
    "nothing-here": ((0, 12, 0), (4, 4, 4)),
    "nothing-there": ((4, 4, 4), (12, 0, 0)),
    "as-it-was": ((4, 5, 3), (4, 5, 3)),
}
RESULTS = ("out", "lse", "dq", "dk", "dv")


def tensors(sizes, dtype):
    """(query, key, value, grad_out, grad_lse) of the whole video, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(0)
    (T, height, width), B, H = sizes
    S = T * height * width
    shapes = [*((B, S, H, dim) for dim in (DIM, DIM, VALUE_DIM, VALUE_DIM)), (B, H, S)]
    return [(1.5 * torch.randn(shape, generator=generator)).bfloat16().to(dtype) for shape in shapes]


def with_gradients(attention, query, key, value, grad_out, grad_lse):
    """(out, lse, dq, dk, dv) of an attention that returns (out, lse)."""
    inputs = [x.detach().clone().requires_grad_(True) for x in (query, key, value)]
    out, lse = attention(*inputs)
    torch.autograd.backward((out, lse), (grad_out, grad_lse.to(lse.dtype)))
    return [out.detach(), lse.detach(), *(x.grad for x in inputs)]


def own_slices(sizes, frames, rank, query, key, value, grad_out, grad_lse):
    """What a rank has of `tensors`."""
    b = sizes[0][1] * sizes[0][2]
    start, stop = b * sum(frames[:rank]), b * sum(frames[: rank + 1])
    return [*(x[:, start:stop] for x in (query, key, value, grad_out)), grad_lse[:, :, start:stop]]


class Kept:
    """What stands for a saved tensor."""

    def __init__(self, tensor):
        # With its graph it would keep itself.
        self.tensor = tensor.detach()


def leaked(attention, own):
    """(tensors that a call saves for its backward pass, those that outlive its results)."""
    saved = []

    def pack(tensor):
        kept = Kept(tensor)
        saved.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        results = attention(*(x.clone().requires_grad_(True) for x in own[:3]))
    del results
    gc.collect()
    return len(saved), sum(reference() is not None for reference in saved)


def sequences():
    """Two tensors of 12 places along their second dimension, and weights for them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 12, 3), (1, 12, 1), (2, 12, 3), (1, 12, 1)]
    dtypes = [torch.float64, torch.float32] * 2
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape, dtype in zip(shapes, dtypes, strict=True)]


def regrouped(rank, counted, before, after):
    """(this rank's tensors after the borders moved, their gradients, bytes sent, bytes sent back)."""
    *tensors, w, v = sequences()
    tensors = [x.split(before, 1)[rank].clone().requires_grad_(True) for x in tensors]
    link = Link(dist.group.WORLD, torch.device("cpu"), True)
    counted.since_last()
    moved = link.close(*link.regroup(tensors, before, after, 1))
    sent = counted.since_last()
    weights = [x.split(after, 1)[rank] for x in (w, v)]
    torch.autograd.backward([x * y for x, y in zip(moved, weights, strict=True)], [torch.ones_like(x) for x in moved])
    return [x.detach() for x in moved], [x.grad for x in tensors], sent, counted.since_last()


def error_of(*tensors, **options):
    try:
        frame_parallel_vmonarch_attention(*tensors, **options)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreements(rank, group):
    """name -> the message that this rank gets where rank 1 of three departs from the others."""
    query, key, value, *_ = own_slices(SIZES, FRAMES[3], rank, *tensors(SIZES, torch.float32))
    qkv, grid, other = (query, key, value), SIZES[0], rank == 1
    return {
        "refusal": error_of(*qkv, grid=(5, 3, 4) if other else grid, group=group),
        "unknown-frame": error_of(*qkv, grid=grid, exact=ExactBlocks(rows=(5 if other else 4,)), group=group),
        "grid": error_of(*qkv, grid=(5, 5, 3) if other else grid, group=group),
        "option": error_of(*qkv, grid=grid, num_iterations=3 if other else 2, group=group),
        "exact": error_of(*qkv, grid=grid, exact=ExactBlocks(band=1) if other else None, group=group),
        "dtype": error_of(*(x.double() if other else x for x in qkv), grid=grid, group=group),
        "heads": error_of(*(x[:, :, :2] if other else x for x in qkv), grid=grid, group=group),
        "gradients": error_of(*(x.clone().requires_grad_(other) for x in qkv), grid=grid, group=group),
        "frames": error_of(*qkv, grid=(7, 3, 5), group=group),
        "kernels": error_of(*(x.double() for x in qkv), grid=grid, implementation="triton", group=group),
        "group": error_of(*qkv, grid=grid, group="world"),
    }


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=240))
    rank = dist.get_rank()
    groups = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 3: None}
    report = {"errors": disagreements(rank, None), "results": {}, "sent": {}, "sent_back": {}}
    counted = dist.all_to_all_single = Sent()
    for name, (frames, sizes, dtype, options) in CASES.items():
        if rank >= len(frames):
            report["outsider"] = error_of(*tensors(sizes, dtype)[:3], group=groups[len(frames)], **options)
            continue

        def attention(*qkv, name=name, frames=frames, options=options):
            counted.since_last()
            results = frame_parallel_vmonarch_attention(*qkv, return_lse=True, group=groups[len(frames)], **options)
            report["sent"][name] = counted.since_last()
            return results

        own = own_slices(sizes, frames, rank, *tensors(sizes, dtype))
        results = with_gradients(attention, *own)
        report["sent_back"][name] = counted.since_last()
        report["results"][name] = results
        if name not in OF_TWO_BY_KERNELS:
            with torch.no_grad():
                out, lse = attention(*own[:3])
            assert torch.equal(results[0], out) and torch.equal(results[1], lse)
        if name == "three-ranks-band":
            report["results"]["checkpointed"] = with_gradients(
                lambda *qkv, attention=attention: checkpoint(attention, *qkv, use_reentrant=False), *own
            )
            value = own[2].clone().requires_grad_(True)
            attention(own[0], own[1], value)[0].backward(own[3])
            report["dv_alone"] = value.grad
            report["leaked"] = leaked(attention, own)
    report["regrouped"] = {name: regrouped(rank, counted, *sizes) for name, sizes in REGROUPED.items()}
    torch.save(report, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with faster():
        main()
