"""Tables and pictures of the kernel benchmark: `python -m vmonarch.eval.studies.kernel_plots`.

Both come from the JSON of `vmonarch bench kernels` alone. The tables go into the documents through
`vmonarch.eval.studies.tables`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from vmonarch.eval.bench.kernels import FORMAT
from vmonarch.eval.bench.tables import digits, good_rows
from vmonarch.eval.render.plot import tidy, write_pngs
from vmonarch.eval.render.table import markdown

ROOT = Path(__file__).resolve().parents[2]
LABELS = {
    "cudnn": "cuDNN, exact",
    "fa2": "FlashAttention-2, exact",
    "vmonarch": "VMonarch",
    "vmonarch-lite": "VMonarch lite",
    "two-resolution": "two resolutions alone",
    "vmonarch-coarse2": "VMonarch coarse=2",
    "vmonarch-coarse2-rows": "VMonarch coarse=2 row_share=0.25",
    "vmonarch-tiles2-coarse2": "VMonarch tiles=(2,2) coarse=2",
    "vmonarch-t1": "VMonarch T=1",
    "vmonarch-t3": "VMonarch T=3",
    "vmonarch-torch": "VMonarch, plain torch",
}
# Okabe and Ito's colours, which colour-blind readers can tell apart, and a marker each for prints in grey. The pictures
# show these methods, the tables all.
_STYLES = {
    "cudnn": ("#555555", "s"),
    "fa2": ("#999999", "D"),
    "vmonarch": ("#0072B2", "o"),
    "vmonarch-lite": ("#D55E00", "*"),
    "two-resolution": ("#CC79A7", "X"),
    "vmonarch-coarse2": ("#56B4E9", "^"),
    "vmonarch-tiles2-coarse2": ("#009E73", "v"),
    "vmonarch-torch": ("#E69F00", "P"),
}
_STAGE_COLOURS = {"exact": "#E69F00", "pool": "#999999", "R": "#0072B2", "L": "#56B4E9"}
_LATER_HATCH = ("", "//", "..", "xx", "++")
PASSES = ("forward", "forward+backward")


class BenchFileError(ValueError):
    """The JSON is not one of `vmonarch bench kernels`, or holds nothing to show."""


def read_results(path: Path) -> dict[str, Any]:
    """The benchmark's JSON.

    Raises:
        BenchFileError: another format, measured in the interpreter, or without a single good result.
        OSError: the file cannot be read.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchFileError(f"{path} is no JSON: {error}") from error
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise BenchFileError(f"{path} is no result of `vmonarch bench kernels` (format {FORMAT})")
    if results["rates"] is None:
        raise BenchFileError(f"{path} was measured in the interpreter, which tells nothing of speed")
    if not any(row["status"] == "ok" for case in results["cases"] for row in case["rows"]):
        raise BenchFileError(f"{path} holds no good result")
    return results


def _label(method: str) -> str:
    return LABELS.get(method, method)


def shape_label(case: dict[str, Any]) -> str:
    """`43×28×52`, with the number of heads where it is not 12."""
    heads = "" if case["heads"] == 12 else f", {case['heads']} heads"
    return "×".join(map(str, case["grid"])) + heads


def _cases(results: dict[str, Any], head_dim: int, kind: str) -> list[dict[str, Any]]:
    """Cases of a head dimension and pass, by tokens."""
    cases = [case for case in results["cases"] if case["head_dim"] == head_dim and case["pass"] == kind]
    return sorted(cases, key=lambda case: (case["heads"], case["tokens"]))


def _head_dims(results: dict[str, Any]) -> list[int]:
    return sorted({case["head_dim"] for case in results["cases"]}, reverse=True)


def _series_of_cases(results: dict[str, Any]) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
    """Head dimension, pass and their cases."""
    for head_dim in _head_dims(results):
        for kind in PASSES:
            yield head_dim, kind, _cases(results, head_dim, kind)


def _methods(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Methods with a good result in any case, in the order of LABELS."""
    found = {method for case in cases for method in good_rows(case)}
    return [*(name for name in LABELS if name in found), *sorted(found - set(LABELS))]


def _drawn(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Those of `_methods` that the pictures show."""
    return [method for method in _methods(cases) if method in _STYLES]


def kernels_table(results: dict[str, Any]) -> str:
    """Times and ratios over cuDNN by shape and method, memory, the stages of VMonarch, and how it was measured."""
    parts = []
    for head_dim, kind, cases in _series_of_cases(results):
        methods = _methods(cases)
        rows = [
            [shape_label(case), f"{case['tokens']:,}", *(_time_cell(case, method) for method in methods)]
            for case in cases
        ]
        heading = ["frames × height × width", "tokens", *map(_label, methods)]
        if methods:
            parts.append(f"d = {head_dim}, {kind}; milliseconds (times as fast as cuDNN):\n\n{markdown(heading, rows)}")
    tables = (_plain_torch_table, _efficiency_table, _memory_table, _stage_table)
    parts += [text for text in (table(results) for table in tables) if text]
    return "\n".join([*parts, _about(results)])


def _time_cell(case: dict[str, Any], method: str) -> str:
    """Milliseconds and the ratio over cuDNN, or why there are none."""
    row = good_rows(case).get(method)
    if row is None:
        return next((row["status"] for row in case["rows"] if row["method"] == method), "–")
    ratio = "" if row["over_cudnn"] is None or method == "cudnn" else f" ({digits(row['over_cudnn'])}×)"
    return digits(row["ms"]["median"]) + ratio


def _efficiency_table(results: dict[str, Any]) -> str:
    """TFLOP/s and distance to the floor of VMonarch, and the error that was found."""
    rows = []
    for head_dim, kind, cases in _series_of_cases(results):
        for case in cases:
            row = good_rows(case).get("vmonarch")
            if row is not None:
                error = max(error["relative"] for error in row["check"]["errors"].values())
                numbers = f"{row['tflops']:.0f}", digits(row["floor_ms"]), f"{row['over_floor']:.2f}×", f"{error:.1e}"
                rows.append([shape_label(case), str(head_dim), kind, *numbers])
    heading = ["VMonarch", "d", "pass", "TFLOP/s", "floor ms", "time / floor", "largest relative error"]
    return markdown(heading, rows) if rows else ""


def _plain_torch_table(results: dict[str, Any]) -> str:
    """How much faster the kernels are than the same method in plain torch."""
    rows = []
    for case in results["cases"]:
        good = good_rows(case)
        if "vmonarch" in good and good["vmonarch"].get("over_torch") is not None:
            times = [digits(good[method]["ms"]["median"]) for method in ("vmonarch-torch", "vmonarch")]
            ratio = f"{digits(good['vmonarch']['over_torch'])}×"
            rows.append([shape_label(case), str(case["head_dim"]), case["pass"], *times, ratio])
    heading = ["frames × height × width", "d", "pass", "plain torch ms", "kernels ms", "faster"]
    return markdown(heading, rows) if rows else ""


def _memory_table(results: dict[str, Any]) -> str:
    rows = []
    methods = _methods(results["cases"])
    for kind in PASSES:
        for case in _cases(results, _head_dims(results)[0], kind):
            good = good_rows(case)
            sizes = [good.get(method, {}).get("peak_extra_bytes") for method in methods]
            if any(size is not None for size in sizes):
                shown = ["–" if size is None else f"{size / 1e6:,.0f}" for size in sizes]
                rows.append([shape_label(case), kind, *shown])
    about = f"Peak memory beyond the inputs, d = {_head_dims(results)[0]}, MB:\n\n"
    return about + markdown(["frames × height × width", "pass", *map(_label, methods)], rows) if rows else ""


def _stage_table(results: dict[str, Any]) -> str:
    """Milliseconds of every stage of the forward pass of VMonarch."""
    cases = [(case, good_rows(case)) for case in _cases(results, _head_dims(results)[0], "forward")]
    stages = [(case, good["vmonarch"]["stages"]) for case, good in cases if good.get("vmonarch", {}).get("stages")]
    names = list(dict.fromkeys(stage["stage"] for _, found in stages for stage in found))
    rows = []
    for case, found in stages:
        by_name = {stage["stage"]: stage for stage in found}
        cells = []
        for name in names:
            stage = by_name.get(name)
            rate = f" ({stage['tflops']:.0f})" if stage and stage.get("tflops") and name[0] in "Re" else ""
            cells.append(f"{digits(stage['ms'])}{rate}" if stage else "–")
        rows.append([shape_label(case), *cells])
    about = f"Stages of VMonarch, forward, d = {_head_dims(results)[0]}; milliseconds (TFLOP/s):\n\n"
    return about + markdown(["frames × height × width", *names], rows) if rows else ""


def speed_table(results: dict[str, Any]) -> str:
    """Milliseconds of exact attention and of VMonarch at head dimension 128, and how many times as fast it is."""
    by_pass = {kind: {shape_label(case): case for case in _cases(results, 128, kind)} for kind in PASSES}
    titles = {"cudnn": "exact, ms", "vmonarch": "VMonarch", "vmonarch-lite": "VMonarch lite"}
    rows = []
    for label, case in by_pass["forward"].items():
        cells = [label, f"{case['tokens']:,}"]
        for kind in PASSES:
            of_kind = by_pass[kind].get(label)
            cells += ["–" if of_kind is None else _time_cell(of_kind, method) for method in titles]
        rows.append(cells)
    training = [title.replace("exact, ms", "exact, forward+backward") for title in titles.values()]
    heading = ["latent frames × height × width", "tokens", *titles.values(), *training]
    versions = results["versions"]
    about = (
        f"{results['hardware']}, {results['date'][:10]}, torch {versions['torch_build']}, Triton {versions['triton']};"
        f" head dimension 128, 12 heads unless said. Made by `{results['command']}`."
    )
    return f"{markdown(heading, rows)}\n{about}\n"


def _about(results: dict[str, Any]) -> str:
    versions, rates = results["versions"], results["rates"]
    lines = [
        f"{results['hardware']}, {results['date'][:10]}, torch {versions['torch_build']}, Triton {versions['triton']},"
        f" {results['settings']['dtype']}, batch 1, 12 heads unless said, first frame exact; medians of one run,"
        f" {results['settings']['timing']}. Measured there: matmul"
        f" {rates['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s, copy"
        f" {rates['copy_bytes_per_second'] / 1e12:.2f} TB/s. Made by `{results['command']}`.",
        "",
        *(f"- {name}: {text}" for name, text in results["formulae"].items()),
    ]
    if results["left_out"]:
        lines += [
            "",
            "Left out: " + "; ".join(f"{entry['case']} ({entry['why']})" for entry in results["left_out"]) + ".",
        ]
    return "\n".join(lines) + "\n"


def _style(method: str) -> dict[str, Any]:
    colour, marker = _STYLES[method]
    return {"color": colour, "marker": marker}


def _token_axis(axes: Axes, series: Sequence[dict[str, Any]]) -> None:
    """Logarithmic, with ticks where there are points, and the frames under each."""
    axes.set_xscale("log")
    ticks = sorted({(case["tokens"], case["grid"][0]) for case in series})
    axes.set_xticks([tokens for tokens, _ in ticks], [f"{tokens / 1000:.0f}k\n{frames}" for tokens, frames in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens, latent frames" + (f" of {series[0]['grid'][1]}×{series[0]['grid'][2]}" if series else ""))


def _ratio_axis(axes: Axes, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    low, high = min([*values, 1.0]) * 0.85, max([*values, 1.0]) * 1.5
    ticks = [tick for tick in (0.1, 0.25, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100) if low <= tick <= high]
    axes.set_ylim(low, high)
    axes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())


def _bars(
    axes: Axes,
    cases: Sequence[dict[str, Any]],
    methods: Sequence[str],
    number: str,
    handles: dict[str, Any],
    *,
    scale: float = 1.0,
    unit: str = "",
) -> list[tuple[float, float]]:
    """A group of bars for each case, of a number of its good rows; returns the place and height of each bar."""
    width = 0.84 / max(1, len(methods))
    tops = []
    for place, case in enumerate(cases):
        for i, method in enumerate(methods):
            height = good_rows(case).get(method, {}).get(number)
            if height is not None:
                tops.append((place + (i - (len(methods) - 1) / 2) * width, height / scale))
                bar = axes.bar(*tops[-1], width * 0.92, color=_style(method)["color"])
                handles.setdefault(_label(method), bar)
    axes.set_xticks(range(len(cases)), [f"{shape_label(case)}\n{case['tokens'] / 1000:.0f}k{unit}" for case in cases])
    axes.tick_params(axis="x", length=0, labelsize=8)
    return tops


def _write_above(axes: Axes, top: tuple[float, float]) -> None:
    """A ratio above its bar, at a distance that does not depend on the scale."""
    axes.annotate(f"{top[1]:.3g}×", top, (0, 3), textcoords="offset points", ha="center", rotation=90, fontsize=7)


# Methods whose ratios are written out, from the upper edge down.
_NAMED = ("vmonarch-lite", "vmonarch")


def _write_at_top(axes: Axes, at: float, ratio: float, method: str) -> None:
    """A ratio of a method at the upper edge, where no line passes."""
    axes.annotate(
        f"{ratio:.3g}×",
        (at, 1.0),
        (0, -10 * (1 + _NAMED.index(method))),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        fontweight="bold",
        color=_style(method)["color"],
    )


def _series(results: dict[str, Any], head_dim: int, kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Cases that share the most common frame size and number of heads, by tokens, and all the others."""
    cases = _cases(results, head_dim, kind)
    families: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for case in cases:
        families.setdefault((case["heads"], *case["grid"][1:]), []).append(case)
    series = max(families.values(), key=len, default=[])
    return series, [case for case in cases if case not in series]


def _finish(
    figure: Figure, title: str, results: dict[str, Any], handles: dict[str, Any], columns: int = 4, size: int = 9
) -> None:
    """Title, what it was measured on, and a legend below."""
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, len(handles)), frameon=False,
        fontsize=size,
    )  # fmt: skip
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", fontweight="bold")
    versions = results["versions"]
    source = (
        f"{results['hardware']}, {results['settings']['dtype']}, batch 1, torch {versions['torch_build']},"
        f" Triton {versions['triton']}, {results['date'][:10]}"
    )
    figure.text(0.995, 0.993, source, fontsize=8, color="#666666", ha="right", va="top")


def speedup_figure(results: dict[str, Any], head_dim: int) -> Figure:
    """Speed-up over cuDNN against tokens (lines, one frame size) and at other grids (bars), a row per pass."""
    kinds = [kind for kind in PASSES if _cases(results, head_dim, kind)]
    figure = Figure(figsize=(11, 3.9 * len(kinds) + 0.9), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False, width_ratios=(1.25, 1))
    handles: dict[str, Any] = {}
    for (left, right), kind in zip(panels, kinds, strict=True):
        series, others = _series(results, head_dim, kind)
        methods = [method for method in _drawn([*series, *others]) if method != "cudnn"]
        values: list[float] = []
        for method in methods:
            points = [
                (case["tokens"], good_rows(case)[method]["over_cudnn"])
                for case in series
                if method in good_rows(case) and good_rows(case)[method]["over_cudnn"] is not None
            ]
            if points:
                values += [ratio for _, ratio in points]
                (handles[_label(method)],) = left.plot(*zip(*points, strict=True), lw=1.8, ms=6, **_style(method))
            for at, ratio in points if method in _NAMED else ():
                _write_at_top(left, at, ratio, method)
        _token_axis(left, series)
        present = [case for case in others if any(row.get("over_cudnn") for row in good_rows(case).values())]
        for top in _bars(right, present, methods, "over_cudnn", handles):
            values.append(top[1])
            _write_above(right, top)
        for axes in (left, right):
            _ratio_axis(axes, [*values, max(values, default=1) * 1.4])
            axes.axhline(1, color="#555555", lw=1, ls="--")
            tidy(axes, "y")
        left.set_ylabel("speed-up over cuDNN")
        left.set_title(kind, loc="left", fontsize=11)
        if not present:
            right.set_visible(False)
    _finish(figure, f"Speed-up over exact attention (cuDNN), d = {head_dim}", results, handles)
    return figure


def time_figure(results: dict[str, Any], head_dim: int) -> Figure:
    """Milliseconds against tokens, both logarithmic, a panel per pass; other grids as points of their own."""
    kinds = [kind for kind in PASSES if _cases(results, head_dim, kind)]
    figure = Figure(figsize=(5.6 * len(kinds), 5.2), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        series, others = _series(results, head_dim, kind)
        for method in _drawn([*series, *others]):
            style = _style(method)
            points = [(c["tokens"], good_rows(c)[method]["ms"]["median"]) for c in series if method in good_rows(c)]
            if points:
                (handles[_label(method)],) = axes.plot(*zip(*points, strict=True), lw=1.8, ms=6, **style)
            for case in others:
                # Of other heads, the times are no part of this picture.
                if method in good_rows(case) and (not series or case["heads"] == series[0]["heads"]):
                    at = (case["tokens"], good_rows(case)[method]["ms"]["median"])
                    (mark,) = axes.plot(*at, ms=6, mfc="white", ls="none", **style)
                    handles.setdefault(_label(method), mark)
        _token_axis(axes, series)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(kind, loc="left", fontsize=11)
        axes.set_ylabel("milliseconds")
        tidy(axes)
    _finish(figure, f"Time of one attention call, d = {head_dim} (hollow: other frame sizes)", results, handles)
    return figure


def stage_figure(results: dict[str, Any], head_dim: int) -> Figure | None:
    """Stacked bars of the stages' times as shares of the call, VMonarch at every shape; None without stages."""
    kinds = []
    for kind in PASSES:
        rows = [(case, good_rows(case).get("vmonarch", {})) for case in _cases(results, head_dim, kind)]
        if found := [(case, row) for case, row in rows if row.get("stages")]:
            kinds.append((kind, found))
    if not kinds:
        return None
    bars = [len(found) for _, found in kinds]
    figure = Figure(figsize=(11, 0.42 * sum(bars) + 1.1 * len(kinds) + 1.2), layout="constrained")
    panels = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=bars)[:, 0]
    used: dict[str, tuple[str, str, float]] = {}
    for axes, (kind, found) in zip(panels, kinds, strict=True):
        for place, (_, row) in enumerate(found):
            left = 0.0
            total = max(row["ms"]["median"], sum(stage["ms"] for stage in row["stages"]))
            for stage in row["stages"]:
                name = stage["stage"]
                first = name.split()[0]
                number = int(first[1:]) if first[0] in "RL" and first[1:].isdigit() else 1
                look = (
                    _STAGE_COLOURS.get(first, _STAGE_COLOURS.get(first[0], "#000000")),
                    _LATER_HATCH[(number - 1) % len(_LATER_HATCH)],
                    0.55 if name.endswith("backward") else 1.0,
                )
                used[name] = look
                share = stage["ms"] / total
                colour, hatch, alpha = look
                axes.barh(place, share, left=left, color=colour, hatch=hatch, alpha=alpha, edgecolor="white", lw=0.6)
                if share > 0.045:
                    axes.text(
                        left + share / 2,
                        place,
                        digits(stage["ms"]),
                        ha="center",
                        va="center",
                        fontsize=7,
                        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
                    )
                left += share
            if left < 0.995:
                axes.barh(place, 1 - left, left=left, color="#eeeeee")
            axes.text(1.01, place, f"{digits(row['ms']['median'])} ms", va="center", fontsize=8)
        axes.set_yticks(range(len(found)), [shape_label(case) for case, _ in found])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        axes.set_title(kind, loc="left", fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=9)
    handles: dict[str, Any] = {
        name: Patch(facecolor=colour, hatch=hatch, alpha=alpha, edgecolor="white")
        for name, (colour, hatch, alpha) in used.items()
    }
    handles["between stages"] = Patch(facecolor="#eeeeee")
    _finish(figure, f"Stages of VMonarch, d = {head_dim}, in milliseconds", results, handles, columns=7, size=8)
    return figure


def memory_figure(results: dict[str, Any], head_dim: int) -> Figure | None:
    """Peak memory beyond the inputs, a group of bars per shape and a panel per pass; None where it was not measured."""
    kinds = []
    for kind in PASSES:
        cases = _cases(results, head_dim, kind)
        if measured := [c for c in cases if any("peak_extra_bytes" in row for row in good_rows(c).values())]:
            kinds.append((kind, measured))
    if not kinds:
        return None
    figure = Figure(figsize=(11, 3.3 * len(kinds) + 0.9), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, (kind, cases) in zip(figure.subplots(len(kinds), 1, squeeze=False)[:, 0], kinds, strict=True):
        _bars(axes, cases, _drawn(cases), "peak_extra_bytes", handles, scale=1e9, unit=" tokens")
        axes.set_ylabel("GB beyond the inputs")
        axes.set_title(kind, loc="left", fontsize=11)
        tidy(axes, "y")
    _finish(figure, f"Peak memory, d = {head_dim}", results, handles)
    return figure


def write_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write `kernels-{speedup,time,stages,memory}-d{D}.png`, all or none, and return their paths."""
    kinds = {"speedup": speedup_figure, "time": time_figure, "stages": stage_figure, "memory": memory_figure}
    figures = {
        folder / f"kernels-{name}-d{head_dim}.png": figure
        for head_dim in _head_dims(results)
        for name, draw in kinds.items()
        if (figure := draw(results, head_dim)) is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_pngs(figures, dpi=130)
    return list(figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 2 if there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.kernel_plots", description=__doc__)
    parser.add_argument("--input", type=Path, default=ROOT / "docs" / "benchmarks" / "kernels-h200.json")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--table", action="store_true", help="print the markdown tables, and draw nothing")
    options = parser.parse_args(arguments)
    try:
        results = read_results(options.input)
    except (OSError, BenchFileError) as error:
        print(f"kernel_plots: error: --input {error}", file=sys.stderr)
        return 2
    if options.table:
        print(kernels_table(results), end="")
        return 0
    for path in write_plots(results, options.output_dir):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
