"""Attention processors for video transformers in diffusers.

Shapes: B batch, S = T·H·W tokens, H heads, D head dim; the latent grid is T frames × H rows × W columns of tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from vmonarch.bias.video import BiasOption
from vmonarch.context_parallel import Share
from vmonarch.families import heads_of
from vmonarch.forward_context import ForwardContext
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import carry_tangents, learns
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.layer_operator import number_of
from vmonarch.options import FirstOrderOptions, NoOptions, VMonarchOptions, has_options
from vmonarch.plan import AttentionPlan, heads_by_method, method_attention
from vmonarch.two_resolution_options import TwoResolutionOptions
from vmonarch.video_processor import VideoAttentionProcessor

# Of a video that took as long as with full attention (docs/benchmarks/eval-proxy.json: 61×192×320).
_TOO_FEW_TOKENS = 3840
# Up to this number of layers of a plan that differ, torch.compile makes a graph for each; beyond it, one for all.
_LAYERS_INLINE = 4


@has_options(VMonarchOptions, "bias", "plan")
class VMonarchProcessor(VideoAttentionProcessor):
    """VMonarch attention for the video transformers of diffusers (VMonarch paper; `vmonarch_attention`).

    Cross-attention, with text or with an image, stays exact.

    Args:
        bias: None, or a low-rank bias that every logit gets, as in `FlashBiasProcessor`.
        plan: None, or what every head of every layer computes: an `AttentionPlan`, the path of its JSON, what that
            holds, or the name of one that ships (of the embedded model: `embedded-1.00`, …). It decides `bias`
            and `options`, which must be left at their defaults. Needs `vmonarch.apply`.
        dense_steps: denoising steps computed with exact attention: the first n (int), the first fraction, rounded up
            (float), or a collection of step indices. Needs `vmonarch.apply(pipe, …)`.
        dense_layers: transformer blocks that keep their own processor, given like `dense_steps`; VACE's control blocks
            follow the block that they feed. Needs `vmonarch.apply`.
        refresh: None, or when attention is exact and renews the residual, exact minus VMonarch attention, that is added
            to VMonarch attention in all other steps: the number of such steps (int), a fraction (float), a collection
            of step indices, or a `vmonarch.Refresh`. For inference. Needs `vmonarch.apply(pipe, …)`.
        grid: (frames, height, width) in tokens; None to learn it from the transformer, call by call.
        implementation: as in `vmonarch_attention`.
        **options: the `VMonarchOptions` by name: num_iterations, exact, coarse, …

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    def __init__(self, *, bias: object = None, plan: object = None, **options: Any) -> None:
        super().__init__(**options)
        self._bias = None if bias is None else BiasOption(bias)
        self.plan = None if plan is None else AttentionPlan.parse(plan)
        if self.plan is not None:
            self._check_alone()
            self._needs_apply = self._needs_apply or "plan"
        self._methods: tuple[str, ...] = ()
        self._groups: dict[str, tuple[int, ...]] = {}

    @property
    def needs_raster(self) -> bool:
        options = self.options
        pooled = options.coarse > 1 or options.row_share < 1 or options.r_share < 1
        return pooled or options.tiles != (1, 1) or self._bias is not None or self.plan is not None

    def check_grid(self, grid: LatentGrid) -> None:
        for options in [self.options] if self.plan is None else self.plan.methods.values():
            if options is not None:
                options.check_grid(grid)

    def warn_of_size(self, grid: LatentGrid) -> None:
        if grid.tokens <= _TOO_FEW_TOKENS:
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

    def _check_alone(self) -> None:
        """Check that a plan is given nothing that it decides."""
        defaults = {**vars(VMonarchOptions()), "bias": None}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                raise ValueError(f"{name} must be left at {default!r} with a plan, which decides it; got {value!r}")

    def bind(self, context: ForwardContext | None, original: Any, attn: Any, layer: int, layers: int) -> Any:
        if self.plan is None:
            return super().bind(context, original, attn, layer, layers)
        component = "transformer" if context is None else context.component
        names = self.plan.heads_of(component, layer, layers, heads_of(attn))
        if all(self.plan.methods[name] is None for name in names):
            return original
        bound = super().bind(context, original, attn, layer, layers)
        bound._methods, bound._groups = names, heads_by_method(names)
        if len(set(self.plan.layers[component])) > _LAYERS_INLINE:
            bound._number = number_of(bound)
        return bound

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> torch.Tensor:
        out: torch.Tensor = self._attend_heads(query, key, value, grid, heads, return_lse=False)
        return out

    def attend_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._attend_heads(query, key, value, grid, heads, return_lse=True)
        return out, lse

    def _attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None,
        return_lse: bool,
    ) -> Any:
        if self._groups:
            return self._attend_by_plan(query, key, value, grid, heads, return_lse)
        return vmonarch_attention(
            query,
            key,
            value,
            grid=grid,
            options=self.options,
            bias=self._factors(grid, query.device, heads),
            return_lse=return_lse,
            implementation=self.implementation,
        )

    def _attend_by_plan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None,
        return_lse: bool,
    ) -> Any:
        """One call for all heads of a method."""
        assert self.plan is not None
        groups = self._groups if heads is None else heads_by_method(self._methods[heads.start : heads.stop])
        found = []
        for name, own in groups.items():
            q, k, v = (_some_heads(x, own) for x in (query, key, value))
            options = self.plan.methods[name]
            if options is not None:
                given = dict(grid=grid, return_lse=return_lse, implementation=self.implementation)
                out = method_attention(q, k, v, options, **given)
            elif return_lse:
                out = flash_entropy_attention(q, k, v, implementation=self.implementation)[:2]
            else:
                out = self._own_attention(q, k, v)
            if len(groups) == 1:
                return out
            found.append(out)
        outs = [out for out, _ in found] if return_lse else found
        joined = _side_by_side(_in_order(groups, _wide(*outs), 2), query.dtype)
        return (joined, torch.cat(_in_order(groups, [lse for _, lse in found], 1), 1)) if return_lse else joined


def _in_order(groups: dict[str, tuple[int, ...]], of_groups: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """What is single heads' in tensors of groups of heads, along `dim`, by the number of the head."""
    parts: dict[int, torch.Tensor] = {}
    for own, x in zip(groups.values(), of_groups, strict=True):
        parts |= zip(own, x.split(1, dim), strict=True)
    return [parts[head] for head in range(len(parts))]


def _side_by_side(heads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Heads [B, S, 1, D], which may be `_wide`, as [B, S, H, D]."""
    joined = torch.cat(heads, 2)
    return joined if joined.dtype == dtype else joined.view(dtype)


def _wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same memory as numbers of 16 bytes, if all allow it: torch copies single heads of these at full bandwidth."""
    if torch.compiler.is_compiling() or learns(*tensors) or carry_tangents(*tensors):
        # Compiled copies are fast as they are, and a view of other numbers has no gradient and no tangent.
        return tensors
    for x in tensors:
        places = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        if x.stride(-1) != 1 or any(place * x.itemsize % 16 for place in places):
            return tensors
    return tuple(x.view(torch.complex128) for x in tensors)


def _some_heads(x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    """Some heads of [B, S, H, D]: a view, where they lie evenly apart and need no gradient."""
    if len(heads) == x.shape[2]:
        return x
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    places = range(heads[0], heads[-1] + 1, step)
    if heads == tuple(places) and not learns(x):
        return x[:, :, places.start : places.stop : step]
    # The gradient of a slice is as large as all heads. And an index would be copied from the CPU, which no CUDA graph
    # can record.
    parts = _wide(x)[0].split(1, 2)
    return _side_by_side([parts[head] for head in heads], x.dtype)


@has_options(NoOptions, "bias", without=("refresh",))
class FlashBiasProcessor(VideoAttentionProcessor):
    """Exact attention with a low-rank bias for the video transformers of diffusers (FlashBias; `flash_bias_attention`).

    Cross-attention, with text or with an image, has no bias.

    Args:
        bias: a pair of tensors (query_factor, key_factor), each [1, S, H or 1, R], for the one grid that they fit; or a
            callable that makes such a pair for a `LatentGrid`, for example `vmonarch.bias.SpatioTemporalDecay(heads)`
            or any module. All layers share it; what it learns is saved by its owner.
        dense_steps, dense_layers, grid: as in `VMonarchProcessor`.
        implementation: as in `flash_bias_attention`.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    def __init__(self, bias: object, **options: Any) -> None:
        super().__init__(**options)
        self._bias = BiasOption(bias)

    attend = VideoAttentionProcessor.attend_exactly
    _attend_sequence = VideoAttentionProcessor._attend_sequence_exactly


class _OpProcessor(VideoAttentionProcessor):
    """Base of processors of an op that plans have, too: what it computes is all in its options."""

    def attend_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(grid=grid, return_lse=True, implementation=self.implementation)
        out, lse = method_attention(query, key, value, self.options, **given)
        return out, lse


@has_options(TwoResolutionOptions)
class TwoResolutionProcessor(_OpProcessor):
    """Attention in two resolutions for the video transformers of diffusers (`two_resolution_attention`).

    Cross-attention, with text or with an image, stays exact.

    Args:
        dense_steps, dense_layers, refresh, grid: as in `VMonarchProcessor`.
        implementation: as in `two_resolution_attention`.
        **options: the `TwoResolutionOptions` by name: share, tile, rest, …

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """


@has_options(FirstOrderOptions)
class FirstOrderProcessor(_OpProcessor):
    """Attention to the first order around mean queries (`first_order_attention`), in all heads: for comparisons.

    Plans give it to the heads that it is for. Cross-attention, with text or with an image, stays exact.

    Args:
        dense_steps, dense_layers, refresh, grid: as in `VMonarchProcessor`.
        implementation: as in `first_order_attention`.
        **options: the `FirstOrderOptions` by name: parts.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """
