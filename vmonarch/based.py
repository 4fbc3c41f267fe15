"""Based for video transformers: linear attention and attention in windows, with what they learn.

Shapes: B batch, S = T·H·W tokens, H heads, D head dim, d' feature dim, C = heads·D channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vmonarch.attend import Attend, Result
from vmonarch.base import Layer, VideoAttentionProcessor
from vmonarch.call import Call
from vmonarch.context_parallel import Part
from vmonarch.kernels.merge.api import merge_partials
from vmonarch.kernels.taylor.api import taylor_attention
from vmonarch.kernels.taylor.reference import FEATURE_MAPS
from vmonarch.kernels.window.api import check_window, window_attention
from vmonarch.own import Own
from vmonarch.validation import check_flag, check_positive_integer

# Latent frames over which the linear part's keys lose a factor e at first.
FIRST_REACH = 16.0
# What a layer can compute.
LAYERS = ("linear", "window", "both", "full")


def initial_projection(layer: int, heads: int, head_dim: int, feature_dim: int) -> torch.Tensor:
    """Orthonormal rows times (D/d')^¼ for each head, [H, d', D], float64; the same in every process."""
    generator = torch.Generator().manual_seed(layer)
    random = torch.randn(heads, head_dim, feature_dim, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(random).Q.mT * (head_dim / feature_dim) ** 0.25


class LinearPart(torch.nn.Module):
    """Linear attention on learnt projections of query and key.

    Its parameters are `query_weight` and `key_weight` [H, d', D]; `log_weight` [H] if it is `merged` with another part;
    `log_rate` [H] if the keys `decay` over time. Their dtype may be wider than the query's.

    Args:
        like: a parameter [C] that sets the device and dtype of these.

    Raises:
        ValueError: `feature_dim` is above the head dimension.
    """

    def __init__(self, spec: BasedProcessor, layer: Layer, merged: bool, like: torch.Tensor) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"feature_map": spec.feature_map, "implementation": spec.implementation}
        heads, head_dim = layer.heads, like.shape[0] // layer.heads
        if spec.feature_dim > head_dim:
            raise ValueError(f"feature_dim={spec.feature_dim}, but heads have only {head_dim} dimensions")
        projection = initial_projection(layer.block, heads, head_dim, spec.feature_dim)
        parameter = lambda values: torch.nn.Parameter(values.to(like, copy=True))
        self.query_weight, self.key_weight = parameter(projection), parameter(projection)
        self.log_weight = parameter(torch.zeros(heads)) if merged else None
        self.log_rate = parameter(torch.full((heads,), -math.log(FIRST_REACH))) if spec.decay else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        frames: int,
        heads: Part | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out [B, S, H, D], lse [B, H, S] if it is merged) of query, key and value [B, S, H, D].

        Args:
            heads: which of the heads these are; None for all.
        """
        own = lambda parameter: parameter if heads is None else heads.of(parameter, 0)
        query, key = (
            torch.einsum("bshd,hfd->bshf", x, own(weight).to(x.dtype))
            for x, weight in ((query, self.query_weight), (key, self.key_weight))
        )
        decay = None if self.log_rate is None else frame_decay(own(self.log_rate), frames)
        attend = functools.partial(taylor_attention, query, key, value, frame_weights=decay, **self.options)
        if self.log_weight is None:
            return attend(), None
        out, lse = attend(return_lse=True)
        return out, lse + own(self.log_weight).to(lse.dtype)[:, None]


def frame_decay(log_rate: torch.Tensor, frames: int) -> torch.Tensor:
    """exp(-rate·|t - t'|) for the logarithms of rates [H]: [H, T, T], at least float32."""
    time = torch.arange(frames, device=log_rate.device)
    rate = log_rate.to(torch.promote_types(log_rate.dtype, torch.float32)).exp()
    return torch.exp(-rate[:, None, None] * (time[:, None] - time).abs())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BasedProcessor(VideoAttentionProcessor):
    """Based for every Wan-family transformer in diffusers: attention linear in the tokens, to be finetuned.

    `vmonarch.apply` gives every self-attention module its own parameters. They belong to the transformer: they train,
    move and are saved with it (see `vmonarch.save_adapter`, `load_adapter`), and `vmonarch.restore` removes them.
    Cross-attention stays exact. A layer computes one of these:

        "linear"  linear attention over all tokens, of queries and keys projected to `feature_dim` by learnt weights
        "window"  exact softmax attention to a neighbourhood; nothing is learnt
        "both"    these two, joined as parts of one softmax by their partition functions, the linear part with a learnt
                  weight per head; keys of the neighbourhood count in both
        "full"    the module's own exact attention

    Training starts from the pretrained attention as far as few features can represent it. Query and key share a
    projection P with random orthonormal rows, times (D/d')^¼. Then E[PᵀP] = √(d'/D)·I, so the logits q·PᵀP·k/√d' are
    q·k/√D on average. (With two independent projections the average would be 0.) Layers and heads have independent
    projections, whose errors do not add up; they are the same in every process. With log-weight 0 the linear part
    counts as what it estimates, the softmax over all keys.

    Args:
        layers: one of the names above for all layers, or a list of them, one for each transformer block. The default
            "both" is the closest to the attention of a pretrained model. VACE's control
            blocks follow the block that they feed.
        feature_dim: d', at most the head dimension.
        feature_map: that of the linear part; see `taylor_attention`.
        window: (frames, rows, columns) of the neighbourhood, the query in the middle.
        decay: let the linear part's keys lose weight over time, as exp(-rate·|t - t'|), with a learnt rate above 0 for
            each head that begins at 1/16 per latent frame.
        dense_steps, dense_layers, grid: as in `VMonarchProcessor`; dense layers are "full" ones.
        implementation: that of the linear part and of windows; see `taylor_attention` and `window_attention`.

    Raises:
        TypeError, ValueError: an option has an unsupported value.

    Source: Based, §4 (linear attention and windows) and Appendix C (decay). The joint softmax, the neighbourhood and
        the initialisation are ours.
    """

    LEARNS = True

    layers: str | Sequence[str] = "both"
    feature_dim: int = 16
    feature_map: str = "taylor"
    window: Any = (3, 5, 5)
    decay: bool = False
    refresh: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        if not all(name in LAYERS for name in names):
            supported = f"one of {', '.join(LAYERS)}, or a list of these with one entry for each transformer block"
            raise ValueError(f"layers must be {supported}, got {self.layers!r}")
        check_positive_integer("feature_dim", self.feature_dim)
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {self.feature_map!r}")
        object.__setattr__(self, "window", check_window(self.window))
        check_flag("decay", self.decay)

    def bind(self, layer: Layer, original: Any) -> Any:
        layers = self.layers
        if not isinstance(layers, str) and len(layers) != layer.blocks:
            raise ValueError(f"layers has {len(layers)} entries, but there are {layer.blocks} transformer blocks")
        computes = layers if isinstance(layers, str) else layers[layer.block]
        return original if computes == "full" else BasedLayer(self, computes, layer, original)


@dataclass(frozen=True)
class Window:
    """Exact softmax attention to a neighbourhood."""

    window: tuple[int, int, int]
    implementation: str = "auto"

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        given: dict[str, Any] = {"window": self.window, "grid": call.grid, "implementation": self.implementation}
        out, lse = window_attention(query, key, value, **given, return_lse=True)
        return out, lse


@dataclass(frozen=True)
class Linear:
    """Linear attention to all tokens, with the parameters of a `LinearPart`."""

    learnt: LinearPart

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        # The module is called so that hooks which move its weights run.
        out, lse = self.learnt(query, key, value, call.grid.frames, call.heads)
        return out, lse


@dataclass(frozen=True)
class Merged:
    """Two parts as one softmax."""

    near: Attend
    far: Attend

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        return merge_partials(self.near(query, key, value, call), self.far(query, key, value, call))


class LearningLayer(torch.nn.Module, Own):
    """The processor of an attention module if it learns, with the module's own parameters.

    They lie in submodules that are called with tensors alone, so that hooks which move weights (offloading, sharding)
    work as for any other module.
    """

    def __init__(self, spec: VideoAttentionProcessor, attend: Attend, original: Any) -> None:
        torch.nn.Module.__init__(self)
        Own.__init__(self, spec, attend, original)

    __repr__ = Own.__repr__
    forward = Own.__call__


class BasedLayer(LearningLayer):
    """A `BasedProcessor` at work in one attention module, with the parameters of that module.

    Args:
        computes: one of the names in `BasedProcessor.layers`.

    Raises:
        ValueError: `feature_dim` is above the head dimension, or the module's weights are on the meta device.
    """

    # Whoever applies it in inference mode may train it later.
    @torch.inference_mode(False)
    def __init__(self, spec: BasedProcessor, computes: str, layer: Layer, original: Any) -> None:
        attn = layer.attn
        # Norms keep a floating-point dtype where other weights are quantised or stored in float8.
        like = attn.norm_q.weight
        if like.device.type == "meta":
            raise ValueError(
                "pipe_or_transformer has weights on the meta device: load them, and apply before offloading"
            )
        linear = LinearPart(spec, layer, computes == "both", like) if computes in ("linear", "both") else None
        attend: Attend = Window(spec.window, spec.implementation)
        if linear is not None:
            attend = Merged(attend, Linear(linear)) if computes == "both" else Linear(linear)
        super().__init__(spec, attend, original)
        self.linear = linear
