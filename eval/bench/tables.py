"""Tables of the benchmarks of low-rank biases, and of linear and window attention, from their JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vmonarch.eval.bench.machine import shown_rates
from vmonarch.eval.render.table import markdown

Case = dict[str, Any]
PASSES = {False: "forward", True: "forward+backward"}


def digits(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}" if value >= 1 else f"{value:.3f}"


def good_rows(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those with times, by method; the first JSON of `vmonarch bench train` has no status."""
    return {row["method"]: row for row in case["rows"] if row.get("status", "ok") == "ok"}


def cell(case: Case, method: str, show: Callable[[dict[str, Any]], str]) -> str:
    """What `show` makes of a method's row; the status of a row without times, a dash where there is none."""
    row = next((row for row in case["rows"] if row["method"] == method), None)
    if row is None:
        return "–"
    return show(row) if method in good_rows(case) else row["status"]


def _ms(case: Case, method: str) -> float | None:
    row = good_rows(case).get(method)
    return None if row is None else row["ms"]["median"]


def _time(case: Case, method: str, ours: str = "") -> str:
    """Milliseconds, and how many times as fast `ours` is; or why there are none."""
    our_ms = _ms(case, ours)

    def show(row: dict[str, Any]) -> str:
        ms = row["ms"]["median"]
        return digits(ms) + ("" if our_ms is None else f" ({digits(ms / our_ms)}×)")

    return cell(case, method, show)


def _ratio(above: float | None, below: float | None) -> str:
    return "–" if above is None or below is None else f"{above / below:.2f}×"


def _heads(case: Case) -> str:
    batch = "" if case["batch"] == 1 else f"{case['batch']} × "
    return f"{batch}{case['tokens']:,}, {case['heads']} heads, d = {case['head_dim']}"


def about(results: dict[str, Any], what: str = "", rates: str = "") -> str:
    """What a table shows, where and how it was measured, and what was left out.

    Args:
        what: the first sentences. rates: of the device, likewise.
    """
    versions, settings = results["versions"], results["settings"]
    sentences = [
        what,
        f"{results['hardware']}, {results['date'][:10]}, torch {versions['torch_build']}, Triton {versions['triton']},"
        f" {settings['dtype']}; medians of up to {settings['rounds']} measurements, {settings['timing']}.",
        rates,
        f"Made by `{results['command']}`.",
    ]
    lines = [
        " ".join(filter(None, sentences)),
        "",
        *(f"- {name}: {text}" for name, text in results["formulae"].items()),
    ]
    if results["left_out"]:
        # The first files have the cases' labels alone.
        left = [x if isinstance(x, str) else f"{x['case']} ({x['why']})" for x in results["left_out"]]
        lines += ["", f"Left out when the time was over: {'; '.join(left)}."]
    return "\n".join(lines) + "\n"


def _about(results: dict[str, Any]) -> str:
    return about(results, rates=f"Measured there: {shown_rates(results['rates'])}.")


def _all_bytes(case: Case, method: str) -> int | None:
    """Inputs and the most that a call allocates beyond them."""
    row = good_rows(case).get(method, {})
    return row["peak_bytes"] + row["input_bytes"] if "peak_bytes" in row else None


@dataclass(frozen=True)
class Bar:
    """What is asked of a ratio between two methods.

    Args:
        measure: (case, method) -> what is compared, None if there is none. above, below: methods.
        bound: of above / below; the least that is asked for if `least`, else the most.
        asked: of which cases.
    """

    what: str
    measure: Callable[[Case, str], float | None]
    above: str
    below: str
    bound: float
    least: bool = False
    asked: Callable[[Case], bool] = lambda _: True

    def ratio(self, case: Case) -> float | None:
        above, below = self.measure(case, self.above), self.measure(case, self.below)
        return None if above is None or below is None else above / below


BIAS_BARS = (
    Bar("time / no bias, R ≤ 16", _ms, "flash-bias", "no-bias", 1.15, asked=lambda case: case["rank"] <= 16),
    Bar("time / no bias, R above 16", _ms, "flash-bias", "no-bias", 1.35, asked=lambda case: case["rank"] > 16),
    Bar("SDPA's time / ours", _ms, "sdpa", "flash-bias", 2.0, least=True),
    Bar("FlexAttention's time / ours", _ms, "flex", "flash-bias", 1.0, least=True),
    Bar("memory / no bias", _all_bytes, "flash-bias", "no-bias", 1.1),
)


def bars_table(results: dict[str, Any], bars: Sequence[Bar]) -> str:
    """How many cases are within each bar, and the one that is farthest from it."""
    rows = []
    for bar in bars:
        cases = [case for case in results["cases"] if bar.asked(case)]
        found = [(value, case["case"]) for case in cases if (value := bar.ratio(case)) is not None]
        if not found:
            continue
        met = sum(value >= bar.bound if bar.least else value <= bar.bound for value, _ in found)
        worst, where = min(found) if bar.least else max(found)
        sign = "≥" if bar.least else "≤"
        rows.append([bar.what, f"{sign} {bar.bound:g}", f"{met} of {len(found)}", f"{worst:.2f} ({where})"])
    return markdown(["asked for", "bar", "cases within it", "the worst"], rows)


def flash_bias_table(results: dict[str, Any]) -> str:
    """FlashBias beside the same kernels without a bias, and others that read it as a matrix; what was asked for."""
    parts = []
    for training, title in PASSES.items():
        rows = []
        for case in (case for case in results["cases"] if case["training"] == training):
            ours, none, matrix = (_all_bytes(case, method) for method in ("flash-bias", "no-bias", "sdpa"))
            beyond = [good_rows(case).get(method, {}).get("peak_bytes") for method in ("flash-bias", "no-bias")]
            name = f"{case['name']}: " if "=" not in case["name"] else ""
            rows.append(
                [
                    f"{name}{_heads(case)}{', causal' if case['causal'] else ''}",
                    str(case["rank"]),
                    _time(case, "flash-bias"),
                    _ratio(_ms(case, "flash-bias"), _ms(case, "no-bias")),
                    _time(case, "sdpa", "flash-bias"),
                    _time(case, "flex", "flash-bias"),
                    "–" if ours is None else f"{ours / 1e6:,.0f}",
                    f"{_ratio(ours, none)} ({_ratio(*beyond)})",
                    _ratio(matrix, ours),
                ]
            )
        heading = [
            "tokens", "R", "FlashBias ms", "time / no bias", "matrix, SDPA ms", "matrix, FlexAttention ms", "memory MB",
            "memory / no bias (inputs left out)", "memory with the matrix, SDPA / ours",
        ]  # fmt: skip
        if rows:
            parts.append(f"{title}; in parentheses, how many times as fast FlashBias is:\n\n{markdown(heading, rows)}")
    return "\n".join([*parts, bars_table(results, BIAS_BARS), _about(results)])


def _time_or_floor(case: Case, what: str) -> float | None:
    """Milliseconds of linear attention, or of a floor of it."""
    row = good_rows(case).get("taylor")
    return None if row is None else row["ms"]["median"] if what == "taylor" else row.get(what)


def _of_kind(*kinds: str) -> Callable[[Case], bool]:
    return lambda case: case["kind"] in kinds


BASED_BARS = (
    Bar("video: time / byte floor", _time_or_floor, "taylor", "byte_floor_ms", 3.0, asked=_of_kind("video")),
    Bar("video: exact, cuDNN / linear", _ms, "cudnn", "taylor", 1.0, least=True, asked=_of_kind("video")),
    Bar("prefill: exact, cuDNN / linear", _ms, "cudnn", "taylor", 1.0, least=True, asked=_of_kind("prefill")),
    Bar("windows: FlexAttention / ours", _ms, "flex", "window", 1.0, least=True, asked=_of_kind("window")),
)


def based_table(results: dict[str, Any]) -> str:
    """Prefill, decoding, video and windows, each beside exact attention."""
    kinds = {"video": _video, "prefill": _prefill, "decode": _decode, "window": _window}
    parts = []
    for kind, table in kinds.items():
        if cases := [case for case in results["cases"] if case["kind"] == kind]:
            parts.append(table(cases))
    return "\n".join([*parts, bars_table(results, BASED_BARS), _about(results)])


def _by(*keys: str) -> Callable[[Case], Any]:
    return lambda case: [case[key] for key in keys]


def _video(cases: Sequence[Case]) -> str:
    rows = []
    for case in sorted(cases, key=_by("training", "heads", "tokens")):
        floors = [_ratio(_ms(case, "taylor"), _time_or_floor(case, f"{floor}_floor_ms")) for floor in ("byte", "flop")]
        others = [_time(case, method, "taylor") for method in ("taylor-torch", "cudnn")]
        rows.append([_heads(case), PASSES[case["training"]], _time(case, "taylor"), *floors, *others])
    heading = ["tokens", "pass", "linear ms", "/ byte floor", "/ FLOP floor", "plain torch ms", "exact, cuDNN ms"]
    about = "All tokens of a video to all; in parentheses, how many times as fast the kernels are:"
    return f"{about}\n\n{markdown(heading, rows)}"


def _prefill(cases: Sequence[Case]) -> str:
    rows = [
        [
            f"{case['batch']} × {case['tokens']:,}",
            PASSES[case["training"]],
            _time(case, "taylor"),
            *(_time(case, method, "taylor") for method in ("taylor-torch", "cudnn", "flash")),
        ]
        for case in sorted(cases, key=_by("training", "batch", "tokens"))
    ]
    heading = ["batch × tokens", "pass", "linear ms", "plain torch ms", "exact, cuDNN ms", "exact, FlashAttention-2 ms"]
    about = f"Causal, {cases[0]['heads']} heads, values of {cases[0]['head_dim']}, q and k of {cases[0]['dims']}:\n\n"
    return about + markdown(heading, rows)


def _decode(cases: Sequence[Case]) -> str:
    methods = list(dict.fromkeys(row["method"] for case in cases for row in case["rows"]))
    names = {"taylor": "linear", "taylor-torch": "linear, plain torch", "window": "window 64"}
    heading = ["batch", *(names.get(m) or f"exact, {int(m.removeprefix('sdpa-')):,} keys" for m in methods)]
    rows = []
    for case in sorted(cases, key=_by("batch")):
        per_ms = lambda row, batch=case["batch"]: f"{batch / row['ms']['median']:,.0f}"
        rows.append([str(case["batch"]), *(cell(case, method, per_ms) for method in methods)])
    return f"Decoding with one layer's attention, thousands of tokens per second:\n\n{markdown(heading, rows)}"


def _window(cases: Sequence[Case]) -> str:
    rows = []
    for case in sorted(cases, key=lambda case: (case["training"], str(case["window"]), case["tokens"])):
        window, grid = ("×".join(map(str, x)) if isinstance(x, list) else x for x in (case["window"], case["grid"]))
        where = f"{window}, causal" if grid is None else f"{window} of {grid}"
        others = [_time(case, method, "window") for method in ("flex", "cudnn")]
        rows.append([where, _heads(case), PASSES[case["training"]], _time(case, "window"), *others])
    heading = ["window", "tokens", "pass", "window ms", "FlexAttention ms", "all tokens, cuDNN ms"]
    return f"Windows; in parentheses, how many times as fast the kernels are:\n\n{markdown(heading, rows)}"
