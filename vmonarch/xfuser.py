"""xfuser (xDiT): VMonarch as an attention backend of its models and runner.

    vmonarch.xfuser.register(vmonarch.VMonarchProcessor(coarse=2))     # xfuser then knows "vmonarch"
    runpy.run_module("xfuser.runner", run_name="__main__", alter_sys=True)     # --attention_backend vmonarch …

Shapes: B batch, S = T·H·W tokens of the video, s tokens of this rank, P ranks, H heads, h = H/P heads of this rank,
D head dim.

Source: xfuser 0.7.0, `core/distributed/attention_backend.py`, `model_executor/layers/usp.py` and
`model_executor/models/transformers/transformer_wan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vmonarch.base import Layer, VideoAttentionProcessor
from vmonarch.call import Call
from vmonarch.context_parallel import Part
from vmonarch.engines import GROUPS, add_member, import_xfuser, ulysses_rank
from vmonarch.grid import LatentGrid
from vmonarch.own import run_stack
from vmonarch.processors import FlashBiasProcessor, VMonarchProcessor


def register(processor: VideoAttentionProcessor, name: str = "vmonarch") -> Any:
    """Make `processor` an attention backend of xfuser, to be chosen by `name` wherever xfuser takes a backend's name.

    xfuser gives it a video's self-attention, [B, h, S, D] for the rank's own heads, and the grid, which its Wan models
    publish as `thw`. Cross-attention goes to the backend that xfuser would choose by itself. Registering a name again
    replaces its processor.

    Args:
        processor: a `VMonarchProcessor` or `FlashBiasProcessor`. A backend is not told layer and step, so that a plan,
            dense_layers, dense_steps and refresh must not be set; for these use `vmonarch.apply` on the pipeline, or
            xfuser's hybrid schedule of backends. Its `grid` serves calls without a published one.
        name: the backend's name, in any case.

    Returns:
        The new member of xfuser's `AttentionBackendType`, for example for `set_attention_backend`.

    Raises:
        TypeError: `processor` is another object.
        ValueError: an option of the processor needs layers, steps or all heads; or xfuser has a backend `name`.
        ImportError: xfuser is not installed, or cannot be imported without a GPU.
        RuntimeError: this Python's `Enum` accepts no further member.
    """
    if not isinstance(processor, (VMonarchProcessor, FlashBiasProcessor)):
        raise TypeError(
            f"processor must be a VMonarchProcessor or FlashBiasProcessor, got {type(processor).__name__}; others can"
            " be applied to xfuser's pipelines with vmonarch.apply"
        )
    for option, usual in {"dense_steps": 0, "dense_layers": 0, "refresh": None, "plan": None}.items():
        if getattr(processor, option, None):
            raise ValueError(
                f"{option} must be {usual} in a backend of xfuser, which is told neither layer nor step: use"
                " vmonarch.apply on the pipeline, or for steps xfuser's hybrid schedule (--use_hybrid_attn_schedule)"
            )

    backends = import_xfuser(f"{GROUPS}.attention_backend")
    state = import_xfuser(f"{GROUPS}.runtime_state").RuntimeState
    functions = backends.ATTENTION_FUNCTION_REGISTRY
    # Without a configuration this is xfuser's choice for the machine; it reads nothing of the state.
    dense = functions[state._select_attention_backend(None)]
    member = add_member(backends.AttentionBackendType, name.upper(), f"{name.upper()} of vmonarch")
    functions[member] = _attention_function(processor, dense, import_xfuser(GROUPS))
    return member


def _attention_function(
    processor: VMonarchProcessor | FlashBiasProcessor, dense: Callable[..., Any], groups: Any
) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The function that xfuser calls for a backend: query, key, value [B, h, S, D] -> ([B, h, S, D], lse or None)."""
    attend = processor.attention(Layer(attn=None, place=0, block=0, blocks=1))
    assert attend is not None

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        options = attention_kwargs or {}
        thw = options.get("thw")
        tokens = query.shape[2]
        # Self-attention of a video comes with its grid, cross-attention without.
        if thw is None and key.shape[2] != tokens:
            return dense(query, key, value, dropout_p=dropout_p, is_causal=is_causal, attention_kwargs=attention_kwargs)
        ranks, rank = ulysses_rank(groups)
        if dropout_p or is_causal or any(options.get(name) is not None for name in ("attn_mask", "indices_k")):
            raise ValueError("xfuser's backend vmonarch supports no dropout, no causal attention and no attention mask")
        grid = _grid(processor.grid, thw, tokens)
        padded = -(-grid.tokens // ranks) * ranks
        if tokens != padded or key.shape[2] != tokens:
            raise ValueError(
                f"grid {tuple(grid)} has {grid.tokens} tokens, but xfuser's self-attention was given {tokens} queries"
                f" and {key.shape[2]} keys on {ranks} ranks"
            )
        h = query.shape[1]
        heads = Part(range(rank * h, (rank + 1) * h), ranks * h) if ranks > 1 else None
        # Autocast computes the norms of queries and keys in float32.
        q, k, v = (x[:, :, : grid.tokens].to(value.dtype).transpose(1, 2) for x in (query, key, value))
        out = run_stack(attend, q, k, v, Call(grid, heads=heads)).transpose(1, 2)
        return torch.nn.functional.pad(out, (0, 0, 0, tokens - grid.tokens)), None

    return attention


def _grid(given: LatentGrid | None, thw: Sequence[int] | None, tokens: int) -> LatentGrid:
    grid = given if thw is None else LatentGrid.parse(tuple(thw), argument="attention_kwargs['thw']")
    if grid is None:
        raise RuntimeError(
            f"xfuser's backend vmonarch was given {tokens} tokens without a grid: the model publishes no"
            " attention_kwargs['thw'] (Wan's wrapper does if it is given attention_kwargs={}); register a processor"
            " with grid=(frames, height, width), or choose another backend for what is no video"
        )
    if given is not None and given != grid:
        raise ValueError(f"grid={tuple(given)}, but xfuser's transformer was given the grid {tuple(grid)}")
    return grid
