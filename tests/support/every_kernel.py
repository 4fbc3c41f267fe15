"""A small call of every kernel in every form, forward and backward, for a sanitizer to look at.

    compute-sanitizer --tool memcheck python tests/support/every_kernel.py flash_bias hopper

looks at one group of calls in one form, and names the kernels that it launched. Sizes are two tiles and more, the last
of them ragged.
"""

import sys
from contextlib import contextmanager

import torch

import vmonarch
from vmonarch import ExactBlocks, taylor_attention, vmonarch_attention
from vmonarch.kernels.common.launch import launch_overrides
from vmonarch.kernels.norm_rotary.api import norm_rotary
from vmonarch.kernels.residual.api import add_residual, attention_residual, renew_residual

GRID, BRICK, LSE = {"grid": (3, 9, 17)}, {"grid": (7, 9, 5)}, {"return_lse": True}


class Float32(tuple):
    """A shape whose tensor is of float32 whatever the others are."""


def qkv(Sq, Sk, D, E=0):
    return [(1, Sq, 2, D), (1, Sk, 2, D), (1, Sk, 2, E or D)]


def masked(op):
    mask = lambda key: torch.arange(key.shape[1], device=key.device)[None] % 3 > 0
    return lambda query, key, *tensors, **options: op(query, key, *tensors, key_mask=mask(key), **options)


@torch.no_grad()
def in_bytes(*tensors, **options):
    return vmonarch.int8_attention(*tensors, **LSE, **options)


def with_bias(query, key, value, *factors, **options):
    return vmonarch_attention(query, key, value, bias=factors, **GRID, **options)


def in_frames(query, key, value, weights, **options):
    return taylor_attention(query, key, value, frame_weights=weights.abs(), **options)


def normed(x, weight, **options):
    angles = torch.linspace(0, 9, 130 * 80, device=x.device).view(1, 130, 1, 80)
    return norm_rotary(x, weight, angles.cos(), angles.sin(), heads=3, eps=1e-6, **options)


@torch.no_grad()
def shared(exact, approximate, **options):
    approximate = approximate.transpose(1, 2)
    kept = attention_residual(exact, approximate, **options)
    renew_residual(kept, exact, approximate, implementation=options["implementation"])
    add_residual(approximate, kept, implementation=options["implementation"])


def merged(out_1, out_2, lse_1, lse_2, **options):
    return vmonarch.merge_partials((out_1, lse_1), (out_2.transpose(1, 2), lse_2), **options)


# By group: an op, the shapes of its tensors, and its options.
CALLS = {
    "vmonarch": [
        *((vmonarch_attention, qkv(459, 459, 128), {**GRID, **LSE, **options}) for options in (
            {}, {"coarse": 2}, {"exact": ExactBlocks(band=0)}, {"row_share": 0.4}, {"last_l_update": False})),
        (vmonarch_attention, qkv(459, 459, 64, 96), GRID),
    ],
    # The L-steps for every size of a tile, and in several; on Hopper centroids have a kernel for wide heads.
    "many_frames": [
        (vmonarch_attention, qkv(T * 15, T * 15, D), {"grid": (T, 3, 5), "exact": exact})
        for T, D in ((20, 64), (43, 64), (81, 64), (140, 64), (20, 128))
        for exact in ("first_frame", ExactBlocks(columns=(1, 17), rows=(2,)))
    ],
    "vmonarch_bias": [
        (with_bias, [*qkv(459, 459, 64), kind((1, 459, 1, 4)), kind((1, 459, 2, 4))], {}) for kind in (tuple, Float32)
    ],
    "monarch": [
        (op, qkv(461, 461, 64), {"block_size": 150, "padding": padding})
        for op in (vmonarch.monarch_attention, masked(vmonarch.monarch_attention)) for padding in ("post", "pre")
    ],
    "flash_entropy": [
        (vmonarch.flash_entropy_attention, qkv(Sq, Sk, D, E), {"entropy_grad": Sq > Sk / 2})
        for Sq, Sk in ((200, 300), (70, 4000)) for D, E in ((64, 0), (128, 0), (80, 40))
    ],
    "flash_bias": [
        (op, [*qkv(200, 300, 64), kind((1, 200, 1, 9)), kind((1, 300, 2, 9))], {**LSE, "causal": causal})
        for op, causal in ((vmonarch.flash_bias_attention, False), (vmonarch.flash_bias_attention, True),
                           (masked(vmonarch.flash_bias_attention), False))
        for kind in (tuple, Float32)
    ],
    "int8": [
        (op, qkv(200, 600, D, E), {}) for op in (in_bytes, masked(in_bytes)) for D, E in ((64, 0), (128, 0), (80, 40))
    ],
    "taylor": [
        *((taylor_attention, qkv(500, 500, 16, 64), options)
          for options in ({}, {"causal": True}, LSE)),
        (taylor_attention, qkv(500, 500, 24, 40), {}),
        (in_frames, [*qkv(500, 500, 16, 64), Float32((2, 5, 5))], {}),
    ],
    "window": [
        *((vmonarch.window_attention, qkv(S, S, 64), {**options, "causal": causal}) for causal in (False, True)
          for S, options in ((300, {"window": 70}), (315, {**BRICK, "window": (3, 5, 4)}))),
        (vmonarch.window_attention, qkv(1, 300, 64), {"window": 70, "causal": True}),
    ],
    # Tiles of 64 tokens have kernels of their own backward.
    "two_resolutions": [
        (vmonarch.two_resolution_attention, qkv(315, 315, 64), {**BRICK, **options}) for options in (
            {}, {"rest": False},
            {"tile": (4, 4, 4)}, {"tile": (4, 4, 4), "rest": False})
    ],
    "norms": [(normed, [(2, 130, 240), (240,)], {})],
    "residual": [(shared, [(2, 130, 3, E), (2, 3, 130, E)], {}) for E in (128, 40)],
    "merging": [
        (merged, [(2, 130, 3, E), (2, 3, 130, E), Float32((2, 3, 130)), Float32((2, 3, 130))], {}) for E in (128, 40)
    ],
}  # fmt: skip
# Whether kernels for Hopper are used where they can be, and the groups that have none.
FORMS, PORTABLE = {"hopper": 1, "portable": 0}, ("taylor", "window", "norms", "residual", "merging")
GROUPS = {name: ("portable",) if name in PORTABLE else tuple(FORMS) for name in CALLS}


def run(group, device, implementation, dtype):
    """Make all calls of a group, without and with gradients."""
    for op, shapes, options in CALLS[group]:
        dtypes = [torch.float32 if isinstance(shape, Float32) else dtype for shape in shapes]
        tensors = [torch.randn(s, device=device, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        with torch.no_grad():
            op(*tensors, **options, implementation=implementation)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        results = op(*leaves, **options, implementation=implementation)
        results = [x for x in (results if isinstance(results, tuple) else (results,)) if getattr(x, "requires_grad", 0)]
        # Overrides are of this thread.
        with torch.autograd.set_multithreading_enabled(False):
            if results:
                torch.autograd.grad(results, leaves, [torch.randn_like(x) for x in results])


@contextmanager
def launches():
    """The names of the kernels that are launched meanwhile."""
    from triton.runtime.jit import JITFunction

    names, launch = set(), JITFunction.run

    def named(self, *args, **options):
        names.add(self.__name__)
        return launch(self, *args, **options)

    JITFunction.run = named
    try:
        yield names
    finally:
        JITFunction.run = launch


def main(group, form):
    torch.manual_seed(0)
    with launches() as names, launch_overrides({"hopper": {"enabled": FORMS[form]}}):
        run(group, "cuda", "triton", torch.bfloat16)
        torch.cuda.synchronize()
    print(f"done {group} {form}: {' '.join(sorted(names))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
