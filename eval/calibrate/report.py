"""The report of a diagnosis, and of the plan made from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from markupsafe import Markup

from vmonarch.eval.calibrate.planning import measures_of, over_steps
from vmonarch.eval.render.plot import heat_map, numbered_lines, page
from vmonarch.plan import AttentionPlan

# The measures that are shown.
_TITLES = {"error": "error", "kl": "row-KL", "output_error": "squared change of the model's output"}


# A picture, and the lines below it.
Captioned = tuple[Markup, tuple[str, ...]]


def report(diagnosis: Mapping[str, Any], plan: AttentionPlan) -> str:
    """The page.

    Args:
        diagnosis: as in `diagnosis.json`.
        plan: made from it.
    """
    shown = {name: title for name, title in _TITLES.items() if name in measures_of(diagnosis)}
    heads = sum(len(row) for rows in plan.layers.values() for row in rows) / len(plan.layers)
    # Predicted, and relative; None where it was not measured.
    mean = plan.about["predicted"].get("mean_output_error")
    return page(
        "calibration.html.j2",
        diagnosis=diagnosis,
        plan=plan,
        means={name: _means(diagnosis, name, shown) for name in diagnosis["candidates"]},
        output_change=None if mean is None else (heads * mean) ** 0.5,
        full_ms=diagnosis.get("full_ms"),
        work=list(_work(diagnosis, plan)),
        transformers=[
            {
                "name": name,
                "steps": part["steps"],
                "charts": list(_charts(part, shown)),
                "losses": list(_losses(name, part, shown)),
            }
            for name, part in diagnosis["transformers"].items()
        ],
    )


def _means(diagnosis: Mapping[str, Any], candidate: str, shown: Mapping[str, str]) -> list[float | None]:
    """Mean error and row-KL of a candidate, and the change of the model's output; None if that was not measured."""
    parts = [part["candidates"][candidate] for part in diagnosis["transformers"].values()]
    mean = lambda measure: torch.cat([over_steps(part[measure], measure).flatten() for part in parts]).mean().item()
    if "output_error" not in shown:
        return [mean("error"), mean("kl"), None]
    changes = torch.cat([torch.tensor(part["output_error"]).sum((1, 2)) for part in parts])
    return [mean("error"), mean("kl"), changes.mean().sqrt().item()]


def _cells(of: str, values: torch.Tensor, title: str, top: float | None = None) -> Captioned:
    """A heat map of [layers, heads]; the darkest is `top`, by default the largest value."""
    largest = values.max().item()
    picture = heat_map(values.numpy(), f"{of}: {title}", top or max(largest, 1e-12))
    return picture, (title, f"mean {values.mean().item():.4g}, largest {largest:.4g}")


def _work(diagnosis: Mapping[str, Any], plan: AttentionPlan) -> Iterator[Captioned]:
    cost = {name: entry["flops"] for name, entry in diagnosis["candidates"].items()}
    for component, rows in plan.layers.items():
        work = torch.tensor([[cost.get(name, 1.0) for name in heads] for heads in rows])
        yield _cells("plan", work, f"{component}: work of every head, of full attention's", 1.0)


def _charts(part: Mapping[str, Any], shown: Mapping[str, str]) -> Iterator[Markup]:
    for measure, title in shown.items():
        candidates = part["candidates"].items()
        lines = {name: torch.tensor(values[measure]).mean((1, 2)).tolist() for name, values in candidates}
        yield numbered_lines(lines, part["steps"], title, "step")


def _losses(component: str, part: Mapping[str, Any], shown: Mapping[str, str]) -> Iterator[list[Captioned]]:
    """Heat maps of all candidates on one scale, for each measure."""
    for measure, title in shown.items():
        found = {name: over_steps(values[measure], measure) for name, values in part["candidates"].items()}
        top = max(values.max().item() for values in found.values())
        yield [_cells(component, values, f"{name}: {title}", top) for name, values in found.items()]
