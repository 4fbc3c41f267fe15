"""What the layers of a transformer compute under Based: the option `layers`, and checks of the others.

Here, and not with the processor, because configuration checks them before diffusers is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from vmonarch.kernels.taylor.feature_maps import FEATURE_MAPS
from vmonarch.kernels.window.api import check_window
from vmonarch.kernels.window.neighbours import Window
from vmonarch.validation import check_flag, check_implementation, check_positive_integer

LAYERS = ("linear", "window", "both", "conv", "full")


def resolve_layers(layers: str | Sequence[str], blocks: int) -> tuple[str, ...]:
    """What each of so many transformer blocks computes; `layers` as in `BasedProcessor`.

    Raises:
        ValueError: the layout does not fit so many blocks.
    """
    if layers == "based":
        if blocks < 2:
            raise ValueError(
                f"layers='based' needs at least 2 transformer blocks, one linear and one window, got {blocks}"
            )
        share = max(1, round(blocks / 5))
        kinds = ["conv"] * blocks
        for n in range(share):
            kinds[int((n + 0.25) * blocks / share)] = "linear"
            kinds[int((n + 0.75) * blocks / share)] = "window"
        return tuple(kinds)
    if isinstance(layers, str):
        return (layers,) * blocks
    if len(layers) != blocks:
        raise ValueError(f"layers has {len(layers)} entries, but there are {blocks} transformer blocks")
    return tuple(layers)


def check_based_options(
    *,
    layers: object = "both",
    feature_dim: object = 16,
    feature_map: object = "taylor",
    window: object = (3, 5, 5),
    decay: object = False,
    implementation: object = "auto",
) -> tuple[str | tuple[str, ...], Window]:
    """Check the options of a `BasedProcessor`; (layers, window) in the form that it keeps.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """
    checked = _check_layers(layers)
    check_positive_integer("feature_dim", feature_dim)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}")
    if FEATURE_MAPS[str(feature_map)].signed and "both" in (checked, *checked):
        raise ValueError(f"feature_map must not be {feature_map!r} with layers 'both': its weights may be negative")
    extents = check_window(window)
    check_flag("decay", decay)
    check_implementation(implementation)
    return checked, extents


def _check_layers(layers: object) -> str | tuple[str, ...]:
    supported = f"based, one of {', '.join(LAYERS)}, or a list of these with one entry for each transformer block"
    if isinstance(layers, str):
        if layers not in ("based", *LAYERS):
            raise ValueError(f"layers must be {supported}, got {layers!r}")
        return layers
    if not isinstance(layers, Sequence):
        raise TypeError(f"layers must be {supported}, got {type(layers).__name__}")
    for number, kind in enumerate(layers):
        if kind not in LAYERS:
            raise ValueError(f"layers[{number}] must be one of {', '.join(LAYERS)}, got {kind!r}")
    return tuple(layers)
