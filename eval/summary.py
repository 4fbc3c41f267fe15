"""The measures of an evaluation, their statistics over its items, and the tables that show them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmonarch.eval.render.tables import shown_number

_RESAMPLES, _SEED = 10_000, 0
INTERVALS = f"95 % percentile bootstrap over items, {_RESAMPLES} resamples, seed {_SEED}"


@dataclass(frozen=True)
class Measure:
    """A measure of videos: its heading, its decimals, whether more is better, and what it is."""

    heading: str
    decimals: int
    more_is_better: bool
    about: str


def _closeness(prefix: str = "", heading: str = "", about: str = "") -> dict[str, Measure]:
    """The measures of how close a video is to the reference."""
    return {
        f"{prefix}psnr": Measure(f"{heading}PSNR dB", 2, True, f"10·log10(1/MSE), the error pooled over frames{about}"),
        f"{prefix}ssim": Measure(f"{heading}SSIM", 4, True, f"11×11 Gaussian window, sigma 1.5, mean of frames{about}"),
        f"{prefix}lpips": Measure(f"{heading}LPIPS", 4, False, f"AlexNet, mean over frames{about}"),
    }


_KEPT = "share of frames that show each object once, in its colour, and no other; of the embedded model's prompts"
_SHOWN = "share of colour, shape and direction that the pixels show as the prompt asks; of the embedded model's prompts"
MEASURES = {
    **_closeness(),
    **_closeness("first_frame_", "first ", ", of the first frame alone"),
    "vmaf": Measure("VMAF", 1, True, "libvmaf's default model, made for HD screens: it ranks; mean over frames"),
    "prompt_score": Measure("prompt score", 3, True, _SHOWN),
    "permanence": Measure("permanence", 3, True, _KEPT),
    "seconds": Measure("s/video", 2, False, "text, denoising and decoding; a batch's time is shared out evenly"),
    "transformer_seconds_per_step": Measure("transformer s/step", 3, False, "in forward calls, guidance included"),
}
TIMES = ("seconds", "transformer_seconds_per_step")


def values_of(records: Sequence[Mapping[str, Any]], label: str, measure: str) -> list[float | None]:
    """One method's values of a measure, item by item, with "inf" as infinity; None where an item has no value."""
    rows = [row for record in records for row in record["results"] if row["method"] == label]
    return [None if row[measure] is None else float(row[measure]) for row in rows]


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and 95 % percentile bootstrap interval, resampling the items; the same for the same values.

    There is no interval for a single value, or if a value is infinite.

    Returns:
        mean (a number, or "inf" or "-inf"), low, high (None without an interval), items.
    """
    import numpy as np
    from scipy.stats import bootstrap

    mean, low, high = float(np.mean(values)), None, None
    if len(values) > 1 and math.isfinite(mean):
        # Half a million numbers at a time: 10,000 resamples of thousands of items would not fit in memory.
        settings = {"n_resamples": _RESAMPLES, "batch": max(1, 500_000 // len(values)), "method": "percentile"}
        found = bootstrap((values,), np.mean, **settings, rng=np.random.default_rng(_SEED))
        low, high = map(float, found.confidence_interval)
    return json_values({"mean": mean, "low": low, "high": high, "items": len(values)})


def low_end(records: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    """The low end of the PSNR of a method's videos, which the mean hides; the percentile is interpolated linearly.

    Returns:
        p5 (in dB, "inf", or None for fewer than 20 videos, where less than one video lies below it),
        below_27 (how many videos are below 27 dB), items.
    """
    import numpy as np

    psnr = sorted(value for value in values_of(records, label, "psnr") if value is not None)
    # Not `numpy.percentile`, which is NaN between infinite numbers.
    p5 = np.interp(0.05 * (len(psnr) - 1), range(len(psnr)), psnr) if len(psnr) >= 20 else None
    return json_values({"p5": p5, "below_27": sum(value < 27 for value in psnr), "items": len(psnr)})


def statistics(records: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`interval` of every measure of every method, and `low_end` of PSNR; None for what was not measured."""

    def of(label: str, key: str) -> dict[str, Any] | None:
        known = [value for value in values_of(records, label, key) if value is not None]
        return interval(known) | (low_end(records, label) if key == "psnr" else {}) if known else None

    return {label: {key: of(label, key) for key in MEASURES} for label in labels}


def differences(
    records: Sequence[Mapping[str, Any]], labels: Sequence[str], baseline: str
) -> dict[str, dict[str, Any]]:
    """`interval` of the paired differences, method minus baseline, item by item; None for measures that one lacks."""

    def of(label: str, key: str) -> dict[str, Any] | None:
        pairs = zip(values_of(records, label, key), values_of(records, baseline, key), strict=True)
        # Two videos that both equal the reference do not differ, though infinity minus infinity is NaN.
        gaps = [0.0 if a == b else a - b for a, b in pairs if a is not None and b is not None]
        return interval(gaps) if gaps and not {math.inf, -math.inf} <= set(gaps) else None

    return {label: {key: of(label, key) for key in MEASURES} for label in labels if label != baseline}


def summary_rows(
    record: Mapping[str, Any], measures: Sequence[str] = tuple(MEASURES)
) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the summary: every method with its FLOPs, means and intervals, and PSNR's `low_end`.

    Args:
        measures: those to show, if they were taken.
    """
    labels = record["methods"]
    columns = {
        "method": [label + " (reference)" * (label == record["reference"]) for label in labels],
        "attention FLOPs": [shown_number(record["attention_flops"][label], 1, "{} %", factor=100) for label in labels],
    }
    of = lambda label: [row for item in record["items"] for row in item["results"] if row["method"] == label]
    for key, heading in (("exact_steps", "exact steps"), ("predicted_steps", "predicted")):
        counts = [[len(row[key]) for row in of(label) if row[key] is not None] for label in labels]
        if any(map(any, counts)):
            columns[heading] = [shown_number(sum(own) / len(own) if own else None) for own in counts]
    for key in measures:
        found, measure = [record["statistics"][label][key] for label in labels], MEASURES[key]
        if any(found):
            columns[measure.heading] = [shown_interval(value, measure.decimals) for value in found]
        if any(found) and key == "psnr":
            columns["p5"] = [shown_number(low and low["p5"], measure.decimals) for low in found]
            columns["< 27 dB"] = [f"{low['below_27']} of {low['items']}" if low else "–" for low in found]
    for dimension in next(iter(record["vbench"].values()), {}):
        columns[dimension] = [f"{record['vbench'][label][dimension]:.4f}" for label in labels]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def sampled(config: Mapping[str, Any]) -> str:
    """The number of videos of a method, the model and the settings, in words."""
    prompts, seeds = (len(config[key]) for key in ("prompts", "seeds"))
    return (
        f"{prompts} prompt{'s' * (prompts > 1)} × {seeds} seed{'s' * (seeds > 1)}, model {config['model']},"
        f" {config['num_frames']}×{config['height']}×{config['width']}, {config['steps']} steps, guidance"
        f" {config['guidance']:g}"
    )


def document_table(record: Mapping[str, Any]) -> dict[str, Any]:
    """`tables` and `caption` for a document: the summary without times."""
    heading, rows = summary_rows(record, [key for key in MEASURES if key not in TIMES])
    about = record["environments"][0]["environment"]
    versions = ", ".join(f"{name} {about['packages'][name]}" for name in ("torch", "diffusers"))
    caption = (
        f"{sampled(record['config'])}; means with 95 % bootstrap intervals; {about['device_name']},"
        f" {about['cpu_count']} cores, {versions}, {record['created'][:10]}."
    )
    made = f" Made by `{record['command']}`." if record["command"] else ""
    return {"tables": [{"header": heading, "rows": rows}], "caption": caption + made}


def shown_interval(value: Mapping[str, Any] | None, decimals: int, *, sign: bool = False) -> str:
    """`mean [low, high]`, without brackets where there is no interval."""
    if value is None:
        return "–"
    mean, *edges = (shown_number(value[key], decimals, sign=sign) for key in ("mean", "low", "high"))
    return mean if value["low"] is None else f"{mean} [{', '.join(edges)}]"


def json_text(record: Mapping[str, Any]) -> str:
    """A record as the text of a file.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, with infinities as text, which JSON lacks: "inf", the PSNR of identical videos; "-inf", a gap to it."""
    return {key: str(value) if value in (math.inf, -math.inf) else value for key, value in values.items()}
