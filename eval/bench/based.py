"""Time linear and window attention against exact attention: `vmonarch bench based`.

Three kinds of cases: causal prefill, in the paper's shape; linear attention between all tokens of a video; and
windows, of a sequence or of a video.

Shapes: B batch, S tokens, H heads, d' dims of linear attention's queries and keys, E dims of values and of the queries
and keys of all other attention. Source: Based, Fig. 4-6 and §5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vmonarch.engines import FA3
from vmonarch.eval.bench.attention import ATTENTION, BOTH, attention_way, case_of, exact, randn, sdpa
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways
from vmonarch.flops import pair_flops
from vmonarch.kernels.taylor.api import taylor_attention
from vmonarch.kernels.window.api import window_attention
from vmonarch.kernels.window.neighbours import extents

EXACT = ("cudnn", FA3)
METHODS_OF = {"prefill": ("taylor", *EXACT), "video": ("taylor", *EXACT), "window": ("window", "flex", *EXACT)}
METHODS = ("taylor", "window", *EXACT, "flex")
OURS = METHODS[:2]
FORMULAE = {
    "legend": "S tokens, F = 1 + d' + d'² features, E value dim, n pairs of a query and a key that it sees; times batch"
    " and heads",
    "linear": "4·S·F·(E + 1), +8·S·F·(E + 1) backward; bytes S·(2·d' + 2·E) numbers, +S·(4·d' + 4·E) backward. Pairs"
    " inside a chunk, and sums that a kernel takes again, are not counted",
    "exact, window": "4·n·E, +10·n·E backward; bytes 4·S·E numbers, +8·S·E backward",
}


def based_case(
    kind: str,
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    training: bool = False,
    window: Any = None,
    grid: tuple[int, int, int] | None = None,
    dims: int = 16,
) -> Case:
    """Linear or window attention.

    Args:
        kind: of METHODS_OF.
        tokens: S. head_dim: E. dims: d'.
        window: tokens of a causal window, or frames, rows and columns of a neighbourhood on `grid`.
    """
    about = {key: value for key, value in locals().items() if key != "training"}
    times = lambda sizes: "×".join(map(str, sizes))
    of = {
        "prefill": f"batch {batch}, {tokens} tokens",
        "video": f"{tokens} tokens, {heads} heads, E={head_dim}",
        "window": f"{window}, {tokens} tokens" if grid is None else f"{times(window)} of {times(grid)}",
    }[kind]
    causal = kind == "prefill" or isinstance(window, int)
    # Along every axis: (size, how far back a query sees, how far ahead).
    axes = [(tokens, window or tokens)] if grid is None else list(zip(grid, window, strict=True))
    reach = [(size, *extents(along, causal)) for size, along in axes]
    return case_of(f"{kind} {of}", training, **about, causal=causal, reach=reach)


def pairs_seen(case: Case) -> int:
    """n: pairs of a query and a key in its window, of one head."""
    of_axis = lambda size, back, ahead: sum(min(i + ahead, size - 1) - max(i - back, 0) + 1 for i in range(size))
    return math.prod(of_axis(*axis) for axis in case.reach)


def linear_work(case: Case, itemsize: int) -> dict[str, Any]:
    """FLOPs and bytes of linear attention; see FORMULAE."""
    F, E, groups = 1 + case.dims + case.dims**2, case.head_dim, case.batch * case.heads
    tokens, passes = groups * case.tokens, 1 + 2 * case.training
    return {"flops": tokens * 4 * passes * F * (E + 1), "bytes": tokens * 2 * passes * (case.dims + E) * itemsize}


def softmax_work(case: Case, pairs: int, itemsize: int) -> dict[str, Any]:
    """FLOPs and bytes of attention to `pairs` keys; see FORMULAE."""
    E, groups = case.head_dim, case.batch * case.heads
    numbers = (4 + 8 * case.training) * case.tokens * E
    return {"flops": pair_flops(groups * pairs, E, training=case.training), "bytes": groups * numbers * itemsize}


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case; they share their inputs."""
    make = partial(randn, case.tokens + case.batch, device, dtype)
    size = lambda dims: (case.batch, case.tokens, case.heads, dims)
    narrow, wide = ([size(dims)] * 2 + [size(case.head_dim)] for dims in (case.dims, case.head_dim))
    (grad,) = make(size(case.head_dim)) if case.training else (None,)

    def way(method: str) -> Way:
        tensors = make(*(narrow if method == "taylor" else wide), learn=case.training)
        attend: Callable[..., torch.Tensor]
        if method in EXACT:
            attend, reference = (partial(by, causal=case.causal) for by in (partial(sdpa, method), exact))
            pairs = case.tokens * (case.tokens + 1) // 2 if case.causal else case.tokens**2
            return attention_way(attend, reference, tensors, grad, **softmax_work(case, pairs, dtype.itemsize))
        op = partial(taylor_attention, causal=case.causal)
        work = linear_work(case, dtype.itemsize)
        if method != "taylor":
            op = partial(window_attention, window=case.window, causal=case.causal, grid=case.grid)
            work = softmax_work(case, pairs_seen(case), dtype.itemsize)
        attend = flex(case, *tensors) if method == "flex" else partial(op, implementation="triton")
        return attention_way(attend, partial(op, implementation="torch"), tensors, grad, **work)

    return {method: partial(way, method) for method in METHODS_OF[case.kind] if not (case.training and method == FA3)}


def flex(case: Case, *tensors: torch.Tensor) -> Callable[..., torch.Tensor]:
    """FlexAttention to the case's windows, compiled for these tensors [B, S, H, D], whatever it is called with."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # After a few functions torch would stop compiling new ones and write all scores to memory instead.
    torch.compiler.reset()
    seen = lambda b, h, i, j: near(case, i, j)
    mask = create_block_mask(seen, None, None, case.tokens, case.tokens, device=tensors[0].device)
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return lambda *_: compiled(*(x.transpose(1, 2) for x in tensors), block_mask=mask).transpose(1, 2)


def near(case: Case, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Whether the query of a number sees the key of a number in the case's window; the numbers broadcast."""
    seen, stride = None, 1
    for size, back, ahead in reversed(case.reach):
        at, of = (x // stride % size for x in (i, j))
        for side in (of >= at - back, of <= at + ahead):
            # One after the other: of all pairs of a video, each condition is several gigabytes.
            seen = side if seen is None else seen & side
        stride *= size
    assert seen is not None
    return seen


def compiled(case: Case, method: str) -> Any:
    """The kind of case and its sizes; FlexAttention's code depends on the window too."""
    if method not in METHODS_OF[case.kind]:
        return None
    if method == "flex":
        return method, case.label
    return (method, case.kind, case.head_dim, case.training, case.grid is None) if method in OURS else None


def bench() -> Bench:
    """All cases, the most telling first."""
    prefill = lambda batch, tokens: ("prefill", batch, tokens, 16, 64, ())
    video = lambda frames, heads, dim: ("video", 1, frames * 28 * 52, heads, dim, ())
    sequence = lambda window, tokens: ("window", 1, tokens, 16, 64, (window,))
    near = lambda frames, *window: ("window", 1, frames * 28 * 52, 12, 128, (window, (frames, 28, 52)))
    groups: list[tuple[Any, ...]] = [
        prefill(1, 16384), video(16, 16, 64), video(16, 12, 128), sequence(64, 65536), near(43, 3, 9, 9),
        prefill(1, 65536), prefill(1, 4096), prefill(1, 1024), video(81, 16, 64), video(81, 12, 128),
        video(43, 16, 64), video(43, 12, 128),
        prefill(1, 32768), prefill(1, 8192), prefill(1, 2048), video(24, 16, 64), video(24, 12, 128),
        prefill(8, 1024), prefill(4, 4096), prefill(4, 16384), prefill(2, 16384),
        near(43, 5, 15, 15), sequence(64, 16384), sequence(128, 65536), near(16, 3, 9, 9),
        sequence(128, 16384), near(16, 5, 15, 15),
    ]  # fmt: skip
    rows = [(*sizes, training, *window) for *sizes, window in groups for training in BOTH]
    return Bench(
        name="based",
        methods=METHODS,
        ours=OURS,
        cases=[based_case(*row) for row in rows],
        ways=ways,
        base="cudnn",
        compiled=compiled,
        formulae=FORMULAE,
        settings=ATTENTION,
    )
