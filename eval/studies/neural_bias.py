"""How well two small networks learn biases that have no factors: `python -m vmonarch.eval.studies.neural_bias`.

The two biases of FlashBias, Appendix F, by its recipe (rank 32, three linear layers, Adam, 10,000 steps), and a picture
like its Fig. 9. Runs on a CPU in minutes.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from vmonarch.bias import NeuralFactors, fit_neural_factors
from vmonarch.eval.record import script_parser
from vmonarch.eval.render.plot import write_pngs
from vmonarch.files import write_json
from vmonarch.pipelines.environment import device_name, package_versions

ROOT = Path(__file__).resolve().parents[2]
RANK, POINTS, FRESH_POINTS, SEED = 32, 256, 512, 0


def gravity(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """1 / (‖x - y‖² + 0.01) of points in a square [0, 1]²; the paper adds 0.01 to the diagonal, here to all pairs."""
    return 1 / ((x[:, None] - y).square().sum(-1) + 0.01)


def spherical_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Angle between points (latitude, longitude) on a sphere, by the haversine formula (FlashBias, Eq. 14)."""
    half = torch.sin((x[:, None] - y) / 2).square()
    chord = half[..., 0] + torch.cos(x[:, None, 0]) * torch.cos(y[:, 0]) * half[..., 1]
    return 2 * torch.arcsin(chord.clamp(0, 1).sqrt())


@dataclass(frozen=True)
class Task:
    """A bias and the box that its points are drawn from.

    Args:
        low, high: bounds of the coordinates.
        order: the coordinate that a picture's points are sorted by.
    """

    bias: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    low: tuple[float, ...]
    high: tuple[float, ...]
    order: int

    def points(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """[count, C]"""
        low, high = torch.tensor(self.low), torch.tensor(self.high)
        return low + (high - low) * torch.rand(count, len(self.low), generator=generator)


# Latitudes are from -π/2 to π/2 here; the paper's box, -π to π, holds every point of the sphere twice.
TASKS = {
    "gravity": Task(gravity, (0.0, 0.0), (1.0, 1.0), 0),
    "spherical distance": Task(spherical_distance, (-math.pi / 2, 0.0), (math.pi / 2, 2 * math.pi), 0),
}


def fit(task: Task, steps: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Train on random points, measure on others.

    Returns:
        (the record, the bias [FRESH_POINTS, FRESH_POINTS] and what the factors give, points sorted).
    """
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    factors = NeuralFactors(len(task.low), RANK)
    began = time.perf_counter()
    errors = fit_neural_factors(
        factors, task.bias, lambda: (task.points(POINTS, generator), task.points(POINTS, generator)), steps=steps
    )
    seconds = time.perf_counter() - began
    points = task.points(FRESH_POINTS, generator)
    points = points[points[:, task.order].argsort()]
    wanted = task.bias(points, points)
    with torch.no_grad():
        query_factor, key_factor = factors(points, points)
    found = query_factor[0, :, 0] @ key_factor[0, :, 0].T
    # What no factors of this rank can do better on these points, had they seen them.
    sigma = torch.linalg.svdvals(wanted.double())
    record = {
        "relative_error": ((found - wanted).norm() / wanted.norm()).item(),
        "relative_error_of_a_constant": ((wanted.mean() - wanted).norm() / wanted.norm()).item(),
        "relative_error_of_svd": (sigma[RANK:].square().sum() / sigma.square().sum()).sqrt().item(),
        "mean_squared_error_first_step": errors[0],
        "mean_squared_error_last_steps": sum(errors[-100:]) / len(errors[-100:]),
        "seconds": round(seconds, 1),
    }
    return record, wanted, found


def draw(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], path: Path) -> None:
    """The biases beside what the factors give."""
    figure = Figure(figsize=(7.4, 3.5 * len(pairs)), layout="constrained")
    axes = figure.subplots(len(pairs), 2, squeeze=False)
    for row, (name, (wanted, found)) in zip(axes, pairs.items(), strict=True):
        # Beyond these the picture would show a few bright pairs and nothing else.
        low, high = (wanted.flatten().quantile(q).item() for q in (0.01, 0.99))
        for ax, bias, title in zip(row, (wanted, found), (name, f"rank {RANK}, by two networks"), strict=True):
            image = ax.imshow(bias.numpy(), vmin=low, vmax=high, cmap="viridis")
            ax.set_title(title)
            ax.set_xlabel("key, sorted by the first coordinate")
            ax.set_ylabel("query")
        figure.colorbar(image, ax=list(row), shrink=0.85)
    write_pngs({path: figure})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = script_parser("studies.neural_bias", __doc__, whole=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/neural-bias.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/neural-bias.png")
    options = parser.parse_args(arguments)
    records, pairs = {}, {}
    for name, task in TASKS.items():
        records[name], *pair = fit(task, options.steps)
        pairs[name] = (pair[0], pair[1])
        print(name, json.dumps(records[name]))
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads",
        "versions": package_versions(),
        "command": f"python -m vmonarch.eval.studies.neural_bias --steps {options.steps}",
        "settings": {"rank": RANK, "points_per_step": POINTS, "fresh_points": FRESH_POINTS, "seed": SEED},
        "biases": records,
    }
    write_json(options.output, results)
    draw(pairs, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
