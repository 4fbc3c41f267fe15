"""HTML pages of the templates beside this file. Each is one file that needs no network: nothing in it is fetched."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from vmonarch.eval.render.plot import colour
from vmonarch.eval.render.table import percent


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
    environment.globals |= {"colour": colour, "percent": percent}
    return environment.get_template(template).render(values)


def breakable(label: str) -> Markup:
    """A method's label, which may break between its options."""
    return escape(label).replace(":", Markup(":<wbr>")).replace(",", Markup(",<wbr>"))
