"""Tables of a benchmark's JSON, with cells formatted for documents."""

from __future__ import annotations

from typing import Any

from vmonarch.eval.render.tables import shown_number


def digits(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"


def caption(run: dict[str, Any]) -> str:
    """One line: where, when and how it was measured, and what is missing."""
    versions, settings, rates = run["versions"], run["settings"], run.get("rates")
    speeds = ""
    if rates:
        matmul, copy = (rates[f"{name}_per_second"] / 1e12 for name in ("matmul_flops", "copy_bytes"))
        speeds = f" Measured there: matmul {matmul:.0f} TFLOP/s, copy {copy:.2f} TB/s."
    left = "; ".join(f"{entry['case']} ({entry['why']})" for entry in run["left_out"])
    return (
        f"{run['hardware']}, {run['date'][:10]}, torch {versions['torch_build']}, Triton {versions['triton']},"
        f" {settings['dtype']}; medians of up to {settings['rounds']} measurements, {settings['timing']}.{speeds}"
        f"{f' Left out: {left}.' if left else ''} Made by `{run['command']}`."
    )


def tables(run: dict[str, Any], base: str) -> dict[str, Any]:
    """{"tables", "caption"}: a table with the times of all ways, and one with all measurements of each.

    Args:
        base: the way that ratios are relative to.
    """
    methods = list(dict.fromkeys(row["method"] for case in run["cases"] for row in case["rows"]))
    times, details = [], []
    for case in run["cases"]:
        rows = {row["method"]: row for row in case["rows"]}
        of_base = rows.get(base, {}).get("ms", {}).get("median")
        faster = {name: of_base / row["ms"]["median"] for name, row in rows.items() if of_base and "ms" in row}
        cells = []
        for name in methods:
            row = rows.get(name, {"status": "–"})
            ratio = f" ({digits(faster[name])}×)" if name in faster and name != base else ""
            cells.append(f"{digits(row['ms']['median'])}{ratio}" if "ms" in row else row["status"])
        times.append([case["case"], *cells])
        for name, row in rows.items():
            if "ms" not in row:
                details.append([case["case"], name, row["status"], *["–"] * 8])
                continue
            ms = row["ms"]["median"]
            floor = max(row.get("flop_floor_ms", 0.0), row.get("byte_floor_ms", 0.0))
            errors = [error["relative"] for error in row["errors"].values()]
            details.append(
                [
                    case["case"],
                    name,
                    digits(ms),
                    f"{digits(row['ms']['p20'])}–{digits(row['ms']['p80'])}",
                    shown_number(row.get("host_ms"), 2),
                    shown_number(faster.get(name), 2, "{}×"),
                    shown_number(row["flops"] / ms / 1e9 if floor and row["flops"] else None, 0),
                    shown_number(row["bytes"] / ms / 1e6 if floor and row["bytes"] else None, 0),
                    shown_number(ms / floor if floor else None, 2),
                    shown_number(row.get("peak_bytes"), 0, factor=1e-6),
                    f"{max(errors):.1e}" if errors else "–",
                ]
            )
    compared = f"× {base}" if base else "faster"
    head = ["case", "way", "ms", "p20–p80", "host ms", compared, "TFLOP/s", "GB/s", "× floor", "peak MB", "error"]
    found = [("times", ["milliseconds", *methods], times), ("details", head, details)]
    named = [{"name": name, "header": header, "rows": rows} for name, header, rows in found]
    return {"tables": named, "caption": caption(run)}
