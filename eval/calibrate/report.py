"""The pictures of a diagnosis as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vmonarch.eval.calibrate.planning import measures_of, over_steps
from vmonarch.eval.report import STYLE
from vmonarch.plan import AttentionPlan

# Of a cell of a heat map, in pixels.
_CELL = 14
_CHART = (420, 200)
_INKS = ("#1b6ca8", "#c8553d", "#588157", "#7b2cbf", "#b5838d", "#e09f3e", "#335c67", "#9e2a2b")
# Of the measures that are shown.
_TITLES = {"error": "error", "kl": "row-KL", "output_error": "squared change of the model's output"}
_STYLE = (
    STYLE
    + """
table { width: auto; } th:first-child, td:first-child { text-align: left; }
.maps, .row { display: flex; flex-wrap: wrap; gap: 20px; } figure { max-width: 440px; }
h3 { margin-top: 24px; }
img { image-rendering: pixelated; width: 300px; height: 300px; border: 1px solid var(--line); }
svg text { font: 11px system-ui, sans-serif; }
pre { background: var(--fill); padding: 12px; overflow-x: auto; font-size: 12px; }
"""
)


def _colour(share: float) -> str:
    """From white (0) over orange to dark red (1)."""
    share = min(max(share, 0.0), 1.0)
    low, high = ((255, 255, 255), (244, 162, 97)) if share < 0.5 else ((244, 162, 97), (130, 15, 40))
    place = 2 * share % 1 if share < 1 else 1.0
    return "#" + "".join(f"{round(a + (b - a) * place):02x}" for a, b in zip(low, high, strict=True))


def heat_map(values: torch.Tensor, title: str, top: float | None = None) -> str:
    """A figure of [layers, heads], a row for each layer; the darkest is `top`, by default the largest value."""
    layers, heads = values.shape
    top = top or max(values.max().item(), 1e-12)
    cells = [
        f'<rect x="{30 + h * _CELL}" y="{l * _CELL}" width="{_CELL}" height="{_CELL}" '
        f'fill="{_colour(values[l, h].item() / top)}"><title>layer {l}, head {h}: {values[l, h].item():.4g}</title>'
        "</rect>"
        for l in range(layers)
        for h in range(heads)
    ]
    labels = [
        f'<text x="25" y="{l * _CELL + 11}" text-anchor="end">{l}</text>'
        for l in range(0, layers, max(1, layers // 10))
    ]
    size = f'width="{32 + heads * _CELL}" height="{layers * _CELL + 2}"'
    caption = f"{html.escape(title)}<br>mean {values.mean().item():.4g}, largest {values.max().item():.4g}"
    return f"<figure><svg {size}>{''.join(labels + cells)}</svg><figcaption>{caption}</figcaption></figure>"


def line_chart(lines: Mapping[str, Sequence[float]], across: Sequence[Any], title: str, axis: str) -> str:
    """A figure of lines over the places `across`, from 0 to the largest value."""
    width, height = _CHART
    top = max(max(values) for values in lines.values()) or 1.0
    left, bottom, count = 50, height - 30, max(len(across) - 1, 1)
    x = lambda i: left + i * (width - left - 10) / count
    y = lambda value: bottom - value / top * (bottom - 15)
    parts = [
        f'<line x1="{left}" y1="{bottom}" x2="{width - 10}" y2="{bottom}" stroke="#999"/>',
        f'<text x="{left - 5}" y="19" text-anchor="end">{top:.3g}</text>',
        f'<text x="{left - 5}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{(left + width) / 2}" y="{height - 3}" text-anchor="middle">{html.escape(axis)}</text>',
    ]
    for i in range(0, len(across), max(1, len(across) // 8)):
        label = html.escape(str(across[i]))
        parts.append(f'<text x="{x(i)}" y="{bottom + 13}" text-anchor="middle">{label}</text>')
    for number, (name, values) in enumerate(lines.items()):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        dash = ' stroke-dasharray="5 3"' if number >= len(_INKS) else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_INKS[number % len(_INKS)]}" stroke-width="2"{dash}>'
            f"<title>{html.escape(name)}</title></polyline>"
        )
    key = " ".join(
        f'<span style="color:{_INKS[number % len(_INKS)]}">{"■" if number < len(_INKS) else "▤"}</span>'
        f"&nbsp;{html.escape(name)}"
        for number, name in enumerate(lines)
    )
    figure = f'<svg width="{width}" height="{height}">{"".join(parts)}</svg>'
    return f"<figure>{figure}<figcaption>{html.escape(title)}<br>{key}</figcaption></figure>"


def map_picture(picture: torch.Tensor, like: torch.Tensor, title: str) -> str:
    """A figure of an attention map [size, size]: the logarithm of its mass, on the scale of the map `like`."""
    from PIL import Image

    logs = lambda mass: mass.clamp(min=1e-12).log10()
    low, high = logs(like).flatten().quantile(torch.tensor([0.01, 0.999])).tolist()
    shade = (logs(picture) - low) / max(high - low, 1e-6)
    levels = (255 * (1 - shade.clamp(0, 1))).round().byte().numpy()
    data = io.BytesIO()
    Image.fromarray(levels, "L").save(data, "PNG", optimize=True)
    source = base64.b64encode(data.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(title, quote=True)}" src="data:image/png;base64,{source}">'
        f"<figcaption>{html.escape(title)}</figcaption></figure>"
    )


def report(
    diagnosis: Mapping[str, Any], plan: AttentionPlan | None, pictures: Mapping[tuple[str, int, int, str], torch.Tensor]
) -> str:
    """The HTML of a diagnosis, of the plan made from it and of the attention maps that were kept."""
    grid = diagnosis["grid"]
    body = [
        "<h1>Attention, head by head</h1>",
        f"<p>Latent grid {' × '.join(map(str, grid))} (frames × rows × columns of tokens). Every candidate saw the"
        " inputs of full attention. <i>error</i>: ‖o − o*‖ / ‖o*‖ of a head's output; <i>row-KL</i>: mean KL(candidate"
        " ‖ full attention) of the rows, in nats. A first frame answered exactly counts as no KL. <i>change of the"
        " model's output</i>: relative, as far as a head's error alone changes it.</p>",
        _candidates_table(diagnosis),
    ]
    if plan is not None:
        body.append(_plan_section(diagnosis, plan))
    for component, part in diagnosis["transformers"].items():
        body.append(f"<h2>{html.escape(component)}: steps {', '.join(map(str, part['steps']))}</h2>")
        body.append('<div class="row">' + _charts(part, _titles(diagnosis)) + "</div>")
        body.append("<h3>What full attention does</h3><div class='row'>")
        for key, title, top in (
            ("entropy", "entropy of a row, nats", None),
            ("first_frame_mass", "mass on the first frame", 1.0),
            ("own_frame_mass", "mass on the query's own frame", 1.0),
        ):
            body.append(heat_map(over_steps(part[key], key), title, top))
        body.append("</div><h3>What the candidates lose</h3>")
        for measure, title in _titles(diagnosis).items():
            found = {name: over_steps(values[measure], measure) for name, values in part["candidates"].items()}
            top = max(values.max().item() for values in found.values())
            figures = [heat_map(values, f"{name}: {title}", top) for name, values in found.items()]
            body.append('<div class="row">' + "".join(figures) + "</div>")
    for component, layer, head in dict.fromkeys(key[:3] for key in pictures):
        body.append(
            f"<h3>Attention maps of {html.escape(component)}, layer {layer}, head {head}</h3><div class='maps'>"
        )
        body += [
            map_picture(picture, pictures[component, layer, head, "full"], name)
            for (place, l, h, name), picture in pictures.items()
            if (place, l, h) == (component, layer, head)
        ]
        body.append("</div>")
    about = json.dumps(diagnosis.get("about", {}), indent=1, ensure_ascii=False)
    body.append(f"<h2>How it was made</h2><pre>{html.escape(about)}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Attention, head by head</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _titles(diagnosis: Mapping[str, Any]) -> dict[str, str]:
    return {name: title for name, title in _TITLES.items() if name in measures_of(diagnosis)}


def _candidates_table(diagnosis: Mapping[str, Any]) -> str:
    rows = []
    for name, candidate in diagnosis["candidates"].items():
        cells = [html.escape(name), f"{100 * candidate['flops']:.1f} %"]
        for measure in ("error", "kl"):
            found = [
                over_steps(part["candidates"][name][measure], measure).flatten()
                for part in diagnosis["transformers"].values()
            ]
            cells.append(f"{torch.cat(found).mean().item():.4f}")
        if "output_error" in measures_of(diagnosis):
            shares = [torch.tensor(p["candidates"][name]["output_error"]) for p in diagnosis["transformers"].values()]
            per_step = torch.cat([share.sum((1, 2)) for share in shares])
            cells.append(f"{100 * per_step.mean().sqrt().item():.1f} %")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    names = ["candidate", "work of full attention", "mean error", "mean row-KL"]
    names += ["change of the model's output"] if "output_error" in measures_of(diagnosis) else []
    heading = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="scroll"><table><tr>{heading}</tr>{"".join(rows)}</table></div>'


def _plan_section(diagnosis: Mapping[str, Any], plan: AttentionPlan) -> str:
    names = list(plan.methods)
    cost = {name: entry["flops"] for name, entry in diagnosis["candidates"].items()}
    parts = ["<h2>The plan</h2>"]
    counts = ", ".join(f"{html.escape(name)}: {count}" for name, count in plan.about["heads"].items())
    predicted = plan.about["predicted"]
    parts.append(
        f"<p>Heads: {counts}. Work: {100 * predicted['flops_of_full']:.1f} % of full attention,"
        f" {predicted['flops_of_vmonarch']:.2f} × VMonarch with its defaults. Predicted mean error"
        f" {predicted['mean_error']:.4f}, mean row-KL {predicted['mean_kl']:.4f}"
    )
    if "mean_output_error" in predicted:
        heads = sum(len(row) for rows in plan.layers.values() for row in rows) / len(plan.layers)
        parts.append(f", change of the model's output {100 * (heads * predicted['mean_output_error']) ** 0.5:.1f} %")
    parts.append(".</p><div class='row'>")
    for component, rows in plan.layers.items():
        work = torch.tensor([[cost.get(name, 1.0) for name in heads] for heads in rows])
        parts.append(heat_map(work, f"{component}: work of every head, of full attention's", 1.0))
    parts.append("</div>")
    return "".join(parts) + f"<p>Methods: {html.escape(', '.join(names))}.</p>"


def _charts(part: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    steps = part["steps"]
    charts = [
        line_chart(
            {
                name: torch.tensor(values[measure]).mean((1, 2)).tolist()
                for name, values in part["candidates"].items()
            },
            steps, f"{title}, mean over layers and heads", "step",
        )
        for measure, title in titles.items()
    ]  # fmt: skip
    mass = torch.tensor(part["distance_mass"]).mean((0, 1, 2)).tolist()
    charts.append(line_chart({"full attention": mass}, range(len(mass)), "mass by distance in time", "latent frames"))
    return "".join(charts)
