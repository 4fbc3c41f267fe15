"""Pages of reports, by the templates beside this file, and their figures: the same numbers give the same bytes.

A page is one file that needs no network: nothing in it is fetched.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; what has one carries a number or marker too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555", "#999999")
# CSS pixels of an inch, and points of text in reports.
_INCH, _TEXT = 96, 8


def page(template: str, **values: Any) -> str:
    """The page of a template.

    What is put into it is escaped unless it is Markup; None is nothing; a name that no value has is an error.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: "" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}
    environment.filters |= {"json": partial(json.dumps, ensure_ascii=False), "breakable": breakable}
    environment.globals["colour"] = colour
    return environment.get_template(template).render(values)


def breakable(label: str) -> Markup:
    """A method's label, which may break between its options."""
    return escape(label).replace(":", Markup(":<wbr>")).replace(",", Markup(",<wbr>"))


def colour(number: int) -> str:
    """The colour of what has this number, from 1."""
    return COLOURS[(number - 1) % len(COLOURS)]


def numbered_points(points: Sequence[tuple[int, float, float, float, float]], title: str, across: str) -> Markup:
    """Points (number, x, y, low and high end of its interval), each with its number in it, as an element of a page."""
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
    axes.set_xlim(left=0)
    text = io.StringIO()
    # Names of parts are hashes of what they hold: figures of a page share only names of equal parts.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "vmonarch", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # Without the head of a file.
    element = Markup(text.getvalue().partition("<svg ")[2])
    return Markup('<svg role="img" aria-label="{}: {}" ').format(title, across) + element
