"""The options of Based, checked when they are made, and what the layers of a transformer compute under them.

Here, and not with the processor, because configuration checks them before diffusers is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vmonarch.kernels.taylor.feature_maps import FEATURE_MAPS
from vmonarch.kernels.window.api import check_window
from vmonarch.validation import check_flag, check_positive_integer

LAYERS = ("linear", "window", "both", "conv", "full")


def resolve_layers(layers: str | Sequence[str], blocks: int) -> tuple[str, ...]:
    """What each of the transformer blocks computes; `layers` as in `BasedProcessor`.

    Raises:
        ValueError: the layout does not fit the number of blocks.
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


@dataclass(frozen=True, kw_only=True)
class BasedOptions:
    """What Based computes; see `BasedProcessor`.

    Raises:
        TypeError, ValueError: an option has an unsupported value; the message begins with its name.
    """

    layers: str | Sequence[str] = "both"
    feature_dim: int = 16
    feature_map: str = "taylor"
    window: Sequence[int] = (3, 5, 5)
    decay: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _check_layers(self.layers))
        check_positive_integer("feature_dim", self.feature_dim)
        object.__setattr__(self, "feature_dim", int(self.feature_dim))
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {self.feature_map!r}")
        if FEATURE_MAPS[self.feature_map].signed and "both" in (self.layers, *self.layers):
            raise ValueError(
                f"feature_map must not be {self.feature_map!r} with layers 'both': its weights may be negative"
            )
        object.__setattr__(self, "window", check_window(self.window))
        check_flag("decay", self.decay)


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
