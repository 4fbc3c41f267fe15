"""The report of a diagnosis, and of the plan made from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from markupsafe import Markup

from vmonarch.eval.calibrate.planning import measures_of, over_steps
from vmonarch.eval.render.plot import numbered_lines, page
from vmonarch.plan import AttentionPlan

# The measures that are shown.
_TITLES = {"error": "error", "kl": "row-KL", "output_error": "squared change of the model's output"}


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
    cost = {name: entry["flops"] for name, entry in diagnosis["candidates"].items()}
    return page(
        "calibration.html.j2",
        diagnosis=diagnosis,
        plan=plan,
        means={name: _means(diagnosis, name, shown) for name in diagnosis["candidates"]},
        output_change=None if mean is None else (heads * mean) ** 0.5,
        full_ms=diagnosis.get("full_ms"),
        plan_work={part: [[cost.get(name, 1.0) for name in row] for row in rows] for part, rows in plan.layers.items()},
        transformers=[
            {
                "name": name,
                "steps": part["steps"],
                "charts": list(_charts(part, shown)),
                "losses": {
                    title: {of: over_steps(x[measure], measure).tolist() for of, x in part["candidates"].items()}
                    for measure, title in shown.items()
                },
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


def _charts(part: Mapping[str, Any], shown: Mapping[str, str]) -> Iterator[Markup]:
    for measure, title in shown.items():
        candidates = part["candidates"].items()
        lines = {name: torch.tensor(values[measure]).mean((1, 2)).tolist() for name, values in candidates}
        yield numbered_lines(lines, part["steps"], title, "step")
