"""Tables as markdown; and those of results files put into documents: `python -m vmonarch.eval.render.tables`.

What stands between `<!-- table: FILE -->` and `<!-- end -->` in a tracked Markdown file is what
`docs/benchmarks/FILE.json` holds: under `tables` a list of {"header": […], "rows": [[…]]}, each with a "title" above it
where it needs one, and under `caption` a line on hardware, date, versions and the command. A table with a "name" is
`<!-- table: FILE#NAME -->`, under which its own "caption" stands if it has one. Nothing else does this.
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
    """A markdown table; columns of numbers, which words may follow, are aligned to the right."""
    number = re.compile(r"[*+−-]*\d[\d.,]*(e[+-]\d+)?[%×*]*( .*)?").fullmatch
    rule = ["---:" if any(map(number, column)) else "---" for column in zip(heading, *rows, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heading, rule, *rows))


def aligned(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For terminals: columns of one width, all but the first aligned to the right; no line break at the end."""
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


def commits(results: dict[str, Any]) -> set[str]:
    """The git trees that results were made with, as every run has recorded them."""
    return set(re.findall(r'"([0-9a-f]{40}(?:-dirty)?|unknown)"', json.dumps(results)))


def table_text(results: dict[str, Any], name: str = "") -> str:
    """The tables of a results file that have a name, or those that have none, with their caption.

    Results that no commit alone can repeat are called so.

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
    """The right contents of a repository's tracked documents whose tables differ from the results files."""
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
