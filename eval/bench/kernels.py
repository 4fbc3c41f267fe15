"""Time the attention kernels against exact attention and plain torch, in one run: `vmonarch bench kernels`.

A case is a latent grid, a number of heads, a head dimension and a pass. Every VMonarch result is first compared with
the float32 plain-torch reference on a few heads, and VMonarch's times are also taken apart by stage.

Legend: B batch (always 1), S tokens, H heads, D head dim, m blocks, b positions per block, t iterations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.eval.bench.clock import MIN_ROUNDS, Clock
from vmonarch.eval.bench.gate import NAMES, failure
from vmonarch.eval.bench.machine import compiling, floor_ms, map_in_processes, measured_dtype, shown_rates
from vmonarch.eval.bench.runner import ATTENTION, Bench, Way, Ways, sdpa, with_gradients
from vmonarch.eval.bench.stages import call_stages, measure_stages
from vmonarch.eval.render.table import aligned, shown_number
from vmonarch.flops import StageWork, full_attention_work, two_resolution_work, vmonarch_work
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.two_resolution.api import two_resolution_attention
from vmonarch.two_resolution_options import TwoResolutionOptions

FORMAT = "vmonarch-kernel-bench-1"
PASSES = {"forward": "forward", "backward": "forward+backward"}
HEAD_DIMS = (128, 64)
# Rows of exact attention that are compared: the whole map would take longer than the measurement.
EXACT_ROWS = 256


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
        kind: "vmonarch", the fused kernels; "torch", the plain-torch VMonarch; "two_resolution"; "cudnn" or "flash", a
            backend of SDPA; "flash_bias".
        options: of `vmonarch_attention` or `two_resolution_attention`; of "flash_bias" `rank`.
        only: the shapes it is measured on, all if empty.
        head_dims: the head dimensions it is measured at, all if empty.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether it is exact attention, by SDPA."""
        return self.kind in ("cudnn", "flash")

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
    Method("vmonarch-coarse2-rows", "vmonarch", {"coarse": 2, "row_share": 0.25}),
    Method("vmonarch-lite", "vmonarch", {"coarse": 2, "row_share": 0.25, "last_l_update": False}),
    Method("two-resolution", "two_resolution"),
    Method("vmonarch-tiles2-coarse2", "vmonarch", {"tiles": (2, 2), "coarse": 2}),
    Method("vmonarch-t1", "vmonarch", {"num_iterations": 1}, head_dims=(128,)),
    Method("vmonarch-t3", "vmonarch", {"num_iterations": 3}, head_dims=(128,)),
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
    def label(self) -> str:
        return f"{self.shape.name} d={self.head_dim} {PASSES['backward' if self.training else 'forward']}"


@dataclass(frozen=True)
class Selection:
    """What is measured."""

    shapes: tuple[Shape, ...] = SHAPES
    methods: tuple[Method, ...] = METHODS
    head_dims: tuple[int, ...] = HEAD_DIMS
    passes: tuple[str, ...] = tuple(PASSES)

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


FORMULAE = {
    "legend": "S tokens, T frames, m blocks, b positions of the largest block, c(k) pooled cells of block k, d head"
    " dim, t iterations, n rows answered exactly (the first frame: H·W); a multiply-add counts 2; times heads",
    "full attention": "4·S²·d forward, +10·S²·d backward",
    "two resolutions": "4·d for each pair of a query and a token of its exact tiles or a mean, and 2·d for each product"
    " of means that chooses them; backward ×5/2",
    "exact": "4·n·S·d forward, +10·n·S·d backward",
    "R-steps": "the first t-1: 4·b·Σ_k c(k)·d, without pooling 4·b·S·d; the last: 6·b·S·d;"
    " backward: ×5/2, the last ×7/3",
    "L-steps": "4·S·m·d each forward, +10·S·m·d each backward",
    "backward": "every product once, the recomputed scores too; products that a kernel repeats are not counted",
    "bytes": "every tensor that a stage reads or writes, once per stage",
    "floor": "max(FLOPs / measured bf16 matmul rate, bytes / measured copy rate)",
}


def method_work(method: Method, case: Case, itemsize: int) -> list[StageWork]:
    """Work of a method on a case, by stage."""
    shape = case.shape
    if method.exact:
        return [
            full_attention_work(shape.tokens, shape.heads, case.head_dim, itemsize=itemsize, training=case.training)
        ]
    if method.kind == "two_resolution":
        options = TwoResolutionOptions(**method.options)
        return [
            two_resolution_work(
                shape.grid, shape.heads, case.head_dim, options, itemsize=itemsize, training=case.training
            )
        ]
    return vmonarch_work(
        shape.grid, shape.heads, case.head_dim, itemsize=itemsize, training=case.training, **method.options
    )


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


def attention(method: Method, inputs: Inputs, grid: LatentGrid, implementation: str = "") -> torch.Tensor:
    """Output [1, S, H, D] of a method; `implementation` overrides that of VMonarch."""
    if method.exact:
        return sdpa(method.kind, inputs.query, inputs.key, inputs.value)
    if method.kind == "flash_bias":
        factors = inputs.factors(method.options["rank"])
        return flash_bias_attention(inputs.query, inputs.key, inputs.value, *factors, implementation="triton")
    implementation = implementation or ("torch" if method.kind == "torch" else "triton")
    attend = two_resolution_attention if method.kind == "two_resolution" else vmonarch_attention
    return attend(inputs.query, inputs.key, inputs.value, grid=grid, implementation=implementation, **method.options)


def call(method: Method, inputs: Inputs, case: Case, implementation: str = "") -> tuple[torch.Tensor, ...]:
    """(out,) or, in training, (out, dq, dk, dv)."""
    leaves = (inputs.query, inputs.key, inputs.value)
    attend = partial(attention, method, inputs, case.shape.grid, implementation)
    return with_gradients(attend, leaves, inputs.grad_out if case.training else None)()


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


def way(method: Method, inputs: Inputs, case: Case) -> Way:
    """A method, checked on a few heads: VMonarch on all rows, exact attention on some."""
    heads, tokens = checked_heads(case), case.shape.tokens
    rows: Any = slice(None)
    compared: tuple[str, ...] = NAMES
    expected: Callable[[], tuple[torch.Tensor, ...]]
    if method.exact:
        rows = torch.linspace(0, tokens - 1, min(EXACT_ROWS, tokens), device=inputs.query.device).long()
        compared = NAMES[: 1 + case.training]
        expected = partial(_exact_rows, inputs, heads, rows, case.training)
    else:
        expected = lambda: call(method, inputs.of_heads(heads), case, implementation="torch")
    work = method_work(method, case, inputs.query.dtype.itemsize)
    run = partial(call, method, inputs, case)
    return Way(
        run=run,
        found=lambda results: {name: x[:, rows][:, :, heads] for name, x in zip(compared, results, strict=False)},
        expected=lambda: dict(zip(compared, expected(), strict=False)),
        flops=sum(stage.flops for stage in work),
        bytes=sum(stage.bytes for stage in work),
        more=partial(_stages, run, work) if method.kind == "vmonarch" else lambda clock: {},
    )


def checked_heads(case: Case) -> list[int]:
    last = case.shape.heads - 1
    return [0] if case.training or last == 0 else [0, last]


# Stages that one process compiles, as patterns: one process for all of a backward pass would be the last to finish.
_PARTS = {False: (r"[RL]\d+",), True: (r"[RL]\d+", r"R\d+ backward", r"L\d+ backward|exact backward")}


def _compile_task(task: tuple[Case, str, str, str]) -> bool:
    """Run some stages of one method once, so that their kernels are in the cache."""
    case, name, stages, device_text = task
    method = next(method for method in METHODS if method.name == name)
    expected = (25 if case.training else 12) * 2 * case.shape.tokens * case.shape.heads * case.head_dim
    with compiling(device_text, 2 * expected) as device:
        inputs = Inputs.random(case, device, measured_dtype(device))
        call_stages(lambda: call(method, inputs, case), stages)
    return True


def compiling_heads(heads: int) -> int:
    """Fewer heads that compile to the same code: Triton only tells apart 1, multiples of 16, and the rest."""
    return 1 if heads == 1 else 16 if heads % 16 == 0 else 2


def compile_tasks(selection: Selection, device: str) -> list[tuple[Case, str, str, str]]:
    """(case, method, stages, device) of what the cases need.

    Only how the exact part is split depends on the number of heads; all else is compiled with few, to save memory.
    """
    fused = [method for method in selection.methods if method.kind == "vmonarch"]
    tasks: dict[tuple[Case, str, str, str], None] = {}
    # Method by method, so that tasks at work at the same time share few kernels, and later ones find theirs compiled.
    for method in fused:
        for case in selection.cases():
            if not method.measured_on(case.shape, case.head_dim):
                continue
            few = Shape(case.shape.grid, compiling_heads(case.shape.heads))
            for stages in _PARTS[case.training]:
                tasks[dataclasses.replace(case, shape=few), method.name, stages, device] = None
    # Methods whose exact rows are computed alike need one task.
    exact = {method.options.get("row_share", 1.0): method.name for method in fused}
    forward = dict.fromkeys(dataclasses.replace(case, training=False) for case in selection.cases())
    return [*((case, name, "exact", device) for case in forward for name in exact.values()), *tasks] if tasks else []


def compile_ahead(selection: Selection, device: torch.device, seconds: float) -> int:
    """Compile what the cases need in several processes; returns how many tasks were not done."""
    return map_in_processes(_compile_task, compile_tasks(selection, str(device)), seconds).count(None)


def _stages(run: Callable[[], Any], work: Sequence[StageWork], clock: Clock) -> dict[str, Any]:
    """{"stages": …}, or {"stages_problem": …}: without a breakdown the times of the whole still stand."""
    try:
        stages = measure_stages(run, work, clock, 7 if clock.device.type == "cuda" else 1)
    except Exception as error:
        return {"stages_problem": failure(error)["problem"]}
    return {
        "stages": [{"stage": stage.stage, "ms": ms, "flops": stage.flops, "bytes": stage.bytes} for stage, ms in stages]
    }


def ways(methods: Sequence[Method], case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """The methods that are measured on a case; they share the inputs."""
    inputs = Inputs.random(case, device, dtype)
    return {m.name: partial(way, m, inputs, case) for m in methods if m.measured_on(case.shape, case.head_dim)}


def finish(
    methods: Sequence[Method], case: Case, rows: list[dict[str, Any]], rates: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Add what follows from times, work and rates; rows that are not "ok" get none, nor are others compared with them.

    Args:
        rates: None where times tell nothing of speed; then no speed is derived.
    """
    named = {method.name: method for method in methods}
    medians = {row["method"]: row["ms"]["median"] for row in rows if row["status"] == "ok"}
    for row in rows:
        method = named[row["method"]]
        row.update(kind=method.kind, options=method.options)
        if "errors" in row:
            row["check"] = {
                "ok": row["status"] != "wrong",
                "errors": row.pop("errors"),
                "heads": checked_heads(case),
                "rows": min(EXACT_ROWS if method.exact else case.shape.tokens, case.shape.tokens),
                "problem": row.get("problem"),
            }
        if "peak_bytes" in row:
            row["peak_extra_bytes"] = row.pop("peak_bytes")
        if row["status"] != "ok" or rates is None:
            continue
        ms = row["ms"]["median"]
        row["floor_ms"] = floor_ms(row["flops"], row["bytes"], rates)
        row["over_floor"] = ms / row["floor_ms"]
        for key, baseline in (("over_cudnn", "cudnn"), ("over_fa2", "fa2"), ("over_torch", "vmonarch-torch")):
            row[key] = medians[baseline] / ms if baseline in medians else None
        for stage in row.get("stages", ()):
            if stage["flops"] or stage["bytes"]:
                stage["tflops"] = stage["flops"] / stage["ms"] / 1e9
                stage["floor_ms"] = floor_ms(stage["flops"], stage["bytes"], rates)
    return rows


def describe(case: Case) -> dict[str, Any]:
    """What the JSON says of a case."""
    return {
        "shape": case.shape.name,
        "grid": list(case.shape.grid),
        "heads": case.shape.heads,
        "tokens": case.shape.tokens,
        "head_dim": case.head_dim,
        "pass": PASSES["backward" if case.training else "forward"],
    }


def _least_seconds(methods: Sequence[Method], case: Case, rates: dict[str, Any]) -> float:
    """A guess of what the least of a case takes: MIN_ROUNDS and the warm-up, at a third of the matmul's rate."""
    measured = [method for method in methods if method.measured_on(case.shape, case.head_dim)]
    flops = sum(stage.flops for method in measured for stage in method_work(method, case, 2))
    return 0.5 + (MIN_ROUNDS + 4) * flops / (rates["matmul_flops_per_second"] / 3)


def bench(selection: Selection = Selection()) -> Bench:
    """The benchmark of what is selected.

    Raises:
        InputError: no method is measured on any of the shapes.
    """
    methods, cases = selection.methods, selection.cases()
    if not cases:
        raise InputError("methods", f"are measured on none of the shapes; {FIGURE_8} with d=64 has them all")
    return Bench(
        methods=tuple(method.name for method in methods),
        ours=tuple(method.name for method in methods if method.kind in ("vmonarch", "two_resolution")),
        cases=cases,
        ways=partial(ways, methods),
        formulae=FORMULAE,
        settings={
            **ATTENTION,
            "batch": 1,
            "memory": "peak_extra_bytes: the most that was allocated during a call beyond what was before it",
            "exact": "first_frame",
            "reference": "float32 plain torch on heads 0 and H-1 (backward: head 0);"
            f" exact attention: on {EXACT_ROWS} rows, out and dq",
        },
        finish=partial(finish, methods),
        describe=describe,
        ahead=partial(compile_ahead, selection),
        least_seconds=partial(_least_seconds, methods),
        format=FORMAT,
        way_seconds=5.0,
        # About four milliseconds, in which the host queues the longest call.
        flushes=64,
    )


def text_table(results: dict[str, Any]) -> str:
    """The short table that the command prints last."""
    rows = []
    for case in results["cases"]:
        name = f"{case['shape']} d={case['head_dim']} {'fwd+bwd' if '+' in case['pass'] else 'fwd'}"
        for row in case["rows"]:
            if row["status"] != "ok":
                rows.append([name, row["method"], row["status"].upper(), *[""] * 6])
                continue
            ms, errors = row["ms"], row["check"]["errors"].values()
            rows.append(
                [
                    name,
                    row["method"],
                    f"{ms['median']:.3f}",
                    f"{ms['p20']:.3f}–{ms['p80']:.3f}",
                    shown_number(row.get("over_cudnn"), 2),
                    shown_number(row.get("tflops"), 0),
                    shown_number(row.get("over_floor"), 2),
                    shown_number(row.get("peak_extra_bytes"), 0, factor=1e-6),
                    f"{max(error['relative'] for error in errors):.1e}",
                ]
            )
            name = ""
    heading = ["case", "method", "ms", "p20–p80", "× cuDNN", "TFLOP/s", "× floor", "extra MB", "error"]
    notes = [f"{results['hardware']}, {results['date'][:10]}, {results['settings']['dtype']}"]
    if results["rates"]:
        notes.append(f"measured rates: {shown_rates(results['rates'])}")
    notes += [f"{name}: {text}" for name, text in results["formulae"].items()]
    notes += [f"left out: {entry['case']} ({entry['why']})" for entry in results["left_out"]]
    return aligned(heading, rows) + "\n\n" + "\n".join(notes)
