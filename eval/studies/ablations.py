"""Tables and pictures of what `collect` has put together: `python -m vmonarch.eval.studies.ablations`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from vmonarch.configs import InputError, read_document
from vmonarch.eval.record import names_now
from vmonarch.eval.render.plot import tidy, write_pngs
from vmonarch.eval.render.table import markdown
from vmonarch.eval.studies.collect import FORMAT
from vmonarch.eval.summary import MEASURES, sampled, shown_number

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("embedded", "proxy")
SHOWN = ("psnr", "ssim", "first_frame_psnr", "first_frame_ssim", "prompt_score")
# Heading, factor and decimals of what methods lose in the attention itself.
_ATTENTION = {
    "kl": ("row-KL", 1, 4),
    "attention_error": ("attention error", 100, 1),
    "output_error": ("change of output", 100, 1),
}
# Methods that every table has beside its own, from the evaluation that made their videos.
CONTROLS = ("local", "block-topk", "block-topk:refresh=0.16", "two-resolution:refresh=0.16")
# What may differ between evaluations whose videos can be compared.
_OWN_SETTINGS = {"methods", "baseline", "lpips", "vbench", "vbench_timeout", "report_items", "report_megabytes"}
# The first come first where two are in each other's way.
_NAMED = ("vmonarch", "plan 1.00", "plan 1.35", "local", "block-topk", "vmonarch-first-band1", "vmonarch-dense-start")
# By what a method changes; Okabe and Ito's colours, and a marker each for prints in grey.
FAMILIES = {
    "iterations, frames per block": ("#0072B2", "o"),
    "exact blocks": ("#009E73", "s"),
    "pooling, tiles": ("#56B4E9", "v"),
    "full attention in some steps or layers": ("#E69F00", "^"),
    "plans": ("#D55E00", "*"),
    "residual sharing": ("#CC79A7", "D"),
    "controls, other factorisations": ("#999999", "X"),
}


def family(method: Mapping[str, Any]) -> str:
    """Which of FAMILIES a method (as a config has it) belongs to."""
    if method.get("refresh") is not None:
        return "residual sharing"
    if method.get("processor", method.get("kind")) != "vmonarch":
        return "controls, other factorisations"
    if method.get("plan"):
        return "plans"
    if method["dense_steps"] or method["dense_layers"]:
        return "full attention in some steps or layers"
    if method["coarse"] != 1 or list(method["tiles"]) != [1, 1]:
        return "pooling, tiles"
    return "iterations, frames per block" if method["exact"] == "first_frame" else "exact blocks"


def read_collection(path: Path) -> dict[str, Any]:
    """The JSON of `vmonarch.eval.studies.collect`.

    Raises:
        InputError: it cannot be read, or is something else.
    """
    results = read_document("input", path, FORMAT, "collection of `vmonarch.eval.studies.collect`")
    renamed: dict[str, Any] = names_now(results)
    return renamed


def ablation_table(results: Mapping[str, Any], name: str) -> str:
    """One of the collected evaluations for a document, with CONTROLS that others have of the same prompts and seeds.

    Means; bold where the paired difference to the baseline is for the better and its 95 % interval leaves out zero,
    in italics where it is for the worse. What is lost in the attention itself only where a diagnosis tells.
    """
    record = results["evaluations"][name]
    losses = _ATTENTION if "attention" in record else {}
    rows = [_row(record, label, losses) for label in record["methods"]]
    controls = {
        label: (origin, other)
        for origin, other in results["evaluations"].items()
        if _sampling(other) == _sampling(record)
        for label in CONTROLS
        if label in other["methods"] and label not in record["methods"]
    }
    for label, (_, other) in controls.items():
        rows.append(_row(other, label, losses, other["baseline"] == record["baseline"]))
    heading = ["", "attention FLOPs", *(MEASURES[key].heading for key in SHOWN)]
    heading += [title + (", %" if factor == 100 else "") for title, factor, _ in losses.values()]
    environment = record["environments"][0]["environment"]
    about = f"{sampled(record['config'])}; baseline {record['baseline']}; {environment['device_name']},"
    about += f" {record['created'][:10]}. Made by `{record['command']}`."
    if controls:
        about += f" Controls: from {', '.join(sorted({origin for origin, _ in controls.values()}))}."
    return f"{markdown(heading, rows)}\n{about}\n"


def _sampling(record: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the videos of an evaluation, but for the methods."""
    return {key: value for key, value in record["config"].items() if key not in _OWN_SETTINGS}


def _row(
    record: Mapping[str, Any], label: str, losses: Mapping[str, tuple[str, int, int]], compared: bool = True
) -> list[str]:
    """A method's cells; `compared`: marked by its differences to the baseline."""
    share = record["attention_flops"][label]
    cells = [label, "–" if share is None else f"{100 * share:.1f} %"]
    differences = record["differences"].get(label, {}) if compared else {}
    for key in SHOWN:
        value = record["statistics"][label][key]
        cells.append(_marked(value, differences.get(key), MEASURES[key].decimals, MEASURES[key].more_is_better))
    lost = record.get("attention", {}).get(label)
    for key, (_, factor, decimals) in losses.items():
        value = None if lost is None or label == record["reference"] else lost[key]
        cells.append(shown_number(None if value is None else factor * value, decimals))
    return cells


def _marked(value: Mapping[str, Any] | None, difference: Mapping[str, Any] | None, decimals: int, up: bool) -> str:
    if value is None:
        return "–"
    text = shown_number(value["mean"], decimals)
    if difference is None or difference["low"] is None or difference["low"] <= 0 <= difference["high"]:
        return text
    return f"**{text}**" if (difference["low"] > 0) == up else f"*{text}*"


def points(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every method of the collected evaluations once: label, family, flops, psnr (mean, low, high), kl or None."""
    found: dict[str, dict[str, Any]] = {}
    for record in results["evaluations"].values():
        kinds = {entry["label"]: family(entry) for entry in record["config"]["methods"]}
        for label in record["methods"]:
            share, value = record["attention_flops"][label], record["statistics"][label]["psnr"]
            if label == record["reference"] or share is None or value is None:
                continue
            lost = record.get("attention", {}).get(label)
            found[label] = {
                "label": label,
                "family": kinds[label],
                "flops": share,
                "psnr": value,
                "kl": None if lost is None else lost["kl"],
            }
    return list(found.values())


def draw(collections: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """PSNR and row-KL over attention FLOPs, a row for each model; the same JSON gives the same bytes."""
    figure = Figure(figsize=(11, 4.4 * len(collections)), layout="constrained")
    grid = figure.subplots(len(collections), 2, squeeze=False)
    handles: dict[str, Any] = {}
    panels: list[tuple[Axes, Any]] = []
    for axes, (model, results) in zip(grid, collections.items(), strict=True):
        found = points(results)
        axes[1].set_yscale("log")
        axes[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 4, 6)))
        axes[1].yaxis.set_major_formatter("{x:g}")
        axes[1].yaxis.set_minor_formatter(NullFormatter())
        values = [(p, p["psnr"]["mean"], p["psnr"]) for p in found], [(p, p["kl"], None) for p in found if p["kl"]]
        for panel, entries in zip(axes, values, strict=True):
            _panel(panel, entries, handles)
            panels.append((panel, entries))
        axes[0].set_ylabel("PSNR to full attention, dB")
        axes[1].set_ylabel("mean row-KL, nats")
        for panel in axes:
            panel.set_title(f"{model} model", loc="left", fontsize=11)
    order = [name for name in FAMILIES if name in handles]
    figure.legend([handles[n] for n in order], order, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    # Where names fit is known once everything has its place.
    figure.draw_without_rendering()
    for panel, entries in panels:
        _name(panel, entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_pngs({path: figure})


def _panel(axes: Axes, values: Sequence[tuple[dict[str, Any], float, Any]], handles: dict[str, Any]) -> None:
    if not values:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#999999")
        axes.set_axis_off()
        return
    default = next((p["flops"] for p, _, _ in values if p["label"] == "vmonarch"), None)
    if default is not None:
        axes.axvline(100 * default, color="#cccccc", lw=1, zorder=0)
    for point, value, interval in values:
        colour, marker = FAMILIES[point["family"]]
        bars = None
        if interval is not None and interval["low"] is not None:
            bars = [[value - interval["low"]], [interval["high"] - value]]
        size = 11 if marker == "*" else 7
        made = axes.errorbar(
            100 * point["flops"], value, bars, fmt=marker, color=colour, ms=size, mec="white", mew=0.6, elinewidth=0.8
        )
        handles.setdefault(point["family"], made)
    axes.set_xlabel("attention FLOPs, % of full attention")
    tidy(axes)


def _name(axes: Axes, values: Sequence[tuple[dict[str, Any], float, Any]]) -> None:
    """Names of _NAMED and of the other plans, where no other name is in the way."""
    taken: list[tuple[float, float]] = []
    named = [entry for name in _NAMED for entry in values if entry[0]["label"] == name]
    named += [entry for entry in values if entry[0]["family"] == "plans"]
    for point, value, _ in named:
        x, y = axes.transData.transform((100 * point["flops"], value))
        if any(abs(x - other_x) < 130 and abs(y - other_y) < 13 for other_x, other_y in taken):
            continue
        taken.append((x, y))
        place = 100 * point["flops"], value
        left = axes.transAxes.inverted().transform((x, y))[0] > 0.7
        name = axes.annotate(
            point["label"], place, (-6 if left else 6, 2), textcoords="offset points", fontsize=7,
            ha="right" if left else "left",
        )  # fmt: skip
        # The layout is settled.
        name.set_in_layout(False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.ablations", description=__doc__)
    benchmarks = ROOT / "docs" / "benchmarks"
    inputs = [benchmarks / f"eval-{model}.json" for model in MODELS]
    parser.add_argument("--input", type=Path, nargs="+", default=inputs, help="JSON of vmonarch.eval.studies.collect")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "ablations.png")
    options = parser.parse_args(arguments)
    try:
        collections = {path.stem.removeprefix("eval-"): read_collection(path) for path in options.input}
    except InputError as error:
        parser.error(str(error))
    draw(collections, options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
