"""The first element of the attention stack in the Wan family, whose projections, norms and rotary embedding are ours.

    hidden states [B, S, C] -> query, key, value [B, S, H, D] -> stack -> [B, S, C]

Shapes: B batch, S tokens (s on this rank), H heads, D head dim, C = H·D channels.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from vmonarch.attend import Attend, Exact, Share, stack_lines
from vmonarch.autocast import without_autocast
from vmonarch.call import Call, current_call
from vmonarch.context_parallel import TokenSplit, check_heads, context_parallel_config, split_tokens
from vmonarch.engines import split_video
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import auto_takes_kernels
from vmonarch.kernels.norm_rotary.api import norm_rotary, why_not_triton

if TYPE_CHECKING:
    from vmonarch.base import VideoAttentionProcessor

# Cosines and sines, [1, S, 1, D] each.
Rotary = tuple[torch.Tensor, torch.Tensor] | None


def rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs of states [B, S, H, D]; computed in the wider dtype, returned in that of `states`."""
    even, odd = states[..., 0::2], states[..., 1::2]
    cosines, sines = cosines[..., 0::2], sines[..., 1::2]
    rotated = torch.empty_like(states)
    rotated[..., 0::2] = even * cosines - odd * sines
    rotated[..., 1::2] = even * sines + odd * cosines
    return rotated


def _is_plain(norm: Any, channels: int) -> bool:
    """Whether a module is a plain RMS norm over all channels, so that its weight defines it completely.

    Offloading and casting put hooks or another forward on it; adapters replace it.
    """
    return (
        type(norm) is torch.nn.RMSNorm
        and norm.weight is not None
        and tuple(norm.normalized_shape) == (channels,)
        and "forward" not in vars(norm)
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)
    )


def _norm_and_rotate(norm: Any, x: torch.Tensor, heads: int, rotary_emb: Rotary, implementation: str) -> torch.Tensor:
    """Queries or keys [B, S, H, D] from their projection [B, S, C]; in one pass where the kernel can compute it."""
    if rotary_emb is None:
        return norm(x).unflatten(2, (heads, -1))
    if implementation == "triton" or (implementation == "auto" and auto_takes_kernels(x.device)):
        angles = (1, x.shape[1], 1, x.shape[2] // heads)
        fits = all(part.shape == angles and not part.requires_grad for part in rotary_emb)
        # Ranks of xfuser may have no token at all.
        if x.numel() and fits and _is_plain(norm, x.shape[2]) and why_not_triton(x, norm.weight, *rotary_emb) is None:
            eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
            return norm_rotary(x, norm.weight, *rotary_emb, heads=heads, eps=eps, implementation=implementation)
    return rotate(norm(x).unflatten(2, (heads, -1)), *rotary_emb)


def project(
    attn: Any, hidden_states: torch.Tensor, rotary_emb: Rotary, implementation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [B, S, H, D] of a self-attention module, normalised and rotated."""
    if attn.fused_projections:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    value = value.unflatten(2, (attn.heads, -1))
    query = _norm_and_rotate(attn.norm_q, query, attn.heads, rotary_emb, implementation)
    key = _norm_and_rotate(attn.norm_k, key, attn.heads, rotary_emb, implementation)
    # Autocast computes the norms in float32.
    return query.to(value.dtype), key.to(value.dtype), value


class Bound:
    """The processor of an attention module while one of ours is applied. `repr` prints its stack.

    Args:
        spec: the processor that was applied.
        attend: the stack below the first element.
        original: the module's processor before.
    """

    spec: VideoAttentionProcessor
    attend: Attend
    original: Any
    # Declared because diffusers sets it on every processor that has it. Those of some models do not.
    _parallel_config: Any = None

    def __repr__(self) -> str:
        return "\n".join([type(self).__name__, *(f"  {line}" for line in stack_lines(self.attend))])


def ours_of(module: Any) -> Bound | None:
    """What `apply` has bound to a module, if it is still there."""
    processor = getattr(module, "processor", None)
    return processor if isinstance(processor, Bound) else None


# The ops choose their precision themselves: autocast would round their sums in float32.
@without_autocast
def run_stack(attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Run a stack on the tokens of this rank: [B, s, H, D] -> [B, s, H, D]."""
    return (attend if call.split is None else Share(attend))(query, key, value, call)[0]


class Own(Bound):
    """The processor of a self-attention module of the Wan family."""

    _attention_backend: Any = None

    def __init__(self, spec: VideoAttentionProcessor, attend: Attend, original: Any) -> None:
        self.spec, self.attend, self.original = spec, attend, original
        # A copy: an attention backend that is chosen later must reach the dense steps, not the original.
        self._dense = copy.copy(original)
        self._attention_backend = getattr(original, "_attention_backend", None)
        # Whether the transformer is one of xfuser's, whose ranks may hold parts of the tokens.
        self._in_xfuser = type(original).__module__.startswith("xfuser.")

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary = None,
        **others: Any,
    ) -> torch.Tensor:
        """Self-attention of the module: hidden_states [B, S, C] -> [B, S, C].

        Raises:
            TypeError, ValueError: an argument that only exact attention supports, a grid that does not fit the tokens,
                or fewer heads than ranks under context parallelism.
            NotImplementedError: tokens are spread over several ranks for ring attention.
            RuntimeError: an option needs the grid or the step, which is not known here.
        """
        others |= {"encoder_hidden_states": encoder_hidden_states}
        unknown = [argument for argument, value in others.items() if value is not None]
        if unknown:
            raise TypeError(f"self-attention of vmonarch supports no {', '.join(unknown)} in {type(attn).__name__}")
        if attention_mask is not None:
            raise ValueError("attention_mask must be None in self-attention of vmonarch: every token attends to all")
        if self._in_xfuser or context_parallel_config(self._parallel_config) is not None:
            return self._on_a_rank(attn, hidden_states, rotary_emb)
        return self._self_attention(attn, hidden_states, rotary_emb, None)

    def _self_attention(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Rotary, split: TokenSplit | None
    ) -> torch.Tensor:
        tokens = hidden_states.shape[1] if split is None else split.all_tokens
        # Exact attention depends on nothing but the number of tokens.
        alone = isinstance(self.attend, Exact) and self.attend.bias is None
        call = Call(LatentGrid(1, 1, tokens)) if alone else current_call()
        if call.dense:
            # The module's own processor computes this.
            for name in ("_attention_backend", "_parallel_config"):
                if getattr(self._dense, name, None) is not getattr(self, name):
                    setattr(self._dense, name, getattr(self, name))
            return self._dense(attn, hidden_states, None, None, rotary_emb)
        if call.grid.tokens != tokens:
            raise ValueError(
                f"grid {tuple(call.grid)} has {call.grid.tokens} tokens, but self-attention was given {tokens}"
            )
        call = call._replace(backend=self._attention_backend, split=split)
        to_out: Any = attn.to_out
        return to_out[1](to_out[0](self.mix(attn, hidden_states, rotary_emb, call)))

    def mix(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Rotary, call: Call) -> torch.Tensor:
        """Everything before the output projection: [B, s, C] -> [B, s, C]."""
        # Exact steps round where the model does: they are bit-identical to it.
        by = "torch" if call.exact else self.spec.implementation
        query, key, value = project(attn, hidden_states, rotary_emb, by)
        return run_stack(self.attend, query, key, value, call).flatten(2, 3)

    @torch.compiler.disable(reason="attention under context parallelism exchanges tokens between processes")
    def _on_a_rank(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Rotary) -> torch.Tensor:
        """Self-attention where this process may have a part of the tokens."""
        if not self._in_xfuser:
            config = context_parallel_config(self._parallel_config)
            self.spec.check_context_parallel(config, attn.heads)
            return self._self_attention(attn, hidden_states, rotary_emb, split_tokens(config, hidden_states.shape[1]))
        call = current_call()
        split = None if call.dense else split_video(call.grid, hidden_states.shape[1])
        if split is None:
            return self._self_attention(attn, hidden_states, rotary_emb, None)
        check_heads(len(split.tokens), attn.heads)
        # Beyond its tokens, this rank holds padding.
        held = split.tokens[split.rank]
        if rotary_emb is not None:
            rotary_emb = rotary_emb[0][:, :held], rotary_emb[1][:, :held]
        out = self._self_attention(attn, hidden_states[:, :held], rotary_emb, split)
        return torch.nn.functional.pad(out, (0, 0, 0, hidden_states.shape[1] - held))
