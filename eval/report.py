"""The report of an evaluation: everything in it comes from the record of `vmonarch eval` and the items' videos."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vmonarch.eval.render.plot import numbered_points, page
from vmonarch.eval.render.tables import shown_number
from vmonarch.eval.summary import MEASURES, sampled, shown_interval, summary_rows

# Measures that are drawn against FLOPs, where they were taken.
PLOTTED = ("psnr", "ssim", "lpips", "prompt_score")


def report(record: Mapping[str, Any], folder: Path) -> str:
    """The page, which carries the record as JSON.

    Args:
        record: as in `evaluation.json`.
        folder: of the evaluation, where the videos are.
    """
    heading, rows = summary_rows(record)
    measured = [key for key in MEASURES if MEASURES[key].heading in heading]
    compared = [key for key in MEASURES if any(values[key] for values in record["differences"].values())]
    others = [label for label in record["methods"] if label != record["reference"]]
    return page(
        "evaluation.html.j2",
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


def _embedded(record: Mapping[str, Any], folder: Path) -> Iterator[tuple[Mapping[str, Any], dict[str, str]]]:
    """The first items with their videos by method, as many as the settings let into the page."""
    room = record["config"]["report_megabytes"] * 1_000_000
    for item in record["items"][: record["config"]["report_items"]]:
        videos = {row["method"]: (folder / item["folder"] / row["video"]).read_bytes() for row in item["results"]}
        room -= sum(map(len, videos.values()))
        if room < 0:
            return
        yield item, {label: f"data:video/mp4;base64,{b64encode(video).decode()}" for label, video in videos.items()}


def quality_plot(record: Mapping[str, Any], key: str) -> Markup | None:
    """A measure against the methods' attention FLOPs; None where no method has both."""
    measure = MEASURES[key]
    points = []
    for number, label in enumerate(record["methods"], start=1):
        value, share = record["statistics"][label][key], record["attention_flops"][label]
        if value is None or share is None or isinstance(value["mean"], str):
            continue
        mean = value["mean"]
        low, high = (mean if value[edge] is None else value[edge] for edge in ("low", "high"))
        points.append((number, 100 * share, mean, low, high))
    better = "more" if measure.more_is_better else "less"
    across = "attention FLOPs, % of full attention"
    return numbered_points(points, f"{measure.heading} ({better} is better)", across) if points else None
