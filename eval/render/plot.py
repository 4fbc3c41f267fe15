"""Pages of reports, by the templates beside this file, and their figures: the same numbers give the same bytes.

A page is one file that needs no network: nothing in it is fetched.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
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


def svg(figure: Figure, label: str, titles: Mapping[Artist, str] | None = None) -> Markup:
    """A figure as an element of a page.

    Args:
        label: what it shows, for readers who cannot see it.
        titles: of parts of it, for a pointer that rests on them.
    """
    shown: dict[str, Markup] = {}
    for artist, title in (titles or {}).items():
        artist.set_gid(f"titled-{len(shown)}")
        shown[f"titled-{len(shown)}"] = Markup("<title>{}</title>").format(title)
    text = io.StringIO()
    # Names of parts are hashes of what they hold: figures of a page share only names of equal parts.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "vmonarch", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # Without the head of a file, and without names of groups, which several figures share.
    element = text.getvalue().partition("<svg ")[2]
    element = re.sub(r'<g id="([^"]*)">', lambda group: f"<g>{shown.get(group[1], '')}", element)
    return Markup('<svg role="img" aria-label="{}" ').format(label) + Markup(element)


def _panel(width: int, height: int, title: str, across: str) -> tuple[Figure, Axes]:
    """A figure with one panel, in CSS pixels, with pale lines behind it and no frame above and to the right."""
    figure = Figure(figsize=(width / _INCH, height / _INCH), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=_TEXT, color="#999999")
    axes.grid(axis="y", color="#e4e4e4", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(across, fontsize=_TEXT, loc="right")
    return figure, axes


def numbered_points(points: Sequence[tuple[int, float, float, float, float, str]], title: str, across: str) -> Markup:
    """Points (number, x, y, low and high end of its interval, what it is), each with its number in it."""
    figure, axes = _panel(396, 280, title, across)
    titles: dict[Artist, str] = {}
    for number, x, y, low, high, about in points:
        axes.errorbar(x, y, [[max(y - low, 0)], [max(high - y, 0)]], color=colour(number), elinewidth=0.8)
        (dot,) = axes.plot(x, y, "o", ms=12, color=colour(number), mew=0, zorder=3)
        axes.text(x, y, str(number), color="white", fontsize=_TEXT, ha="center", va="center_baseline", zorder=4)
        titles[dot] = about
    axes.margins(x=0.08, y=0.12)
    axes.set_xlim(left=0)
    return svg(figure, f"{title}: {across}", titles)
