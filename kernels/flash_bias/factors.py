"""Factors of a bias in the form that the kernels take: of the dtype of the query, and still as exact as given."""

from __future__ import annotations

import torch

MAX_RANK = 256
# Parts that a float32 number is cut into, by dtype, to keep about 22 bits of it.
_PARTS = {torch.float16: 2, torch.bfloat16: 3}


def why_too_wide(factor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take a factor among tensors of `dtype`, or None if they can."""
    parts = _PARTS[dtype] if factor.dtype != dtype and dtype in _PARTS else 1
    most = MAX_RANK // (parts * (parts + 1) // 2)
    if factor.shape[-1] <= most:
        return None
    return f"the rank of the factors is {factor.shape[-1]} (supported for {factor.dtype} among {dtype}: up to {most})"


def as_parts(factor: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of `dtype` whose sum is `factor`, in falling size."""
    parts = []
    for _ in range(_PARTS[dtype]):
        parts.append(factor.to(dtype))
        factor = factor - parts[-1].to(factor.dtype)
    return parts


def in_dtype(
    query_factor: torch.Tensor, key_factor: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of `dtype` with the same product φq·φkᵀ.

    A float32 factor among 16-bit tensors is cut into parts, and the products of parts become columns: all but the
    smallest, which are below what is left out anyway.

    Args:
        query_factor: […, Sq, H, R]. key_factor: […, Sk, H, R]; both of `dtype` or both of float32.

    Returns:
        the two factors, of a rank three or six times as high where they were cut.
    """
    if query_factor.dtype == dtype:
        return query_factor, key_factor
    query_parts, key_parts = as_parts(query_factor, dtype), as_parts(key_factor, dtype)
    pairs = _pairs(dtype)
    return torch.cat([query_parts[i] for i, _ in pairs], -1), torch.cat([key_parts[j] for _, j in pairs], -1)


def _pairs(dtype: torch.dtype) -> list[tuple[int, int]]:
    """The pairs of parts of φq and φk that are multiplied."""
    return [(i, n - i) for n in range(_PARTS[dtype]) for i in range(n + 1)]


def gradients_of_cut(
    query_gradient: torch.Tensor, key_gradient: torch.Tensor, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients […, rank] of factors from those of what `in_dtype` made of them (and more columns, not read).

    The largest part of a factor meets all parts of the other, and so the other as a whole.
    """

    def whole(gradient: torch.Tensor, side: int) -> torch.Tensor:
        columns = gradient[..., : rank * len(_pairs(dtype))].unflatten(-1, (-1, rank))
        return columns[..., [n for n, pair in enumerate(_pairs(dtype)) if pair[side] == 0], :].sum(-2)

    return whole(query_gradient, 0), whole(key_gradient, 1)


def extended(
    query: torch.Tensor, key: torch.Tensor, query_factor: torch.Tensor, key_factor: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[q | φq/scale] and [k | φk] [B, S, H, D + R]: their scaled products are the logits with the bias.

    Args:
        query, key: [B, S, H, D]. query_factor, key_factor: [B or 1, S, H or 1, R]. scale: not 0.
    """
    dtype = query.dtype
    wide = torch.promote_types(query_factor.dtype, torch.float32)
    factors = (query_factor.to(wide) / scale, key_factor.to(wide))
    if query_factor.dtype == dtype:
        factors = (factors[0].to(dtype), factors[1].to(dtype))
    elif dtype in _PARTS:
        factors = in_dtype(*factors, dtype)
    B, _, H, _ = query.shape
    pairs = zip((query, key), factors, strict=True)
    extended_query, extended_key = (torch.cat([x, f.to(dtype).expand(B, -1, H, -1)], -1) for x, f in pairs)
    return extended_query, extended_key
