"""Checks of the tensors that attention ops take. Each error names the argument and what is supported."""

from __future__ import annotations

import torch

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, tensor: object) -> None:
    """Check one of the tensors [B, S, H, D].

    Raises:
        TypeError: it is not a tensor, or not of a supported floating-point dtype.
        ValueError: it has other dimensions, or none of some.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [B, S, H, D], got {type(tensor).__name__}")
    if tensor.ndim != 4:
        raise ValueError(f"{name} must have four dimensions [B, S, H, D], got shape {tuple(tensor.shape)}")
    if tensor.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise TypeError(f"{name} must be one of {supported}, got {str(tensor.dtype).removeprefix('torch.')}")
    if 0 in tensor.shape:
        raise ValueError(f"{name} must have no empty dimension, got shape {tuple(tensor.shape)}")


def check_qkv(query: object, key: object, value: object, *, same_length: bool = False) -> None:
    """Check query [B, Sq, H, D], key [B, Sk, H, D] and value [B, Sk, H, Dv].

    Args:
        same_length: also demand Sq = Sk.

    Raises:
        TypeError: an argument is not a tensor, or not of a supported floating-point dtype.
        ValueError: ranks, shapes, dtypes or devices do not fit together.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have the dtype of query ({query.dtype}), got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must lie on the device of query ({query.device}), got {tensor.device}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the batch size of query ({query.shape[0]}), got {tensor.shape[0]}")
        if tensor.shape[2] != query.shape[2]:
            raise ValueError(
                f"{name} must have as many heads as query ({query.shape[2]}), got {tensor.shape[2]};"
                " grouped-query attention is not supported"
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key must have the head dimension of query ({query.shape[3]}), got {key.shape[3]}")
    if value.shape[1] != key.shape[1]:
        raise ValueError(f"value must have as many tokens as key ({key.shape[1]}), got {value.shape[1]}")
    if same_length and key.shape[1] != query.shape[1]:
        raise ValueError(f"key must have as many tokens as query ({query.shape[1]}), got {key.shape[1]}")


def check_key_mask(key_mask: object, key: torch.Tensor) -> None:
    """Check that `key_mask` is None or a boolean [B, Sk] on the device of `key` [B, Sk, H, D].

    Raises:
        TypeError: it is no boolean tensor.
        ValueError: its shape or device is another.
    """
    if key_mask is None:
        return
    if not isinstance(key_mask, torch.Tensor) or key_mask.dtype != torch.bool:
        got = key_mask.dtype if isinstance(key_mask, torch.Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a boolean tensor [B, S], got {got}")
    if key_mask.shape != key.shape[:2]:
        raise ValueError(f"key_mask must be [B, S] = {tuple(key.shape[:2])}, got {tuple(key_mask.shape)}")
    if key_mask.device != key.device:
        raise ValueError(f"key_mask must lie on the device of query ({key.device}), got {key_mask.device}")


def check_factors(query_factor: object, key_factor: object, query: torch.Tensor, key: torch.Tensor) -> None:
    """Check the factors of a bias: [B or 1, Sq, H or 1, R] and [B or 1, Sk, H or 1, R], of query's dtype or float32.

    Raises:
        TypeError: a factor is not a tensor.
        ValueError: shapes, dtypes or devices do not fit together.
    """
    B, _, H, _ = query.shape
    batch, heads = (f"{size} or 1" if size > 1 else "1" for size in (B, H))
    for name, factor, tokens in (
        ("query_factor", query_factor, query.shape[1]),
        ("key_factor", key_factor, key.shape[1]),
    ):
        if not isinstance(factor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor [B or 1, S, H or 1, R], got {type(factor).__name__}")
        fits = factor.ndim == 4 and factor.shape[0] in (1, B) and factor.shape[1] == tokens
        if not fits or factor.shape[2] not in (1, H) or factor.shape[3] == 0:
            raise ValueError(f"{name} must be [{batch}, {tokens}, {heads}, R], got shape {tuple(factor.shape)}")
        if factor.dtype not in (query.dtype, torch.float32):
            raise ValueError(f"{name} must have the dtype of query ({query.dtype}) or be float32, got {factor.dtype}")
        if factor.device != query.device:
            raise ValueError(f"{name} must lie on the device of query ({query.device}), got {factor.device}")
    assert isinstance(query_factor, torch.Tensor) and isinstance(key_factor, torch.Tensor)
    for what, ours, theirs in (
        ("rank", query_factor.shape[3], key_factor.shape[3]),
        ("dtype", query_factor.dtype, key_factor.dtype),
    ):
        if ours != theirs:
            raise ValueError(f"key_factor must have the {what} of query_factor ({ours}), got {theirs}")
