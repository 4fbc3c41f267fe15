"""Presets: settings by name. The same names serve YAML and the command line (`configs/attention.yaml`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vmonarch.base import VideoAttentionProcessor

# Of the methods those to choose from; the others are controls and parts of studies.
_PRESETS = {
    "near-lossless": "exact attention in 28 % of the steps, the closest to full attention",
    "fast": "exact attention in 16 % of the steps, faster and less close",
    "vmonarch-dense-start": "exact attention in the first fifth of the steps, no memory for residuals",
    "vmonarch-first-band1": "exact near in time, in every step",
    "vmonarch": "the paper's method in every step, for finetuned models",
    "vmonarch-t3": "as vmonarch, with three iterations",
    "vmonarch-t1": "as vmonarch, with one iteration",
    "vmonarch-lite": "as vmonarch, with pooled keys, the least work",
    "two-resolution": "exact where scores are highest, means elsewhere",
}


def presets() -> dict[str, str]:
    """The presets that `vmonarch.apply(pipe, NAME)` takes, each with a line on it."""
    return dict(_PRESETS)


def preset_processor(name: str) -> VideoAttentionProcessor:
    """The processor of a preset, or of another method of `configs/attention.yaml`.

    Args:
        name: the name, or `name:key=value,…` with options of its own, as on the command line.

    Raises:
        ValueError: an unknown name or option, or a method that is no processor.
    """
    from vmonarch.configs.methods import resolve_method

    return resolve_method(name, argument="processor").processor()
