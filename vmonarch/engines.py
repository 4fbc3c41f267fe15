"""Helpers for other engines: members for their enumerations of backends, FlashAttention-3, xfuser's ranks and tokens.

Source: xfuser 0.7.0, `core/distributed/parallel_state.py` and `model_executor/models/transformers/transformer_wan.py`;
FlashAttention-3 (Shah et al., 2024) as fa3-fwd 0.0.3 has it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from vmonarch.context_parallel import TokenSplit, check_ring
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import HOPPER_DTYPES, learns, on_hopper

# Names of FlashAttention-3 and cuDNN among diffusers' backends.
FA3 = "fa3"
CUDNN = "_native_cudnn"
# xfuser's module of groups of processes.
GROUPS = "xfuser.core.distributed"


def add_member(enumeration: Any, name: str, value: str) -> Any:
    """The member of an enumeration with this name and value, added if it is not there.

    An enumeration cannot be extended by subclassing, and the engines look names up in their own.

    Raises:
        ValueError: a member of that name has another value.
        RuntimeError: this Python's `Enum` accepts no further member.
    """
    if name in enumeration.__members__:
        if enumeration[name].value != value:
            raise ValueError(f"name must not be that of another member of {enumeration.__name__}, got {name!r}")
        return enumeration[name]
    kind = enumeration._member_type_
    member = kind.__new__(enumeration, *([] if kind is object else [value]))
    member._name_, member._value_ = name, value
    member.__objclass__ = enumeration
    member._sort_order_ = len(enumeration)
    setattr(enumeration, name, member)
    enumeration._member_map_[name] = member
    enumeration._member_names_.append(name)
    enumeration._value2member_map_[value] = member
    if not (enumeration[name] is enumeration(value) is member and list(enumeration)[-1] is member):
        raise RuntimeError(f"this Python's Enum takes no further member, which {enumeration.__name__} needs for ours")
    return member


def fa3_backend(device: torch.device) -> Any:
    """Register FlashAttention-3 as a backend of diffusers, and return its name there.

    Raises:
        ImportError: it is not installed.
        ValueError: the device is no Hopper GPU.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    if not on_hopper(device):
        raise ValueError(f"{FA3!r} needs a Hopper GPU, got {device}: use null, which is cuDNN's in compiled models")
    packages = (name for name in ("fa3_fwd_interface", "flash_attn_interface") if importlib.util.find_spec(name))
    if (package := next(packages, None)) is None:
        raise ImportError(f"{FA3!r} needs FlashAttention-3: pip install fa3-fwd, or build flash_attn_3")
    member = add_member(AttentionBackendName, FA3.upper(), FA3)
    # A new function would make torch.compile compile again.
    if member not in _AttentionBackendRegistry._backends:
        kernel = importlib.import_module(package).flash_attn_func
        _AttentionBackendRegistry.register(member)(functools.partial(_flash_attention_3, kernel))
    return member


def _flash_attention_3(
    kernel: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """[B, S, H, D] -> [B, S, H, E], and lse [B, H, S] on request; NotImplementedError for what it cannot compute."""
    if attn_mask is not None or learns(query, key, value) or query.dtype not in HOPPER_DTYPES:
        raise NotImplementedError(
            f"attention backend {FA3!r} supports bfloat16 and float16 without attn_mask and gradients, got"
            f" {query.dtype}: use another backend, such as {CUDNN}"
        )
    out, lse = kernel(query, key, value, softmax_scale=scale, causal=is_causal, return_attn_probs=True)[:2]
    return (out, lse) if return_lse else out


@functools.cache
def import_xfuser(name: str) -> Any:
    """A module of xfuser.

    Raises:
        ImportError: xfuser is not installed, or cannot be imported, because a GPU or a dependency is missing.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, NotImplementedError) as error:
        supported = "supported is xfuser>=0.7,<0.8, on a GPU: pip install 'xfuser>=0.7,<0.8'"
        raise ImportError(f"xfuser cannot be imported: {error}; {supported}") from error


def ulysses_rank(groups: Any) -> tuple[int, int]:
    """(P, this rank) from xfuser's module of groups, which is passed in: torch.compile cannot follow its import.

    Raises:
        NotImplementedError: ring attention.
    """
    check_ring(groups.get_ring_parallel_world_size(), "ulysses_degree")
    return groups.get_ulysses_parallel_world_size(), groups.get_ulysses_parallel_rank()


def split_video(grid: LatentGrid, tokens: int) -> TokenSplit | None:
    """How xfuser's ranks share the tokens of a video; None if this process holds all.

    xfuser pads the S tokens to a multiple of the ranks, so the last ranks may hold fewer than s.

    Args:
        tokens: s, with padding.

    Raises:
        NotImplementedError: ring attention.
        ValueError: s does not fit the grid.
    """
    groups = import_xfuser(GROUPS)
    ranks, rank = ulysses_rank(groups)
    if tokens != -(-grid.tokens // ranks):
        raise ValueError(
            f"grid {tuple(grid)} has {grid.tokens} tokens, but xfuser's self-attention was given {tokens} on each of"
            f" {ranks} ranks"
        )
    if ranks == 1:
        return None
    held = tuple(min(max(grid.tokens - earlier * tokens, 0), tokens) for earlier in range(ranks))
    return TokenSplit(groups.get_sp_group().ulysses_group, rank, held)
