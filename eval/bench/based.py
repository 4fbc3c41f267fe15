"""Time linear and window attention against exact attention: `vmonarch bench based`.

Four kinds of cases: prefill, causal, in the paper's shape; decoding, one token with a state, with the keys of a window,
or with a cache of all keys; linear attention between all tokens of a video; and windows, of a sequence or of a video.

Shapes: B batch, S tokens, H heads, d' dims of linear attention's queries and keys, E dims of values and of the queries
and keys of all other attention. Source: Based, Fig. 4-7 and §5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from vmonarch.eval.bench.gate import NAMES
from vmonarch.eval.bench.runner import ATTENTION, Bench, Tensors, Way, Ways, flex, sdpa, with_gradients
from vmonarch.flops import pair_flops
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.reference import in_row_chunks, softmax_parts, to_groups
from vmonarch.kernels.taylor.api import taylor_attention
from vmonarch.kernels.taylor.reference import LinearState
from vmonarch.kernels.window.api import window_attention
from vmonarch.kernels.window.neighbours import extents

# Keys that a decoded token sees in a cache.
CACHES = (65536, 16384, 4096, 1024, 64)
DECODE_WINDOW = 64
# Tokens that made the state.
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
    "legend": "S tokens, F = 1 + d' + d'² features, E value dim, n pairs of a query and a key that it sees; a"
    " multiply-add counts 2; times batch and heads",
    "linear": "4·S·F·(E + 1) forward, the sums of keys and what queries read of them; +8·S·F·(E + 1) backward: what dq"
    " reads of the keys' sums, the sums of queries, what dk and dv read of these. Pairs inside a chunk, and sums that a"
    " kernel takes again, are not counted",
    "exact, window": "4·n·E forward, +10·n·E backward",
    "bytes": "linear: q', k', v read and out written, once, S·(2·d' + 2·E) numbers; backward: these and dO read,"
    " dq', dk' and dv written, +S·(4·d' + 4·E). Exact and window: 4·S·E, +8·S·E",
    "decode": "linear: 4·F·(E + 1), the float32 state read and written; from a cache of n keys: 4·n·E, the cache read;"
    " tokens per second are batch / time, of attention alone",
    "byte floor": "bytes / measured copy rate; FLOP floor: FLOPs / measured bf16 matmul rate",
    "graph": "decoding is recorded as a CUDA graph of one token, because launching takes longer than computing; all"
    " else is called as a model would call it",
}


@dataclass(frozen=True)
class Case:
    """What one row of numbers is measured on.

    Args:
        kind: of METHODS_OF.
        tokens: S; of "decode", keys of the longest cache.
        head_dim: E. dims: d'.
        training: forward and backward.
        window: tokens of a causal window, or frames, rows and columns of a neighbourhood on `grid`.
    """

    kind: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    training: bool = False
    window: int | tuple[int, int, int] | None = None
    grid: tuple[int, int, int] | None = None
    dims: int = 16

    @property
    def causal(self) -> bool:
        return self.kind == "prefill" or isinstance(self.window, int)

    @property
    def label(self) -> str:
        of = {
            "prefill": f"batch {self.batch}, {self.tokens} tokens",
            "decode": f"batch {self.batch}",
            "video": f"{self.tokens} tokens, {self.heads} heads, E={self.head_dim}",
            "window": f"{self.window}, {self.tokens} tokens"
            if self.grid is None
            else f"{_times(self.window)} of {_times(self.grid)}",
        }[self.kind]
        passes = {"decode": ""}.get(self.kind, " forward+backward" if self.training else " forward")
        return f"{self.kind} {of}{passes}"

    @property
    def reach(self) -> list[tuple[int, int, int]]:
        """Along every axis that a window cuts: (size, how far back a query sees, how far ahead)."""
        if self.kind != "window":
            return [(self.tokens, self.tokens, 0)] if self.causal else []
        if isinstance(self.window, int):
            return [(self.tokens, *extents(self.window, True))]
        assert self.grid is not None and self.window is not None
        return [(size, *extents(window, False)) for size, window in zip(self.grid, self.window, strict=True)]

    def pairs(self, reach: Sequence[tuple[int, int, int]]) -> int:
        """n: pairs of a query and a key that it sees, of one head."""
        seen = [
            sum(min(i + ahead, size - 1) - max(i - back, 0) + 1 for i in range(size)) for size, back, ahead in reach
        ]
        return math.prod(seen) if seen else self.tokens**2

    def linear_work(self, itemsize: int) -> tuple[float, float]:
        """FLOPs and bytes of linear attention; see FORMULAE."""
        F, E, groups = 1 + self.dims + self.dims**2, self.head_dim, self.batch * self.heads
        if self.kind == "decode":
            return groups * 4 * F * (E + 1), groups * 2 * F * (E + 1) * 4
        numbers = (2 + 4 * self.training) * self.dims + (2 + 4 * self.training) * E
        return groups * self.tokens * (4 + 8 * self.training) * F * (E + 1), groups * self.tokens * numbers * itemsize

    def softmax_work(self, pairs: int, itemsize: int) -> tuple[float, float]:
        """FLOPs and bytes of attention to `pairs` keys; see FORMULAE."""
        E, groups = self.head_dim, self.batch * self.heads
        if self.kind == "decode":
            return pair_flops(groups * pairs, E), groups * 2 * pairs * E * itemsize
        numbers = (4 + 8 * self.training) * self.tokens * E
        return pair_flops(groups * pairs, E, training=self.training), groups * numbers * itemsize


def _times(sizes: Any) -> str:
    return "×".join(map(str, sizes))


def standard_cases() -> list[Case]:
    """All cases, the most telling first."""

    def prefill(batch: int, tokens: int) -> list[Case]:
        return [Case("prefill", batch, tokens, 16, 64, training=training) for training in (False, True)]

    def video(frames: int, heads: int, dim: int) -> list[Case]:
        return [Case("video", 1, frames * 28 * 52, heads, dim, training=training) for training in (False, True)]

    def neighbourhood(frames: int, window: tuple[int, int, int]) -> list[Case]:
        grid = (frames, 28, 52)
        return [Case("window", 1, math.prod(grid), 12, 128, training, window, grid) for training in (False, True)]

    def sequence(window: int, tokens: int) -> list[Case]:
        return [Case("window", 1, tokens, 16, 64, training=training, window=window) for training in (False, True)]

    def decode(batch: int) -> list[Case]:
        return [Case("decode", batch, CACHES[0], 16, 64)]

    groups = [
        prefill(1, 16384), video(16, 16, 64), video(16, 12, 128), decode(128), sequence(64, 65536),
        neighbourhood(43, (3, 9, 9)),
        prefill(1, 65536), prefill(1, 4096), prefill(1, 1024), video(81, 16, 64), video(81, 12, 128),
        video(43, 16, 64), video(43, 12, 128), decode(1), decode(256), decode(32), decode(8),
        prefill(1, 32768), prefill(1, 8192), prefill(1, 2048), video(24, 16, 64), video(24, 12, 128),
        prefill(8, 1024), prefill(4, 4096), prefill(4, 16384), prefill(2, 16384),
        neighbourhood(43, (5, 15, 15)), sequence(64, 16384), sequence(128, 65536), neighbourhood(16, (3, 9, 9)),
        sequence(128, 16384), neighbourhood(16, (5, 15, 15)),
    ]  # fmt: skip
    return [case for group in groups for case in group]


class Inputs:
    """Tensors of a case, each made when it is first needed; standard normal."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self._generator = torch.Generator(device).manual_seed(case.tokens + case.batch)
        # Gradients of one head take as long as all else of a check.
        self.checked = [0] if case.training else [0, case.heads - 1]
        self._expected: dict[str, Tensors] = {}

    def _randn(self, tokens: int, dims: int, learns: bool = False) -> torch.Tensor:
        size = (self.case.batch, tokens, self.case.heads, dims)
        x = torch.randn(size, generator=self._generator, device=self.device, dtype=self.dtype)
        return x.requires_grad_(learns)

    @property
    def _queries(self) -> int:
        return 1 if self.case.kind == "decode" else self.case.tokens

    @cached_property
    def narrow(self) -> list[torch.Tensor]:
        """Queries and keys of linear attention, [B, S, H, d']."""
        return [self._randn(self._queries, self.case.dims, self.case.training) for _ in range(2)]

    @cached_property
    def wide(self) -> list[torch.Tensor]:
        """Queries and keys of other attention, [B, S, H, E]."""
        return [self._randn(self._queries, self.case.head_dim, self.case.training) for _ in range(2)]

    @cached_property
    def value(self) -> torch.Tensor:
        """[B, S, H, E]"""
        return self._randn(self._queries, self.case.head_dim, self.case.training)

    @cached_property
    def grad_out(self) -> torch.Tensor | None:
        """[B, S, H, E] in training."""
        return self._randn(self._queries, self.case.head_dim) if self.case.training else None

    @cached_property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens so far, [B, S, H, E]."""
        return self._randn(self.case.tokens, self.case.head_dim), self._randn(self.case.tokens, self.case.head_dim)

    @cached_property
    def state(self) -> LinearState:
        """What BEFORE tokens left."""
        q, k = (self._randn(BEFORE, self.case.dims) for _ in range(2))
        v = self._randn(BEFORE, self.case.head_dim)
        return taylor_attention(q, k, v, causal=True, return_state=True, implementation="torch")[1]

    def of_checked(self, x: torch.Tensor) -> torch.Tensor:
        """The checked heads of the first batch entry of [B, S, H, ·]."""
        return x[:1, :, self.checked]

    def expected(self, kind: str, attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Tensors:
        """`attend` of float32 copies of the checked heads, kept under the name `kind`."""
        if kind not in self._expected:
            training = self.case.training
            copies = [self.of_checked(x).detach().float().requires_grad_(training) for x in tensors]
            grad_out = None if self.grad_out is None else self.of_checked(self.grad_out).float()
            results = with_gradients(lambda: attend(*copies), copies, grad_out)()
            self._expected[kind] = dict(zip(NAMES, results, strict=False))
        return self._expected[kind]


def near(reach: Sequence[tuple[int, int, int]]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Whether the query of a number sees the key of a number, by a `Case.reach` with an axis; the numbers broadcast."""

    def sees(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor | None = None
        stride = 1
        for axis, (size, back, ahead) in reversed(list(enumerate(reach))):
            at, of = (x if stride == 1 else x // stride for x in (i, j))
            if axis > 0:
                at, of = at % size, of % size
            # One after the other: of all pairs of a video, each condition is several gigabytes.
            after = of >= at - back
            seen = after if seen is None else seen & after
            seen = seen & (of <= at + ahead)
            stride *= size
        assert seen is not None
        return seen

    return sees


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Sequence[tuple[int, int, int]]
) -> torch.Tensor:
    """Softmax attention of [B, S, H, E] with every score computed, a chunk of rows at a time."""
    B, Sq, H, _ = query.shape
    sees = near(reach)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        scores = q[..., :-1] @ k.transpose(1, 2)
        if reach:
            rows, keys = q[0, :, -1].detach().long(), torch.arange(k.shape[1], device=k.device)
            scores = scores.masked_fill(~sees(rows[:, None], keys[None, :]), -torch.inf)
        p, row_sum, _ = softmax_parts(scores)
        return (p @ v / row_sum,)

    # The last column says which row it is, for that is lost in a chunk; float32 is exact up to 2²⁴.
    rows = torch.arange(Sq, device=query.device, dtype=torch.float32)[None, :, None].expand(B * H, -1, -1)
    q = torch.cat([to_groups(query) * query.shape[-1] ** -0.5, rows], -1)
    (out,) = in_row_chunks(attend, q, to_groups(key), to_groups(value))
    return out.unflatten(0, (B, H)).transpose(1, 2)


def _taylor_step(inputs: Inputs, implementation: str) -> Way:
    """One token that reads a state and joins it."""
    case, state, checked = inputs.case, inputs.state, inputs.checked
    q, k, v = *inputs.narrow, inputs.value

    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            out, after = taylor_attention(
                q, k, v, causal=True, state=state, return_state=True, implementation=implementation
            )
        return out, after.kv, after.k

    def expected() -> Tensors:
        before = LinearState(state.kv[:1, checked], state.k[:1, checked], state.tokens)
        out, after = taylor_attention(
            *(inputs.of_checked(x).float() for x in (q, k, v)), causal=True, state=before, return_state=True,
            implementation="torch",
        )  # fmt: skip
        return {"out": out, "state": after.kv, "sums": after.k}

    flops, moved = case.linear_work(inputs.dtype.itemsize)
    return Way(
        run=run,
        found=lambda results: {
            "out": inputs.of_checked(results[0]),
            **{name: x[:1, checked] for name, x in zip(("state", "sums"), results[1:], strict=True)},
        },
        expected=expected,
        flops=flops,
        bytes=moved,
        input_bytes=_bytes_of(q, k, v, state.kv, state.k),
        graph=inputs.device.type == "cuda",
    )


def _cached_step(inputs: Inputs, keys: int, attend: Callable[..., torch.Tensor]) -> Way:
    """One token that reads the last keys of a cache."""
    case, q = inputs.case, inputs.wide[0]
    k, v = (x[:, -keys:] for x in inputs.cache)
    flops, moved = case.softmax_work(keys, inputs.dtype.itemsize)
    return Way(
        run=with_gradients(lambda: attend(q, k, v), (), None),
        found=lambda results: {"out": inputs.of_checked(results[0])},
        expected=lambda: inputs.expected(f"cache {keys}", partial(dense, reach=[]), (q, k, v)),
        flops=flops,
        bytes=moved,
        input_bytes=_bytes_of(q, k, v),
        graph=inputs.device.type == "cuda",
    )


def _bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def way(method: str, inputs: Inputs) -> Way:
    """One way to compute the case of these inputs."""
    case = inputs.case
    implementation = "torch" if method == "taylor-torch" else "triton"
    if case.kind == "decode":
        if method.startswith("taylor"):
            return _taylor_step(inputs, implementation)
        if method == "window":
            step = partial(window_attention, window=DECODE_WINDOW, causal=True, implementation="triton")
            return _cached_step(inputs, DECODE_WINDOW, step)
        return _cached_step(inputs, int(method.removeprefix("sdpa-")), partial(sdpa, "sdpa"))
    reach = case.reach
    attend: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    if method.startswith("taylor"):
        tensors = [*inputs.narrow, inputs.value]
        attend = partial(taylor_attention, causal=case.causal, implementation=implementation)
        reference, checked_as = partial(taylor_attention, causal=case.causal, implementation="torch"), "taylor"
        flops, moved = case.linear_work(inputs.dtype.itemsize)
    else:
        tensors = [*inputs.wide, inputs.value]
        if method == "window":
            grid = None if case.grid is None else LatentGrid(*case.grid)
            assert case.window is not None
            attend = partial(
                window_attention, window=case.window, causal=case.causal, grid=grid, implementation="triton"
            )
        elif method == "flex":
            attend = _flex(inputs)
        else:
            attend = partial(sdpa, method, causal=case.causal)
            reach = [(case.tokens, case.tokens, 0)] if case.causal else []
        reference, checked_as = partial(dense, reach=reach), str(reach)
        flops, moved = case.softmax_work(case.pairs(reach), inputs.dtype.itemsize)
    return Way(
        run=with_gradients(lambda: attend(*tensors), tensors, inputs.grad_out),
        found=lambda results: {n: inputs.of_checked(x) for n, x in zip(NAMES, results, strict=False)},
        expected=lambda: inputs.expected(checked_as, reference, tensors),
        flops=flops,
        bytes=moved,
        input_bytes=_bytes_of(*tensors, inputs.grad_out),
    )


def _flex(inputs: Inputs) -> Callable[..., torch.Tensor]:
    """FlexAttention with the blocks of the case's window; the blocks are made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask

    S, sees = inputs.case.tokens, near(inputs.case.reach)
    mask = create_block_mask(lambda b, h, i, j: sees(i, j), None, None, S, S, device=inputs.device)
    q, k = inputs.wide
    run = flex(q, k, inputs.value, block_mask=mask)
    return lambda *_: run()


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case, none of them made yet; they share the inputs."""
    inputs = Inputs(case, device, dtype)
    methods = [
        method
        for method in METHODS_OF[case.kind]
        if not method.startswith("sdpa-") or int(method.removeprefix("sdpa-")) <= case.tokens
    ]
    return {method: partial(way, method, inputs) for method in methods}


def compiled(case: Case, method: str) -> Hashable | None:
    """What the code of a method depends on; see `Bench`."""
    if method not in METHODS_OF[case.kind]:
        return None
    if method == "flex":
        return method, case.label
    return (method, case.kind, case.head_dim, case.training, case.grid is None) if method in OURS else None


def bench() -> Bench:
    """The benchmark, for the registry."""
    return Bench(
        methods=METHODS,
        ours=OURS,
        cases=standard_cases(),
        ways=ways,
        compiled=compiled,
        formulae=FORMULAE,
        settings=ATTENTION,
    )
