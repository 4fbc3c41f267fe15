"""Tables as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, all columns but the first aligned to the right."""
    lines = [heading, ["---", *("---:" for _ in heading[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def aligned(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`markdown` with columns of one width, for terminals; no line break at the end."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    pad = lambda row: [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [pad(heading), rule, *map(pad, rows)])


def shown_number(value: Any, decimals: int = 1, form: str = "{}", *, factor: float = 1.0, sign: bool = False) -> str:
    """A number for people; a dash for None, and text such as "inf" as it is.

    Args:
        form: with `{}` for the number.
    """
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    return form.format(f"{factor * value:{'+' if sign else ''}.{decimals}f}")


def percent(share: float | None) -> str:
    """A share, with one decimal; a dash for None."""
    return shown_number(share, 1, "{} %", factor=100)
