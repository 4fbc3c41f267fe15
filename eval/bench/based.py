"""Time linear and window attention against exact attention: `vmonarch bench based`.

Four kinds of cases: prefill, causal, in the paper's shape; decoding, one token with a state, with the keys of a window,
or with a cache of all keys; linear attention between all tokens of a video; and windows, of a sequence or of a video.

Shapes: B batch, S tokens, H heads, d' dims of linear attention's queries and keys, E dims of values and of the queries
and keys of all other attention. Source: Based, Fig. 4-7 and §5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vmonarch.eval.bench.attention import ATTENTION, BOTH, attention_way, bytes_of, case_of, exact, flex, randn, sdpa
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways
from vmonarch.flops import pair_flops
from vmonarch.kernels.taylor.api import taylor_attention
from vmonarch.kernels.taylor.reference import LinearState
from vmonarch.kernels.window.api import window_attention
from vmonarch.kernels.window.neighbours import extents

# Keys that a decoded token sees in a cache, in a window, and that made the state.
CACHES = (65536, 16384, 4096, 1024, 64)
DECODE_WINDOW = 64
BEFORE = 64
METHODS_OF = {
    "prefill": ("taylor", "taylor-torch", "cudnn", "flash"),
    "video": ("taylor", "taylor-torch", "cudnn"),
    "window": ("window", "flex", "cudnn"),
    "decode": ("taylor", "taylor-torch", "window", *(f"sdpa-{keys}" for keys in CACHES)),
}
METHODS = tuple(dict.fromkeys(method for methods in METHODS_OF.values() for method in methods))
OURS = ("taylor", "window")
FORMULAE = {
    "legend": "S tokens, F = 1 + d' + d'² features, E value dim, n pairs of a query and a key that it sees; times batch"
    " and heads",
    "linear": "4·S·F·(E + 1), +8·S·F·(E + 1) backward; bytes S·(2·d' + 2·E) numbers, +S·(4·d' + 4·E) backward. Pairs"
    " inside a chunk, and sums that a kernel takes again, are not counted",
    "exact, window": "4·n·E, +10·n·E backward; bytes 4·S·E numbers, +8·S·E backward",
    "decode": "linear: 4·F·(E + 1), the float32 state read and written; from a cache of n keys: 4·n·E, the cache read."
    " It is recorded as a CUDA graph of one token, because launching takes longer than computing",
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
        tokens: S; for "decode", keys of the longest cache.
        head_dim: E. dims: d'.
        window: tokens of a causal window, or frames, rows and columns of a neighbourhood on `grid`.
    """
    about = {key: value for key, value in locals().items() if key != "training"}
    times = lambda sizes: "×".join(map(str, sizes))
    of = {
        "prefill": f"batch {batch}, {tokens} tokens",
        "decode": f"batch {batch}",
        "video": f"{tokens} tokens, {heads} heads, E={head_dim}",
        "window": f"{window}, {tokens} tokens" if grid is None else f"{times(window)} of {times(grid)}",
    }[kind]
    causal = kind == "prefill" or isinstance(window, int)
    # Along every axis: (size, how far back a query sees, how far ahead).
    axes = [(tokens, window or tokens)] if grid is None else list(zip(grid, window, strict=True))
    reach = [(size, *extents(along, causal)) for size, along in axes]
    made = case_of(f"{kind} {of}", training, **about, causal=causal, reach=reach)
    return Case(**{**vars(made), "label": f"{kind} {of}"}) if kind == "decode" else made


def pairs_seen(case: Case) -> int:
    """n: pairs of a query and a key in its window, of one head."""
    of_axis = lambda size, back, ahead: sum(min(i + ahead, size - 1) - max(i - back, 0) + 1 for i in range(size))
    return math.prod(of_axis(*axis) for axis in case.reach)


def linear_work(case: Case, itemsize: int) -> dict[str, Any]:
    """FLOPs and bytes of linear attention; see FORMULAE."""
    F, E, groups = 1 + case.dims + case.dims**2, case.head_dim, case.batch * case.heads
    if case.kind == "decode":
        return {"flops": groups * 4 * F * (E + 1), "bytes": groups * 2 * F * (E + 1) * 4}
    tokens, passes = groups * case.tokens, 1 + 2 * case.training
    return {"flops": tokens * 4 * passes * F * (E + 1), "bytes": tokens * 2 * passes * (case.dims + E) * itemsize}


def softmax_work(case: Case, pairs: int, itemsize: int) -> dict[str, Any]:
    """FLOPs and bytes of attention to `pairs` keys; see FORMULAE."""
    E, groups = case.head_dim, case.batch * case.heads
    numbers = 2 * pairs * E if case.kind == "decode" else (4 + 8 * case.training) * case.tokens * E
    return {"flops": pair_flops(groups * pairs, E, training=case.training), "bytes": groups * numbers * itemsize}


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case; they share their inputs."""
    make = partial(randn, case.tokens + case.batch, device, dtype)
    if case.kind == "decode":
        return _decoding(case, make)
    size = lambda dims: (case.batch, case.tokens, case.heads, dims)
    narrow, wide = ([size(dims)] * 2 + [size(case.head_dim)] for dims in (case.dims, case.head_dim))
    (grad,) = make(size(case.head_dim)) if case.training else (None,)

    def way(method: str) -> Way:
        attend: Callable[..., torch.Tensor]
        if method.startswith("taylor"):
            by = "torch" if method == "taylor-torch" else "triton"
            attend, reference = (partial(taylor_attention, causal=case.causal, implementation=i) for i in (by, "torch"))
            return attention_way(
                attend, reference, make(*narrow, learn=case.training), grad, **linear_work(case, dtype.itemsize)
            )
        tensors = make(*wide, learn=case.training)
        if method in ("window", "flex"):
            of: dict[str, Any] = {"window": case.window, "causal": case.causal, "grid": case.grid}
            attend, reference = (partial(window_attention, **of, implementation=i) for i in ("triton", "torch"))
            if method == "flex":
                from torch.nn.attention.flex_attention import create_block_mask

                seen = lambda b, h, i, j: near(case, i, j)
                mask = create_block_mask(seen, None, None, case.tokens, case.tokens, device=device)
                attend = flex(*tensors, block_mask=mask)
            work = softmax_work(case, pairs_seen(case), dtype.itemsize)
        else:
            attend = partial(sdpa, method, causal=case.causal)
            reference = partial(exact, causal=case.causal)
            pairs = case.tokens * (case.tokens + 1) // 2 if case.causal else case.tokens**2
            work = softmax_work(case, pairs, dtype.itemsize)
        return attention_way(attend, reference, tensors, grad, **work)

    return {method: partial(way, method) for method in METHODS_OF[case.kind]}


def _decoding(case: Case, make: Callable[..., list[torch.Tensor]]) -> Ways:
    """One token that reads a state and joins it, or that reads the last keys of a cache."""
    B, H, E = case.batch, case.heads, case.head_dim
    q, k, v = make(*[(B, 1, H, case.dims)] * 2, (B, 1, H, E))
    before = make(*[(B, BEFORE, H, case.dims)] * 2, (B, BEFORE, H, E))
    wide, keys, values = make((B, 1, H, E), *[(B, case.tokens, H, E)] * 2)
    graph = q.device.type == "cuda"
    advance = partial(taylor_attention, causal=True, return_state=True)
    state: LinearState = advance(*before, implementation="torch")[1]

    def step(by: str, of: LinearState, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            out, after = advance(*qkv, state=of, implementation=by)
        return out, after.kv, after.k

    def way(method: str) -> Way:
        if method.startswith("taylor"):
            names = ("out", "state", "sums")
            floats = [x.float() for x in (q, k, v)]
            of_floats = LinearState(state.kv.float(), state.k.float(), state.tokens)
            return Way(
                run=partial(step, "torch" if method == "taylor-torch" else "triton", state, q, k, v),
                found=lambda results: dict(zip(names, results, strict=True)),
                expected=lambda: dict(zip(names, step("torch", of_floats, *floats), strict=True)),
                input_bytes=bytes_of([q, k, v, state.kv, state.k]),
                graph=graph,
                **linear_work(case, q.itemsize),
            )
        seen = DECODE_WINDOW if method == "window" else int(method.removeprefix("sdpa-"))
        attend: Callable[..., torch.Tensor] = partial(sdpa, "sdpa")
        if method == "window":
            attend = partial(window_attention, window=DECODE_WINDOW, causal=True, implementation="triton")
        tensors = [wide, keys[:, -seen:], values[:, -seen:]]
        return attention_way(attend, exact, tensors, None, graph=graph, **softmax_work(case, seen, q.itemsize))

    sees = lambda method: not method.startswith("sdpa-") or int(method.removeprefix("sdpa-")) <= case.tokens
    return {method: partial(way, method) for method in METHODS_OF["decode"] if sees(method)}


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
    decode = lambda batch: ("decode", batch, CACHES[0], 16, 64, ())
    sequence = lambda window, tokens: ("window", 1, tokens, 16, 64, (window,))
    near = lambda frames, *window: ("window", 1, frames * 28 * 52, 12, 128, (window, (frames, 28, 52)))
    groups: list[tuple[Any, ...]] = [
        prefill(1, 16384), video(16, 16, 64), video(16, 12, 128), decode(128), sequence(64, 65536), near(43, 3, 9, 9),
        prefill(1, 65536), prefill(1, 4096), prefill(1, 1024), video(81, 16, 64), video(81, 12, 128),
        video(43, 16, 64), video(43, 12, 128), decode(1), decode(256), decode(32), decode(8),
        prefill(1, 32768), prefill(1, 8192), prefill(1, 2048), video(24, 16, 64), video(24, 12, 128),
        prefill(8, 1024), prefill(4, 4096), prefill(4, 16384), prefill(2, 16384),
        near(43, 5, 15, 15), sequence(64, 16384), sequence(128, 65536), near(16, 3, 9, 9),
        sequence(128, 16384), near(16, 5, 15, 15),
    ]  # fmt: skip
    rows: list[tuple[Any, ...]] = [
        (kind, *sizes, training, *window)
        for kind, *sizes, window in groups
        for training in BOTH
        if not (kind == "decode" and training)
    ]
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
