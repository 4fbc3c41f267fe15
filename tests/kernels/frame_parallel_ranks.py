"""What one rank does for test_frame_parallel.py: run every case and save results, errors and bytes sent.

Arguments: rank, number of ranks, folder.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from vmonarch import ExactBlocks
from vmonarch.kernels.monarch.parallel import frame_parallel_vmonarch_attention

# For 2 and for 3 ranks: how many of the 5 frames each has.
FRAMES = {2: (2, 3), 3: (1, 3, 1)}
GRID = (5, 3, 5)
# Batch and heads.
SIZES = (2, 3)
# The interpreter is slow.
TRITON_GRID, TRITON_SIZES = (5, 2, 3), (1, 2)
DIM, VALUE_DIM = 4, 6

CASES = {
    "paper": dict(),
    "one-iteration": dict(num_iterations=1),
    "three-iterations": dict(num_iterations=3, exact=None),
    "no-exact-block": dict(exact=None),
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
    "uneven": dict(frames=(4, 1), exact=ExactBlocks(columns=(1, 4))),
    "fewer-positions-than-ranks": dict(grid=(5, 1, 1), exact=ExactBlocks(band=1)),
}
OF_THREE_RANKS = ("paper", "band", "rows-and-columns", "fewer-positions-than-ranks")
TRITON_CASES = {
    "triton-paper": dict(),
    "triton-coarse": dict(coarse=2, entropy_grad=True, num_iterations=3, exact=None),
    "triton-band": dict(exact=ExactBlocks(band=1), scale=-0.3),
    "triton-rows-aware": dict(exact=ExactBlocks(rows=(0, 3))),
    "triton-columns-unaware": dict(exact=ExactBlocks(rows=(4,), columns=(0,), aware=False), num_iterations=1),
}
RESULTS = ("out", "lse", "dq", "dk", "dv")


def cases(ranks):
    """name -> (grid, frames of each rank, batch and heads, dtype, options)."""
    chosen = {name: CASES[name] for name in OF_THREE_RANKS} if ranks == 3 else {**CASES, **TRITON_CASES}
    table = {}
    for name, options in chosen.items():
        options = dict(options)
        frames = options.pop("frames", FRAMES[ranks])
        if name in TRITON_CASES:
            table[name] = TRITON_GRID, frames, TRITON_SIZES, torch.float32, dict(options, implementation="triton")
        else:
            grid = options.pop("grid", GRID)
            table[name] = grid, frames, SIZES, torch.float64, dict(options, implementation="torch")
    return table


def tensors(grid, sizes, dtype):
    """(query, key, value, grad_out, grad_lse) of the whole video."""
    generator = torch.Generator().manual_seed(0)
    S, (B, H) = grid[0] * grid[1] * grid[2], sizes
    shapes = [*((B, S, H, dim) for dim in (DIM, DIM, VALUE_DIM, VALUE_DIM)), (B, H, S)]
    return [(1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]


def with_gradients(attention, query, key, value, grad_out, grad_lse):
    inputs = [x.detach().clone().requires_grad_(True) for x in (query, key, value)]
    out, lse = attention(*inputs)
    torch.autograd.backward((out, lse), (grad_out, grad_lse))
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *(x.grad for x in inputs)), strict=True))


def own_slices(grid, frames, rank, query, key, value, grad_out, grad_lse):
    b = grid[1] * grid[2]
    start, stop = b * sum(frames[:rank]), b * sum(frames[: rank + 1])
    return [*(x[:, start:stop] for x in (query, key, value, grad_out)), grad_lse[:, :, start:stop]]


class Counted:
    """Bytes that this rank sends to others through `all_to_all_single`."""

    def __init__(self):
        self.bytes, self.all_to_all_single = 0, dist.all_to_all_single

    def __call__(self, output, tensor, output_splits, input_splits, **options):
        assert tensor.dtype == torch.uint8 and sum(input_splits) == tensor.numel()
        self.bytes += sum(size for r, size in enumerate(input_splits) if r != dist.get_rank())
        return self.all_to_all_single(output, tensor, output_splits, input_splits, **options)

    def since(self):
        count, self.bytes = self.bytes, 0
        return count


def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreements(rank, ranks):
    """name -> the message that this rank gets where rank 1 departs from the others."""
    frames = FRAMES[ranks]
    own = own_slices(GRID, frames, rank, *tensors(GRID, SIZES, torch.float32))[:3]
    other = rank == 1
    attention = frame_parallel_vmonarch_attention
    return {
        "first-call": error_of(attention, *own, grid=(5, 3, 4) if other else GRID),
        "grid": error_of(attention, *own, grid=(6, 3, 5) if other else GRID),
        "option": error_of(attention, *own, grid=GRID, num_iterations=3 if other else 2),
        "exact": error_of(attention, *own, grid=GRID, exact=ExactBlocks(band=1) if other else None),
        "dtype": error_of(attention, *(x.double() if other else x for x in own), grid=GRID),
        "gradients": error_of(attention, *(x.clone().requires_grad_(other) for x in own), grid=GRID),
        "frames": error_of(attention, *own, grid=(7, 3, 5)),
    }


def main():
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    counted = dist.all_to_all_single = Counted()
    results, sent, sent_with_gradients = {}, {}, {}
    errors = disagreements(rank, ranks)
    for name, (grid, frames, sizes, dtype, options) in cases(ranks).items():
        attention = lambda *qkv, o=options, g=grid: frame_parallel_vmonarch_attention(
            *qkv, grid=g, return_lse=True, **o
        )
        own = own_slices(grid, frames, rank, *tensors(grid, sizes, dtype))
        counted.since()
        with torch.no_grad():
            inference = attention(*own[:3])
        sent[name] = counted.since()
        results[name] = with_gradients(attention, *own)
        sent_with_gradients[name] = counted.since()
        results[name]["inference"] = inference[0]
    report = {"results": results, "sent": sent, "sent_with_gradients": sent_with_gradients, "errors": errors}
    torch.save(report, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
