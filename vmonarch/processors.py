"""Attention processors for the Wan family of video transformers in diffusers.

Shapes: B batch, S = T·H·W tokens, H heads, D head dim; the latent grid is T frames × H rows × W columns of tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_chronoedit as chronoedit
from diffusers.models.transformers import transformer_skyreels_v2 as skyreels
from diffusers.models.transformers import transformer_wan as wan
from diffusers.models.transformers import transformer_wan_animate as animate

from vmonarch.bias.video import BiasOption, Factors, GridBias
from vmonarch.context_parallel import (
    Share,
    TokenSplit,
    callers_parallel_config,
    check_heads,
    check_no_first_block_cache,
    check_ring,
    context_parallel_config,
    split_tokens,
)
from vmonarch.dense import Dense, DenseSet
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.constants import kept
from vmonarch.kernels.common.launch import auto_takes_kernels
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.monarch.parallel import frame_parallel_vmonarch_attention
from vmonarch.kernels.norm_rotary.api import norm_rotary, why_not_triton
from vmonarch.layer_operator import layer_attention, number_of
from vmonarch.options import OPTION_FIELDS, VMonarchOptions, takes_options
from vmonarch.plan import AttentionPlan, HeadGroups
from vmonarch.residuals import Branch, Refresh, ResidualSharing
from vmonarch.steps import DenoisingStep, denoising_step
from vmonarch.validation import check_implementation, check_parallel_by
from vmonarch.xfuser_groups import split_video

# Attention modules with the projections, norms and rotary embedding of Wan. diffusers defines the class once per model.
WAN_ATTENTION = (wan.WanAttention, animate.WanAttention, chronoedit.WanAttention, skyreels.SkyReelsV2Attention)
# Only ever called with `encoder_hidden_states`, so their own processor answers for them.
CROSS_ATTENTION_ONLY = (animate.WanAnimateFaceBlockCrossAttention,)


# torch.compile makes a graph for each of a plan's layers that differ, up to so many; of more it makes one for all.
_LAYERS_INLINE = 4


class ForwardCall(NamedTuple):
    """What the processors need to know about the transformer's current forward call.

    Args:
        shared: what its layers have made for each other, by what it is; None where there is nothing to share it by.
    """

    grid: LatentGrid
    exact: bool
    shared: dict[Any, Any] | None = None


class _Own(threading.local):
    """What belongs to the running thread: "call", the forward call that it has begun last, and its "transformer"."""

    # In a dictionary, because torch.compile passes over what is written to attributes of this.
    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}


class ForwardContext:
    """Filled in by a transformer's forward pre-hook, read by its processors; one for each transformer.

    A copy, pickled or not, knows of no call.

    Args:
        patch_size: (t, h, w) size of the transformer's patches.
        dense_steps: the steps computed with exact attention.
        component: name of the transformer in its pipeline.
        sharing: the residuals of the pipeline, if they are shared between steps.
    """

    def __init__(
        self,
        patch_size: tuple[int, int, int],
        dense_steps: DenseSet,
        component: str = "transformer",
        sharing: ResidualSharing | None = None,
    ) -> None:
        self.patch_size = patch_size
        self.component = component
        self.dense_steps = dense_steps
        self.sharing = sharing
        # Of any thread.
        self.call: ForwardCall | None = None
        self._own = _Own()
        self._grids_by_tokens: dict[int, set[LatentGrid]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardContext, (self.patch_size, self.dense_steps, self.component, self.sharing)

    def begin(
        self, transformer: torch.nn.Module, latents: torch.Size, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a forward call on latents of size [T, H, W] (before patches are cut).

        Raises:
            RuntimeError: `dense_steps` or `refresh` are asked for, and the step is not known.
        """
        grid = LatentGrid(*(size // patch for size, patch in zip(latents, self.patch_size, strict=True)))
        exact = False
        if self.dense_steps.some:
            step = denoising_step(transformer, "dense_steps", "use dense_steps=0")
            exact = self.dense_steps.contains(step.step, step.steps)
        if self.sharing is not None:
            self._own.latest["branch"] = self.sharing.begin(transformer, args, kwargs)
        compiling = torch.compiler.is_compiling()
        self.call = ForwardCall(grid, exact)
        self._own.latest["call"] = self.call if compiling else self.call._replace(shared={})
        if not compiling:
            self._own.latest["transformer"] = weakref.ref(transformer)
            self._grids_by_tokens.setdefault(grid.tokens, set()).add(grid)

    def end(self) -> None:
        """Forget what the layers of the thread's forward call have shared: it is over."""
        call = self._own.latest.get("call")
        if not torch.compiler.is_compiling() and call is not None:
            self._own.latest["call"] = call._replace(shared=None)
        if self.sharing is not None:
            self.sharing.end(self._own.latest.pop("branch", None))

    def forget(self) -> None:
        """The processors are taken off: nothing of their calls is kept."""
        self.call = None
        if self.sharing is not None:
            self.sharing.forget()

    def branch(self) -> Branch | None:
        """Whose residuals the running thread's forward call uses; None outside of one."""
        return self._own.latest.get("branch")

    def current(self, tokens: int) -> ForwardCall | None:
        """The call that the running thread is in; None when only the rotary embedding can tell.

        Raises:
            RuntimeError: gradient checkpointing recomputes a block of a run with `dense_steps`.
        """
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            # Gradient checkpointing computes a block again during backward, when the transformer may have seen
            # another video since: the last call is not necessarily this block's.
            if self.dense_steps.some:
                raise RuntimeError("dense_steps cannot be combined with gradient checkpointing; use dense_steps=0")
            grids = self._grids_by_tokens.get(tokens, set())
            return ForwardCall(next(iter(grids)), False) if len(grids) == 1 else None
        call: ForwardCall | None = self._own.latest.get("call", self.call)
        return call

    def step(self, needed_by: str, instead: str) -> DenoisingStep:
        """See `denoising_step`, of the running thread's forward call."""
        return denoising_step(self._own.latest["transformer"](), needed_by, instead)

    def shared(self) -> dict[Any, Any] | None:
        """Where the layers of the running thread's forward call keep what they share; None outside of one."""
        call = self._own.latest.get("call")
        return None if call is None else call.shared


def infer_grid(cosines: torch.Tensor) -> LatentGrid:
    """Read the latent grid off a rotary embedding.

    A Wan transformer gives the first channels of a head to time, then as many to height as to width. Position 1 differs
    from position 0 by a whole radian in the first channel of each part, so that even bfloat16 tells them apart.

    Args:
        cosines: [1, S, 1, D], the cosines of every token.

    Raises:
        ValueError: this is not the rotary embedding of a whole, ordered T×H×W grid of tokens.
    """
    advice = "pass grid=(frames, height, width) or use vmonarch.apply, which needs no inference"
    if cosines.ndim != 4 or cosines.shape[0] != 1 or cosines.shape[2] != 1:
        raise ValueError(f"rotary_emb must be [1, S, 1, D] to tell the grid, got {tuple(cosines.shape)}; {advice}")
    tokens, head_dim = cosines.shape[1], cosines.shape[3]
    space = 2 * (head_dim // 6)
    if space == 0:
        raise ValueError(f"rotary_emb has too few channels ({head_dim}) to tell the grid; {advice}")
    time, height, width = cosines.detach()[0, :, 0].split((head_dim - 2 * space, space, space), dim=1)

    def first_change(part: torch.Tensor) -> int:
        changed = (part != part[0]).any(dim=1)
        # argmax of an all-equal vector is 0, which can be no change: token 0 equals itself.
        return int(changed.int().argmax()) or part.shape[0]

    per_frame = first_change(time)
    columns = first_change(height[:per_frame])
    grid = LatentGrid(tokens // per_frame, per_frame // columns, columns)
    whole = grid.tokens == tokens and bool((cosines[0, 0] == 1).all())
    if whole:
        time, height, width = (part.unflatten(0, grid) for part in (time, height, width))
        same = (time == time[:, :1, :1]).all() & (height == height[:1, :, :1]).all() & (width == width[:1, :1]).all()
        # Position 0 may not come back: two videos in one sequence are no grid.
        for axis in (time[1:, 0, 0], height[0, 1:, 0], width[0, 0, 1:]):
            same = same & (axis != 1).any(dim=1).all()
        whole = bool(same)
    if not whole:
        raise ValueError(f"rotary_emb is not that of a whole grid of {tokens} tokens in order; {advice}")
    return grid


def _rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs of states [B, S, H, D]; computed in the wider dtype, returned in that of `states`."""
    even, odd = states[..., 0::2], states[..., 1::2]
    cosines, sines = cosines[..., 0::2], sines[..., 1::2]
    rotated = torch.empty_like(states)
    rotated[..., 0::2] = even * cosines - odd * sines
    rotated[..., 1::2] = even * sines + odd * cosines
    return rotated


def _is_plain(norm: Any, channels: int) -> bool:
    """Whether a module is nothing but the RMS norm of so many channels, so that its weight tells all that it does.

    Offloading and casting put hooks or another forward on it, adapters take its place.
    """
    return (
        type(norm) is torch.nn.RMSNorm
        and norm.weight is not None
        and tuple(norm.normalized_shape) == (channels,)
        and "forward" not in vars(norm)
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)
    )


def _norm_and_rotate(
    norm: Any, x: torch.Tensor, heads: int, rotary_emb: tuple[torch.Tensor, torch.Tensor], implementation: str
) -> torch.Tensor:
    """Queries or keys [B, S, H, D] of their projection [B, S, C]: in one pass where the kernel can do all of it."""
    if implementation == "triton" or (implementation == "auto" and auto_takes_kernels(x.device)):
        angles = (1, x.shape[1], 1, x.shape[2] // heads)
        fits = all(part.shape == angles and not part.requires_grad for part in rotary_emb)
        # Ranks of xfuser may have no token at all.
        if x.numel() and fits and _is_plain(norm, x.shape[2]) and why_not_triton(x, norm.weight, *rotary_emb) is None:
            eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
            return norm_rotary(x, norm.weight, *rotary_emb, heads=heads, eps=eps, implementation=implementation)
    return _rotate(norm(x).unflatten(2, (heads, -1)), *rotary_emb)


def _project(
    attn: Any,
    hidden_states: torch.Tensor,
    rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [B, S, H, D] of a self-attention module, normalised and rotated."""
    if attn.fused_projections:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    value = value.unflatten(2, (attn.heads, -1))
    if rotary_emb is None:
        query, key = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key)))
    else:
        query = _norm_and_rotate(attn.norm_q, query, attn.heads, rotary_emb, implementation)
        key = _norm_and_rotate(attn.norm_k, key, attn.heads, rotary_emb, implementation)
    # Autocast computes the norms in float32.
    return query.to(value.dtype), key.to(value.dtype), value


def _may_be_parallel() -> bool:
    """Whether tokens may be spread over processes; torch.compile cannot look further."""
    return not torch.compiler.is_compiling() and torch.distributed.is_available() and torch.distributed.is_initialized()


class VideoAttentionProcessor:
    """Base of the processors: replaces self-attention, leaves cross-attention to the model's own exact processor.

    A subclass defines `attend` and lists its options in `_OPTIONS`. Use it in one of three ways:

        vmonarch.apply(pipe, processor)                   # knows the grid of every call, compiles, can be undone
        vmonarch.pipelines.WanPipeline.set_attn_processor(processor)
        pipe.transformer.set_attn_processor(processor)    # reads the grid off the rotary embedding, or takes `grid=`

    Args:
        dense_steps, dense_layers, refresh: see `VMonarchProcessor`.
        grid: the latent grid, (frames, height, width) in tokens; None to learn it from the transformer.
    """

    _OPTIONS: tuple[str, ...] = ("dense_steps", "dense_layers", "grid")
    # Whether bound processors have parameters.
    LEARNS = False
    # Of the ops: "auto", "triton" or "torch".
    implementation = "auto"
    # What attention is shared by under context parallelism: "heads" or "frames".
    parallel_by = "heads"
    # Declared for diffusers, which sets them on every processor that has them.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(
        self, *, dense_steps: object = 0, dense_layers: object = 0, refresh: object = None, grid: object = None
    ) -> None:
        self.dense_steps: Dense = DenseSet("dense_steps", dense_steps).dense
        self.dense_layers: Dense = DenseSet("dense_layers", dense_layers).dense
        self.refresh = Refresh.parse(refresh)
        self.grid = None if grid is None else LatentGrid.parse(grid)
        self._dense = next(
            (name for name in ("dense_steps", "dense_layers") if DenseSet(name, getattr(self, name)).some), None
        )
        self._needs_apply = self._dense if self.refresh is None else "refresh"
        self._bias: BiasOption | None = None
        # By which torch.compile finds the layer when it runs; None where it is to look inside.
        self._number: torch.Tensor | None = None
        self._context: ForwardContext | None = None
        self._original: Any = None
        # Whether the transformer is one of xfuser's, whose ranks may hold parts of the tokens.
        self._in_xfuser = False
        self._inferred: tuple[weakref.ref[torch.Tensor], LatentGrid] | None = None

    def check_context_parallel(self, config: Any, heads: int) -> None:
        """Check that self-attention with so many heads can be computed under diffusers' `ContextParallelConfig`.

        Raises:
            NotImplementedError: ring attention.
            ValueError: by heads, or with `refresh`, there are fewer of them than ranks; or the model's own attention,
                which `dense_steps` and `dense_layers` keep, cannot share them.
        """
        check_ring(config.ring_degree, "ContextParallelConfig(ulysses_degree=…)")
        ranks = config.ulysses_degree
        self._check_heads(ranks, heads)
        if self._dense is not None and heads % ranks and not config.ulysses_anything:
            raise ValueError(
                f"{self._dense} keeps the model's own attention, which shares heads evenly: its {heads} do not divide"
                f" by ulysses_degree={ranks}; use ulysses_anything=True or {self._dense}=0"
            )

    def _check_heads(self, ranks: int, heads: int) -> None:
        """Raise ValueError if there are fewer heads than ranks where ranks share heads."""
        if self.parallel_by == "heads":
            check_heads(ranks, heads, "VMonarchProcessor(parallel_by='frames')")
        elif self.refresh is not None:
            check_heads(ranks, heads, "refresh=None: its exact attention is always shared by heads")

    @property
    def bias(self) -> GridBias | None:
        """What makes the factors of the bias, of processors that have one."""
        return None if self._bias is None else self._bias.bias

    def _factors(self, grid: LatentGrid, device: torch.device, heads: Share | None) -> Factors | None:
        """Those of the bias, if there is one, for all heads (None) or some; the layers of a forward call share them."""
        if self._bias is None:
            return None
        shared = None if self._context is None else self._context.shared()
        return self._bias.factors(grid, device, heads, shared)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> torch.Tensor:  # pragma: no cover
        """Self-attention: query, key, value [B, S, H, D] -> [B, S, H, D].

        Args:
            heads: which of the module's heads these are; None for all.
        """
        raise NotImplementedError

    def mix(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
        grid: LatentGrid,
        split: TokenSplit | None = None,
    ) -> torch.Tensor:
        """What a module computes before its output projection: [B, S, C] -> [B, S, C].

        Args:
            split: where the tokens are; None if all of them are here.
        """
        query, key, value = _project(attn, hidden_states, rotary_emb, self.implementation)
        device = query.device.type
        # Autocast does not know the meta device.
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._attend_split(query, key, value, grid, split).flatten(2, 3)
        # The ops choose their precision themselves: autocast would round their sums in float32.
        with torch.autocast(device, enabled=False):
            return self._attend_split(query, key, value, grid, split).flatten(2, 3)

    def _attend_split(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid, split: TokenSplit | None
    ) -> torch.Tensor:
        """`attend`, whose tensors may have a part of the tokens."""
        if self.refresh is not None and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise RuntimeError("refresh is for inference: residuals have no gradient; train with refresh=None")
        if split is None:
            if self._number is not None and torch.compiler.is_compiling():
                return layer_attention(query, key, value, self._number, list(grid))
            return self.attend_layer(query, key, value, grid)
        if self.parallel_by == "frames":
            return self._attend_with_residual(
                len(query),
                lambda: self._attend_by_heads(split, grid, self.attend_exactly, query, key, value),
                lambda: self._attend_by_frames(split, grid, query, key, value),
            )
        return self._attend_by_heads(split, grid, self.attend_layer, query, key, value)

    def attend_layer(self, *inputs: Any) -> torch.Tensor:
        """What `attend` computes of these, with the residual of the layer where residuals are shared."""
        return self._attend_with_residual(
            len(inputs[0]), lambda: self.attend_exactly(*inputs), lambda: self.attend(*inputs)
        )

    def attend_exactly(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> torch.Tensor:
        """What `attend` approximates, with the same arguments: exact attention, with the bias if there is one."""
        factors = self._factors(grid, query.device, heads)
        if factors is not None:
            return flash_bias_attention(query, key, value, *factors, implementation=self.implementation)
        return dispatch_attention_fn(query, key, value, backend=self._attention_backend)

    def _attend_with_residual(
        self, samples: int, exact: Callable[[], torch.Tensor], approximate: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if self.refresh is None:
            return approximate()
        assert self._context is not None and self._context.sharing is not None
        branch = self._context.branch()
        if branch is None:
            raise RuntimeError("refresh needs forward calls of the transformer itself; use refresh=None for its parts")
        return self._context.sharing.attend(branch, (self, samples), exact, approximate, self.implementation)

    def _attend_by_heads(
        self, split: TokenSplit, grid: LatentGrid, attend: Callable[..., torch.Tensor], *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Self-attention of this rank's tokens, by one of the functions above for all tokens of its heads."""
        heads = split.share(tensors[0].shape[2])
        return split.gather_heads(attend(*split.gather_tokens(*tensors), grid, heads), heads.total)

    def _attend_by_frames(
        self, split: TokenSplit, grid: LatentGrid, *tensors: torch.Tensor
    ) -> torch.Tensor:  # pragma: no cover
        """Self-attention of this rank's tokens, of processors that can be shared by frames."""
        raise NotImplementedError

    @property
    def config(self) -> dict[str, Any]:
        """The options as JSON-serialisable values; `from_config` takes them back."""

        def plain(option: Any) -> Any:
            if self._bias is not None and option is self._bias.bias:
                return self._bias.config()
            if isinstance(option, AttentionPlan):
                return option.to_dict()
            if dataclasses.is_dataclass(option) and not isinstance(option, type):
                return {name: plain(entry) for name, entry in dataclasses.asdict(option).items()}
            return list(option) if isinstance(option, tuple) else option

        return {name: plain(getattr(self, name)) for name in self._OPTIONS}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> VideoAttentionProcessor:
        """A processor with the options of a `config`.

        Raises:
            TypeError, ValueError: an unknown option, or one with an unsupported value.
        """
        unknown = sorted(set(config) - set(cls._OPTIONS))
        if unknown:
            raise TypeError(f"{cls.__name__} has no option {', '.join(unknown)}; it has {', '.join(cls._OPTIONS)}")
        return cls(**config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._OPTIONS)})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_inferred": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._number is not None:
            # Of copies too: a number is of one processor.
            self._number = number_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> VideoAttentionProcessor:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._context = copy.deepcopy(self._context, memo)
        twin._original = copy.deepcopy(self._original, memo)
        return twin

    def bind(self, context: ForwardContext | None, original: Any, attn: Any, layer: int, layers: int) -> Any:
        """A copy of this processor for one attention module of one transformer, or `original` to leave that as it is.

        Args:
            context: filled in by that transformer's pre-hook; None where there is none.
            original: the module's processor so far; it computes the dense steps.
            attn: the module.
            layer: which of the transformer's `layers` blocks it is in.
        """
        return copy.copy(self)._place(context, original)

    def _place(self, context: ForwardContext | None, original: Any) -> VideoAttentionProcessor:
        self._context = context
        # A copy, so that an attention backend chosen later reaches the dense steps and leaves the original alone.
        self._original = copy.copy(original)
        self._attention_backend = getattr(original, "_attention_backend", None)
        self._in_xfuser = type(original).__module__.startswith("xfuser.")
        if self.refresh is not None:
            self._number = number_of(self)
        return self

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """The attention of one module: hidden_states [B, S, C] -> [B, S, C].

        Raises:
            TypeError: the module is not one of the Wan family.
            ValueError: an attention mask in self-attention, a grid that does not fit the tokens, or fewer heads (or, by
                frames, fewer latent frames) than ranks under context parallelism.
            NotImplementedError: tokens are spread over several ranks for ring attention.
            RuntimeError: the grid or the step that an option needs is not known here.
        """
        name = type(self).__name__
        if unsupported or not isinstance(attn, (*WAN_ATTENTION, *CROSS_ATTENTION_ONLY)):
            extra = f" called with {', '.join(unsupported)}" if unsupported else ""
            raise TypeError(
                f"{name} supports the attention of Wan, Wan-VACE, Wan-Animate, ChronoEdit and SkyReels-V2 transformers,"
                f" got {type(attn).__name__}{extra}"
            )
        if encoder_hidden_states is not None:
            # Only self-attention has a rotary embedding; face attention in Wan-Animate does not even take one.
            rotary = () if rotary_emb is None else (rotary_emb,)
            return self._exact(attn, hidden_states, encoder_hidden_states, attention_mask, *rotary)
        if attention_mask is not None:
            raise ValueError(f"{name} supports no attention_mask in self-attention: every token attends to all others")
        if self._context is None and self._parallel_config is None and _may_be_parallel():
            self._parallel_config = callers_parallel_config()
        if context_parallel_config(self._parallel_config) is not None:
            return self._self_attention_of_a_part(attn, hidden_states, rotary_emb)
        if self._in_xfuser:
            return self._self_attention_in_xfuser(attn, hidden_states, rotary_emb)
        return self._self_attention(attn, hidden_states, rotary_emb, None)

    def _self_attention(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
        split: TokenSplit | None,
    ) -> torch.Tensor:
        if split is not None:
            check_no_first_block_cache()
        tokens = hidden_states.shape[1] if split is None else split.all_tokens
        call = self._current_call(tokens, rotary_emb, split)
        if call.exact:
            return self._exact(attn, hidden_states, None, None, rotary_emb)
        to_out: Any = attn.to_out
        return to_out[1](to_out[0](self.mix(attn, hidden_states, rotary_emb, call.grid, split)))

    @torch.compiler.disable(reason="attention under context parallelism exchanges tokens between processes")
    def _self_attention_of_a_part(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Self-attention where this process has a part of the tokens."""
        config = context_parallel_config(self._parallel_config)
        self.check_context_parallel(config, attn.heads)
        split = split_tokens(config, hidden_states.shape[1])
        return self._self_attention(attn, hidden_states, rotary_emb, split)

    @torch.compiler.disable(reason="attention in xfuser exchanges tokens between processes")
    def _self_attention_in_xfuser(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Self-attention in a transformer of xfuser, where this process may have a part of the tokens."""
        call = None if self._context is None else self._context.current(0)
        if call is None:
            raise RuntimeError(
                f"{type(self).__name__} needs the grid of a transformer of xfuser from vmonarch.apply(pipe, processor),"
                " which tells none of a block that gradient checkpointing computes again"
            )
        if call.exact:
            return self._exact(attn, hidden_states, None, None, rotary_emb)
        split = split_video(call.grid, hidden_states.shape[1])
        if split is None:
            return self._self_attention(attn, hidden_states, rotary_emb, None)
        self._check_heads(len(split.tokens), attn.heads)
        # What this rank has beyond its tokens is padding.
        held = split.tokens[split.rank]
        if rotary_emb is not None:
            rotary_emb = rotary_emb[0][:, :held], rotary_emb[1][:, :held]
        out = self._self_attention(attn, hidden_states[:, :held], rotary_emb, split)
        return torch.nn.functional.pad(out, (0, 0, 0, hidden_states.shape[1] - held))

    def _exact(self, attn: Any, *inputs: Any) -> torch.Tensor:
        """What the module's own processor computes."""
        processor = attn._default_processor_cls() if self._original is None else self._original
        for name in ("_attention_backend", "_parallel_config"):
            if getattr(processor, name, None) is not getattr(self, name):
                setattr(processor, name, getattr(self, name))
        return processor(attn, *inputs)

    def _current_call(
        self,
        tokens: int,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
        split: TokenSplit | None,
    ) -> ForwardCall:
        if self._context is not None and self._context.call is not None:
            call = self._context.current(tokens)
            if call is None:
                call = ForwardCall(self._infer_grid(rotary_emb, split), False)
            if self.grid is not None and self.grid != call.grid:
                raise ValueError(f"grid={tuple(self.grid)}, but the transformer was given the grid {tuple(call.grid)}")
        else:
            if self._needs_apply is not None:
                raise RuntimeError(
                    f"{self._needs_apply} needs vmonarch.apply(pipe, processor): a processor set by set_attn_processor"
                    " on a transformer knows neither its layer nor the step"
                )
            call = ForwardCall(self._infer_grid(rotary_emb, split) if self.grid is None else self.grid, False)
        if call.grid.tokens != tokens:
            raise ValueError(
                f"grid {tuple(call.grid)} has {call.grid.tokens} tokens, but self-attention was given {tokens}"
            )
        return call

    def _infer_grid(self, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None, split: TokenSplit | None) -> LatentGrid:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(self).__name__} cannot read the grid off the rotary embedding under torch.compile; use"
                " vmonarch.apply(pipe_or_transformer, processor) or pass grid=(frames, height, width)"
            )
        if rotary_emb is None:
            raise RuntimeError(
                f"{type(self).__name__} needs the grid, and there is no rotary_emb to read it off; use"
                " vmonarch.apply(pipe_or_transformer, processor) or pass grid=(frames, height, width)"
            )
        cosines = rotary_emb[0]
        # By identity: grids of equal size, such as 16×30×52 and 16×52×30, differ in nothing but these values.
        if self._inferred is None or self._inferred[0]() is not cosines:
            self._inferred = (weakref.ref(cosines), infer_grid(cosines if split is None else split.gather(cosines)))
        return self._inferred[1]


class FullAttentionProcessor(VideoAttentionProcessor):
    """Exact attention, which ranks share as all these processors do: any number of heads, forward and backward.

    diffusers' own shares heads evenly, and its backward pass wants query, key and value of one dtype, which autocast
    does not leave them: it computes the norms of query and key in float32.
    """

    _OPTIONS = ()

    def __init__(self) -> None:
        super().__init__()

    def _current_call(
        self,
        tokens: int,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
        split: TokenSplit | None,
    ) -> ForwardCall:
        # Of the grid only the number of tokens matters.
        return ForwardCall(LatentGrid(1, 1, tokens), False)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> torch.Tensor:
        return dispatch_attention_fn(query, key, value, backend=self._attention_backend)


class VMonarchProcessor(VideoAttentionProcessor):
    """VMonarch attention for every Wan-family transformer in diffusers (VMonarch paper; `vmonarch_attention`).

    Cross-attention, with text or with an image, stays exact.

    Args:
        bias: None, or a low-rank bias that every logit gets, as in `FlashBiasProcessor`.
        plan: None, or what every head of every layer computes: an `AttentionPlan`, the path of its JSON, what that
            holds, or the name of one that ships (of the embedded model: `embedded-1.00`, …). It decides the options
            above, which must be left at their defaults. Needs `vmonarch.apply`.
        dense_steps: denoising steps computed with exact attention: the first n (int), the first fraction, rounded up
            (float), or a collection of step indices. Needs `vmonarch.apply(pipe, …)`.
        dense_layers: transformer blocks that keep their own processor, given like `dense_steps`; VACE's control blocks
            follow the block that they feed. Needs `vmonarch.apply`.
        refresh: None, or when attention is exact and renews the residual, exact minus VMonarch attention, that is added
            to VMonarch attention in all other steps: the number of such steps (int), a fraction (float), a collection
            of step indices, or a `vmonarch.Refresh`. For inference. Needs `vmonarch.apply(pipe, …)`.
        grid: (frames, height, width) in tokens; None to learn it from the transformer, call by call.
        parallel_by: what the ranks share under diffusers' context parallelism, without which it changes nothing:
            "heads" (Ulysses), or "frames" (`frame_parallel_vmonarch_attention`), which asks nothing of the number of
            heads, needs a latent frame for every rank and offers neither frames_per_block, tiles, bias nor plan. With
            `refresh` exact attention is shared by heads, of which every rank needs one.
        implementation: as in `vmonarch_attention`.
        **options: the `VMonarchOptions` by name: num_iterations, exact, coarse, …

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    _OPTIONS = (
        *(field.name for field in OPTION_FIELDS),
        "bias",
        "plan",
        "dense_steps",
        "dense_layers",
        "refresh",
        "grid",
        "parallel_by",
        "implementation",
    )

    @takes_options
    def __init__(
        self,
        *,
        bias: object = None,
        plan: object = None,
        dense_steps: object = 0,
        dense_layers: object = 0,
        refresh: object = None,
        grid: object = None,
        parallel_by: str = "heads",
        implementation: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(dense_steps=dense_steps, dense_layers=dense_layers, refresh=refresh, grid=grid)
        self._bias = None if bias is None else BiasOption(bias)
        self.options = VMonarchOptions(**options)
        check_implementation(implementation)
        self.parallel_by = parallel_by
        self.implementation = implementation
        self.plan = None if plan is None else AttentionPlan.parse(plan)
        check_parallel_by(
            parallel_by,
            frames_per_block=self.options.frames_per_block,
            tiles=self.options.tiles,
            bias=self._bias,
            plan=self.plan,
        )
        if self.plan is not None:
            self._check_alone()
            self._needs_apply = self._needs_apply or "plan"
        self._methods: tuple[str, ...] = ()
        self._groups: HeadGroups | None = None

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
        names = self.plan.heads_of(component, layer, layers, attn.heads)
        if all(self.plan.methods[name] is None for name in names):
            return original
        bound = super().bind(context, original, attn, layer, layers)
        bound._methods, bound._groups = names, HeadGroups.of(names)
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
        if self._groups is not None:
            return self._attend_by_plan(self._groups, query, key, value, grid, heads)
        return vmonarch_attention(
            query,
            key,
            value,
            grid=grid,
            options=self.options,
            bias=self._factors(grid, query.device, heads),
            implementation=self.implementation,
        )

    def _attend_by_frames(self, split: TokenSplit, grid: LatentGrid, *tensors: torch.Tensor) -> torch.Tensor:
        out = frame_parallel_vmonarch_attention(
            *split.to_frames(grid, *tensors),
            grid=grid,
            group=split.group,
            options=self.options,
            implementation=self.implementation,
        )
        assert isinstance(out, torch.Tensor)
        return split.from_frames(grid, out)

    def _attend_by_plan(
        self,
        groups: HeadGroups,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None,
    ) -> torch.Tensor:
        """One call for all heads of a method; heads are put into such an order only where they are not."""
        assert self.plan is not None
        if heads is not None:
            groups = HeadGroups.of(self._methods[heads.start : heads.stop])
        if groups.order is not None:
            query, key, value = (_in_order(x, groups.order) for x in (query, key, value))
        parts = []
        counts = [count for _, count in groups.sizes]
        inputs = zip(*(x.split(counts, 2) for x in (query, key, value)), strict=True)
        for (name, _), (q, k, v) in zip(groups.sizes, inputs, strict=True):
            options = self.plan.methods[name]
            if options is None:
                parts.append(dispatch_attention_fn(q, k, v, backend=self._attention_backend))
            else:
                parts.append(
                    vmonarch_attention(q, k, v, grid=grid, options=options, implementation=self.implementation)
                )
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return out if groups.back is None else _in_order(out, groups.back)


for _field in OPTION_FIELDS:
    setattr(VMonarchProcessor, _field.name, property(operator.attrgetter(f"options.{_field.name}")))


def _in_order(x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    """[B, S, H, D] with its heads in another order."""
    if torch.compiler.is_compiling():
        # An index would be copied from the CPU, which no CUDA graph can record.
        parts = x.split(1, 2)
        return torch.cat([parts[head] for head in heads], 2)
    return x.index_select(2, _index(heads, x.device))


@kept
def _index(places: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, device=device)


class FlashBiasProcessor(VideoAttentionProcessor):
    """Exact attention with a low-rank bias for every Wan-family transformer (FlashBias; `flash_bias_attention`).

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

    _OPTIONS = ("bias", "dense_steps", "dense_layers", "grid", "implementation")

    def __init__(
        self,
        bias: object,
        *,
        dense_steps: object = 0,
        dense_layers: object = 0,
        grid: object = None,
        implementation: str = "auto",
    ) -> None:
        super().__init__(dense_steps=dense_steps, dense_layers=dense_layers, grid=grid)
        self._bias = BiasOption(bias)
        check_implementation(implementation)
        self.implementation = implementation

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> torch.Tensor:
        factors = self._factors(grid, query.device, heads)
        assert factors is not None
        return flash_bias_attention(query, key, value, *factors, implementation=self.implementation)
