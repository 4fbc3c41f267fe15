"""The monoid that merges partial attentions (docs/attention.md, "Merging").

An element is a pair (value, lse): a normalised value and its log-weight. Merging is associative and commutative, and
(0, -inf) is the neutral element. Tiles of a kernel, split keys, exact and Monarch parts of one row, text and video
keys and the partial results of several devices all meet through this one operation.
"""

from __future__ import annotations

import torch

from vmonarch.precision import own_precision


@own_precision
def merge_partials(
    *partials: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial attention results over disjoint sets of keys into the result over their union.

    Args:
        partials: pairs (out [B, S, H, D], lse [B, H, S]); lse is the logarithm of the sum of exponentials that `out`
            was normalised by, -inf where no key was attended (`out` is ignored there).

    Returns:
        (out [B, S, H, D] in the dtype of the first `out`, lse [B, H, S]).

    Raises:
        TypeError: a partial result is not a pair of tensors, or `out` and `lse` are not floating point.
        ValueError: no partial result is given, or shapes or devices do not fit together.
    """
    if not partials:
        raise ValueError("merge_partials needs at least one partial result (out, lse)")
    for number, partial in enumerate(partials):
        _check_partial(number, partial, partials[0])
    outs = [out for out, _ in partials]
    lses = torch.stack([lse for _, lse in partials])
    # A finite shift keeps (-inf) - (-inf) out of the exponent where every part is empty.
    lse_max = lses.amax(0)
    shift = torch.where(torch.isneginf(lse_max), torch.zeros_like(lse_max), lse_max).detach()
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    empty = total == 0
    safe_total = torch.where(empty, torch.ones_like(total), total)
    merged = torch.zeros_like(outs[0], dtype=torch.promote_types(outs[0].dtype, lses.dtype))
    for out, weight in zip(outs, weights, strict=True):
        share = (weight / safe_total).transpose(1, 2).unsqueeze(-1)
        # An empty part counts for nothing whatever its `out` holds; a NaN weight must stay visible.
        merged = merged + torch.where(share == 0, torch.zeros_like(merged), out * share)
    lse = torch.where(empty, torch.full_like(total, -torch.inf), shift + torch.log(safe_total))
    return merged.to(outs[0].dtype), lse


def _check_partial(number: int, partial: object, first: tuple[torch.Tensor, torch.Tensor]) -> None:
    if not isinstance(partial, (tuple, list)) or len(partial) != 2:
        raise TypeError(f"partial result {number} must be a pair (out, lse), got {type(partial).__name__}")
    for name, tensor in zip(("out", "lse"), partial, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} of partial result {number} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} of partial result {number} must be floating point, got {tensor.dtype}")
    out, lse = partial
    if out.ndim != 4:
        raise ValueError(f"out of partial result {number} must be [B, S, H, D], got shape {tuple(out.shape)}")
    expected = (out.shape[0], out.shape[2], out.shape[1])
    if lse.shape != expected:
        raise ValueError(f"lse of partial result {number} must be [B, H, S] = {expected}, got {tuple(lse.shape)}")
    if out.shape != first[0].shape:
        raise ValueError(
            f"out of partial result {number} must have the shape of the first, {tuple(first[0].shape)},"
            f" got {tuple(out.shape)}"
        )
    if out.device != first[0].device or lse.device != first[0].device:
        raise ValueError(f"partial result {number} must lie on the device of the first ({first[0].device})")
