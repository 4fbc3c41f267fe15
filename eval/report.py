"""The report of an evaluation: one HTML file that needs no network and no other file.

Everything in it comes from the record of `vmonarch eval` (which it carries as JSON) and the items' videos. Text that
users wrote is escaped; nothing is fetched from anywhere.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vmonarch.eval.summary import MEASURES, sampled, shown_interval, shown_number, summary_rows

# Measures that are drawn against FLOPs, where they were taken.
PLOTTED = ("psnr", "ssim", "lpips", "prompt_score")
# Okabe and Ito's colours, which colour-blind readers can tell apart; points carry their method's number too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#999999")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 396, 280, 58, 16, 30, 44

# Of this project's pages.
STYLE = """
:root { --ink: #18181b; --faint: #62626b; --line: #dcdce2; --fill: #f5f5f8; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 24px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
h3 { font-size: 15px; margin: 0 0 8px; overflow-wrap: anywhere; }
p { margin: 6px 0; max-width: 90ch; } .faint { color: var(--faint); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
/* Always there where a table is wider than the page: many systems hide scroll bars until something moves. */
.scroll::-webkit-scrollbar { height: 12px; background: var(--fill); }
.scroll::-webkit-scrollbar-thumb { background: #a1a1aa; border: 3px solid var(--fill); border-radius: 6px; }
@supports not selector(::-webkit-scrollbar) { .scroll { scrollbar-color: #a1a1aa var(--fill); } }
/* And a shadow on the right while there is more, for those that show no bar at all. */
.scroll { background: linear-gradient(270deg, #fff 24px, #fff0 48px) local,
  linear-gradient(270deg, #0003, #0000 16px); }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
td.text, th.text { text-align: left; } td.text { white-space: normal; min-width: 17em; }
thead th { white-space: normal; vertical-align: bottom; background: var(--fill); position: sticky; top: 0; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.scroll th:first-child, .scroll td:first-child { position: sticky; left: 0; z-index: 1; background: #fff;
  box-shadow: inset -1px 0 var(--line); }
.scroll thead th:first-child { background: var(--fill); }
tbody tr:last-child td { border-bottom: 0; } .range { color: var(--faint); font-size: 12px; }
.key { display: inline-block; min-width: 1.6em; margin-right: 6px; border-radius: 9px; color: #fff; text-align: center;
  font-size: 12px; }
.plots { display: flex; flex-wrap: wrap; gap: 12px; }
.plots svg { border: 1px solid var(--line); border-radius: 6px; max-width: 100%; height: auto; }
.item { border: 1px solid var(--line); border-radius: 6px; padding: 14px; margin: 12px 0; }
.videos { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 12px; }
figure { margin: 0; } video { width: 100%; display: block; background: #000; border-radius: 4px; }
figcaption { font-size: 13px; overflow-wrap: anywhere; }
.controls { display: flex; gap: 10px; align-items: center; margin-bottom: 10px; } .controls input { flex: 1; }
.controls button, .controls select { font: inherit; padding: 2px 12px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: 13px; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; } code { overflow-wrap: anywhere; }
@media (max-width: 640px) {
  body { padding: 14px; } th, td { padding: 6px 8px; }
  td.text { min-width: 9em; overflow-wrap: anywhere; }
  .scroll td:first-child { max-width: 42vw; } .item { padding: 10px; }
  .videos { grid-template-columns: 1fr 1fr; gap: 8px; } dl { grid-template-columns: 1fr; }
}
"""

_SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value ?? "";
    const number = text => text === "" ? NaN : text === "inf" ? Infinity : Number(text);
    const rows = [...table.tBodies[0].rows];
    const textual = rows.every(row => Number.isNaN(number(value(row))));
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (textual) return down * x.localeCompare(y);
      const [m, n] = [number(x), number(y)];
      if (Number.isNaN(m) || Number.isNaN(n)) return Number.isNaN(m) - Number.isNaN(n);
      return m === n ? 0 : down * (m < n ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  }));
}
for (const item of document.querySelectorAll(".item")) {
  const videos = [...item.querySelectorAll("video")];
  const [button, range, speed] = ["button", "input", "select"].map(name => item.querySelector(name));
  const lead = videos[0];
  let playing = false;
  const show = () => { button.textContent = playing ? "Pause" : "Play"; };
  const seek = time => videos.forEach(video => { video.currentTime = time; });
  const play = () => { playing = true; show(); videos.forEach(video => video.play().catch(() => {})); };
  const pause = () => { playing = false; show(); videos.forEach(video => video.pause()); seek(lead.currentTime); };
  button.addEventListener("click", () => {
    if (playing) return pause();
    if (lead.ended) seek(0);
    play();
  });
  speed.addEventListener("change", () => videos.forEach(video => { video.playbackRate = Number(speed.value); }));
  range.addEventListener("input", () => { pause(); seek(Number(range.value) * lead.duration); });
  lead.addEventListener("timeupdate", () => { if (lead.duration) range.value = lead.currentTime / lead.duration; });
  // Together again at every round: players drift apart by frames.
  lead.addEventListener("ended", () => { if (playing) { seek(0); play(); } });
}
"""


def report(record: Mapping[str, Any], folder: Path) -> str:
    """The page.

    Args:
        record: as in `evaluation.json`.
        folder: of the evaluation, where the videos are.
    """
    embedded = list(_embedded(record, folder))
    shown = {item["number"] for item, _ in embedded}
    parts = [
        _heading(record),
        _summary(record),
        _plots(record),
        _differences(record),
        _videos(record, embedded),
        _all_items(record, shown),
        _settings(record),
    ]
    # Within a script element only "<" could end the text; JSON may write it like this.
    data = json.dumps(record, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # An empty icon, so that the browser asks nobody for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>vmonarch eval</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f'\n<script type="application/json" id="record">{data}</script>\n<script>{_SCRIPT}</script>\n'
        "</body>\n</html>\n"
    )


def _embedded(record: Mapping[str, Any], folder: Path) -> Iterator[tuple[Mapping[str, Any], dict[str, bytes]]]:
    """The first items with their videos by method, as many as the settings let into the page."""
    room = record["config"]["report_megabytes"] * 1_000_000
    for item in record["items"][: record["config"]["report_items"]]:
        videos = {row["method"]: (folder / item["folder"] / row["video"]).read_bytes() for row in item["results"]}
        room -= sum(map(len, videos.values()))
        if room < 0:
            return
        yield item, videos


def _colour(record: Mapping[str, Any], label: str) -> str:
    return _COLOURS[record["methods"].index(label) % len(_COLOURS)]


def _key(record: Mapping[str, Any], label: str) -> str:
    """The number that stands for a method in the plots."""
    number = record["methods"].index(label) + 1
    return f'<span class="key" style="background:{_colour(record, label)}">{number}</span>'


def _name(label: str) -> str:
    """A method's label as HTML that may break between its options."""
    return escape(label).replace(":", ":<wbr>").replace(",", ",<wbr>")


def _table(heading: Sequence[str], rows: Sequence[Sequence[tuple[str, Any]]], *, text: Sequence[int] = (0,)) -> str:
    """A sortable table of cells (HTML, what to sort by).

    Args:
        text: the columns with text.
    """
    kind = lambda column: ' class="text"' if column in text else ""
    head = "".join(
        f'<th scope="col"{kind(i)}><button type="button">{_name(name)}</button></th>' for i, name in enumerate(heading)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{kind(i)} data-value="{escape("" if value is None else str(value))}">{html}</td>'
            for i, (html, value) in enumerate(row)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>'
        "</div>"
    )


def _heading(record: Mapping[str, Any]) -> str:
    about = f"{len(record['methods'])} methods, {sampled(record['config'])}. {record['created'][:10]}."
    command = f"<p>Made by <code>{escape(record['command'])}</code></p>" if record["command"] else ""
    return f'<header><h1>vmonarch eval</h1>\n<p class="faint">{escape(about)}</p>\n{command}</header>'


def _interval_cell(value: Mapping[str, Any] | None, decimals: int, *, sign: bool = False) -> tuple[str, Any]:
    mean, _, edges = shown_interval(value, decimals, sign=sign).partition(" ")
    return mean + (f' <span class="range">{edges}</span>' if edges else ""), None if value is None else value["mean"]


def _summary(record: Mapping[str, Any]) -> str:
    heading, texts = summary_rows(record)
    shown = [key for key in MEASURES if MEASURES[key].heading in heading]
    rows = []
    for label, cells in zip(record["methods"], texts, strict=True):
        row: list[tuple[str, Any]] = [(_key(record, label) + _name(cells[0]), label)]
        row.append((cells[1], record["attention_flops"][label]))
        row += [_interval_cell(record["statistics"][label][key], MEASURES[key].decimals) for key in shown]
        row += [(cell, cell) for cell in cells[2 + len(shown) :]]
        rows.append(row)
    reference = escape(record["reference"])
    legend = "".join(
        f"<dt>{escape(MEASURES[key].heading)}</dt><dd>{escape(MEASURES[key].about)}"
        f"{'' if key == 'seconds' else '; more is better' if MEASURES[key].more_is_better else '; less is better'}</dd>"
        for key in shown
    )
    return (
        f"<section><h2>Summary</h2>\n{_table(heading, rows)}\n<p>Means over items, paired by prompt and seed with"
        f" <b>{reference}</b>; in brackets {escape(record['intervals'])}. Attention FLOPs are predicted, of the whole"
        " video's self-attention without its projections, relative to full attention. A click on a heading sorts.</p>\n"
        f"<details><summary>What is measured</summary><dl>{legend}</dl></details></section>"
    )


def _plots(record: Mapping[str, Any]) -> str:
    figures = [svg for key in PLOTTED if (svg := quality_plot(record, key))]
    if not figures:
        return ""
    return (
        '<section><h2>Quality against attention FLOPs</h2>\n<div class="plots">' + "\n".join(figures) + "</div>\n"
        '<p class="faint">Numbers are those of the methods in the summary; bars are its intervals. Methods that equal'
        " the reference, or whose FLOPs are not known, are not drawn.</p></section>"
    )


def quality_plot(record: Mapping[str, Any], key: str) -> str:
    """A measure against the methods' attention FLOPs as SVG; empty where no method has both."""
    points = []
    for number, label in enumerate(record["methods"], start=1):
        value, share = record["statistics"][label][key], record["attention_flops"][label]
        if value is None or share is None or isinstance(value["mean"], str):
            continue
        low, high = (value[edge] if value[edge] is not None else value["mean"] for edge in ("low", "high"))
        points.append((number, label, 100 * share, value["mean"], low, high))
    if not points:
        return ""
    x_ticks = _ticks(0.0, max(x for _, _, x, *_ in points))
    y_ticks = _ticks(min(point[4] for point in points), max(point[5] for point in points))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    x_of = lambda x: _LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (right - _LEFT)
    y_of = lambda y: bottom - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (bottom - _TOP)
    measure = MEASURES[key]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="system-ui, sans-serif" font-size="11"'
        f' aria-label="{escape(measure.heading)} against attention FLOPs">',
        f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600">{escape(measure.heading)}'
        f" ({'more' if measure.more_is_better else 'less'} is better)</text>",
        f'<text x="{right}" y="{_HEIGHT - 8}" text-anchor="end">attention FLOPs, % of full attention</text>',
    ]
    for tick in y_ticks:
        y = y_of(tick)
        lines.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dcdce2"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in x_ticks:
        lines.append(f'<text x="{x_of(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:.4g}</text>')
    for number, label, share, mean, low, high in points:
        x, y, colour = x_of(share), y_of(mean), _colour(record, label)
        bar = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y_of(low):.1f}" y2="{y_of(high):.1f}" stroke="{colour}"/>'
        spelt = f"{label}: {measure.heading} {mean:.{measure.decimals}f} at {share:.1f} % of the FLOPs"
        lines.append(
            f'<g>{bar}<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{colour}"/><text x="{x:.1f}" y="{y + 4:.1f}"'
            f' text-anchor="middle" fill="#fff">{number}</text><title>{escape(spelt)}</title></g>'
        )
    return "\n".join([*lines, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that hold [low, high] between them."""
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, last + 1)]


def _differences(record: Mapping[str, Any]) -> str:
    """Paired differences to the baseline."""
    table = record["differences"]
    shown = [key for key in MEASURES if any(values[key] for values in table.values())]
    if not shown:
        return ""
    rows = [
        [
            (_key(record, label) + _name(label), label),
            *(_interval_cell(values[key], MEASURES[key].decimals, sign=True) for key in shown),
        ]
        for label, values in table.items()
    ]
    baseline = escape(record["baseline"])
    heading = ["method", *(MEASURES[key].heading for key in shown)]
    return (
        f"<section><h2>Differences to {baseline}</h2>\n{_table(heading, rows)}\n<p>Method minus {baseline}, paired item"
        " by item. Where an interval holds no zero, the choice of the items alone is unlikely to have made the"
        " difference.</p></section>"
    )


def _caption(row: Mapping[str, Any], reference: str) -> str:
    if row["method"] == reference:
        return "reference"
    texts = [f"PSNR {shown_number(row['psnr'], 2)} dB", f"SSIM {shown_number(row['ssim'], 3)}"]
    return " · ".join(texts + ([f"LPIPS {shown_number(row['lpips'], 3)}"] if row["lpips"] is not None else []))


def _videos(record: Mapping[str, Any], embedded: Sequence[tuple[Mapping[str, Any], dict[str, bytes]]]) -> str:
    total, config = len(record["items"]), record["config"]
    note = (
        f"The videos of {len(embedded)} of {total} items are in this page (at most {config['report_items']} items and"
        f" {config['report_megabytes']} MB, by report_items and report_megabytes); the others are listed below and lie"
        " in their folders."
        if len(embedded) < total
        else "The videos of every item are in this page."
    )
    parts = []
    for item, videos in embedded:
        figures = []
        for row in item["results"]:
            data = base64.b64encode(videos[row["method"]]).decode()
            figures.append(
                f'<figure><video muted playsinline preload="auto" src="data:video/mp4;base64,{data}"></video>'
                f"<figcaption>{_key(record, row['method'])}<b>{_name(row['method'])}</b><br>"
                f'<span class="faint">{escape(_caption(row, record["reference"]))}</span></figcaption></figure>'
            )
        speeds = "".join(
            f'<option value="{speed:g}"{" selected" if speed == 1 else ""}>{speed:g}×</option>'
            for speed in (0.25, 0.5, 1.0)
        )
        parts.append(
            f'<article class="item" id="item-{item["number"]}"><h3>{item["number"]}. {escape(item["prompt"])}'
            f' <span class="faint">seed {item["seed"]}</span></h3>\n<div class="controls"><button type="button">Play'
            '</button><input type="range" min="0" max="1" step="any" value="0" aria-label="place in the video">'
            f'<select aria-label="speed">{speeds}</select></div>\n'
            f'<div class="videos">{"".join(figures)}</div></article>'
        )
    return f"<section><h2>Side by side</h2>\n<p>{note}</p>\n" + "\n".join(parts) + "</section>"


def _all_items(record: Mapping[str, Any], embedded: set[int]) -> str:
    others = [label for label in record["methods"] if label != record["reference"]]
    heading = ["item", "prompt", "seed", *(f"{label}: PSNR dB" for label in others)]
    rows = []
    for item in record["items"]:
        number = item["number"]
        place = f'<a href="#item-{number}">{number}</a>' if number in embedded else str(number)
        row: list[tuple[str, Any]] = [(place, number)]
        prompt = f'<span title="{escape(item["folder"])}">{escape(item["prompt"])}</span>'
        row += [(prompt, item["prompt"]), (str(item["seed"]), item["seed"])]
        by_method = {result["method"]: result for result in item["results"]}
        row += [(shown_number(by_method[label]["psnr"], 2), by_method[label]["psnr"]) for label in others]
        rows.append(row)
    table = _table(heading, rows, text=(1,))
    return (
        f'<section><h2>All items</h2>\n{table}\n<p class="faint">Every measure of every item is in the JSON that this'
        " page carries.</p></section>"
    )


def _settings(record: Mapping[str, Any]) -> str:
    """Settings, versions and machines."""

    def entries(values: Mapping[str, Any]) -> str:
        return "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(json.dumps(value, ensure_ascii=False))}</dd>"
            for key, value in values.items()
        )

    config = {key: value for key, value in record["config"].items() if key not in ("prompts", "methods")}
    methods = "".join(
        f"<dt>{escape(method['label'])}</dt><dd>{escape(json.dumps(method, ensure_ascii=False))}</dd>"
        for method in record["config"]["methods"]
    )
    machines = "".join(
        f"<h3>Versions and machine of {len(entry['items'])} items</h3><dl>{entries(entry['environment'])}</dl>"
        for entry in record["environments"]
    )
    return (
        f"<section><h2>Settings</h2>\n<details open><summary>Methods</summary><dl>{methods}</dl></details>\n"
        f"<details><summary>Sampling</summary><dl>{entries(config)}</dl></details>\n"
        f"<details><summary>Versions</summary>{machines}</details></section>"
    )
