"""What float8 products in the R-steps would cost in accuracy: `python -m vmonarch.eval.studies.float8`.

Emulated, so it needs no GPU: operands are rounded as they would be stored, products summed in float32. Tensor cores of
Hopper sum float8 products in fewer bits, so that errors there are at least these. Keys are smoothed (their mean over
the frame is taken off: it changes no weight, and comes back in aL), and every block of rows has its scale, as in
SageAttention and FlashAttention-3.

Legend: B batch, H heads, m frames, b positions, D head dim, E value dim, P unnormalised weights.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from vmonarch.configs import InputError
from vmonarch.eval.bench.machine import provenance
from vmonarch.eval.bench.runner import sdpa
from vmonarch.eval.record import script_parser
from vmonarch.eval.render.table import made, markdown
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch import reference
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.pipelines.environment import device_name, shown_command

FORMAT = "vmonarch-float8-1"
FLOAT8 = torch.float8_e4m3fn
# Rows that share a scale: a tile of the kernels.
BLOCK = 64
# The least error in the norm that float8 may have, as a multiple of bfloat16's, and still be offered.
ALLOWED = 3.0


@dataclass(frozen=True)
class Precision:
    """What is rounded to float8 in an R-step; the rest is in bfloat16, sums in float32.

    Args:
        scores: the operands of z Kᵀ. values: those of P K and P V.
        last: also in the last R-step, whose results are the output.
    """

    scores: bool = False
    values: bool = False
    last: bool = True


PRECISIONS = {
    "bfloat16": Precision(),
    "float8 z and K": Precision(scores=True),
    "float8 P, K and V": Precision(values=True),
    "float8": Precision(scores=True, values=True),
    "float8, the last R-step in bfloat16": Precision(scores=True, values=True, last=False),
    "float8 z and K, the last R-step in bfloat16": Precision(scores=True, last=False),
}


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bfloat16, in its own dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """x [..., rows, D] rounded to float8, every BLOCK rows by their own scale, in its own dtype."""
    rows = x.shape[-2]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % BLOCK)).unflatten(-2, (-1, BLOCK))
    scale = padded.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30) / torch.finfo(FLOAT8).max
    return ((padded / scale).to(FLOAT8).to(x.dtype) * scale).flatten(-3, -2)[..., :rows, :]


def r_step(precision: Precision) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """`reference.r_step`, whose shapes are those of its arguments, with rounded operands and no masked keys."""

    def step(
        z: torch.Tensor,
        key: torch.Tensor,
        key_bias: torch.Tensor | None,
        value: torch.Tensor | None,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        assert key_bias is None, "frames are whole, keys not pooled"
        here = precision.last or value is None
        round_scores = to_float8 if precision.scores and here else to_bfloat16
        round_values = to_float8 if precision.values and here else to_bfloat16
        mean = key.mean(-2, keepdim=True)
        smooth = key - mean
        z = to_bfloat16(z)
        scores = round_scores(z) @ round_scores(smooth).transpose(-1, -2)
        top = scores.amax(-1, keepdim=True)
        P = (scores - top).exp()
        total = P.sum(-1, keepdim=True)
        if precision.values and here:
            # All weights are at most 1, so that one scale serves.
            largest = torch.finfo(FLOAT8).max
            weights = (P * largest).to(FLOAT8).to(P.dtype) / largest
        else:
            weights = to_bfloat16(P)
        aL = to_bfloat16(weights @ round_values(smooth) / total + mean)
        y = None if value is None else to_bfloat16(weights @ round_values(value) / total)
        lse = (top + total.log()).squeeze(-1) + (z * mean).sum(-1)
        return aL, (z * aL).sum(-1) - lse, y

    return step


@contextlib.contextmanager
def rounded(precision: Precision) -> Iterator[None]:
    """The reference computes its R-steps with rounded operands."""
    with mock.patch.object(reference, "r_step", r_step(precision)):
        yield


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_tensors(grid: LatentGrid, heads: int, head_dim: int, seed: int = 0) -> Tensors:
    """Query, key and value [1, S, H, D] of standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, grid.tokens, heads, head_dim)
    query, key, value = (torch.randn(size, generator=generator) for _ in range(3))
    return query, key, value


def embedded_tensors(steps: int) -> tuple[LatentGrid, list[Tensors]]:
    """Query, key and value [1, S, H, D] of every layer of the embedded model, in the middle of sampling a video."""
    from vmonarch import VMonarchProcessor, apply
    from vmonarch.pipelines import WanPipeline
    from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path

    found: list[Tensors] = []
    grids: list[LatentGrid] = []

    class Kept(VMonarchProcessor):
        def attend(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid, heads: Any = None
        ) -> torch.Tensor:
            grids.append(grid)
            found.append((query, key, value))
            return sdpa("sdpa", query, key, value)

    pipe = WanPipeline.from_pretrained(embedded_model_path())
    pipe.set_progress_bar_config(disable=True)
    settings = EMBEDDED_SETTINGS
    with apply(pipe, Kept()), torch.no_grad():
        pipe(
            "a red circle moving right",
            height=settings.height,
            width=settings.width,
            num_frames=settings.num_frames,
            num_inference_steps=steps,
            guidance_scale=1.0,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        )
    layers = len(found) // steps
    middle = steps // 2 * layers
    return grids[0], found[middle : middle + layers]


def relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """‖x − x₀‖ / ‖x₀‖ of all tensors together."""
    difference = sum(float((x.double() - y).square().sum()) for x, y in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(float(y.square().sum()) for y in expected))


def measure(name: str, grid: LatentGrid, inputs: Sequence[Tensors], options: dict[str, Any]) -> dict[str, Any]:
    """Errors of the output of VMonarch, without exact blocks, against float64 from the same bfloat16 inputs."""
    inputs = [(to_bfloat16(q), to_bfloat16(k), to_bfloat16(v)) for q, k, v in inputs]

    def run(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        out = vmonarch_attention(*tensors, grid=grid, exact=None, implementation="torch", **options)
        assert isinstance(out, torch.Tensor)
        return out

    expected = [run([x.double() for x in tensors]) for tensors in inputs]
    full = [sdpa("sdpa", q.double(), k.double(), v.double()) for q, k, v in inputs]
    errors = {}
    for label, precision in PRECISIONS.items():
        with rounded(precision):
            errors[label] = relative_error([run(tensors) for tensors in inputs], expected)
    least = errors["bfloat16"]
    return {
        "case": name,
        "grid": list(grid),
        "heads": inputs[0][0].shape[2],
        "head_dim": inputs[0][0].shape[3],
        "options": options,
        "monarch_error": relative_error(expected, full),
        "rows": [{"precision": label, "error": error, "factor": error / least} for label, error in errors.items()],
    }


def float8_table(results: dict[str, Any]) -> str:
    """Errors in every precision, by case."""
    cases = results["cases"]
    rows = []
    for i, label in enumerate(PRECISIONS):
        found = [case["rows"][i] for case in cases]
        rows.append([label, *(f"{row['error']:.1e} ({row['factor']:.1f}×)" for row in found)])
    rows.append(["VMonarch itself, against full attention", *(f"{case['monarch_error']:.1e}" for case in cases)])
    heading = ["", *(case["case"] for case in cases)]
    about = (
        "‖x − x₀‖ / ‖x₀‖ of the output, x₀ in float64 (× that of bfloat16; allowed are"
        f" {results['settings']['allowed']:g}×). "
    )
    return made(results, markdown(heading, rows), about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.float8", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--quick", action="store_true", help="small frames, few steps: to see that it runs")
    options = parser.parse_args(arguments)
    try:
        check_output(options.output)
    except InputError as error:
        parser.error(str(error))
    height, width, steps = (4, 6, 2) if options.quick else (44, 80, 20)
    grid = LatentGrid(3, height, width)
    embedded, layers = embedded_tensors(steps)
    cases = [
        measure(f"normal, {grid.tokens_per_frame} tokens a frame", grid, [random_tensors(grid, 1, 128)], {}),
        measure(f"embedded model, {embedded.tokens_per_frame} tokens a frame", embedded, layers, {}),
        measure("embedded model, one iteration", embedded, layers, {"num_iterations": 1}),
    ]
    results = {
        "format": FORMAT,
        **provenance(torch.device("cpu"), shown_command(("python", "-m", "vmonarch.eval.studies.float8"), arguments)),
        "hardware": device_name("cpu"),
        "settings": {"float8": str(FLOAT8).removeprefix("torch."), "rows_of_a_scale": BLOCK, "allowed": ALLOWED},
        "cases": cases,
    }
    write_json(options.output, results)
    print(float8_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
