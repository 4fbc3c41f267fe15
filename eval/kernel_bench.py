"""Time the attention kernels against exact attention and plain torch, in one run: `vmonarch bench kernels`.

A case is a latent grid, a number of heads, a head dimension and a pass; its methods take turns, round after round, so
that a chip which slows down or is shared slows all of them. Times are CUDA events with a cold L2. What is wrong is not
timed: every VMonarch result is first compared with the float32 plain-torch reference on a few heads.

Legend: B batch (always 1), S tokens, H heads, D head dim, m blocks, b positions per block, t iterations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError, suggest
from vmonarch.files import AtomicFiles
from vmonarch.flops import block_sizes
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import interpreted
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.pipelines.environment import device_name, git_commit, package_versions

FORMAT = "vmonarch-kernel-bench-1"
PASSES = {"forward": "forward", "backward": "forward+backward"}
HEAD_DIMS = (128, 64)
FULL_SECONDS, QUICK_SECONDS = 480.0, 120.0
MIN_ROUNDS = 3
# A method whose calls take seconds is measured in fewer rounds than the others.
METHOD_SECONDS = 5.0
# Compiling may take this share of the budget.
COMPILE_SHARE = 0.5

# Relative errors (Frobenius norm) that a dtype may have against the float32 reference; of any single row, 10 × as much.
BOUNDS = {
    torch.bfloat16: {"out": 2e-2, "gradient": 5e-2},
    torch.float16: {"out": 4e-3, "gradient": 1e-2},
    torch.float32: {"out": 1e-4, "gradient": 1e-3},
}
ROW_FACTOR = 10
# Rows of exact attention that are compared: the whole map would take longer than the measurement.
EXACT_ROWS = 256


class WrongResultError(RuntimeError):
    """A kernel gave a result outside the stated bounds, or failed: the run measured something else than attention."""


@dataclass(frozen=True)
class Shape:
    """A latent grid (T, H, W) with a number of attention heads, written `TxHxW:heads`."""

    grid: LatentGrid
    heads: int = 12

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From `TxHxW` (12 heads) or `TxHxW:heads`.

        Raises:
            InputError: it is not written like that.
        """
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?::(\d+))?", text)
        numbers = [int(group) for group in match.groups() if group] if match else []
        if not numbers or 0 in numbers:
            known = ", ".join(shape.name for shape in SHAPES)
            raise InputError("shapes", f"must be frames x height x width of the latent, such as {known}; got {text!r}")
        return cls(LatentGrid(*numbers[:3]), *numbers[3:])

    @property
    def name(self) -> str:
        return "x".join(map(str, self.grid)) + (f":{self.heads}" if self.heads != 12 else "")

    @property
    def tokens(self) -> int:
        return self.grid.tokens


@dataclass(frozen=True)
class Method:
    """A way to compute attention.

    Args:
        kind: "vmonarch", the fused kernels; "torch", the plain-torch VMonarch; "cudnn" or "flash", a backend of SDPA;
            "flash_bias".
        options: of `vmonarch_attention`; of "flash_bias" `rank`.
        only: the shapes it is measured on, all if empty.
        head_dims: the head dimensions it is measured at, all if empty.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()

    def measured_on(self, shape: Shape, head_dim: int) -> bool:
        return (not self.only or shape.name in self.only) and (not self.head_dims or head_dim in self.head_dims)


# The paper's Fig. 8: 32 frames of 2048 tokens, where it compares with the plain-torch form.
FIGURE_8 = "32x32x64"
# In order of priority: where the budget ends, the rest is left out.
SHAPES = tuple(
    Shape(LatentGrid(*grid), heads)
    for *grid, heads in (
        (43, 28, 52, 12),
        (16, 28, 52, 12),
        (16, 45, 80, 12),
        (81, 28, 52, 12),
        (24, 44, 80, 40),
        (36, 28, 52, 12),
        (24, 28, 52, 12),
        (32, 32, 64, 12),
    )
)
METHODS = (
    Method("cudnn", "cudnn"),
    Method("vmonarch", "vmonarch"),
    Method("vmonarch-coarse2", "vmonarch", {"coarse": 2}),
    Method("vmonarch-tiles2-coarse2", "vmonarch", {"tiles": (2, 2), "coarse": 2}),
    Method("vmonarch-t1", "vmonarch", {"num_iterations": 1}),
    Method("vmonarch-t3", "vmonarch", {"num_iterations": 3}),
    Method("fa2", "flash"),
    Method("vmonarch-torch", "torch", only=(FIGURE_8,), head_dims=(64,)),
)
QUICK_SHAPES = ("43x28x52", "16x28x52", "16x45x80")
QUICK_METHODS = ("cudnn", "vmonarch", "vmonarch-coarse2", "vmonarch-tiles2-coarse2")


@dataclass(frozen=True)
class Case:
    """What one table row of methods is measured on; `training` is forward and backward together."""

    shape: Shape
    head_dim: int
    training: bool

    @property
    def name(self) -> str:
        return f"{self.shape.name} d={self.head_dim} {PASSES['backward' if self.training else 'forward']}"


@dataclass(frozen=True)
class BenchConfig:
    """What `run_bench` measures, and where the result goes.

    Args:
        device: "cuda", "cuda:N", or "cpu" (only through Triton's interpreter: a test of the benchmark itself).
        budget: seconds after which no case and no round is added.
        rounds: measurements of every method in a case, at most.
    """

    output: Path
    shapes: tuple[Shape, ...] = SHAPES
    methods: tuple[Method, ...] = METHODS
    head_dims: tuple[int, ...] = HEAD_DIMS
    passes: tuple[str, ...] = tuple(PASSES)
    rounds: int = 15
    budget: float = FULL_SECONDS
    device: str = "cuda"
    command: str = ""
    progress: bool = True

    def cases(self) -> list[Case]:
        """All cases, the most telling first: forward before backward, head dimension 128 before 64."""
        return [
            Case(shape, head_dim, name == "backward")
            for head_dim in self.head_dims
            for name in self.passes
            for shape in self.shapes
            if any(method.measured_on(shape, head_dim) for method in self.methods)
            # Fig. 8 is of d = 64; elsewhere its shape would only repeat what the others tell.
            if not (shape.name == FIGURE_8 and head_dim != 64 and len(self.shapes) > 1)
        ]


def choose(argument: str, names: Sequence[str], known: dict[str, Any]) -> tuple[Any, ...]:
    """The named things, in the order given.

    Raises:
        InputError: a name that is not known, given twice, or none at all.
    """
    if not names:
        raise InputError(argument, f"must name at least one of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise InputError(argument, f"must be of {', '.join(known)}; got {name!r}{suggest(name, known)}")
    if len(set(names)) < len(names):
        raise InputError(argument, f"must differ from each other, got {', '.join(names)}")
    return tuple(known[name] for name in names)


def check_device(name: str) -> torch.device:
    """The device to measure on.

    Raises:
        InputError: there is no such device, or the kernels cannot run there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise InputError("device", f"must be cuda, cuda:N, or cpu with TRITON_INTERPRET=1; got {name!r}")
    if device.type == "cpu":
        if not interpreted():
            raise InputError("device", "cpu needs TRITON_INTERPRET=1 and tells nothing of speed; supported: cuda")
        return device
    if not torch.cuda.is_available():
        raise InputError(
            "device", f"{name!r} cannot be used: there is no CUDA device here, and speed is measured on one"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise InputError("device", f"must be up to cuda:{torch.cuda.device_count() - 1}, got {name!r}")
    if interpreted():
        raise InputError("device", f"{name!r} cannot be measured with TRITON_INTERPRET=1: unset it")
    return torch.device("cuda", index)


def check_output(path: Path) -> None:
    """Check that a file can be written there, before anything is computed.

    Raises:
        InputError: the path is a folder, or in one that is missing or not writable.
    """
    if path.is_dir() or not path.name:
        raise InputError("output", f"must be a file, got the folder {str(path)!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("output", f"{str(path)!r} cannot be written: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK):
        raise InputError("output", f"{str(path)!r} cannot be written: its folder is not writable")


FORMULAE = {
    "legend": "S tokens, T frames, m blocks, b positions of the largest block, c(k) pooled cells of block k, d head"
    " dim, t iterations, n rows answered exactly (the first frame: H·W); a multiply-add counts 2; times heads",
    "full attention": "4·S²·d forward, +10·S²·d backward",
    "exact": "4·n·S·d forward, +10·n·S·d backward",
    "R-steps": "the first t-1: 4·b·Σ_k c(k)·d, without pooling 4·b·S·d; the last: 6·b·S·d;"
    " backward: ×5/2, the last ×7/3",
    "L-steps": "4·S·m·d each forward, +10·S·m·d each backward",
    "backward": "every product once, the recomputed scores too; products that a kernel repeats are not counted",
    "bytes": "every tensor that a stage reads or writes, once per stage",
    "floor": "max(FLOPs / measured bf16 matmul rate, bytes / measured copy rate)",
}


@dataclass(frozen=True)
class StageWork:
    """FLOPs and bytes of one stage, all heads."""

    stage: str
    flops: float
    bytes: float


def vmonarch_work(
    grid: LatentGrid,
    heads: int,
    head_dim: int,
    *,
    itemsize: int,
    training: bool,
    num_iterations: int = 2,
    tiles: tuple[int, int] = (1, 1),
    coarse: int = 1,
) -> list[StageWork]:
    """Work of `vmonarch_attention(exact="first_frame")` by stage, forward and with `training` backward (FORMULAE).

    Source: docs/attention.md, "FLOPs", for ragged tiles and cells too.
    """
    S, d, t, f = grid.tokens, head_dim, num_iterations, 4
    m, b, cells = block_sizes(grid, tiles, coarse)
    places, n = m * b, grid.tokens_per_frame
    s = itemsize

    def stage(name: str, flops: float, elements: float, statistics_: float) -> StageWork:
        return StageWork(name, heads * flops, heads * (elements * d * s + statistics_ * f))

    pool = stage("pool", 0, S + cells, 0)
    stages = [stage("exact", 4 * n * S * d, 2 * n + 2 * S, n)]
    if coarse > 1:
        stages.append(pool)
    for i in range(t):
        z = S if i == 0 else places
        if i < t - 1:
            stages.append(stage(f"R{i + 1}", 4 * b * cells * d, z + cells + places, places))
            stages.append(stage(f"L{i + 1}", 4 * S * m * d, S + 2 * places, places + (S + places) * training))
        else:
            stages.append(stage(f"R{i + 1}", 6 * b * S * d, z + 2 * S + 2 * places, places))
            stages.append(stage(f"L{i + 1}", 4 * S * m * d, 2 * S + n + 2 * places, places + S))
    if not training:
        return stages

    # Gradients that a stage adds to are read and written.
    stages += [pool] if coarse > 1 else []
    for i in reversed(range(t)):
        z = S if i == 0 else places
        dz = 2 * S if i == 0 else places
        if i == t - 1:
            # q, do, out, dq; aL, y, daL, dy
            stages.append(stage(f"L{i + 1} backward", 10 * S * m * d, 4 * S + n + 4 * places, 2 * S + 3 * places))
            # k, v, dk, dv; daL, dy
            stages.append(stage(f"R{i + 1} backward", 14 * b * S * d, z + dz + 6 * S + 2 * places, 4 * places))
        else:
            # q, dq (added to); aL, daR, daL
            stages.append(stage(f"L{i + 1} backward", 10 * S * m * d, 3 * S + 3 * places, 2 * S + 4 * places))
            # k, dk (added to); daL
            keys = cells * 2 + 2 * S if coarse > 1 else 3 * S
            stages.append(stage(f"R{i + 1} backward", 10 * b * cells * d, z + dz + keys + places, 4 * places))
    # q, do, out and dq of the rows; k, v, dk, dv
    stages.append(stage("exact backward", 10 * n * S * d, 5 * n + 6 * S, 2 * n))
    return stages


def full_attention_work(tokens: int, heads: int, head_dim: int, *, itemsize: int, training: bool) -> StageWork:
    """Work of exact attention over all pairs: q, k, v, out and lse; in the backward pass also dq, dk, dv, do."""
    flops = (14 if training else 4) * tokens**2 * head_dim
    elements = (4 + 8 * training) * tokens * head_dim
    return StageWork("attention", heads * flops, heads * (elements * itemsize + 4 * tokens * (1 + training)))


def method_work(method: Method, case: Case, itemsize: int) -> list[StageWork]:
    """Work of a method on a case, by stage."""
    shape = case.shape
    if method.kind in ("cudnn", "flash"):
        return [
            full_attention_work(shape.tokens, shape.heads, case.head_dim, itemsize=itemsize, training=case.training)
        ]
    return vmonarch_work(
        shape.grid, shape.heads, case.head_dim, itemsize=itemsize, training=case.training, **method.options
    )


def measured_dtype(device: torch.device) -> torch.dtype:
    """bfloat16; in the interpreter float32, because its bfloat16 products are wrong."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Inputs:
    """query, key, value and the gradient of the output, each [1, S, H, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor

    @classmethod
    def random(cls, case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Standard normal values, the same for a case on every run."""
        generator = torch.Generator(device).manual_seed(case.shape.tokens + case.head_dim)
        size = (1, case.shape.tokens, case.shape.heads, case.head_dim)
        tensors = [torch.randn(size, generator=generator, device=device, dtype=torch.float32) for _ in range(4)]
        inputs = [tensor.to(dtype) for tensor in tensors]
        for tensor in inputs[:3]:
            tensor.requires_grad_(case.training)
        return cls(*inputs)

    def factors(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors [1, S, H, rank] of a bias of order 1, which learn when the query does."""
        query = self.query.detach()
        generator = torch.Generator(query.device).manual_seed(rank)
        size = (*query.shape[:3], rank)
        factors = [torch.randn(size, generator=generator, device=query.device) * rank**-0.25 for _ in range(2)]
        first, second = (x.to(query.dtype).requires_grad_(self.query.requires_grad) for x in factors)
        return first, second

    def of_heads(self, heads: list[int]) -> Inputs:
        """Float32 copies of some heads."""
        tensors = [tensor.detach()[:, :, heads].float() for tensor in (self.query, self.key, self.value, self.grad_out)]
        for tensor in tensors[:3]:
            tensor.requires_grad_(self.query.requires_grad)
        return Inputs(*tensors)


def sdpa(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Exact attention of [B, S, H, D] by one backend of torch, on transposed views as diffusers has them.

    Args:
        backend: "cudnn" or "flash"; or "sdpa", the one that torch chooses.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}
    with sdpa_kernel(backends[backend]) if backend in backends else contextlib.nullcontext():
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=causal
        )
    return out.transpose(1, 2)


def attention(method: Method, inputs: Inputs, grid: LatentGrid, implementation: str = "") -> torch.Tensor:
    """Output [1, S, H, D] of a method; `implementation` overrides that of VMonarch."""
    if method.kind in ("cudnn", "flash"):
        return sdpa(method.kind, inputs.query, inputs.key, inputs.value)
    if method.kind == "flash_bias":
        factors = inputs.factors(method.options["rank"])
        return flash_bias_attention(inputs.query, inputs.key, inputs.value, *factors, implementation="triton")
    implementation = implementation or {"vmonarch": "triton", "torch": "torch"}[method.kind]
    return vmonarch_attention(
        inputs.query, inputs.key, inputs.value, grid=grid, implementation=implementation, **method.options
    )


def call(method: Method, inputs: Inputs, case: Case, implementation: str = "") -> tuple[torch.Tensor, ...]:
    """(out,) or, in training, (out, dq, dk, dv)."""
    if not case.training:
        with torch.no_grad():
            return (attention(method, inputs, case.shape.grid, implementation),)
    out = attention(method, inputs, case.shape.grid, implementation)
    return (out.detach(), *torch.autograd.grad(out, (inputs.query, inputs.key, inputs.value), inputs.grad_out))


NAMES = ("out", "dq", "dk", "dv")


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Relative errors in the Frobenius norm: of all, and the largest of any row [..., D] (no row counts as small)."""
    difference = torch.linalg.vector_norm(found.float() - expected, dim=-1)
    norms = torch.linalg.vector_norm(expected, dim=-1)
    typical = norms.square().mean().sqrt().clamp_min(1e-30)
    return {
        "relative": (difference.square().mean().sqrt() / typical).item(),
        "row": (difference / norms.clamp_min(typical)).max().item(),
    }


def _exact_rows(inputs: Inputs, heads: list[int], rows: torch.Tensor, training: bool) -> tuple[torch.Tensor, ...]:
    """Float32 exact attention of some rows: (out,) or (out, dq), each [1, rows, heads, D]."""
    some = inputs.of_heads(heads)
    query = some.query.detach()[:, rows].requires_grad_(training)
    key, value = some.key.detach(), some.value.detach()
    scores = torch.einsum("bshd,bnhd->bhsn", query, key) * query.shape[-1] ** -0.5
    out = torch.einsum("bhsn,bnhd->bshd", scores.softmax(-1), value)
    if not training:
        return (out,)
    return (out.detach(), *torch.autograd.grad(out, query, some.grad_out[:, rows]))


def check_result(method: Method, inputs: Inputs, case: Case) -> dict[str, Any]:
    """Compare a method's results on a few heads with float32 (VMonarch: the plain-torch reference, all rows).

    Returns:
        {"ok", "errors": {name: {"relative", "row"}}, "heads", "rows", "problem" or None}.
    """
    dtype = inputs.query.dtype
    results = call(method, inputs, case)
    last = case.shape.heads - 1
    heads = [0] if case.training or last == 0 else [0, last]
    if method.kind in ("cudnn", "flash"):
        count = min(EXACT_ROWS, case.shape.tokens)
        rows = torch.linspace(0, case.shape.tokens - 1, count, device=inputs.query.device).long()
        expected = _exact_rows(inputs, heads, rows, case.training)
        found = tuple(result[:, rows][:, :, heads] for result in results[: len(expected)])
    else:
        expected = call(method, inputs.of_heads(heads), case, implementation="torch")
        found = tuple(result[:, :, heads] for result in results)
    errors = {name: relative_errors(x, y) for name, x, y in zip(NAMES, found, expected, strict=False)}
    problems = []
    for name, error in errors.items():
        bound = BOUNDS[dtype]["out" if name == "out" else "gradient"]
        # Written so that NaN is a problem too.
        if not error["relative"] <= bound:
            problems.append(f"{name} is off by {error['relative']:.2g} (at most {bound:.2g})")
        elif not error["row"] <= ROW_FACTOR * bound:
            problems.append(f"a row of {name} is off by {error['row']:.2g} (at most {ROW_FACTOR * bound:.2g})")
    compared = EXACT_ROWS if method.kind in ("cudnn", "flash") else case.shape.tokens
    return {
        "ok": not problems,
        "errors": errors,
        "heads": heads,
        "rows": min(compared, case.shape.tokens),
        "problem": "; ".join(problems) or None,
    }


class Clock:
    """Durations on a device: CUDA events there, the processor's clock in the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch: torch.Tensor | None = None
        if device.type == "cuda":
            # Several times the L2 of any chip.
            self._scratch = torch.empty(256 * 2**20, dtype=torch.int8, device=device)

    def flush(self, times: int = 1) -> None:
        """Overwrite the L2; several times also keeps the chip busy while the host prepares what is measured next."""
        if self._scratch is not None:
            for _ in range(times):
                self._scratch.zero_()

    def mark(self) -> Any:
        """A point in the stream's time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Milliseconds between two marks, after `wait`."""
        return (stop - start) * 1e3 if self.device.type != "cuda" else start.elapsed_time(stop)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def release_memory(device: torch.device) -> None:
    """Give what nothing refers to back to a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, 20th and 80th percentile."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "p20": percentile(values, 0.2),
        "p80": percentile(values, 0.8),
    }


def measure(
    runs: dict[str, Callable[[], Any]], rounds: dict[str, int], clock: Clock, deadline: float, flushes: int = 1
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time the runs in turns: one of each per round, each round beginning with another.

    Args:
        rounds: how often each is measured.
        deadline: `time.monotonic()` after which no round begins, except the first MIN_ROUNDS.
        flushes: how often the L2 is overwritten before each call; many keep the host ahead of a chip that is done soon.

    Returns:
        (milliseconds on the device, milliseconds until the host had queued the call), lists by name.
    """
    names = list(runs)
    device_ms: dict[str, list[float]] = {name: [] for name in names}
    host_ms: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(max(rounds.values(), default=0)):
        if turn >= MIN_ROUNDS and time.monotonic() >= deadline:
            break
        clock.flush(8)
        marks = []
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn >= rounds[name]:
                continue
            clock.flush(flushes)
            start = clock.mark()
            began = time.perf_counter()
            runs[name]()
            host_ms[name].append((time.perf_counter() - began) * 1e3)
            marks.append((name, start, clock.mark()))
        clock.wait()
        for name, start, stop in marks:
            device_ms[name].append(clock.between(start, stop))
    return device_ms, host_ms


@dataclass(frozen=True)
class StageCall:
    """One call of a stage as `fused.forward` or `fused.backward` made it."""

    stage: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def watched_stages(watch: Callable[[StageCall], Any]) -> Iterator[None]:
    """Let `watch` make every call of a stage in `kernels.monarch.fused` and of FlashBias, in place of the call itself.

    So the stages run in the order and with the tensors of the real operator, whatever these are.
    """
    from vmonarch.kernels.flash_bias import op as bias_op
    from vmonarch.kernels.monarch import fused

    counts = {"R": 0, "L": 0, "R backward": 0, "L backward": 0}

    def numbered(kind: str) -> str:
        if kind.endswith("backward"):
            # The backward pass takes the iterations in reverse.
            counts[kind] += 1
            return f"{kind[0]}{counts[kind[0]] - counts[kind] + 1} backward"
        counts[kind] += 1
        return f"{kind}{counts[kind]}"

    def method(original: Callable[..., Any], name: Callable[[], str]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            return watch(StageCall(name(), functools.partial(original, self), args, kwargs))

        return watched

    def function(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return watch(StageCall(name, original, args, kwargs))

        return watched

    r_methods = {"forward": "R", "backward": "R backward"}
    l_methods = {"centroids": "L", "output": "L", "backward": "L backward"}
    stand_ins: dict[str, Any] = {
        "RStep": type(
            "RStep",
            (fused.RStep,),
            {
                "pool": method(fused.RStep.pool, lambda: "pool"),
                **{
                    name: method(getattr(fused.RStep, name), functools.partial(numbered, kind))
                    for name, kind in r_methods.items()
                },
            },
        ),
        "LStep": type(
            "LStep",
            (fused.LStep,),
            {
                name: method(getattr(fused.LStep, name), functools.partial(numbered, kind))
                for name, kind in l_methods.items()
            },
        ),
        "flash_forward": function(fused.flash_forward, "exact"),
        "flash_backward": function(fused.flash_backward, "exact backward"),
    }
    of_bias = {
        "forward_kernel": function(bias_op.forward_kernel, "bias"),
        "backward_kernels": function(bias_op.backward_kernels, "bias backward"),
    }
    changes = [(fused, name, new) for name, new in stand_ins.items()]
    changes += [(bias_op, name, new) for name, new in of_bias.items()]
    originals = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, new in changes:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old in originals:
            setattr(module, name, old)


def measure_stages(
    run: Callable[[], Any], work: Sequence[StageWork], clock: Clock, rounds: int
) -> list[tuple[StageWork, float]]:
    """Median milliseconds of every stage of `run`, in order; the gaps between them are in none."""
    by_stage: list[list[float]] = []
    names: list[str] = []
    for _ in range(rounds):
        marks: list[tuple[str, Any, Any]] = []

        def watch(stage: StageCall, marks: list[tuple[str, Any, Any]] = marks) -> Any:
            start = clock.mark()
            result = stage.function(*stage.args, **stage.kwargs)
            marks.append((stage.stage, start, clock.mark()))
            return result

        with watched_stages(watch):
            clock.flush(8)
            run()
        clock.wait()
        names = [name for name, _, _ in marks]
        by_stage.append([clock.between(start, stop) for _, start, stop in marks])
    medians = [statistics.median(times) for times in zip(*by_stage, strict=True)]
    rest = list(work)
    stages = []
    for name, ms in zip(names, medians, strict=True):
        known = next((stage for stage in rest if stage.stage == name), StageWork(name, 0.0, 0.0))
        if known in rest:
            rest.remove(known)
        stages.append((known, ms))
    return stages


def measure_rates(device: torch.device) -> dict[str, float | str] | None:
    """FLOP/s of an 8192³ bf16 matmul and bytes/s (read + written) of a 2 GB copy; None in the interpreter."""
    if device.type != "cuda":
        return None
    clock = Clock(device)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.empty(2**31, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], Any]] = {
        "matmul": lambda: torch.mm(a, b, out=product),
        "copy": lambda: target.copy_(source),
    }
    for run in runs.values():
        run()
    clock.wait()
    times, _ = measure(runs, dict.fromkeys(runs, 15), clock, math.inf)
    matmul, copy = (statistics.median(times[name]) / 1e3 for name in ("matmul", "copy"))
    return {
        "matmul_flops_per_second": 2 * 8192**3 / matmul,
        "copy_bytes_per_second": 2 * 2**31 / copy,
        "how": "median of 15: bf16 8192x8192x8192 matmul; copy of 2 GiB, bytes read + written",
    }


def floor_ms(flops: float, moved: float, rates: dict[str, Any]) -> float:
    """max(FLOPs / measured bf16 matmul rate, bytes / measured copy rate), in milliseconds."""
    return 1e3 * max(flops / rates["matmul_flops_per_second"], moved / rates["copy_bytes_per_second"])


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.partition("\n")[0].strip() or None if run.returncode == 0 else None


def versions(device: torch.device) -> dict[str, str | None]:
    """Of everything that bears on speed."""
    import vmonarch

    return {
        "vmonarch": vmonarch.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        **package_versions(("torch", "triton", "numpy")),
        # The build says which CUDA it is for.
        "torch_build": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
    }


def map_in_processes(
    function: Callable[[Any], Any],
    tasks: Sequence[Any],
    seconds: float,
    *,
    processes: int | None = None,
    stalled: float = 120.0,
) -> list[Any]:
    """`function` of every task, in processes of their own; None for those that failed or were not done in time.

    Compiled kernels stay in Triton's cache on disk, where this process finds them.

    Args:
        stalled: seconds without a finished task after which the rest is given up: the process of a task has died.
    """
    if not tasks:
        return []
    if processes is None:
        processes = max(1, min((os.cpu_count() or 2) - 1, 15, len(tasks)))
    now = time.monotonic()
    deadline, progress = now + seconds, now
    results: list[Any] = [None] * len(tasks)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting = {i: pool.apply_async(function, (task,)) for i, task in enumerate(tasks)}
        while waiting and time.monotonic() < min(deadline, progress + stalled):
            time.sleep(0.05)
            for i in [i for i, answer in waiting.items() if answer.ready()]:
                answer = waiting.pop(i)
                progress = time.monotonic()
                try:
                    results[i] = answer.get()
                except Exception as error:
                    print(f"a process failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return results


# Stages that one process compiles, as patterns: one process for all of a backward pass would be the last to finish.
_PARTS = {False: (r"[RL]\d+",), True: (r"[RL]\d+", r"R\d+ backward", r"L\d+ backward|exact backward")}
# What the calls of other stages are made of; without the rest their values are arbitrary.
RETURNING = "exact|pool|bias|bias backward"


def call_stages(run: Callable[[], Any], needed: str) -> list[StageCall]:
    """Run an operator, of its stages only those whose names `needed` matches (all if empty); returns all calls."""
    calls: list[StageCall] = []

    def watch(stage: StageCall) -> Any:
        calls.append(stage)
        if needed and re.fullmatch(f"{needed}|{RETURNING}", stage.stage) is None:
            return None
        return stage.function(*stage.args, **stage.kwargs)

    with watched_stages(watch):
        run()
    return calls


def _compile_task(task: tuple[Case, str, str, str]) -> bool:
    """Run some stages of one method once, so that their kernels are in the cache."""
    case, name, stages, device_text = task
    device = torch.device(device_text)
    torch.cuda.set_device(device)
    method = next(method for method in METHODS if method.name == name)
    shape = case.shape
    expected = (25 if case.training else 12) * 2 * shape.tokens * shape.heads * case.head_dim
    waited = time.monotonic()
    while torch.cuda.mem_get_info(device)[0] < 2 * expected and time.monotonic() < waited + 60:
        time.sleep(0.5)
    inputs = Inputs.random(case, device, measured_dtype(device))
    call_stages(lambda: call(method, inputs, case), stages)
    torch.cuda.synchronize(device)
    release_memory(device)
    return True


def compiling_heads(heads: int) -> int:
    """Fewer heads that compile to the same code: Triton only tells apart 1, multiples of 16, and the rest."""
    return 1 if heads == 1 else 16 if heads % 16 == 0 else 2


def compile_tasks(config: BenchConfig, device: str) -> list[tuple[Case, str, str, str]]:
    """(case, method, stages, device) of what the cases need.

    Only how the exact part is split depends on the number of heads; all else is compiled with few, to save memory.
    """
    tasks: dict[tuple[Case, str, str, str], None] = {}
    # Method by method, so that tasks at work at the same time share few kernels, and later ones find theirs compiled.
    for method in config.methods:
        for case in config.cases():
            if method.kind != "vmonarch" or not method.measured_on(case.shape, case.head_dim):
                continue
            few = Shape(case.shape.grid, compiling_heads(case.shape.heads))
            for stages in _PARTS[case.training]:
                tasks[dataclasses.replace(case, shape=few), method.name, stages, device] = None
    exact = [(dataclasses.replace(case, training=False), "vmonarch", "exact", device) for case in config.cases()]
    return [*dict.fromkeys(exact), *tasks] if tasks else []


def compile_ahead(config: BenchConfig, device: torch.device, seconds: float) -> int:
    """Compile what the cases need in several processes; returns how many tasks were not done."""
    return map_in_processes(_compile_task, compile_tasks(config, str(device)), seconds).count(None)


def failure(error: Exception) -> dict[str, Any]:
    memory = isinstance(error, torch.OutOfMemoryError)
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return {"status": "out of memory" if memory else "failed", "problem": f"{type(error).__name__}: {text}"}


def _prepare(
    method: Method, case: Case, inputs: Inputs, clock: Clock, rounds: int
) -> tuple[dict[str, Any], Callable[[], Any] | None, int]:
    """Check and warm up a method: (what the row says so far, what to time or None, rounds)."""
    row: dict[str, Any] = {"method": method.name, "kind": method.kind, "options": method.options}
    device = clock.device

    def run() -> Any:
        return call(method, inputs, case)

    seconds = 0.0
    try:
        check = check_result(method, inputs, case)
        row["check"] = check
        if not check["ok"]:
            return {**row, "status": "wrong", "problem": check["problem"]}, None, 0
        if device.type == "cuda":
            release_memory(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            run()
            clock.wait()
            row["peak_extra_bytes"] = torch.cuda.max_memory_allocated(device) - before
            start = clock.mark()
            run()
            stop = clock.mark()
            clock.wait()
            seconds = clock.between(start, stop) / 1e3
    except Exception as error:
        if "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError):
            # The device is lost to this process, and with it every later measurement.
            raise
        return {**row, **failure(error)}, None, 0
    affordable = max(MIN_ROUNDS + 2, int(METHOD_SECONDS / max(seconds, 1e-6)))
    return {**row, "status": "ok"}, run, min(rounds, affordable)


def finish_rows(
    rows: list[dict[str, Any]], works: dict[str, list[StageWork]], rates: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Add what follows from times, work and rates; rows that are not "ok" get none, nor are others compared with them.

    Args:
        rates: None where times tell nothing of speed; then no speed is derived.
    """
    medians = {row["method"]: row["ms"]["median"] for row in rows if row["status"] == "ok"}
    for row in rows:
        work = works[row["method"]]
        flops, moved = sum(stage.flops for stage in work), sum(stage.bytes for stage in work)
        row.update(flops=flops, bytes=moved)
        if row["status"] != "ok" or rates is None:
            continue
        ms = row["ms"]["median"]
        row["tflops"] = flops / ms / 1e9
        row["floor_ms"] = floor_ms(flops, moved, rates)
        row["over_floor"] = ms / row["floor_ms"]
        for key, baseline in (("over_cudnn", "cudnn"), ("over_fa2", "fa2"), ("over_torch", "vmonarch-torch")):
            row[key] = medians[baseline] / ms if baseline in medians else None
        for stage in row.get("stages", ()):
            if stage["flops"] or stage["bytes"]:
                stage["tflops"] = stage["flops"] / stage["ms"] / 1e9
                stage["floor_ms"] = floor_ms(stage["flops"], stage["bytes"], rates)
    return rows


def _stages(run: Callable[[], Any], work: Sequence[StageWork], clock: Clock) -> dict[str, Any]:
    """{"stages": …}, or {"stages_problem": …}: without a breakdown the times of the whole still stand."""
    try:
        stages = measure_stages(run, work, clock, 7 if clock.device.type == "cuda" else 1)
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        return {"stages_problem": failure(error)["problem"]}
    return {
        "stages": [{"stage": stage.stage, "ms": ms, "flops": stage.flops, "bytes": stage.bytes} for stage, ms in stages]
    }


def run_case(
    case: Case, config: BenchConfig, clock: Clock, rates: dict[str, Any] | None, deadline: float
) -> dict[str, Any]:
    """Check, time and break down all methods on one case."""
    device = clock.device
    dtype = measured_dtype(device)
    methods = [method for method in config.methods if method.measured_on(case.shape, case.head_dim)]
    inputs = Inputs.random(case, device, dtype)
    rows: list[dict[str, Any]] = []
    runs: dict[str, Callable[[], Any]] = {}
    rounds: dict[str, int] = {}
    for method in methods:
        row, run, turns = _prepare(method, case, inputs, clock, config.rounds)
        rows.append(row)
        if run is not None:
            runs[method.name], rounds[method.name] = run, turns
        release_memory(device)
    times, host = measure(runs, rounds, clock, deadline) if runs else ({}, {})
    works = {method.name: method_work(method, case, dtype.itemsize) for method in methods}
    for row in rows:
        name = row["method"]
        if name not in runs:
            continue
        row.update(ms=summary(times[name]), host_ms=statistics.median(host[name]), rounds=len(times[name]))
        row["rounds_left_out"] = rounds[name] - row["rounds"]
        if row["kind"] == "vmonarch":
            row.update(_stages(runs[name], works[name], clock))
    return {
        "shape": case.shape.name,
        "grid": list(case.shape.grid),
        "heads": case.shape.heads,
        "tokens": case.shape.tokens,
        "head_dim": case.head_dim,
        "pass": PASSES["backward" if case.training else "forward"],
        "rows": finish_rows(rows, works, rates),
    }


def _predicted_seconds(case: Case, config: BenchConfig, rates: dict[str, Any] | None) -> float:
    """A guess of what the least of a case takes: MIN_ROUNDS and the warm-up, at a third of the matmul's rate."""
    if rates is None:
        return 0.0
    methods = [method for method in config.methods if method.measured_on(case.shape, case.head_dim)]
    flops = sum(stage.flops for method in methods for stage in method_work(method, case, 2))
    return 0.5 + (MIN_ROUNDS + 4) * flops / (rates["matmul_flops_per_second"] / 3)


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Replace the file as a whole: readers see the old one or the new one."""
    with AtomicFiles(overwrite=True) as files:
        files.stage(path).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run_bench(config: BenchConfig) -> dict[str, Any]:
    """Measure all cases of `config` and write the JSON after each.

    Returns:
        what was written: {"format", "date", "hardware", "versions", "command", "settings", "rates", "formulae",
        "cases": [{"shape", "grid", "heads", "tokens", "head_dim", "pass", "rows": [{"method", "status", "ms", …}]}],
        "left_out", "complete"}. Times are milliseconds.

    Raises:
        InputError: the device or the output cannot be used.
    """
    started = time.monotonic()
    deadline = started + config.budget
    device = check_device(config.device)
    check_output(config.output)
    cases = config.cases()
    if not cases:
        raise InputError("methods", f"are measured on none of the shapes; {FIGURE_8} with d=64 has them all")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    real = device.type == "cuda"

    def say(text: str) -> None:
        if config.progress:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    if real:
        missing = compile_ahead(config, device, COMPILE_SHARE * config.budget)
        say(f"kernels compiled; {missing} left to compile when they are met" if missing else "kernels compiled")
    rates = measure_rates(device)
    dtype = measured_dtype(device)
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": device_name(device) if real else "interpreter",
        "versions": versions(device),
        "command": config.command or shlex.join(["vmonarch", *sys.argv[1:]]),
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "batch": 1,
            "layout": "[B, S, H, D]; SDPA gets transposed views of it",
            "exact": "first_frame",
            "inputs": "standard normal",
            "timing": "CUDA events, L2 overwritten before each call, methods in turns" if real else "no speed",
            "rounds": config.rounds,
            "budget_s": config.budget,
            "bounds": {**BOUNDS[dtype], "row_factor": ROW_FACTOR},
            "reference": "float32 plain torch on heads 0 and H-1 (backward: head 0);"
            f" exact attention: on {EXACT_ROWS} rows, out and dq",
        },
        "rates": rates,
        "formulae": FORMULAE,
        "cases": [],
        "left_out": [],
        "complete": False,
    }
    clock = Clock(device)
    write_json(config.output, results)
    for case in cases:
        left = deadline - time.monotonic()
        if left <= _predicted_seconds(case, config, rates):
            results["left_out"].append({"case": case.name, "why": f"the budget of {config.budget:g} s was used up"})
            continue
        results["cases"].append(run_case(case, config, clock, rates, deadline))
        if cut := max(row.get("rounds_left_out", 0) for row in results["cases"][-1]["rows"]):
            results["left_out"].append({"case": case.name, "why": f"{cut} rounds did not fit the budget"})
        write_json(config.output, results)
        say(case.name)
    results["complete"] = not results["left_out"]
    results["seconds"] = round(time.monotonic() - started, 1)
    write_json(config.output, results)
    return results


def wrong_rows(results: dict[str, Any]) -> list[str]:
    """What makes a run fail: wrong results of any method, and VMonarch kernels that did not run."""
    return [
        f"{row['method']} at {case['shape']} d={case['head_dim']} {case['pass']}: {row['problem']}"
        for case in results["cases"]
        for row in case["rows"]
        if row["status"] == "wrong" or (row["status"] != "ok" and row["kind"] == "vmonarch")
    ]


def text_table(results: dict[str, Any]) -> str:
    """The short table that the command prints last."""
    heading = ["case", "method", "ms", "p20–p80", "× cuDNN", "TFLOP/s", "× floor", "extra MB", "error"]
    lines = [heading]
    for case in results["cases"]:
        name = f"{case['shape']} d={case['head_dim']} {'fwd+bwd' if '+' in case['pass'] else 'fwd'}"
        for row in case["rows"]:
            if row["status"] != "ok":
                lines.append([name, row["method"], row["status"].upper(), *[""] * 6])
                continue
            ms, peak = row["ms"], row.get("peak_extra_bytes")
            error = max(error["relative"] for error in row["check"]["errors"].values())

            def number(key: str, digits: int, row: dict[str, Any] = row) -> str:
                return "–" if row.get(key) is None else f"{row[key]:.{digits}f}"

            lines.append(
                [
                    name,
                    row["method"],
                    f"{ms['median']:.3f}",
                    f"{ms['p20']:.3f}–{ms['p80']:.3f}",
                    number("over_cudnn", 2),
                    number("tflops", 0),
                    number("over_floor", 2),
                    "–" if peak is None else f"{peak / 1e6:.0f}",
                    f"{error:.1e}",
                ]
            )
            name = ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    table = "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    notes = [f"{results['hardware']}, {results['date'][:10]}, {results['settings']['dtype']}"]
    if results["hardware"] == "interpreter":
        notes[0] += ": times of the interpreter, which tell nothing of speed"
    if results["rates"]:
        rates = results["rates"]
        notes.append(
            f"measured rates: matmul {rates['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s,"
            f" copy {rates['copy_bytes_per_second'] / 1e12:.2f} TB/s"
        )
    notes += [f"{name}: {text}" for name, text in results["formulae"].items()]
    notes += [f"left out: {entry['case']} ({entry['why']})" for entry in results["left_out"]]
    return table + "\n\n" + "\n".join(notes)
