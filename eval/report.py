"""The report of an evaluation: everything in it comes from the record of `vmonarch eval` and the items' videos.

The page is made from the templates in `render/`. It is one file and fetches nothing from the network. The same numbers
give the same bytes.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

from vmonarch.eval.render.tables import shown_number
from vmonarch.eval.summary import MEASURES, sampled, shown_interval, summary_rows

# Measures that are plotted against FLOPs, if they were taken.
PLOTTED = ("psnr", "ssim", "lpips", "prompt_score")
# Okabe and Ito's colours, which colour-blind readers can tell apart; all that is coloured also has a number or marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#999999")
# CSS pixels per inch, and the size of text in points.
_INCH, _TEXT = 96, 8


def report(record: Mapping[str, Any], folder: Path) -> str:
    """The page, which carries the record as JSON.

    Args:
        record: as in `evaluation.json`.
        folder: the evaluation's folder, with the videos.
    """
    heading, rows = summary_rows(record)
    measured = [key for key in MEASURES if MEASURES[key].heading in heading]
    compared = [key for key in MEASURES if any(values[key] for values in record["differences"].values())]
    others = [label for label in record["methods"] if label != record["reference"]]
    template = _environment().get_template("evaluation.html.j2")
    return template.render(
        record=record,
        sampled=sampled(record["config"]),
        heading=heading,
        rows=rows,
        measured=measured,
        plots=[plot for key in PLOTTED if (plot := quality_plot(record, key))],
        compared=compared,
        difference_heading=["method", *(MEASURES[key].heading for key in compared)],
        embedded=list(_embedded(record, folder)),
        item_heading=["item", "prompt", "seed", *(f"{label}: PSNR dB" for label in others)],
        methods={method["label"]: method for method in record["config"]["methods"]},
        sampling={key: value for key, value in record["config"].items() if key not in ("prompts", "methods")},
        shown_number=shown_number,
        shown_interval=shown_interval,
    )


def _environment() -> Environment:
    """The Jinja environment of the templates.

    Values are escaped unless they are Markup; None becomes nothing; an undefined name is an error.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "render"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: "" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}
    environment.filters |= {"json": partial(json.dumps, ensure_ascii=False), "breakable": breakable}
    environment.globals["colour"] = colour
    return environment


def _embedded(record: Mapping[str, Any], folder: Path) -> Iterator[tuple[Mapping[str, Any], dict[str, str]]]:
    """The first items with their videos by method, up to the limits in the settings."""
    room = record["config"]["report_megabytes"] * 1_000_000
    for item in record["items"][: record["config"]["report_items"]]:
        videos = {row["method"]: (folder / item["folder"] / row["video"]).read_bytes() for row in item["results"]}
        room -= sum(map(len, videos.values()))
        if room < 0:
            return
        yield item, {label: f"data:video/mp4;base64,{b64encode(video).decode()}" for label, video in videos.items()}


def quality_plot(record: Mapping[str, Any], key: str) -> Markup | None:
    """Plot of a measure against attention FLOPs, a numbered point per method; None if no method has both."""
    measure = MEASURES[key]
    points = []
    for number, label in enumerate(record["methods"], start=1):
        value, share = record["statistics"][label][key], record["attention_flops"][label]
        if value is None or share is None or isinstance(value["mean"], str):
            continue
        mean = value["mean"]
        low, high = (mean if value[edge] is None else value[edge] for edge in ("low", "high"))
        points.append((number, 100 * share, mean, low, high))
    if not points:
        return None
    title = f"{measure.heading} ({'more' if measure.more_is_better else 'less'} is better)"
    across = "attention FLOPs, % of full attention"
    figure = Figure(figsize=(396 / _INCH, 280 / _INCH), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=_TEXT, color="#999999")
    axes.grid(axis="y", color="#e4e4e4", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(across, fontsize=_TEXT, loc="right")
    for number, x, y, low, high in points:
        axes.errorbar(x, y, [[max(y - low, 0)], [max(high - y, 0)]], color=colour(number), elinewidth=0.8)
        axes.plot(x, y, "o", ms=12, color=colour(number), mew=0, zorder=3)
        axes.text(x, y, str(number), color="white", fontsize=_TEXT, ha="center", va="center_baseline", zorder=4)
    axes.margins(x=0.08, y=0.12)
    axes.set_xlim(left=0, right=max(100, *(x for _, x, *_ in points)) + 4)
    text = io.StringIO()
    # Ids in the SVG are hashes of contents, so that figures on a page share only the ids of equal parts.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "vmonarch", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # Without the XML header.
    element = Markup(text.getvalue().partition("<svg ")[2])
    return Markup('<svg role="img" aria-label="{}: {}" ').format(title, across) + element


def breakable(label: str) -> Markup:
    """A method's label that may wrap between its options."""
    return escape(label).replace(":", Markup(":<wbr>")).replace(",", Markup(",<wbr>"))


def colour(number: int) -> str:
    """The colour for a number, counted from 1."""
    return COLOURS[(number - 1) % len(COLOURS)]
