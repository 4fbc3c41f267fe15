"""Markdown tables, and documents filled with tables from results files: `python -m vmonarch.eval.render.tables`.

In a tracked Markdown file, the text between `<!-- table: FILE -->` and `<!-- end -->` comes from
`docs/benchmarks/FILE.json`, which holds `tables`, a list of {"header": […], "rows": [[…]]} with an optional "title"
above each, and `caption`, a line on hardware, date, versions and the command. `<!-- table: FILE#NAME -->` selects the
table with that "name", with its own "caption" if it has one. Nothing else writes tables into documents.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(<!-- table: (?P<file>[^\s#]+)#?(?P<name>\S*) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; columns that have numbers, perhaps followed by words, are right-aligned."""
    number = re.compile(r"[*+−-]*\d[\d.,]*(e[+-]\d+)?[%×*]*( .*)?").fullmatch
    rule = ["---:" if any(map(number, column)) else "---" for column in zip(heading, *rows, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heading, rule, *rows))


def aligned(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for terminals, with padded columns, all but the first right-aligned; no line break at the end."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    pad = lambda row: [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [pad(heading), rule, *map(pad, rows)])


def shown_number(value: Any, decimals: int = 1, form: str = "{}", *, factor: float = 1.0, sign: bool = False) -> str:
    """A number as readable text; a dash for None; text such as "inf" unchanged.

    Args:
        form: of the result, with `{}` for the number.
    """
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    return form.format(f"{factor * value:{'+' if sign else ''}.{decimals}f}")


def commits(results: dict[str, Any]) -> set[str]:
    """The commits that results were made at, as every run recorded them."""
    return set(re.findall(r'"([0-9a-f]{40}(?:-dirty)?|unknown)"', json.dumps(results)))


def table_text(results: dict[str, Any], name: str = "") -> str:
    """The tables of a results file with this name, or those without one, and their caption.

    The caption says so if no commit alone can reproduce the results.

    Raises:
        KeyError: there is no such table, or it has no caption.
    """
    parts = [part for part in results["tables"] if part.get("name", "") == name]
    if not parts:
        raise KeyError(f"no table {name!r}")
    title = lambda part: f"{part['title']}\n\n" if "title" in part else ""
    texts = [title(part) + markdown(part["header"], part["rows"]) for part in parts]
    first, *more = (parts[-1].get("caption") or results["caption"]).split("\n")
    found = commits(results)
    if not found or "unknown" in found:
        first += " The commit is unknown."
    elif any(commit.endswith("-dirty") for commit in found):
        first += " The tree had changes."
    return "\n".join([*texts, "\n".join([first, *more]) + "\n"])


def render(text: str, folder: Path) -> str:
    """`text` with every table written anew from the results files of a folder.

    Raises:
        FileNotFoundError, KeyError: a file or table that a block names does not exist.
    """

    def block(match: re.Match[str]) -> str:
        results = json.loads((folder / f"{match['file']}.json").read_text(encoding="utf-8"))
        return match[1] + table_text(results, match["name"]) + match[4]

    return BLOCK.sub(block, text)


def outdated(root: Path) -> dict[Path, str]:
    """The new text of every tracked document in a repository whose tables differ from the results files."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "*.md"], capture_output=True, text=True, check=True)
    found = {}
    for path in (root / name for name in listed.stdout.splitlines()):
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (new := render(old, root / "docs" / "benchmarks")) != old:
            found[path] = new
    return found


if __name__ == "__main__":
    for path, text in outdated(Path()).items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")
