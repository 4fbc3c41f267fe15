"""What fits on a GPU of 24, 48, 80 or 141 GB: the tables of `docs/gpu-sizes.md`, from `docs/benchmarks/e2e.json`.

A video's memory while denoising is

    weights (2 bytes each) + activations (in proportion to the tokens) + residuals (with `refresh`)

Activations of a model are those of its measured setting, per token. Residuals are `residual_bytes`, as in
`vmonarch info --residuals`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vmonarch.eval.bench.e2e import SETTINGS, Setting
from vmonarch.eval.bench.e2e_table import newest_rows
from vmonarch.eval.render.table import markdown
from vmonarch.eval.wan_models import read_model
from vmonarch.kernels.residual.api import residual_bytes

CARDS = (24, 48, 80, 141)
# Of a card's memory: CUDA itself, the gaps between allocations, and what else runs there take the rest.
USABLE = 0.9
# Sizes that were not measured themselves, such as the models' defaults.
OTHER_SIZES = (
    Setting("1.3b-81x480x832", "wan2.1-1.3b", 81, 480, 832),
    Setting("14b-81x480x832", "wan2.1-14b", 81, 480, 832),
    Setting("14b-81x720x1280", "wan2.1-14b", 81, 720, 1280),
    Setting("5b-121x704x1280", "wan2.2-5b", 121, 704, 1280),
)
REFRESH = ("near-lossless", "fast")


class Need(NamedTuple):
    """Bytes that denoising a video takes.

    Args:
        measured: of VMonarch without and with residuals, where it was; None where it was not.
        layers: of the transformer.
    """

    setting: Setting
    tokens: int
    weights: float
    activations: float
    residuals: int
    measured: tuple[float | None, float | None]
    layers: int

    @property
    def every_step(self) -> float:
        return self.measured[0] or self.weights + self.activations

    @property
    def refresh(self) -> float:
        return self.measured[1] or self.every_step + self.residuals

    @property
    def on_host(self) -> float:
        """With `Refresh(offload=True)`: the residuals of two layers of one branch are on the GPU."""
        return self.every_step + self.residuals / self.layers


def needs(results: dict[str, Any]) -> list[Need]:
    """What every setting and size takes, by what `vmonarch bench e2e` measured."""
    measured = {}
    for name, rows in newest_rows(results).items():
        peaks = {method: row["peak_bytes"] for (method, mode), (row, _) in rows.items() if mode == "compiled"}
        case = rows["vmonarch", "compiled"][1]
        measured[name] = (2 * case["parameters"] * case["transformers"], case["tokens"], peaks)
    per_token = {
        setting.model: (weights, (peaks["vmonarch"] - weights) / tokens)
        for setting in SETTINGS
        for weights, tokens, peaks in [measured[setting.name]]
    }
    found = []
    for setting in (*SETTINGS, *OTHER_SIZES):
        model = read_model(setting.model)
        heads, width, layers = (
            model.transformer[name] for name in ("num_attention_heads", "attention_head_dim", "num_layers")
        )
        tokens = model.grid(model.latents(setting.frames, setting.height, setting.width, argument="size")).tokens
        weights, activations = per_token[setting.model]
        peaks = measured.get(setting.name, (0, 0, {}))[2]
        refresh = next((peaks[method] for method in REFRESH if method in peaks), None)
        residuals = 2 * layers * residual_bytes(1, tokens, heads, width, "int8")
        found.append(
            Need(setting, tokens, weights, activations * tokens, residuals, (peaks.get("vmonarch"), refresh), layers)
        )
    return sorted(found, key=lambda need: (need.weights, need.tokens))


def _gigabytes(value: float, measured: bool = True) -> str:
    return f"{'' if measured else '≈ '}{value / 1e9:.1f}"


def _name(setting: Setting) -> str:
    model = {"wan2.1-1.3b": "Wan2.1 1.3B", "wan2.1-14b": "Wan2.1 14B", "wan2.2-5b": "Wan2.2 5B"}[setting.model]
    return f"{model}, {setting.frames}×{setting.height}×{setting.width}"


def memory_table(results: dict[str, Any]) -> str:
    """GB that denoising takes, part by part; measured totals without a sign, arithmetic with ≈."""
    rows = [
        [
            _name(need.setting),
            f"{need.tokens:,}",
            *(_gigabytes(value) for value in (need.weights, need.activations, need.residuals)),
            _gigabytes(need.every_step, need.measured[0] is not None),
            _gigabytes(need.refresh, need.measured[1] is not None),
            _gigabytes(need.on_host, False),
        ]
        for need in needs(results)
    ]
    heading = ["model, video", "tokens", "weights", "activations", "residuals"]
    table = markdown([*heading, "every step", "near-lossless", "residuals on the host"], rows)
    return f"{table}\n{_source(results)}"


def fit(need: Need, card: int) -> str:
    """The most faithful setting without training that a card holds, with one component on it at a time."""
    room = card * 1e9 * USABLE
    for where, weights in (("", 0.0), (" + group", need.weights)):
        for what, bytes_ in (("near-lossless", need.refresh), ("residuals on host", need.on_host)):
            if bytes_ - weights <= room:
                return what + where
    return "every step + group" if need.every_step - need.weights <= room else "–"


def fits_table(results: dict[str, Any]) -> str:
    """For every video and card, the setting to take."""
    rows = [[_name(need.setting), *(fit(need, card) for card in CARDS)] for need in needs(results)]
    return markdown(["model, video", *(f"{card} GB" for card in CARDS)], rows) + f"\n{_source(results)}"


def others_table(results: dict[str, Any]) -> str:
    """Peaks of the components that stand before and after denoising."""
    rows = []
    for setting, found in newest_rows(results).items():
        cases = [case for _, case in found.values() if case["vae"]["status"] == "ok"]
        if cases:
            rows.append([setting, *(_gigabytes(cases[-1][part]["peak_bytes"]) for part in ("text_encoder", "vae"))])
    return markdown(["setting", "text encoder", "VAE decode, float32"], rows) + f"\n{_source(results)}"


def _source(results: dict[str, Any]) -> str:
    run = results["runs"][-1]
    return f"{run['hardware']}, torch {run['versions']['torch']}; made of `docs/benchmarks/e2e.json`.\n"
