"""Residual sharing in plain torch: the specification of the kernels.

Shapes: B batch, S tokens, H heads, E value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Residual(NamedTuple):
    """The difference between exact and approximate attention, compressed.

    Attributes:
        values: [B, S, H, E], contiguous, int8.
        scale: [B, S, H], float32: the difference is values·scale.
    """

    values: torch.Tensor
    scale: torch.Tensor


def attention_residual_reference(exact: torch.Tensor, approximate: torch.Tensor) -> Residual:
    """Arguments and result as in `attention_residual`."""
    wide = torch.promote_types(exact.dtype, torch.float32)
    x = (exact.to(wide) - approximate.to(wide)).float().contiguous()
    largest = x.abs().amax(-1)
    scale = torch.where(largest.isfinite(), largest, torch.nan) / 127
    # One below float32's normal range has no reciprocal; such a difference counts as 0.
    counts = scale >= torch.finfo(torch.float32).tiny
    steps = torch.where(counts.unsqueeze(-1), x * scale.reciprocal().unsqueeze(-1), 0.0)
    return Residual(steps.round().to(torch.int8), scale)


def renew_residual_reference(residual: Residual, exact: torch.Tensor, approximate: torch.Tensor) -> torch.Tensor:
    """Arguments and result as in `renew_residual`."""
    wide, (values, scale) = torch.promote_types(exact.dtype, torch.float32), residual
    change = (exact.to(wide) - approximate.to(wide)).float() - values.float() * scale.unsqueeze(-1)
    new = attention_residual_reference(exact, approximate)
    values.copy_(new.values)
    scale.copy_(new.scale)
    return torch.stack([x.square().sum((1, 2, 3)) for x in (change, exact.float())])


def add_residual_reference(out: torch.Tensor, residual: Residual) -> torch.Tensor:
    """Arguments and result as in `add_residual`."""
    wide = torch.promote_types(out.dtype, torch.float32)
    x = residual.values.to(wide) * residual.scale.to(wide).unsqueeze(-1)
    return out.copy_(out.to(wide) + x)
