"""What all attention processors for video transformers in diffusers share.

Shapes: B batch, S tokens, of which N = T·H·W are the video's, H heads, D head dim; the latent grid is T frames × H rows
× W columns of tokens. In most models, and in all of the Wan family, S = N.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_chronoedit as chronoedit
from diffusers.models.transformers import transformer_skyreels_v2 as skyreels
from diffusers.models.transformers import transformer_wan as wan
from diffusers.models.transformers import transformer_wan_animate as animate
from torch.fx.experimental.symbolic_shapes import guard_or_false

from vmonarch.bias.video import BiasOption, Factors, GridBias
from vmonarch.context_parallel import (
    Share,
    TokenSplit,
    callers_parallel_config,
    check_heads,
    check_no_first_block_cache,
    check_ring,
    context_parallel_config,
    split_sequence,
    split_tokens,
)
from vmonarch.dense import DenseSet
from vmonarch.forward_context import ForwardCall, ForwardContext, infer_grid
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import auto_takes_kernels, carry_tangents, learns
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.layer_operator import layer_attention, number_of
from vmonarch.options import NoOptions
from vmonarch.plan import AttentionPlan
from vmonarch.projections import project
from vmonarch.residuals import Refresh
from vmonarch.sequence import TokenSequence, joint_attention, masked_attention
from vmonarch.spread import Spread
from vmonarch.validation import check_implementation
from vmonarch.xfuser_groups import split_video

# Attention modules with the projections, norms and rotary embedding of Wan. diffusers defines the class once per model.
WAN_ATTENTION = (wan.WanAttention, animate.WanAttention, chronoedit.WanAttention, skyreels.SkyReelsV2Attention)
# Only ever called with `encoder_hidden_states`, so their own processor answers for them.
CROSS_ATTENTION_ONLY = (animate.WanAnimateFaceBlockCrossAttention,)


def _may_be_parallel() -> bool:
    """Whether tokens may be spread over processes; torch.compile cannot look further."""
    return not torch.compiler.is_compiling() and torch.distributed.is_available() and torch.distributed.is_initialized()


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return learns(*tensors) or carry_tangents(*tensors)


class VideoAttentionProcessor:
    """Base of the processors: replaces self-attention, leaves cross-attention to the model's own exact processor.

    A subclass defines `attend`, or `attend_with_lse` and so serves models whose self-attention is joint, of the video
    and other tokens, too. It lists its options in `_OPTIONS`; those of its op are a dataclass, `_KIND`. Use it in one
    of three ways, of which the first two are one and the same:

        vmonarch.apply(pipe, processor)       # knows the grid of every call, compiles, can be undone
        pipe.set_attn_processor(processor)    # or pipe.transformer.set_attn_processor
        attn.set_processor(processor)         # Wan: reads the grid off the rotary embedding, or `grid=`

    Args:
        dense_steps, dense_layers, refresh: see `VMonarchProcessor`.
        grid: the latent grid, (frames, height, width) in tokens; None to learn it from the transformer.
        implementation: what the ops are given: "auto", "triton" or "torch".
        **options: of the op, by name.
    """

    # What all have that are applied to a model.
    COMMON: ClassVar[tuple[str, ...]] = ("dense_steps", "dense_layers", "refresh", "grid", "implementation")
    _OPTIONS: tuple[str, ...] = COMMON
    _KIND: type[Any] = NoOptions
    # Whether bound processors have parameters.
    LEARNS = False
    # How many videos of the grid a joint sequence holds, one after the other.
    videos = 1
    # How context parallelism spreads the tokens of a model beyond the Wan family.
    spread: Spread | None = None
    # Declared for diffusers, which sets them on every processor that has them.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(
        self,
        *,
        dense_steps: object = 0,
        dense_layers: object = 0,
        refresh: object = None,
        grid: object = None,
        implementation: str = "auto",
        **options: Any,
    ) -> None:
        for name in (*options, *(("refresh",) if refresh is not None else ())):
            if name not in self._OPTIONS:
                known = ", ".join(self._OPTIONS)
                raise TypeError(f"{name} is no known option of {type(self).__name__}; known: {known}")
        self.options = self._KIND(**options)
        check_implementation(implementation)
        self.implementation = implementation
        steps, layers = DenseSet("dense_steps", dense_steps), DenseSet("dense_layers", dense_layers)
        self.dense_steps, self.dense_layers = steps.dense, layers.dense
        self.refresh = Refresh.parse(refresh)
        self.grid = None if grid is None else LatentGrid.parse(grid)
        self._dense = next((dense.argument for dense in (steps, layers) if dense.some), None)
        self._needs_apply = self._dense if self.refresh is None else "refresh"
        self._bias: BiasOption | None = None
        # torch.compile finds the layer by it when it runs; None where it is to look inside.
        self._number: torch.Tensor | None = None
        # Which of the transformer's blocks it is in, once it is bound.
        self._layer = 0
        self._context: ForwardContext | None = None
        self._original: Any = None
        # Whether the transformer is one of xfuser's, whose ranks may hold parts of the tokens.
        self._in_xfuser = False
        self._inferred: tuple[weakref.ref[torch.Tensor], LatentGrid] | None = None

    def check_context_parallel(self, config: Any, heads: int) -> None:
        """Check that self-attention with this number of heads works under diffusers' `ContextParallelConfig`.

        Raises:
            NotImplementedError: ring attention.
            ValueError: there are fewer heads than ranks; or the model's own attention, which `dense_steps` and
                `dense_layers` keep, cannot share them.
        """
        check_ring(config.ring_degree, "ContextParallelConfig(ulysses_degree=…)")
        ranks = config.ulysses_degree
        check_heads(ranks, heads)
        if self._dense is not None and heads % ranks and not config.ulysses_anything:
            raise ValueError(
                f"{self._dense} keeps the model's own attention, which shares heads evenly: its {heads} do not divide"
                f" by ulysses_degree={ranks}; use ulysses_anything=True or {self._dense}=0"
            )

    def check_joint_context_parallel(self, config: Any, heads: int) -> None:
        """`check_context_parallel` beyond the Wan family, where all attention of the video is ours.

        Raises:
            NotImplementedError: ring attention.
            ValueError: there are fewer heads than ranks.
        """
        check_ring(config.ring_degree, "ContextParallelConfig(ulysses_degree=…)")
        check_heads(config.ulysses_degree, heads)

    def check_run(self, grid: LatentGrid, steps: int, layers: int) -> None:
        """Raise ValueError if an option does not fit a run of so many steps of a transformer with so many layers."""
        DenseSet("dense_steps", self.dense_steps).contains(0, steps)
        DenseSet("dense_layers", self.dense_layers).contains(0, layers)
        if self.refresh is not None:
            self.refresh.schedule(steps)
        self.check_grid(grid)

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if an option does not fit videos of this latent grid."""

    def warn_of_size(self, grid: LatentGrid) -> None:
        """Warn of what a user may not expect of videos of this grid, which the transformer is called with next."""

    @property
    def bias(self) -> GridBias | None:
        """What makes the factors of the bias, for processors that have one."""
        return None if self._bias is None else self._bias.bias

    def _factors(self, grid: LatentGrid, device: torch.device, heads: Share | None) -> Factors | None:
        """Factors of the bias, if there is one, for some heads or all (None); layers of a forward call share them."""
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
    ) -> torch.Tensor:
        """Self-attention: query, key, value [B, N, H, D] -> [B, N, H, D].

        Args:
            heads: which of the module's heads these are; None for all.
        """
        return self.attend_with_lse(query, key, value, grid, heads)[0]

    def attend_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `attend` computes, and the log-partition of every row [B, H, N]; for joint attention."""
        raise NotImplementedError(
            f"{type(self).__name__} does not support joint attention, of the video and other tokens"
        )

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
        query, key, value = project(attn, hidden_states, rotary_emb, self.implementation)
        return self._attend_tokens(query, key, value, TokenSequence(grid), split=split).flatten(2, 3)

    def attend_joint(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Self-attention in place of a softmax of the model's own: [B, S, H, D] -> [B, S, H, D].

        Args:
            key_mask: boolean [B, S], true where a key may be attended; every key of the video. None for all.

        Raises:
            RuntimeError: the grid is not known.
            ValueError: there are fewer tokens than the video has.
        """
        # Autocast, and norms in float32, leave queries and keys in another dtype than values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if context_parallel_config(self._parallel_config) is not None:
            return self._attend_joint_of_a_part(query, key, value, key_mask)
        sequence = TokenSequence.of(*self.joint_grid(query.shape[1]), query.shape[1])
        return self._attend_tokens(query, key, value, sequence, key_mask)

    @torch.compiler.disable(reason="attention under context parallelism exchanges tokens between processes")
    def _attend_joint_of_a_part(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`attend_joint` where this process has a part of the tokens.

        Raises:
            NotImplementedError: First Block Cache, or gradients where those of the ranks have no meaning.
        """
        check_no_first_block_cache()
        assert self.spread is not None
        if not self.spread.differentiable and _needs_gradient(query, key, value):
            raise NotImplementedError(
                "gradients are not supported under context parallelism with this model: call it under torch.no_grad()"
            )
        config, tokens = context_parallel_config(self._parallel_config), query.shape[1]
        split, sequence = split_sequence(config, self.spread.others_whole, *self.joint_grid(tokens), tokens)
        whole_mask = None if key_mask is None else split.whole_mask(key_mask)
        return self._attend_tokens(query, key, value, sequence, whole_mask, split)

    def joint_grid(self, tokens: int) -> tuple[LatentGrid, int | None]:
        """The grid of the video in joint attention, and how many tokens come before it, as in `TokenSequence.of`."""
        call = None if self._context is None else self._context.current(tokens)
        if call is None:
            raise RuntimeError(
                f"{type(self).__name__} needs the grid, which this call of the transformer does not tell: pass"
                " grid=(frames, height, width) to the processor, call the transformer itself, not its forward, and"
                " checkpoint its blocks by its enable_gradient_checkpointing()"
            )
        self._check_grid(call.grid)
        return call.grid._replace(frames=self.videos * call.grid.frames), call.before

    @property
    def needs_raster(self) -> bool:
        """Whether the method knows rows and columns, and not only frames."""
        return True

    def exact_now(self) -> bool:
        """Whether the running step is one of `dense_steps`."""
        call = None if self._context is None else self._context.current(0)
        return call is not None and call.exact

    def _attend_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: TokenSequence,
        key_mask: torch.Tensor | None = None,
        split: TokenSplit | None = None,
    ) -> torch.Tensor:
        device = query.device.type
        # Autocast does not know the meta device.
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._attend_split(query, key, value, sequence, key_mask, split)
        # The ops choose their precision themselves: autocast would round their sums in float32.
        with torch.autocast(device, enabled=False):
            return self._attend_split(query, key, value, sequence, key_mask, split)

    def _attend_split(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: TokenSequence,
        key_mask: torch.Tensor | None,
        split: TokenSplit | None,
    ) -> torch.Tensor:
        """`attend`, whose tensors may have a part of the tokens."""
        if self.refresh is not None and _needs_gradient(query, key, value):
            raise RuntimeError("refresh is for inference: residuals have no gradient; train with refresh=None")
        if split is None:
            # The operator has no forward-mode derivative.
            opaque = self._number is not None and torch.compiler.is_compiling()
            if opaque and not carry_tangents(query, key, value):
                return layer_attention(query, key, value, self._number, key_mask, [*sequence.grid, *sequence[1:]])
            return self.attend_layer(query, key, value, sequence, key_mask=key_mask)
        attend = self._attend_as_the_model if self.exact_now() else self.attend_layer
        attend = functools.partial(attend, key_mask=key_mask)
        return self._attend_by_heads(split, sequence, attend, query, key, value)

    def _attend_as_the_model(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: TokenSequence,
        heads: Share,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the model's own attention computes in one process, with the arguments of `attend_layer`."""
        return self._own_attention(query, key, value, key_mask)

    def attend_layer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: TokenSequence,
        heads: Share | None = None,
        key_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Self-attention of a sequence, with the residual of the layer where residuals are shared."""
        inputs = query, key, value
        if not guard_or_false(sequence.others == 0):
            exact = lambda: self._attend_sequence_exactly(*inputs, sequence, heads, key_mask)
            approximate = lambda: self._attend_sequence(*inputs, sequence, heads, key_mask)
        else:
            of = (sequence.grid,) if heads is None else (sequence.grid, heads)
            exact = lambda: self.attend_exactly(*inputs, *of)
            approximate = lambda: self.attend(*inputs, *of)
        return self._attend_with_residual(len(query), exact, approximate)

    def _attend_sequence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: TokenSequence,
        heads: Share | None,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """`attend` of the video in a sequence with other tokens; these get exact attention."""
        return joint_attention(
            query,
            key,
            value,
            sequence,
            key_mask,
            video=lambda q, k, v: self.attend_with_lse(q, k, v, sequence.grid, heads),
            exact=lambda q, k, v: self._own_attention(q, k, v, key_mask),
            implementation=self.implementation,
        )

    def _attend_sequence_exactly(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: TokenSequence,
        heads: Share | None,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """What `_attend_sequence` approximates."""
        factors = self._factors(sequence.grid, query.device, heads)
        if factors is None:
            return self._own_attention(query, key, value, key_mask)
        padded = [sequence.padded(factor) for factor in factors]
        out: torch.Tensor = flash_bias_attention(
            query, key, value, *padded, key_mask=key_mask, implementation=self.implementation
        )
        return out

    def _own_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Exact attention by the backend that the user has chosen, or else by the fastest there is for a mask."""
        wanted = self._attention_backend is None and self.implementation != "torch"
        if key_mask is not None and wanted and auto_takes_kernels(query.device):
            return masked_attention(query, key, value, key_mask, implementation=self.implementation)[0]
        mask = None if key_mask is None else key_mask[:, None, None]
        return dispatch_attention_fn(query, key, value, attn_mask=mask, backend=self._attention_backend)

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
        return self._own_attention(query, key, value)

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
        self, split: TokenSplit, tokens: Any, attend: Callable[..., torch.Tensor], *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Self-attention of this rank's tokens, by one of the functions above for all tokens of its heads."""
        heads = split.share(tensors[0].shape[2])
        return split.gather_heads(attend(*split.gather_tokens(*tensors), tokens, heads), heads.total)

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
        # What ranks shared was an option once, with this default.
        config = {name: value for name, value in config.items() if (name, value) != ("parallel_by", "heads")}
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
            # A copy needs a number of its own.
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
        return copy.copy(self)._place(context, original, layer)

    def _place(self, context: ForwardContext | None, original: Any, layer: int = 0) -> VideoAttentionProcessor:
        self._layer = layer
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
        **others: Any,
    ) -> torch.Tensor:
        """The attention of one module of the Wan family: hidden_states [B, S, C] -> [B, S, C].

        Raises:
            TypeError: the module is of another family, whose transformers need `vmonarch.apply`, or of none.
            ValueError: an attention mask in self-attention, a grid that does not fit the tokens, or fewer heads than
                ranks under context parallelism.
            NotImplementedError: tokens are spread over several ranks for ring attention.
            RuntimeError: the grid or the step that an option needs is not known here.
        """
        name = type(self).__name__
        if not isinstance(attn, (*WAN_ATTENTION, *CROSS_ATTENTION_ONLY)):
            raise TypeError(
                f"{name} can be set on attention modules of the Wan family, got {type(attn).__name__}; use"
                " vmonarch.apply(pipe_or_transformer, processor)"
            )
        unknown = [argument for argument, value in others.items() if value is not None]
        if unknown:
            raise TypeError(f"{name} supports no {', '.join(unknown)} in {type(attn).__name__}")
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
        check_heads(len(split.tokens), attn.heads)
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
            self._check_grid(call.grid)
        else:
            if self._needs_apply is not None:
                raise RuntimeError(
                    f"{self._needs_apply} needs vmonarch.apply(pipe, processor): a processor that is set on an"
                    " attention module knows neither its layer nor the step"
                )
            call = ForwardCall(self._infer_grid(rotary_emb, split) if self.grid is None else self.grid, False)
        if call.grid.tokens != tokens:
            raise ValueError(
                f"grid {tuple(call.grid)} has {call.grid.tokens} tokens, but self-attention was given {tokens}"
            )
        return call

    def _check_grid(self, found: LatentGrid) -> None:
        if self.grid is not None and self.grid != found:
            raise ValueError(f"grid={tuple(self.grid)}, but the transformer was given the grid {tuple(found)}")

    def _infer_grid(self, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None, split: TokenSplit | None) -> LatentGrid:
        instead = "use vmonarch.apply(pipe_or_transformer, processor) or pass grid=(frames, height, width)"
        name = type(self).__name__
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{name} cannot read the grid off the rotary embedding under torch.compile; {instead}; checkpoint"
                " blocks by the transformer's enable_gradient_checkpointing()"
            )
        if rotary_emb is None:
            raise RuntimeError(f"{name} needs the grid, and there is no rotary_emb to read it off; {instead}")
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
        # Only the number of tokens in the grid matters.
        return ForwardCall(LatentGrid(1, 1, tokens), False)

    attend = VideoAttentionProcessor.attend_exactly
    _attend_sequence = VideoAttentionProcessor._attend_sequence_exactly

    @property
    def needs_raster(self) -> bool:
        return False


class DenseLayerProcessor(FullAttentionProcessor):
    """The model's own attention in a layer beyond the Wan family that keeps it, and ours where ranks share tokens.

    Under our plans the model's own would count text once for every rank.
    """

    def exact_now(self) -> bool:
        return True
