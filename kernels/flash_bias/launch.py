"""FlashBias on the kernels of flash attention: what they are to add to its logits.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, R bias rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vmonarch.kernels.common.launch import block_dim, hopper_fits, tma_fits, unit_stride
from vmonarch.kernels.flash_entropy.backward import flash_backward
from vmonarch.kernels.flash_entropy.forward import HOPPER_KEYS, Bias, flash_forward
from vmonarch.kernels.flash_entropy.segments import Segment, all_pairs

# What the kernels for Hopper take: a rank up to this, and this many rows of a tile.
HOPPER_RANK = 64
HOPPER_ROWS = 128
# Heads and ranks up to this leave registers for two programs.
NARROW = 32


@dataclass(frozen=True)
class Launch:
    """What the kernels of one call share.

    Args:
        query: [B, Sq, H, D]. key: [B, Sk, H, D]. value: [B, Sk, H, E].
        query_factor: [B or 1, Sq, H or 1, R]. key_factor: [B or 1, Sk, H or 1, R]; of the dtype of `query`. With R = 0
            there is no bias, which benchmarks compare with.
        key_mask: bool [B, Sk], True where a key counts; or None.
        scale: above 0.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_factor: torch.Tensor
    key_factor: torch.Tensor
    key_mask: torch.Tensor | None
    scale: float
    causal: bool

    @property
    def rank(self) -> int:
        return self.query_factor.shape[3]

    def factors(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """φq and φk with zero columns after their own."""
        query_factor, key_factor = (
            factor if columns == self.rank else torch.nn.functional.pad(factor, (0, columns - self.rank))
            for factor in (self.query_factor, self.key_factor)
        )
        return query_factor, key_factor

    def bias(self, grad_out: torch.Tensor | None = None) -> Bias:
        """What the kernels take, those for Hopper where they can; in the backward pass with its `grad_out`."""
        tensors = (self.query, self.key, self.value, *(() if grad_out is None else (grad_out,)))
        skipped = self.key.shape[1] - self.query.shape[1]
        if (
            self.key_mask is None
            and self.rank <= HOPPER_RANK
            # The diagonal has to be in the last tile of keys of a tile of rows.
            and not (self.causal and (grad_out is not None or skipped % HOPPER_KEYS))
            and hopper_fits("flash_bias", *tensors)
        ):
            # There rows of factors take a multiple of 16 bytes.
            factors = self.factors(-(-self.rank // 8) * 8)
            # A second program works while the other begins or ends a tile of rows.
            narrow = max(self.query.shape[3], self.rank) <= NARROW and not self.causal
            if self.rank == 0 or tma_fits(*factors):
                return Bias(factors if self.rank else None, None, self.causal, programs=2 if narrow else 1)
        # Masked columns would cost registers.
        factors = self.factors(block_dim(self.rank))
        return Bias(factors if self.rank else None, self.key_mask, self.causal, programs=0)


def flash_bias_forward(launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E] in the dtype of the query, lse [B, H, Sq] in float32); arguments are not checked."""
    query, key, value, bias = launch.query, launch.key, launch.value, launch.bias()
    Sq, Sk = query.shape[1], key.shape[1]
    # The kernel for Hopper is told where the keys of a tile of rows end.
    rows = HOPPER_ROWS if bias.programs and bias.causal else Sq
    segments = tuple(
        Segment(first, min(first + rows, Sq), ((0, min(first + rows + Sk - Sq, Sk)),)) for first in range(0, Sq, rows)
    )
    splits = None if bias.programs else 1
    out, lse, _ = flash_forward(
        query, key, value, segments, scale=launch.scale, entropy=False, splits=splits, bias=bias
    )
    return out, lse


def flash_bias_backward(
    launch: Launch,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    factor_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) in the dtype of the query, (dφq, dφk), one for every head; arguments are not checked.

    Args:
        grad_out, out: [B, Sq, H, E]. grad_lse, lse: [B, H, Sq].
        factor_dtypes: of dφq and dφk, which may have more columns than the factors.
    """
    query, key, value = launch.query, launch.key, launch.value
    B, Sq, H, _ = query.shape
    Sk = key.shape[1]
    grad_out = unit_stride(grad_out)
    bias = launch.bias(grad_out)
    dfq, dfk = (query.new_empty(B, S, H, bias.rank, dtype=d) for S, d in zip((Sq, Sk), factor_dtypes, strict=True))
    if grad_lse is not None and launch.key_mask is not None:
        # A query without any key has no gradient, whatever its lse's is.
        grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    gradients = flash_backward(
        grad_out, grad_lse, None, query, key, value, out, lse, None, all_pairs(Sq, Sk), scale=launch.scale, splits=1,
        bias=bias, dfq=dfq, dfk=dfk,
    )  # fmt: skip
    return *gradients, dfq, dfk
