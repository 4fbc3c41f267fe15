"""A small call of every kernel in every form, forward and backward, for a sanitizer to look at.

    compute-sanitizer --tool memcheck python -m vmonarch.eval.studies.every_kernel flash_bias hopper
    python -m vmonarch.eval.studies.every_kernel --list | xargs -P 8 -L 1 python -m vmonarch.eval.studies.every_kernel

The first line looks at one family of kernels in one form, the second runs them all and leaves what it compiles in
Triton's cache. Sizes are two tiles and more, the last of them ragged. Each run names the kernels that it launched.

Legend: B batch, S tokens, H heads, D head dim, E value dim, R bias rank, T frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vmonarch import (
    ExactBlocks,
    flash_bias_attention,
    flash_entropy_attention,
    merge_partials,
    monarch_attention,
    taylor_attention,
    two_resolution_attention,
    vmonarch_attention,
    window_attention,
)
from vmonarch.eval.record import script_parser
from vmonarch.kernels.common.launch import launch_overrides
from vmonarch.kernels.norm_rotary.api import norm_rotary
from vmonarch.kernels.residual.api import DTYPES, add_residual, attention_residual

# Whether kernels for Hopper are used where they can be.
FORMS = {"hopper": 1, "portable": 0}


class Caller:
    """Calls ops on random tensors of one device and dtype, without and with gradients."""

    def __init__(self, device: str, implementation: str, dtype: torch.dtype) -> None:
        self.device, self.implementation, self.dtype = device, implementation, dtype

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def __call__(self, op: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
        options["implementation"] = self.implementation
        with torch.no_grad():
            op(*tensors, **options)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        results = op(*leaves, **options)
        results = [x for x in (results if isinstance(results, tuple) else (results,)) if x.requires_grad]
        # Overrides are of this thread.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(results, leaves, [torch.randn_like(x) for x in results])

    def attend(
        self,
        op: Callable[..., Any],
        Sq: int,
        Sk: int,
        D: int,
        *others: torch.Tensor,
        E: int | None = None,
        **options: Any,
    ) -> None:
        """Call with a query, key and value of two heads."""
        shapes = ((1, Sq, 2, D), (1, Sk, 2, D), (1, Sk, 2, E or D))
        self(op, *(self.tensor(*shape) for shape in shapes), *others, **options)


def vmonarch(call: Caller) -> None:
    grid = (3, 9, 17)
    for options in (
        {},
        {"coarse": 2, "entropy_grad": True},
        {"tiles": (2, 2)},
        {"tiles": (2, 2), "coarse": 2},
        {"frames_per_block": 2},
        {"exact": ExactBlocks(band=0)},
        {"row_share": 0.4, "r_share": 0.4},
        {"last_l_update": False},
    ):
        call.attend(vmonarch_attention, 459, 459, 128, grid=grid, return_lse=True, **options)
    call.attend(vmonarch_attention, 459, 459, 64, grid=grid, E=96)


def many_frames(call: Caller) -> None:
    """The L-steps for every size of a tile, and in several tiles."""
    for T in (20, 43, 81, 140):
        for exact in ("first_frame", ExactBlocks(columns=(1, 17), rows=(2,))):
            call.attend(vmonarch_attention, T * 15, T * 15, 64, grid=(T, 3, 5), exact=exact)
    # On Hopper centroids have a kernel for wide heads.
    call.attend(vmonarch_attention, 20 * 15, 20 * 15, 128, grid=(20, 3, 5))


def vmonarch_bias(call: Caller) -> None:
    def op(query, key, value, query_factor, key_factor, **options):
        return vmonarch_attention(query, key, value, bias=(query_factor, key_factor), grid=(3, 9, 17), **options)

    for dtype in (call.dtype, torch.float32):
        factors = [call.tensor(1, 459, heads, 4, dtype=dtype) for heads in (1, 2)]
        call.attend(op, 459, 459, 64, *factors)


def monarch(call: Caller) -> None:
    mask = torch.rand(1, 461, device=call.device) < 0.7
    for padding in ("post", "pre"):
        for key_mask in (None, mask):
            call.attend(monarch_attention, 461, 461, 64, block_size=150, padding=padding, key_mask=key_mask)


def flash_entropy(call: Caller) -> None:
    for Sq, Sk in ((200, 300), (70, 4000)):
        for D in (64, 128):
            call.attend(flash_entropy_attention, Sq, Sk, D, entropy_grad=True)
    call.attend(flash_entropy_attention, 200, 300, 80, E=40)


def flash_bias(call: Caller) -> None:
    mask = torch.rand(1, 300, device=call.device) < 0.7
    for options in ({}, {"causal": True}, {"key_mask": mask}):
        for dtype in (call.dtype, torch.float32):
            factors = call.tensor(1, 200, 1, 9, dtype=dtype), call.tensor(1, 300, 2, 9, dtype=dtype)
            call.attend(flash_bias_attention, 200, 300, 64, *factors, return_lse=True, **options)


def taylor(call: Caller) -> None:
    for options in ({}, {"causal": True}, {"feature_map": "elu"}, {"return_lse": True}):
        call.attend(taylor_attention, 500, 500, 16, E=64, **options)
    call.attend(taylor_attention, 500, 500, 24, E=40)
    weights = torch.rand(2, 5, 5, device=call.device)

    def in_frames(query, key, value, weights, **options):
        return taylor_attention(query, key, value, frame_weights=weights, **options)

    call.attend(in_frames, 500, 500, 16, weights, E=64)
    with torch.no_grad():
        state = None
        for tokens in (70, 1, 1):
            inputs = [call.tensor(1, tokens, 2, size) for size in (16, 16, 64)]
            _, state = taylor_attention(
                *inputs, causal=True, state=state, return_state=True, implementation=call.implementation
            )


def window(call: Caller) -> None:
    for causal in (False, True):
        call.attend(window_attention, 300, 300, 64, window=70, causal=causal)
        call.attend(window_attention, 7 * 9 * 5, 7 * 9 * 5, 64, grid=(7, 9, 5), window=(3, 5, 4), causal=causal)
    call.attend(window_attention, 1, 300, 64, window=70, causal=True)


def two_resolutions(call: Caller) -> None:
    tokens = 7 * 9 * 5
    chosen = ({"cell": (2, 2, 4), "sink": True}, {"rest": False, "local": 1}, {"share": None, "beta": 0.5})
    # Tiles of 64 tokens, too, which have kernels of their own backward.
    for options in (*chosen, {"tile": (4, 4, 4)}, {"tile": (4, 4, 4), "rest": False}):
        call.attend(two_resolution_attention, tokens, tokens, 64, grid=(7, 9, 5), **options)


def norms(call: Caller) -> None:
    def op(x, weight, **options):
        angles = call.tensor(1, 130, 1, 80, dtype=torch.float32)
        return norm_rotary(x, weight, angles.cos(), angles.sin(), heads=3, eps=1e-6, **options)

    call(op, call.tensor(2, 130, 240), call.tensor(240))


def residual(call: Caller) -> None:
    for E in (128, 40):
        exact, approximate = call.tensor(2, 130, 3, E), call.tensor(2, 3, 130, E).transpose(1, 2)
        for dtype in DTYPES:
            kept = attention_residual(exact, approximate, dtype=dtype, implementation=call.implementation)
            add_residual(approximate, kept, implementation=call.implementation)


def merging(call: Caller) -> None:
    def op(out_1, out_2, lse_1, lse_2, **options):
        return merge_partials((out_1, lse_1), (out_2, lse_2), **options)

    for E in (128, 40):
        lses = [call.tensor(2, 3, 130, dtype=torch.float32) for _ in range(2)]
        call(op, call.tensor(2, 130, 3, E), call.tensor(2, 3, 130, E).transpose(1, 2), *lses)


# Which forms each family has.
FAMILIES: dict[Callable[[Caller], None], Sequence[str]] = {
    vmonarch: ("hopper", "portable"),
    many_frames: ("hopper", "portable"),
    vmonarch_bias: ("hopper", "portable"),
    monarch: ("hopper", "portable"),
    flash_entropy: ("hopper", "portable"),
    flash_bias: ("hopper", "portable"),
    taylor: ("hopper", "portable"),
    window: ("portable",),
    two_resolutions: ("hopper", "portable"),
    norms: ("portable",),
    residual: ("portable",),
    merging: ("portable",),
}


@contextmanager
def launches() -> Iterator[set[str]]:
    """The names of the kernels that are launched meanwhile."""
    from triton.runtime.jit import JITFunction

    names: set[str] = set()
    run = JITFunction.run

    def named(self: Any, *args: Any, **options: Any) -> Any:
        names.add(self.__name__)
        return run(self, *args, **options)

    JITFunction.run = named
    try:
        yield names
    finally:
        JITFunction.run = run


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.every_kernel", __doc__)
    families = {family.__name__: family for family in FAMILIES}
    parser.add_argument("family", nargs="?", choices=list(families), help="default: all")
    parser.add_argument("form", nargs="?", choices=list(FORMS), help="default: all that the family has")
    parser.add_argument("--list", action="store_true", help="print every family and form, and do nothing else")
    options = parser.parse_args(arguments)
    chosen = [
        (name, form)
        for name, family in families.items()
        for form in FAMILIES[family]
        if options.family in (None, name) and options.form in (None, form)
    ]
    if options.list:
        print("\n".join(" ".join(one) for one in chosen))
        return 0
    for name, form in chosen:
        torch.manual_seed(0)
        with launches() as names, launch_overrides({"hopper": {"enabled": FORMS[form]}}):
            families[name](Caller("cuda", "triton", torch.bfloat16))
            torch.cuda.synchronize()
        print(f"done {name} {form}: {' '.join(sorted(names))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
