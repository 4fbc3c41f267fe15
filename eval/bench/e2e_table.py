"""The tables of `vmonarch bench e2e`, from its JSON alone."""

from __future__ import annotations

from typing import Any

from vmonarch.eval.attention_flops import STEP_KINDS
from vmonarch.eval.bench.e2e import FORMULAE, MODES, SETTINGS
from vmonarch.eval.bench.parts import PARTS
from vmonarch.eval.render.table import markdown, shown_number

# Profiled kernels that add up to more than so many forward calls are said to: their durations are not all work then.
PROFILE_BOUND = 1.1
# What ratios of `video_table` are to; its methods and their titles there.
STOCK = ("full", "compiled")
VIDEO_METHODS = {
    "near-lossless": "VMonarch, near-lossless",
    "fast": "VMonarch, fast",
    "vmonarch": "VMonarch, every step",
}
# What rows of `stack_table` are called that have another title than their method: parts of `stack-fast`, recipes.
STACK_TITLES = {
    **VIDEO_METHODS,
    "full": "stock, compiled",
    "stock:linears=float8": "float8 linear layers",
    "stack-fast:linears=null,cache=null": "VMonarch, exact in 16 % of the steps",
    "stack-fast:attention=full,linears=null": "step cache",
    "stack-near-lossless": "recipe `stack-near-lossless`",
    "stack-fast": "recipe `stack-fast`",
}


def in_order(found: dict[str, Any]) -> dict[str, Any]:
    """What is found by setting, in the order of SETTINGS; others last."""
    order = {setting.name: i for i, setting in enumerate(SETTINGS)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def newest_rows(results: dict[str, Any]) -> dict[str, dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]]:
    """{setting: {(method, mode): (row, its case)}}: of rows measured in several runs the last that has times."""
    found: dict[str, dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in results["runs"]:
        for case in run["cases"]:
            rows = found.setdefault(case["setting"], {})
            for row in case["rows"]:
                key = row["method"], row["mode"]
                if row["status"] == "ok" or key not in rows:
                    rows[key] = row, case
    return in_order(found)


def ratio(row: dict[str, Any], case: dict[str, Any], mode: str) -> float | None:
    """How many times as fast as full attention in `mode` a row is, both of the same run; None if there is none."""
    base = next((r for r in case["rows"] if (r["method"], r["mode"]) == ("full", mode)), None)
    if base is None or base is row or base["status"] != "ok" or row["status"] != "ok":
        return None
    return base["step_s"]["median"] / row["step_s"]["median"]


def e2e_table(results: dict[str, Any]) -> str:
    """Seconds of steps and videos with the ratios that are aimed at, and what the time goes into."""
    rows, parts, kinds, longer = [], [], [], ""
    for setting, found in newest_rows(results).items():
        for (method, mode), (row, case) in found.items():
            name = [setting, f"{method}, {mode}"]
            if row["status"] != "ok":
                rows.append([*name, row["status"], *["–"] * 7])
                continue
            aims = case["aims"] if (method, mode) == ("vmonarch", "compiled") and case["aims"] else (None, None)
            over = [
                shown_number(ratio(row, case, base), 2, "{}×") + ("" if aim is None else f" (aim {aim:g}×)")
                for base, aim in zip(MODES, aims, strict=True)
            ]
            error = row["errors"].get("to_stock")
            rows.append(
                [
                    *name,
                    f"{row['forward_s']['median']:.3f}",
                    f"{row['step_s']['median']:.3f}",
                    f"{row['denoise_s']:.1f}",
                    shown_number(row["video_s"]),
                    *over,
                    shown_number(row.get("peak_bytes"), factor=1e-9),
                    "–" if error is None else f"{error:.1e}",
                ]
            )
            if "kinds" in row:
                kinds.append((name, row["kinds"]))
            if "parts" in row:
                parts.append([*name, *(f"{100 * row['parts'][part] / row['parts_of_ms']:.0f} %" for part in PARTS)])
                times = row["parts_of_ms"] / 1e3 / row["single_forward_s"]
                if times > PROFILE_BOUND:
                    longer += (
                        f"- {', '.join(name)}: the profiled kernels add up to {times:.2f} times a forward call; their"
                        " shares may be off\n"
                    )
    heading = ["setting", "method", "forward s", "step s", "denoising s", "video s"]
    table = markdown([*heading, "× stock eager", "× stock compiled", "GB", "error"], rows)
    shares_table = markdown(["setting", "method", *PARTS], parts)
    met = [kind for kind in STEP_KINDS if any(kind in found for _, found in kinds)]
    cell = lambda k: "–" if k is None else f"{k['steps']} × {k['step_s']['median']:.3f}"
    lines = [[*name, *(cell(found.get(kind)) for kind in met)] for name, found in kinds]
    kinds_table = f"\nSteps of each kind, and their seconds:\n\n{markdown(['setting', 'method', *met], lines)}"
    return (
        f"{table}{kinds_table if kinds else ''}\nWhere a forward call spends its time:\n\n{shares_table}\n{longer}"
        f"{_about(results)}"
    )


def video_table(results: dict[str, Any]) -> str:
    """Seconds per video alone, of the settings that have them: what a first reader wants to know.

    A line is one case, the last with full attention, compiled, which ratios are to. A method has a column if any case
    has it. Memory is that of denoising, residuals counted.
    """
    cases = {}
    for run in results["runs"]:
        for case in run["cases"]:
            rows = {(row["method"], row["mode"]): row for row in case["rows"] if row.get("video_s")}
            if STOCK in rows and len(rows) > 1:
                cases[case["setting"]] = (run, case, rows)
    shown = in_order(cases).values()
    named = {
        method: title
        for method, title in VIDEO_METHODS.items()
        if any((method, "compiled") in rows for *_, rows in shown)
    }
    lines, made = [], []
    for run, case, rows in shown:
        stock, ours = rows[STOCK], [rows.get((method, "compiled"), {}) for method in named]
        times = ["–" if not row else f"{row['video_s']:.1f} ({stock['video_s'] / row['video_s']:.2f}×)" for row in ours]
        memory = [shown_number(row.get("peak_bytes"), factor=1e-9) for row in (stock, *ours[:1])]
        lines.append([case["setting"], f"{case['tokens']:,}", f"{stock['video_s']:.1f}", *times, *memory])
        made.append(
            f"{run['hardware']}, {run['date'][:10]}, torch {run['versions']['torch']}, Triton"
            f" {run['versions']['triton']}, {run['settings']['steps']} steps. Made by `{run['command']}`."
        )
    titles = list(named.values())
    heading = ["setting", "tokens", "full attention, s", *(f"{title}, s" for title in titles)]
    table = markdown([*heading, "full attention, GB", *(f"{title}, GB" for title in titles[:1])], lines)
    return table + "\n" + "\n".join(dict.fromkeys(made)) + "\n"


def stack_table(results: dict[str, Any]) -> str:
    """Seconds per video of what recipes are made of, alone and together, with ratios to the stock model, compiled."""
    settings = newest_rows(results)
    rows, made = [], []
    for method in dict.fromkeys(method for found in settings.values() for method, _ in found):
        cells = []
        for found in settings.values():
            stock, row = found[STOCK][0], found.get((method, "compiled"), ({},))[0]
            faster = f"{stock['video_s'] / row['video_s']:.2f}×" if row else "–"
            cells += [shown_number(row.get("video_s")), faster, shown_number(row.get("peak_bytes"), factor=1e-9)]
        rows.append([STACK_TITLES.get(method, f"`{method}`"), *cells])
    heading = [title for name in settings for title in (f"{name}, s", "faster", "GB")]
    table = markdown(["blocks compiled, and", *heading], rows)
    for run in results["runs"]:
        versions = run["versions"]
        made.append(
            f"{run['hardware']}, {run['date'][:10]}, torch {versions['torch']}, Triton {versions['triton']},"
            f" {run['settings']['steps']} steps, random weights. Made by `{run['command']}`."
        )
    return table + "\n" + "\n".join(made) + "\n"


def _about(results: dict[str, Any]) -> str:
    measured = {
        name
        for setting, found in newest_rows(results).items()
        for (method, mode), (row, _) in found.items()
        if row["status"] == "ok"
        for name in (setting, f"{setting} {method} {mode}")
    }
    lines = [f"{name}: {text}" for name, text in FORMULAE.items()]
    for case in {case["setting"]: case for run in results["runs"] for case in run["cases"]}.values():
        seconds = [
            f"{name} {case[key]['seconds']:.2f} s" if case[key]["status"] == "ok" else f"{name} {case[key]['status']}"
            for key, name in (("vae", "VAE decode"), ("text_encoder", "text encoder"))
        ]
        paper = f"; paper {case['paper_s'][0]:g} → {case['paper_s'][1]:g} s" if case["paper_s"] else ""
        lines.append(
            f"{case['setting']}: {case['tokens']:,} tokens, {case['weights']} weights, {', '.join(seconds)}{paper}"
        )
    for run in results["runs"]:
        settings, versions = run["settings"], run["versions"]
        lines.append(
            f"{run['hardware']}, torch {versions['torch']}, Triton {versions['triton']}, {settings['dtype']},"
            f" {settings['steps']} steps, up to {settings['rounds']} rounds, {run['date'][:10]}: `{run['command']}`"
        )
        lines += [
            f"left out: {entry['case']} ({entry['why']})" for entry in run["left_out"] if entry["case"] not in measured
        ]
    return "".join(f"- {line}\n" for line in lines)
