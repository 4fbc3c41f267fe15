"""Attention processors for video transformers in diffusers.

Shapes: B batch, S = T·H·W tokens, H heads, D head dim; the latent grid is T frames × H rows × W columns of tokens.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from vmonarch.attend import Attend, ByHead, Op
from vmonarch.base import Layer, VideoAttentionProcessor
from vmonarch.bias import BiasOption
from vmonarch.grid import LatentGrid
from vmonarch.options import FirstOrderOptions, TwoResolutionOptions, VMonarchOptions
from vmonarch.plan import AttentionPlan

# A video of this size took as long as with full attention (docs/benchmarks/eval-proxy.json: 61×192×320).
_TOO_FEW_TOKENS = 3840
# For up to this many different layers of a plan, torch.compile makes a graph each; beyond it, one for all.
_LAYERS_INLINE = 4


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VMonarchProcessor(VideoAttentionProcessor, VMonarchOptions):
    """VMonarch attention for the video transformers of diffusers (VMonarch paper; `vmonarch_attention`).

    Cross-attention, with text or with an image, stays exact.

    Args:
        bias: None, or a low-rank bias on every logit, as in `FlashBiasProcessor`.
        plan: None, or what every head of every layer computes: an `AttentionPlan`, the path of its JSON, the contents
            of that, or the name of a shipped one (for the embedded model: `embedded-1.00`, …). `bias` and `options`
            must be left at their defaults, because the plan decides them. Needs `vmonarch.apply`.
        dense_steps: denoising steps computed with exact attention: the first n (int), the first fraction, rounded up
            (float), or a collection of step indices. Needs `vmonarch.apply(pipe, …)`.
        dense_layers: transformer blocks that keep their own processor, given like `dense_steps`; VACE's control blocks
            follow the block that they feed. Needs `vmonarch.apply`.
        refresh: None, or the steps in which attention is exact and renews the residual, exact minus VMonarch attention,
            which all other steps add to VMonarch attention: a number (int), a fraction (float) or a collection of
            steps, or a `vmonarch.Refresh`, which also takes a tolerance. For inference. Needs
            `vmonarch.apply(pipe, …)`.
        grid: (frames, height, width) in tokens; None to read it from every call of the transformer.
        implementation: as in `vmonarch_attention`.
        **options: the `VMonarchOptions` by name: num_iterations, exact, coarse, …

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    OP = VMonarchOptions

    bias: Any = None
    plan: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias is not None and self.refresh is not None and self.refresh.precision is not None:
            raise ValueError(f"refresh.precision must be None with a bias, got {self.refresh.precision!r}")
        if self.plan is None:
            return
        object.__setattr__(self, "plan", AttentionPlan.parse(self.plan))
        for name, default in {**vars(VMonarchOptions()), "bias": None}.items():
            if (value := getattr(self, name)) != default:
                raise ValueError(f"{name} must be left at {default!r} with a plan, which decides it; got {value!r}")

    @property
    def needs_raster(self) -> bool:
        return self.coarse > 1 or self.row_share < 1 or self.bias is not None or self.plan is not None

    def check_grid(self, grid: LatentGrid) -> None:
        for options in [self.options] if self.plan is None else self.plan.methods.values():
            if options is not None:
                options.check_grid(grid)

    def warn_of_size(self, grid: LatentGrid) -> None:
        # Predicted steps make any video faster.
        if grid.tokens <= _TOO_FEW_TOKENS and (self.refresh is None or self.refresh.cache is None):
            warnings.warn(
                f"videos of {grid.tokens} tokens are too small for VMonarch to make them faster: with"
                f" {_TOO_FEW_TOKENS} tokens they took as long as with full attention",
                stacklevel=2,
            )
        planned = None if self.plan is None else self.plan.about.get("grid")
        if planned not in (None, list(grid)):
            warnings.warn(
                f"the plan was made for {' × '.join(map(str, planned))} latent tokens (frames × rows × columns), and"
                f" these videos have {' × '.join(map(str, grid))}: its heads may lose more than it says; calibrate at"
                " this size",
                stacklevel=2,
            )

    def attention(self, layer: Layer) -> Attend | None:
        if self.plan is None:
            return Op(self.options, self.implementation, self.bias_option)
        names = self.plan.heads_of(layer.component, layer.block, layer.blocks, layer.heads)
        if all(self.plan.methods[name] is None for name in names):
            return None
        op = lambda options: self.exact_attention if options is None else Op(options, self.implementation)
        return ByHead({name: op(self.plan.methods[name]) for name in dict.fromkeys(names)}, names)

    def is_opaque(self, layer: Layer) -> bool:
        of_plan = self.plan is not None and len(set(self.plan.layers[layer.component])) > _LAYERS_INLINE
        return of_plan or super().is_opaque(layer)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FlashBiasProcessor(VideoAttentionProcessor):
    """Exact attention with a low-rank bias for the video transformers of diffusers (FlashBias; `flash_bias_attention`).

    Cross-attention, with text or with an image, has no bias.

    Args:
        bias: a pair of tensors (query_factor, key_factor), each [1, S, H or 1, R], for the one grid that they fit; or a
            callable that makes such a pair for a `LatentGrid`, for example `vmonarch.bias.SpatioTemporalDecay(heads)`
            or any module. All layers share it; its owner saves what it learns.
        dense_steps, dense_layers, grid: as in `VMonarchProcessor`.
        implementation: as in `flash_bias_attention`.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    bias: Any = field(kw_only=False)
    refresh: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", BiasOption(self.bias).bias)
        super().__post_init__()

    def attention(self, layer: Layer) -> Attend:
        return self.exact_attention


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TwoResolutionProcessor(VideoAttentionProcessor, TwoResolutionOptions):
    """Attention in two resolutions for the video transformers of diffusers (`two_resolution_attention`).

    Cross-attention, with text or with an image, stays exact.

    Args:
        dense_steps, dense_layers, refresh, grid: as in `VMonarchProcessor`.
        implementation: as in `two_resolution_attention`.
        **options: the `TwoResolutionOptions` by name: share, tile, rest, …

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    OP = TwoResolutionOptions


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FirstOrderProcessor(VideoAttentionProcessor, FirstOrderOptions):
    """Attention to the first order around mean queries (`first_order_attention`) in all heads, for comparisons.

    Plans use it for the heads that it suits. Cross-attention, with text or with an image, stays exact.

    Args:
        dense_steps, dense_layers, refresh, grid: as in `VMonarchProcessor`.
        implementation: as in `first_order_attention`.
        **options: the `FirstOrderOptions` by name: parts.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    OP = FirstOrderOptions


def presets() -> dict[str, str]:
    """The presets that `vmonarch.apply(pipe, NAME)` takes, each with a one-line description."""
    # The other methods in `configs/attention.yaml` are controls and parts of studies.
    return {
        "near-lossless": "exact attention where this video needs it, the closest to full attention",
        "fast": "exact attention in fewer steps, faster and less close",
        "cached": "full attention, in the steps whose output is not predicted",
        "vmonarch-dense-start": "exact attention in the first fifth of the steps, no memory for residuals",
        "vmonarch-first-band1": "exact near in time, in every step",
        "vmonarch": "the paper's method in every step, for finetuned models",
        "vmonarch-t3": "as vmonarch, with three iterations",
        "vmonarch-t1": "as vmonarch, with one iteration",
        "vmonarch-lite": "as vmonarch, with pooled keys, the least work",
        "two-resolution": "exact where scores are highest, means elsewhere",
    }
