"""Time RMS norm with rotary embedding in one kernel against diffusers' code: `vmonarch bench norm`.

Queries of one self-attention module, at the sizes of `vmonarch bench e2e`. All ways are compared with float64, and ours
may err at most twice as much as diffusers' own code in the same dtype.

Legend: B batch (always 1), S tokens, H heads, D head dim, C = H·D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.eval.bench.e2e import SETTINGS
from vmonarch.eval.bench.runner import Bench, Way, Ways, with_gradients
from vmonarch.eval.bench.tables import PASSES, about, cell, digits, good_rows
from vmonarch.eval.render.table import markdown
from vmonarch.eval.wan_models import read_model_config
from vmonarch.grid import LatentGrid
from vmonarch.kernels.norm_rotary.api import norm_rotary
from vmonarch.kernels.norm_rotary.reference import norm_rotary_reference
from vmonarch.projections import rotate

METHODS = ("vmonarch", "diffusers", "compiled")
# How much of diffusers' error ours may have.
ERROR_FACTOR = 2.0
# Errors below this are those of float64 numbers rounded to float32, of which a multiple says nothing.
LEAST_ERROR = 1e-7
NAMES = ("out", "dx", "dweight")
EPS = 1e-6
FORMULAE = {
    "forward": "bytes = 2·S·C·s + 2·S·D·4 + C·s, s bytes of an element: x, out; cosines and sines in float32; weight",
    "forward+backward": "bytes = 5·S·C·s + 4·S·D·4 + 4·C·s: x, out; gradient, x, dx; angles twice; weight, dweight",
    "GB/s": "those bytes / median time: what must be moved, not what a way moves",
    "error": "‖x − x₀‖ / ‖x₀‖, x₀ in float64 from the same inputs",
}


@dataclass(frozen=True)
class Case:
    """A grid of tokens and the heads of one module; `training` is forward and backward together."""

    name: str
    grid: LatentGrid
    heads: int
    head_dim: int
    training: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {'forward+backward' if self.training else 'forward'}"

    @property
    def tokens(self) -> int:
        return self.grid.tokens

    def bytes(self, itemsize: int) -> float:
        """By FORMULAE."""
        S, C = self.tokens, self.heads * self.head_dim
        passes, angles, weights = (5, 4, 4) if self.training else (2, 2, 1)
        return passes * S * C * itemsize + angles * S * self.head_dim * 4 + weights * C * itemsize


def standard_cases() -> list[Case]:
    """The settings of the end-to-end benchmark, forward before backward."""
    cases = []
    for training in (False, True):
        for setting in SETTINGS:
            model = read_model_config(setting.model)
            grid = model.grid(model.latents(setting.frames, setting.height, setting.width, argument="settings"))
            shape = model.transformer["num_attention_heads"], model.transformer["attention_head_dim"]
            cases.append(Case(setting.name, grid, *shape, training))
    return cases


class Inputs:
    """x [1, S, C], weight [C] and the gradient of the result [1, S, H, D]; cosines and sines [1, S, 1, D] of Wan."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

        C = case.heads * case.head_dim
        generator = torch.Generator(device).manual_seed(case.tokens + C)
        x, grad = (
            torch.randn(1, case.tokens, C, generator=generator, device=device, dtype=torch.float32).to(dtype)
            for _ in range(2)
        )
        weight = 1 + 0.3 * torch.randn(C, generator=generator, device=device)
        self.x = x.requires_grad_(case.training)
        self.weight = weight.to(dtype).requires_grad_(case.training)
        self.grad = grad.unflatten(2, (case.heads, case.head_dim)) if case.training else None
        rope = WanRotaryPosEmbed(case.head_dim, (1, 1, 1), 1024).to(device)
        self.cosines, self.sines = rope(torch.empty(1, 1, *case.grid, device=device))
        self.heads = case.heads

    def expected(self) -> dict[str, torch.Tensor]:
        """What all ways are compared with, in float64."""
        x, weight, cosines, sines = (
            tensor.detach().double() for tensor in (self.x, self.weight, self.cosines, self.sines)
        )
        leaves = [tensor.requires_grad_(self.grad is not None) for tensor in (x, weight)]
        grad = None if self.grad is None else self.grad.double()
        run = with_gradients(
            lambda: norm_rotary_reference(x, weight, cosines, sines, heads=self.heads, eps=EPS), leaves, grad
        )
        return dict(zip(NAMES, run(), strict=False))


def diffusers_code(
    x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int
) -> torch.Tensor:
    """What `WanAttnProcessor` does to a projection: the norm, then the rotation, rounded in between."""
    normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)
    return rotate(normed.unflatten(2, (heads, -1)), cosines, sines)


def way(method: str, case: Case, device: torch.device, dtype: torch.dtype) -> Way:
    """One way to compute a case."""
    inputs = Inputs(case, device, dtype)
    tensors = (inputs.x, inputs.weight, inputs.cosines, inputs.sines)
    implementation = "triton" if device.type == "cuda" else "torch"
    code: Callable[..., torch.Tensor] = diffusers_code
    if method == "compiled":
        # After a few functions torch would stop compiling new ones.
        torch.compiler.reset()
        code = torch.compile(diffusers_code, fullgraph=True, dynamic=False)

    def attend() -> torch.Tensor:
        if method == "vmonarch":
            return norm_rotary(*tensors, heads=case.heads, eps=EPS, implementation=implementation)
        return code(*tensors, case.heads)

    return Way(
        with_gradients(attend, (inputs.x, inputs.weight), inputs.grad),
        lambda results: dict(zip(NAMES, results, strict=False)),
        inputs.expected,
        bytes=case.bytes(dtype.itemsize),
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case."""
    return {method: lambda method=method: way(method, case, device, dtype) for method in METHODS}  # type: ignore[misc]


def judge(rows: Sequence[dict[str, Any]]) -> None:
    """Call our result wrong where it errs more than ERROR_FACTOR times as much as diffusers' code."""
    errors = {row["method"]: row.get("errors", {}) for row in rows}
    for row in rows:
        if row["method"] != "vmonarch" or row["status"] != "ok":
            continue
        for name, error in row["errors"].items():
            other = errors.get("diffusers", {}).get(name)
            if other is None:
                continue
            found, bound = error["relative"], ERROR_FACTOR * max(other["relative"], LEAST_ERROR)
            if not found <= bound:
                row.update(
                    status="wrong", problem=f"{name} is off by {found:.2g}, diffusers by {other['relative']:.2g}"
                )
                row.pop("ms", None)


def norm_table(results: dict[str, Any]) -> str:
    """Milliseconds and GB/s of every way, and the largest errors."""
    rows = []
    for case in results["cases"]:
        ours = good_rows(case).get("vmonarch")

        def show(row: dict[str, Any], ours: dict[str, Any] | None = ours) -> str:
            ms = row["ms"]["median"]
            faster = "" if ours is None or row is ours else f", {ms / ours['ms']['median']:.2f}×"
            return f"{digits(ms)} ({row['bytes'] / ms / 1e6:.0f} GB/s{faster})"

        cells = [case["name"], PASSES[case["training"]], *(cell(case, method, show) for method in METHODS)]
        for method in ("vmonarch", "diffusers"):
            errors = next((row.get("errors") for row in case["rows"] if row["method"] == method), None)
            cells.append(f"{max(error['relative'] for error in errors.values()):.1e}" if errors else "–")
        rows.append(cells)
    heading = ["setting", "pass", "one kernel", "diffusers", "diffusers compiled", "our error", "diffusers' error"]
    return f"{markdown(heading, rows)}\n{about(results, 'Milliseconds (GB/s; how many times as long as ours).')}"


def bench() -> Bench:
    """The benchmark, for the registry."""
    return Bench(
        methods=METHODS,
        ours=("vmonarch",),
        cases=standard_cases(),
        ways=ways,
        formulae=FORMULAE,
        settings={
            "inputs": "standard normal",
            "layout": "x [1, S, C], result [1, S, H, D]; angles of Wan, float32",
            "reference": f"float64 plain torch, all rows; ours at most {ERROR_FACTOR:g} × diffusers' error",
        },
        finish=lambda case, rows, rates: judge(rows),
    )
