"""Random calls of the public ops and processors against float64: `python -m vmonarch.eval.studies.fuzz`.

A case is a pure function of its number. It draws shapes, strides, dtype, options, values and which gradients are taken;
the truth is plain torch on the CPU, on float64 copies of the inputs. A result x may err

    max |x - truth| <= 2 · max |noisy - truth| + 4 · u · max |truth| + least

where `noisy` is that float64 computation with every intermediate of every operation rounded at random to the precision
of the dtype, that is, multiplied by 1 + u·U(-1, 1), and with every sum off by U(-1, 1) times float32's epsilon times
the sum of its terms' magnitudes: what plain torch in the same precision errs. The maximum is over one such run, or
twenty where one does not suffice. u is half the machine epsilon of the dtype (8 times that for float32, in which sums
are taken), `least` is its smallest number. NaN and -inf must be where the truth has them. What an op does not write is
NaN, because torch fills new memory with it for the time of the call.

Kernels are compiled for every head dimension, dtype, set of options and kind of strides, which takes far longer than
a case. So these are drawn from `--configurations` ones, which all cases share, with two draws of strides for each.
Cases run in several processes, each of which keeps to its own configurations as long as they have cases; one that
crashes or hangs costs its case and no other.

Legend: B batch, S tokens, H heads, D head dim of query and key, E of value, R rank of a bias, T frames.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vmonarch import (
    ExactBlocks,
    flash_bias_attention,
    flash_entropy_attention,
    merge_partials,
    monarch_attention,
    taylor_attention,
    vmonarch_attention,
    window_attention,
)
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import aligned
from vmonarch.files import write_json
from vmonarch.kernels.norm_rotary.api import norm_rotary
from vmonarch.kernels.residual.api import DTYPES, add_residual, attention_residual
from vmonarch.kernels.taylor.reference import LinearState

Tensors = dict[str, torch.Tensor]

BUDGET = "max |x - truth| <= 2 · max |noisy - truth| + 4 · u · max |truth| + least"
ERROR_FACTOR, FLOOR = 2.0, 4.0
# Noisy runs, the largest error of which counts: so many, and where that is not enough, so many.
NOISY_RUNS = (1, 20)
# Draws of strides, and of gradients that are absent, for every configuration.
MEMORIES = 2
# Crashes after which nothing more is tried.
MOST_CRASHES = 50
# Operations whose results are rounded in a noisy run; others move numbers, compare or make them.
ROUNDED = {
    "_fused_rms_norm", "_fused_rms_norm_backward", "_softmax", "_softmax_backward_data", "add", "addmm", "baddbmm",
    "bmm", "convolution", "convolution_backward", "cos", "div", "elu", "elu_backward", "exp", "linear", "log", "mean",
    "mm", "mul", "mv", "pow", "reciprocal", "rsqrt", "rsub", "sigmoid", "silu", "silu_backward", "sin", "sqrt", "sub",
    "sum",
}  # fmt: skip
# Of those, the ones that sum: where terms cancel, the error is relative to their magnitudes and not to the result.
SUMS = {"addmm", "baddbmm", "bmm", "linear", "mean", "mm", "mv", "sum"}


class Noise(TorchDispatchMode):
    """Every result of an arithmetic operation is multiplied by 1 + unit·U(-1, 1); sums err on their own, too.

    Sums are taken in float32: their errors are up to its epsilon times the sum of the terms' magnitudes.
    """

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.generator = unit, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in ROUNDED:
            return result
        if name in SUMS and result.is_floating_point():
            magnitudes = func(*(x.abs() if isinstance(x, torch.Tensor) else x for x in args), **(kwargs or {}))
            result = result + torch.finfo(torch.float32).eps * magnitudes * self._uniform(result)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        rounded = tuple(self._rounded(part) for part in parts)
        return rounded if isinstance(result, (tuple, list)) else rounded[0]

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x * (1 + self.unit * self._uniform(x))

    def _uniform(self, x: torch.Tensor) -> torch.Tensor:
        """Random numbers from -1 to 1 in the shape of `x`."""
        return 2 * torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 1


@dataclass
class Case:
    """One call.

    Args:
        number: of the case.
        op: its name.
        tensors: inputs, floating-point ones with gradients unless `fixed`.
        options: everything else that was drawn, to be printed.
        run: (tensors, implementation) -> (results by name, further tensors whose gradients are taken).
        dtype: whose precision the results are to have.
        fixed: names of inputs without a gradient.
        forward_only: whether no gradient is taken.
        nan: a NaN was planted, so that only its places are compared.
        autocast: the op is called, and its backward pass run, under autocast.
    """

    number: int
    op: str
    tensors: Tensors
    options: dict[str, Any]
    run: Callable[[Tensors, str], tuple[Tensors, Tensors]]
    dtype: torch.dtype
    fixed: tuple[str, ...] = ()
    forward_only: bool = False
    nan: bool = False
    autocast: bool = False
    cotangents: dict[str, tuple[int, str, float]] = field(default_factory=dict)

    def describe(self) -> str:
        shapes = {
            name: f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} strides {x.stride()}"
            for name, x in self.tensors.items()
        }
        under = {"autocast": True} if self.autocast else {}
        return f"{self.op}({', '.join(f'{k}={v}' for k, v in {**under, **self.options, **shapes}.items())})"


class Draw:
    """What a case is drawn from.

    Args:
        number: of the case.
        configurations: how many there are of what decides the compiled kernels; None for one of its own.
        device: where the tensors lie.
        implementation: "torch", or "triton", which takes fewer dtypes, strides and head dimensions.
        interpreted: whether kernels run in Triton's interpreter: then everything is tiny, and without bfloat16.
    """

    def __init__(
        self, number: int, configurations: int | None, device: torch.device, implementation: str, interpreted: bool
    ) -> None:
        self.number, self.device, self.implementation, self.tiny = number, device, implementation, interpreted
        configuration = number if configurations is None else number % configurations
        turn = 0 if configurations is None else number // configurations % MEMORIES
        #: Of shapes and values.
        self.of_case = random.Random(f"case {number}")
        #: Of what kernels are compiled for.
        self.of_kernel = random.Random(f"kernel {configuration}")
        #: Of strides, and of gradients that are absent: kernels are compiled for these too.
        self.of_memory = random.Random(f"memory {configuration} {turn}")
        self.values = torch.Generator().manual_seed(number)
        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        if implementation == "triton":
            # On a GPU 16 bit has most of the kernels.
            dtypes = dtypes[:2] if interpreted else [torch.float32, *2 * dtypes[1:]]
        self.dtype = self.of_kernel.choice(dtypes)
        self.aligned = self.of_kernel.random() < 0.6

    def size(self, most: int) -> int:
        """1, a prime, a multiple of a tile, or anything, up to `most`; small ones are as likely as large ones."""
        most = max(1, min(most, 30) if self.tiny else most)
        kind = self.of_case.random()
        if kind < 0.1:
            return 1
        top = min(most, int(2 ** self.of_case.uniform(0, math.log2(most + 0.99))))
        if kind < 0.4:
            return max(n for n in range(1, top + 1) if all(n % d for d in range(2, n)))
        if kind < 0.6 and top >= 16:
            return top // 16 * 16
        return self.of_case.randint(1, top)

    def head_dim(self) -> int:
        if self.tiny:
            return self.of_kernel.choice([1, 5, 16, 20])
        aligned, others = [16, 32, 64, 64, 128, 128], [1, 2, 5, 20, 40, 72, 80, 96]
        wide = [160, 256] if self.implementation == "triton" else [160, 257, 300]
        return self.of_kernel.choice(2 * aligned + others + wide if self.aligned else 2 * others + aligned[1:5] + wide)

    def dims(self) -> tuple[int, int]:
        D = self.head_dim()
        return D, D if self.of_kernel.random() < 0.7 else self.head_dim()

    def layout(self) -> str:
        kinds = ["contiguous", "heads first", "fused", "padded", "offset"]
        if self.implementation == "torch":
            kinds += ["odd", "expanded", "dims first"]
        elif not self.aligned:
            # Kernels for Hopper take none of these, and others would be compiled in their place.
            kinds += ["odd", "expanded"]
        return self.of_memory.choice(kinds)

    def tensor(
        self, *shape: int, spread: float = 1.0, mean: float = 0.0, layout: str = "contiguous", dtype: Any = None
    ):
        """A tensor of any rank; layouts other than contiguous are of rank 3 or 4, [B, S, …]."""
        dtype = dtype or self.dtype
        source = (1, *shape[1:]) if layout == "expanded" else shape
        x = (torch.randn(source, generator=self.values) * spread + mean).to(dtype)
        return strided(x.to(self.device), layout, shape[0])

    def qkv(self, Sq: int, Sk: int, B: int, H: int, D: int, E: int) -> Tensors:
        spread, mean = self.of_case.choice([0.3, 1.0, 1.0, 2.0]), self.of_case.choice([0.0, 0.0, 5.0])
        # As a model makes them, all three alike, or each in its own way.
        layouts = [self.layout()] * 3 if self.of_memory.random() < 0.7 else [self.layout() for _ in range(3)]
        return {
            "query": self.tensor(B, Sq, H, D, spread=spread, layout=layouts[0]),
            "key": self.tensor(B, Sk, H, D, spread=spread, layout=layouts[1]),
            "value": self.tensor(B, Sk, H, E, mean=mean, layout=layouts[2]),
        }

    def key_mask(self, B: int, S: int) -> torch.Tensor:
        mask = torch.rand(B, S, generator=self.values) < self.of_case.choice([0.0, 0.2, 0.8])
        mask[:, : self.of_case.choice([0, 1, S])] |= True
        mask[0] &= self.of_case.random() > 0.1
        return mask.to(self.device)

    def factor(self, B: int, S: int, H: int, R: int, dtype: torch.dtype) -> torch.Tensor:
        B, H = self.of_case.choice([1, B]), self.of_case.choice([1, H])
        return self.tensor(B, S, H, R, spread=R**-0.25, dtype=dtype, layout=self.layout())

    def scale(self, *, positive: bool = False, zero: bool = True) -> float | None:
        others = [] if positive else [-0.3, *([0.0] if zero else [])]
        return self.of_case.choice([None, None, 0.2, 0.7, *others])

    def batch_and_heads(self) -> tuple[int, int]:
        return (1, 2) if self.tiny else (self.of_case.choice([1, 1, 2]), self.of_case.choice([1, 2, 3]))


def strided(x: torch.Tensor, layout: str, batch: int) -> torch.Tensor:
    """The numbers of `x` [B, S, …] in memory of another shape."""
    if layout == "heads first" and x.ndim == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "dims first":
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "fused":
        others = torch.full_like(x, torch.nan)
        return torch.stack([others, x, others], 2)[:, :, 1]
    if layout in ("padded", "odd"):
        # As `x[..., :20]` of 32.
        extra = 3 if layout == "odd" else 32 - x.shape[-1] % 32
        return torch.nn.functional.pad(x, (0, extra), value=torch.nan)[..., : x.shape[-1]]
    if layout == "offset":
        return torch.cat([torch.full_like(x[:, :1], torch.nan), x], 1)[:, 1:]
    if layout == "expanded":
        return x.expand(batch, *x.shape[1:])
    return x.clone()


def _exact(draw: Draw, T: int) -> str | ExactBlocks | None:
    kind = draw.of_kernel.choice([None, "first_frame", "first_frame", "rows", "columns", "band", "all"])
    aware = draw.of_kernel.random() < 0.6
    frames = lambda: tuple(frame for frame in range(T) if draw.of_case.random() < 2 / (T + 1))
    if kind == "rows":
        return ExactBlocks(rows=frames(), aware=aware)
    if kind == "columns":
        return ExactBlocks(columns=frames(), aware=aware)
    if kind == "band":
        return ExactBlocks(band=draw.of_case.choice([0, 1, T]), aware=aware)
    if kind == "all":
        return ExactBlocks(rows=frames(), columns=frames(), band=draw.of_case.choice([None, 0, 1]), aware=aware)
    return kind


def _vmonarch_options(draw: Draw) -> tuple[dict[str, Any], tuple[int, int, int]]:
    most_frames = draw.of_kernel.choice([16, 16, 32, 70])
    T, most = draw.size(most_frames), 50 if draw.tiny else 600
    H = draw.size(math.isqrt(most // T) + 1)
    grid = (T, H, draw.size(most // T // H + 1))
    iterations = draw.of_kernel.choice([1, 2, 2, 2, 3])
    tiled, update = draw.of_kernel.random() < 0.3, draw.of_kernel.random() < 0.7
    options: dict[str, Any] = {
        "num_iterations": iterations,
        "frames_per_block": draw.of_case.choice([1, 1, 2, 3, T]),
        "tiles": (min(grid[1], draw.of_case.choice([1, 2, 3])), min(grid[2], draw.of_case.choice([1, 2])))
        if tiled
        else (1, 1),
        "coarse": draw.of_kernel.choice([1, 1, 2, 3]) if iterations > 1 else 1,
        "exact": _exact(draw, T),
        "min_mass": draw.of_case.choice([0.1, 0.1, 0.0, 1.0]),
    }
    # Shares of tiles are left at 1: what they choose may hang on a rounding.
    options["last_l_update"] = update or iterations == 1 or tiled or options["frames_per_block"] > 1
    return options, grid


def _vmonarch(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    options, grid = _vmonarch_options(draw)
    B, H = draw.batch_and_heads()
    D, E = draw.dims()
    S = math.prod(grid)
    tensors = draw.qkv(S, S, B, H, D, E)
    R = draw.of_kernel.choice([0, 0, 0, 2, 9])
    if R and D + 6 * R <= 256:
        dtype = draw.of_kernel.choice([draw.dtype, torch.float32])
        tensors |= {name: draw.factor(B, S, H, R, dtype) for name in ("query_factor", "key_factor")}
    options |= {
        "grid": grid,
        "scale": draw.scale(zero="query_factor" not in tensors),
        "entropy_grad": draw.of_kernel.random() < 0.3,
    }

    def run(query, key, value, implementation, query_factor=None, key_factor=None):
        bias = None if query_factor is None else (query_factor, key_factor)
        out, lse = vmonarch_attention(
            query, key, value, bias=bias, return_lse=True, implementation=implementation, **options
        )
        return {"out": out, "lse": lse}

    return tensors, options, run


def _with_lse(op: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Tensors]:
    def run(**tensors: Any) -> Tensors:
        return dict(zip(("out", "lse"), op(**tensors, return_lse=True, **options), strict=True))

    return run


def _monarch(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    S = draw.size(400)
    B, H = draw.batch_and_heads()
    tensors = draw.qkv(S, S, B, H, *draw.dims())
    if draw.of_kernel.random() < 0.5:
        tensors["key_mask"] = draw.key_mask(B, S)
    options: dict[str, Any] = {
        "block_size": draw.of_case.choice([1, max(1, math.isqrt(S)), draw.size(S), S, S + 3]),
        "num_iterations": draw.of_kernel.choice([1, 2, 3]),
        "padding": draw.of_case.choice(["post", "pre"]),
        "min_mass": draw.of_case.choice([0.0, 0.1]),
        "scale": draw.scale(),
        "entropy_grad": draw.of_kernel.random() < 0.3,
    }

    return tensors, options, _with_lse(monarch_attention, options)


def _flash_entropy(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    B, H = draw.batch_and_heads()
    tensors = draw.qkv(draw.size(400), draw.size(600), B, H, *draw.dims())
    options: dict[str, Any] = {"scale": draw.scale(), "entropy_grad": draw.of_kernel.random() < 0.5}

    def run(implementation, **tensors):
        results = flash_entropy_attention(**tensors, implementation=implementation, **options)
        return dict(zip(("out", "lse", "entropy"), results, strict=True))

    return tensors, options, run


def _flash_bias(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    B, H = draw.batch_and_heads()
    D, E = draw.dims()
    causal = draw.of_kernel.random() < 0.4
    Sk = draw.size(500)
    Sq = draw.size(min(Sk, 300)) if causal else draw.size(300)
    tensors = draw.qkv(Sq, Sk, B, H, D, E)
    dtype = draw.of_kernel.choice([draw.dtype, torch.float32])
    R = draw.of_kernel.choice([1, 2, 5, 9, 16, 40])
    tensors |= {"query_factor": draw.factor(B, Sq, H, R, dtype), "key_factor": draw.factor(B, Sk, H, R, dtype)}
    if draw.of_kernel.random() < 0.4:
        tensors["key_mask"] = draw.key_mask(B, Sk)
    options: dict[str, Any] = {"causal": causal, "scale": draw.scale()}

    return tensors, options, _with_lse(flash_bias_attention, options)


def _taylor(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    feature_map = draw.of_kernel.choice(
        ["taylor", "taylor", "taylor", "relu", "elu", "square", "performer", "cosformer", "identity"]
    )
    form = draw.of_kernel.choice(["all", "all", "causal", "frames", "state", "causal state"])
    B, H = draw.batch_and_heads()
    D = draw.of_kernel.choice([1, 5, 16] if draw.tiny else [1, 5, 16, 16, 16, 24, 32])
    E = draw.head_dim()
    causal = "causal" in form
    T = draw.size(9) if form == "frames" else 1
    Sk = draw.size(500 // T) * T
    Sq = Sk if causal or form == "frames" else draw.size(300)
    tensors = draw.qkv(Sq, Sk, B, H, D, E)
    if feature_map == "identity":
        # Weights of either sign may cancel to nothing.
        tensors |= {name: tensors[name].abs() for name in ("query", "key")}
    options: dict[str, Any] = {
        "causal": causal,
        "feature_map": feature_map,
        "scale": draw.scale(positive=True),
        "max_tokens": 1200,
    }
    tokens = 0
    if form == "frames":
        weights = torch.rand(H, T, T, generator=draw.values)
        weights[:, :, 1:] *= draw.of_case.choice([0.0, 1.0])
        tensors["frame_weights"] = weights.to(draw.device)
    if "state" in form:
        tokens = draw.size(100)
        before = {name: draw.tensor(B, tokens, H, size).cpu().double() for name, size in (("key", D), ("value", E))}
        if feature_map == "identity":
            before["key"] = before["key"].abs()
        _, state = taylor_attention(
            before["key"], before["key"], before["value"], return_state=True, implementation="torch",
            **{**options, "causal": False},
        )  # fmt: skip
        tensors |= {"kv": state.kv.float().to(draw.device), "k": state.k.float().to(draw.device)}
    with_lse = feature_map != "identity"

    def run(query, key, value, implementation, frame_weights=None, kv=None, k=None):
        state = None if kv is None else LinearState(kv, k, tokens)
        attend: Any = taylor_attention
        results = attend(
            query, key, value, frame_weights=frame_weights, state=state, return_lse=with_lse,
            return_state=state is not None, implementation=implementation, **options,
        )  # fmt: skip
        results = list(results) if isinstance(results, tuple) else [results]
        if state is not None:
            after = results.pop()
            results += [after.kv, after.k]
        names = ["out", *(["lse"] if with_lse else []), *(["kv", "k"] if state is not None else [])]
        return dict(zip(names, results, strict=True))

    return tensors, options, run


def _window(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    B, H = draw.batch_and_heads()
    options: dict[str, Any] = {"causal": draw.of_kernel.random() < 0.5, "scale": draw.scale()}
    if draw.of_kernel.random() < 0.5:
        Sk = draw.size(400)
        Sq = draw.of_case.choice([Sk, draw.size(Sk), 1])
        options["window"] = draw.of_case.choice([1, 2, draw.size(70), Sk + 3])
    else:
        grid = (draw.size(6), draw.size(9), draw.size(9))
        Sq = Sk = math.prod(grid)
        options |= {"grid": grid, "window": tuple(draw.of_case.choice([1, 2, 3, 4, size + 1]) for size in grid)}
    tensors = draw.qkv(Sq, Sk, B, H, *draw.dims())

    return tensors, options, _with_lse(window_attention, options)


def _norm_rotary(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    B, H = draw.batch_and_heads()
    D = 2 * max(1, draw.head_dim() // 2)
    S = draw.size(400)
    angles = torch.randn(1, S, 1, D // 2, generator=draw.values).repeat_interleave(2, -1) * 5
    weight_dtype = draw.of_kernel.choice([draw.dtype, torch.float32])
    tensors = {
        "x": draw.tensor(B, S, H * D, spread=3.0, layout=draw.layout()),
        "weight": 1 + draw.tensor(H * D, spread=0.3, dtype=weight_dtype),
        "cosines": angles.cos().to(draw.device),
        "sines": angles.sin().to(draw.device),
    }
    options: dict[str, Any] = {"heads": H, "eps": draw.of_case.choice([1e-6, 1e-5, 1e-2])}

    def run(implementation, **tensors):
        return {"out": norm_rotary(**tensors, implementation=implementation, **options)}

    return tensors, options, run


def _residual(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    """Forward only. The scale is held to its dtype's precision, the sum to a few steps of the worst row's scale."""
    B, H = draw.batch_and_heads()
    S, E = draw.size(400), draw.head_dim()
    spread = draw.of_case.choice([1e-3, 0.3, 1.0])
    approximate = draw.tensor(B, S, H, E, layout=draw.layout())
    exact = approximate + draw.tensor(B, S, H, E, spread=spread)
    # The interpreter cuts numbers to bfloat16, where it should round them.
    options: dict[str, Any] = {"dtype": draw.of_kernel.choice(("int8",) if draw.tiny else DTYPES)}

    def run(exact, approximate, implementation):
        residual = attention_residual(exact, approximate, implementation=implementation, **options)
        out = add_residual(approximate.clone(), residual, implementation=implementation)
        return {"out": out} if residual.scale is None else {"out": out, "scale": residual.scale}

    return {"exact": strided(exact, draw.layout(), B), "approximate": approximate}, options, run


def _merge(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., Tensors]]:
    B, H = draw.batch_and_heads()
    S, E = draw.size(300), draw.head_dim()
    parts = draw.of_case.choice([1, 2, 3, 5])
    tensors = {}
    for i in range(parts):
        tensors[f"out{i}"] = draw.tensor(B, S, H, E, layout=draw.layout())
        lse = draw.tensor(B, H, S, spread=draw.of_case.choice([1.0, 20.0]), mean=4.0, dtype=torch.float32)
        empty = torch.rand(B, H, S, generator=draw.values) < draw.of_case.choice([0.0, 0.0, 0.3, 1.0])
        tensors[f"lse{i}"] = lse.masked_fill(empty.to(draw.device), -torch.inf)

    def run(implementation, **tensors):
        pairs = ((tensors[f"out{i}"], tensors[f"lse{i}"]) for i in range(parts))
        # The kernels take two.
        out, lse = merge_partials(*pairs, implementation=implementation if parts == 2 else "auto")
        return {"out": out, "lse": lse}

    return tensors, {"parts": parts}, run


def _processor(draw: Draw) -> tuple[Tensors, dict[str, Any], Callable[..., tuple[Tensors, Tensors]]]:
    """Self-attention of a tiny Wan transformer with one of the processors."""
    method = draw.of_kernel.choice(["VMonarch", "FlashBias", "Based"])
    H, D = draw.of_case.choice([1, 2, 3]), draw.of_kernel.choice([12, 16, 32])
    kind = draw.of_kernel.choice(["linear", "window", "both", "conv"])
    decay = draw.of_kernel.random() < 0.5
    options, grid = _vmonarch_options(draw)
    B, S = draw.of_case.choice([1, 2]), math.prod(grid)
    tensors = {"hidden": draw.tensor(B, S, H * D, layout=draw.layout())}
    if method == "FlashBias":
        options = {}
        tensors |= {name: draw.factor(1, S, H, 4, torch.float32) for name in ("query_factor", "key_factor")}
    elif method == "Based":
        options = {"layers": [kind], "feature_dim": 8, "decay": decay, "window": (3, 2, 5)}

    def run(hidden, implementation, **factors):
        from diffusers import WanTransformer3DModel

        from vmonarch import BasedProcessor, FlashBiasProcessor, VMonarchProcessor
        from vmonarch import apply as install

        torch.manual_seed(draw.number)
        model = WanTransformer3DModel(
            patch_size=(1, 1, 1), num_attention_heads=H, attention_head_dim=D, in_channels=1, out_channels=1,
            text_dim=8, freq_dim=8, ffn_dim=8, num_layers=1, rope_max_seq_len=max(grid),
        )  # fmt: skip
        for norm in (model.blocks[0].attn1.norm_q, model.blocks[0].attn1.norm_k):
            torch.nn.init.normal_(norm.weight, 1.5, 0.5)
        rotary = [part.to(hidden.device) for part in model.rope(torch.empty(1, 1, *grid))]
        if hidden.dtype == torch.float64:
            rotary = [part.double() for part in rotary]
        # The truth has the same weights.
        model.blocks.to(draw.dtype).to(hidden.device, hidden.dtype)
        processor: Any
        if method == "VMonarch":
            processor = VMonarchProcessor(grid=grid, implementation=implementation, **options)
        elif method == "FlashBias":
            bias = (factors["query_factor"], factors["key_factor"])
            processor = FlashBiasProcessor(bias, grid=grid, implementation=implementation)
        else:
            processor = BasedProcessor(grid=grid, implementation=implementation, **options)
        install(model, processor)
        attention = model.blocks[0].attn1
        out = attention(hidden, rotary_emb=tuple(rotary))
        # torch 2.13 on the CPU errs in bfloat16 gradients of such filters, where the channels come last.
        wrong = hidden.device.type == "cpu" and draw.dtype == torch.bfloat16
        return {"out": out}, {
            name: p
            for name, p in attention.named_parameters()
            if name.endswith("weight") and not (wrong and "convolution" in name)
        }

    return tensors, {"processor": method, "grid": grid, "heads": H, **options}, run


# How often an op is drawn among all of them.
OPS: dict[str, tuple[int, Callable[[Draw], Any]]] = {
    "vmonarch_attention": (10, _vmonarch),
    "monarch_attention": (4, _monarch),
    "flash_entropy_attention": (4, _flash_entropy),
    "flash_bias_attention": (6, _flash_bias),
    "taylor_attention": (7, _taylor),
    "window_attention": (3, _window),
    "norm_rotary": (2, _norm_rotary),
    "residual": (1, _residual),
    "merge_partials": (1, _merge),
    "processor": (3, _processor),
}
# One after the other in an order that mixes them.
_TURNS = [name for name, (weight, _) in OPS.items() for _ in range(weight)]
_TURNS = [_TURNS[i * 17 % len(_TURNS)] for i in range(len(_TURNS))]
# Inputs that get no gradient.
FIXED = ("key_mask", "cosines", "sines", "frame_weights", "kv", "k")


def op_of(number: int, configurations: int | None, ops: Sequence[str]) -> str:
    """Which op the case of that number is of."""
    turns = [op for op in _TURNS if op in ops]
    return turns[(number if configurations is None else number % configurations) % len(turns)]


def make_case(
    number: int,
    *,
    configurations: int | None = None,
    device: str = "cpu",
    implementation: str = "torch",
    ops: Sequence[str] = tuple(OPS),
) -> Case:
    """The case of that number; the same every time for the same arguments."""
    from vmonarch.kernels.common.launch import interpreted

    op = op_of(number, configurations, ops)
    draw = Draw(
        number, configurations, torch.device(device), implementation, implementation == "triton" and interpreted()
    )
    tensors, options, run = OPS[op][1](draw)

    def results_and_leaves(tensors: Tensors, implementation: str) -> tuple[Tensors, Tensors]:
        results = run(**tensors, implementation=implementation)
        return results if isinstance(results, tuple) else (results, {})

    case = Case(
        number,
        op,
        tensors,
        options,
        results_and_leaves,
        draw.dtype,
        FIXED,
        # The kernels have no gradient through states, and residuals have none.
        forward_only=draw.of_kernel.random() < 0.25 or "kv" in tensors or op == "residual",
    )
    case.nan = _planted_nan(case, draw)
    case.forward_only |= case.nan
    small = op == "taylor_attention" or draw.dtype != torch.float16
    magnitude = draw.of_case.choice([1.0, 1.0, 1e-3] if small else [1.0])
    taken = draw.of_memory.choice(["all", "all", "all", "out", "rest"])
    for i, name in enumerate(("out", "lse", "entropy")):
        if taken == "all" or (taken == "out") == (name == "out"):
            layout = draw.of_memory.choice(["contiguous", "contiguous", "heads first", "padded", "one number"])
            case.cotangents[name] = (number + i, layout, magnitude)
    if op in ("norm_rotary", "processor"):
        case.cotangents = {"out": (number, "contiguous", magnitude)}
    # The linear layers around an op are another matter.
    case.autocast = op != "processor" and draw.of_case.random() < 0.1
    return case


def _planted_nan(case: Case, draw: Draw) -> bool:
    """Plant a NaN in one query now and then, where it is clear what it must reach."""
    query = case.tensors.get("query")
    plain = case.options.get("frames_per_block", 1) == 1 and case.options.get("tiles", (1, 1)) == (1, 1)
    alone = (
        "block_size" not in case.options
        and "key_mask" not in case.tensors
        and case.options.get("exact") is None
        and plain
    )
    if draw.of_case.random() > 0.08 or query is None or not alone or (query.shape[0] > 1 and query.stride(0) == 0):
        return False
    query[-1, draw.of_case.randrange(query.shape[1]), 0] = torch.nan
    return True


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory is full of NaN, so that what an op does not write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def results_of(case: Case, tensors: Tensors, implementation: str) -> Tensors:
    """Results by name, and gradients by "d" and the name of the input."""
    learns = not case.forward_only
    leaves = {
        name: x.detach().requires_grad_(learns and x.is_floating_point() and name not in case.fixed)
        for name, x in tensors.items()
    }
    with torch.set_grad_enabled(learns):
        results, parameters = case.run(leaves, implementation)
    if not learns:
        return results
    leaves = {name: x for name, x in {**leaves, **parameters}.items() if x.requires_grad}
    outputs, cotangents = [], []
    for name, x in results.items():
        if name in case.cotangents and x.requires_grad:
            outputs.append(x)
            cotangents.append(_cotangent(x, *case.cotangents[name], case.dtype))
    gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if outputs:
        gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    missing = {
        name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), gradients, strict=True)
    }
    return {name: x.detach() for name, x in results.items()} | {f"d{name}": g for name, g in missing.items()}


def _cotangent(x: torch.Tensor, seed: int, layout: str, magnitude: float, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers on every device; nothing flows into a row without keys."""
    if layout == "one number" and torch.isfinite(x.detach()).all():
        # As the gradient of a sum comes.
        return torch.full((), magnitude, dtype=dtype).to(x).expand(x.shape)
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    values = values.to(dtype).to(x).masked_fill(~torch.isfinite(x.detach()), 0)
    return strided(values, layout, x.shape[0])


def check(case: Case, implementation: str) -> dict[str, float]:
    """Error over budget by result; infinite where NaN, infinity, shape or dtype is not as it should be."""
    wide = {name: x.detach().cpu().double() if x.is_floating_point() else x.cpu() for name, x in case.tensors.items()}
    wide = {name: x.clone(memory_format=torch.contiguous_format) for name, x in wide.items()}
    with (
        poisoned_memory(),
        torch.autocast(next(iter(case.tensors.values())).device.type, torch.bfloat16, enabled=case.autocast),
    ):
        ours = results_of(case, case.tensors, implementation)
        ours = {name: x.cpu() for name, x in ours.items()}
    truth = results_of(case, wide, "torch")
    if case.nan:
        assert truth["out"].isnan().any(), "plain torch in float64 hides a NaN in the query"
        return {name: _misplaced_nan(ours[name], x) for name, x in truth.items()}
    unit = torch.finfo(case.dtype).eps * (4 if case.dtype == torch.float32 else 0.5)
    noisy: list[Tensors] = []
    ratios: dict[str, float] = {}
    for runs in NOISY_RUNS:
        for seed in range(len(noisy), runs):
            with Noise(unit, seed):
                noisy.append(results_of(case, wide, "torch"))
        ratios = {
            name: _over_budget(ours[name], x, [run[name] for run in noisy], unit, case.dtype)
            for name, x in truth.items()
        }
        if all(ratio <= 1 or ratio == math.inf for ratio in ratios.values()):
            break
    return ratios


def _over_budget(
    x: torch.Tensor, truth: torch.Tensor, noisy: list[torch.Tensor], unit: float, dtype: torch.dtype
) -> float:
    if x.shape != truth.shape or x.isnan().any():
        return math.inf
    # What is too large for the dtype of the result may be infinite.
    fits = torch.isfinite(truth) & (truth.abs() < torch.finfo(x.dtype).max / 2)
    if not torch.equal(x[~torch.isfinite(truth)].double(), truth[~torch.isfinite(truth)]):
        return math.inf
    if not fits.any():
        return 0.0
    exact = truth[fits]
    error = (x.double()[fits] - exact).abs().max()
    budget = max(float((y[fits] - exact).abs().nan_to_num(0.0).max()) for y in noisy)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    ratio = float(error / (ERROR_FACTOR * budget + FLOOR * unit * float(exact.abs().max()) + least))
    return math.inf if math.isnan(ratio) else ratio


def _misplaced_nan(x: torch.Tensor, truth: torch.Tensor) -> float:
    """0, or infinity if a NaN of the truth is hidden, or a head that has none there has one here."""
    if x.shape != truth.shape:
        return math.inf
    # [B, S, H, E] or [B, H, S]
    in_head = (1, 3) if truth.ndim == 4 else (2,)
    spilt = x.isnan().any(in_head) & ~truth.isnan().any(in_head)
    hidden = truth.isnan() & ~x.isnan()
    return math.inf if hidden.any() or spilt.any() else 0.0


@dataclass
class Outcome:
    """What came of a case: the largest error over its budget, and what went wrong, empty if nothing."""

    number: int
    op: str
    ratio: float
    failure: str = ""
    case: str = ""


def outcome_of(number: int, implementation: str, **options: Any) -> Outcome:
    """Make a case and check it; an exception is a failure too."""
    op, description = "?", ""
    try:
        case = make_case(number, implementation=implementation, **options)
        op, description = case.op, case.describe()
        ratios = check(case, implementation)
    except Exception:
        return Outcome(number, op, math.inf, traceback.format_exc(limit=-6), description)
    worst = max(ratios, key=lambda name: ratios[name])
    wrong = ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items() if not ratio <= 1)
    return Outcome(number, op, ratios[worst], wrong and f"error over budget: {wrong}", wrong and description)


def _work(connection: Connection, options: Mapping[str, Any]) -> None:
    """A process that checks the numbers it is sent until it is sent None, or its device no longer works."""
    torch.set_num_threads(1)
    # What it writes would go between the lines of the others.
    warnings.simplefilter("ignore")
    alive = True
    while alive and (number := connection.recv()) is not None:
        outcome = outcome_of(number, **options)
        if outcome.failure and options["device"] != "cpu":
            try:
                torch.cuda.synchronize()
            except Exception:
                alive = False
        connection.send((outcome, alive))


def run(
    numbers: Sequence[int], *, processes: int, seconds: float, patience: float, **options: Any
) -> tuple[list[Outcome], int]:
    """Check these cases in several processes: the outcomes, and how many cases there was no time for.

    Args:
        seconds: no case starts after these.
        patience: seconds that one case may take.
        options: of `outcome_of`.
    """
    context = multiprocessing.get_context("spawn")
    # For every process its own configurations, so that no two compile the same.
    waiting: list[list[int]] = [[] for _ in range(min(processes, len(numbers)))]
    for number in reversed(numbers):
        waiting[number % (options["configurations"] or len(waiting)) % len(waiting)].append(number)
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + seconds
    crashes = 0
    # By connection: the process, its place among them, the case that it is at, and when that began.
    workers: dict[Any, tuple[Any, int, int, float]] = {}

    def go_on(connection: Any, process: Any, place: int) -> None:
        cases = waiting[place] or max(waiting, key=len)
        if cases and time.monotonic() < deadline and crashes < MOST_CRASHES:
            connection.send(cases[-1])
            workers[connection] = process, place, cases.pop(), time.monotonic()
        else:
            connection.send(None)
            del workers[connection]

    def start(place: int) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, options), daemon=True)
        process.start()
        there.close()
        workers[here] = process, place, -1, 0.0
        go_on(here, process, place)

    def lose(connection: Any, reason: str) -> None:
        nonlocal crashes
        process, place, number, _ = workers.pop(connection)
        process.kill()
        process.join()
        crashes += 1
        outcomes.append(Outcome(number, op_of(number, options["configurations"], options["ops"]), math.inf, reason))
        if any(waiting):
            start(place)

    for place in range(len(waiting)):
        start(place)
    while workers:
        ready: Any = wait(list(workers), timeout=0.5)
        for connection in ready:
            process, place, *_ = workers[connection]
            try:
                outcome, alive = connection.recv()
            except (EOFError, ConnectionError):
                process.join(10)
                lose(connection, f"its process ended with exit code {process.exitcode}")
                continue
            outcomes.append(outcome)
            if alive:
                go_on(connection, process, place)
            else:
                del workers[connection]
                start(place)
        for connection, (*_, since) in list(workers.items()):
            if time.monotonic() - since > patience:
                lose(connection, f"no result after {patience:.0f} s")
    return outcomes, sum(map(len, waiting))


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for every op: cases, failures, and the largest error over its budget of the cases that have one."""
    rows = []
    for op in [*OPS, "?"]:
        of_op = [outcome for outcome in outcomes if outcome.op == op]
        if of_op:
            worst = max(of_op, key=lambda outcome: outcome.ratio)
            failed = sum(bool(outcome.failure) for outcome in of_op)
            rows.append([op, str(len(of_op)), str(failed), f"{worst.ratio:.3g}", str(worst.number)])
    return aligned(["op", "cases", "failed", "worst ratio", "its case"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if a case failed."""
    parser = script_parser("studies.fuzz", __doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--only", type=int, nargs="+", help="check these cases, and print all about them")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS), help="draw from these (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--implementation", choices=["torch", "triton"], default="torch")
    parser.add_argument("--configurations", type=int, help="what kernels are compiled for is one of so many draws")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case starts after these")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds that a case may take (default: 240)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args(arguments)
    how = {name: getattr(options, name) for name in ("device", "implementation", "configurations", "ops")}
    words = ["--device", options.device, "--implementation", options.implementation]
    if options.configurations is not None:
        words += ["--configurations", str(options.configurations)]
    if options.ops != list(OPS):
        words += ["--ops", *options.ops]
    again = " ".join(["python -m vmonarch.eval.studies.fuzz", *words, "--only"])

    start = time.monotonic()
    if options.only:
        torch.set_num_threads(1)
        outcomes, left = [outcome_of(number, **how) for number in options.only], 0
        for outcome in outcomes:
            print(f"{outcome}\n{make_case(outcome.number, **how).describe()}")
    else:
        numbers = range(options.seed, options.seed + options.cases)
        outcomes, left = run(
            numbers, processes=options.processes, seconds=options.seconds, patience=options.patience, **how
        )
    outcomes.sort(key=lambda outcome: outcome.number)
    failed = [outcome for outcome in outcomes if outcome.failure]
    if options.output:
        record = {
            **script_record("studies.fuzz", arguments, options.device),
            "budget": BUDGET,
            "seconds": round(time.monotonic() - start, 1),
            "cases": len(outcomes),
            "not_reached": left,
            "by_op": {
                op: {
                    "cases": len(ratios),
                    "median_ratio": statistics.median(ratios),
                    "worst_ratio": max((ratio for ratio in ratios if math.isfinite(ratio)), default=None),
                }
                for op in OPS
                if (ratios := [outcome.ratio for outcome in outcomes if outcome.op == op])
            },
            "replay": f"{again} NUMBER",
            "failed": [asdict(outcome) | {"ratio": str(outcome.ratio)} for outcome in failed],
        }
        write_json(options.output, record)
    for outcome in failed[:20]:
        print(f"\ncase {outcome.number}: {outcome.case}\n{outcome.failure.rstrip()}")
    print(f"\n{table(outcomes)}")
    print(f"{len(outcomes)} cases, {len(failed)} failed, {left} not reached, {time.monotonic() - start:.0f} s")
    if failed:
        print(f"again: {again} {' '.join(str(outcome.number) for outcome in failed[:200])}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
