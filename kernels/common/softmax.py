"""The online-softmax monoid as jit helpers: one definition for every kernel (docs/attention.md, "Merging").

An element of the monoid is (row_max, row_sum, row_entropy, acc): the running maximum of the logits, Σ p, Σ p·t and
Σ p·v with t = logit - row_max and p = 2^t. Logits are counted in units of log 2, so that no kernel needs more than
exp2 and log2: `log2_scale` is the softmax scale times log2(e). VMonarch, Eq. 9-18.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def log2_scale_of(scale: float) -> float:
    """The `log2_scale` of the helpers for a softmax scale that is not negative.

    A zero scale becomes one so small that every finite logit is 0, but a masked one, -inf · log2_scale, is not NaN.
    """
    return max(scale * LOG2_E, 2.0**-100)


@triton.jit
def online_softmax(
    scores,
    row_max,
    row_sum,
    row_entropy,
    log2_scale,
    ENTROPY: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr,
):
    """Take one tile of raw scores [M, N] into the running sums.

    Args:
        scores: float32 q·k without the scale, which must not be negative; -inf masks a key.
        row_max, row_sum, row_entropy: [M] running sums, -inf, 0 and 0 at the start. `row_entropy` is passed through
            unless ENTROPY.
        MAY_BE_EMPTY: whether all keys that a row has met so far may be masked.

    Returns:
        (p [M, N], alpha [M] = factor of what was accumulated before, row_max, row_sum, row_entropy).
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * log2_scale)
    if MAY_BE_EMPTY:
        # A finite maximum keeps (-inf) - (-inf) out of the exponent.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        shift = new_max
    t = scores * log2_scale - shift[:, None]
    p = tl.exp2(t)
    alpha = tl.exp2(row_max - shift)
    if ENTROPY:
        # Where the maximum moves by log α: Σ p·t becomes α·Σ p·t + α·log α·Σ p (VMonarch, Eq. 18).
        moved = tl.where(alpha > 0, alpha * (row_entropy + (row_max - shift) * row_sum), 0.0)
        row_entropy = moved + tl.sum(tl.where(p > 0, p * t, 0.0), 1)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    return p, alpha, new_max, row_sum, row_entropy


@triton.jit
def log2_partition(row_max, row_sum):
    """log2 Σ 2^logit of each row, -inf for a row without any key, NaN for one with NaN among its logits."""
    empty = row_sum == 0
    return tl.where(empty, -float("inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))


@triton.jit
def entropy_of(row_sum, row_entropy):
    """Shannon entropy of each row in nats, 0 for a row without any key, NaN for one with NaN among its logits."""
    safe_sum = tl.where(row_sum == 0, 1.0, row_sum)
    return (tl.log2(safe_sum) - row_entropy / safe_sum) * 0.6931471805599453


@triton.jit
def probabilities(scores, lse, log2_scale):
    """Recompute the attention probabilities of a tile in the backward pass.

    Args:
        scores: float32 q·k without the scale, -inf where masked.
        lse: log-partition in nats, broadcastable to `scores`; -inf for a row without any key, whose p is 0.
    """
    log2_lse = lse * 1.4426950408889634
    return tl.exp2(scores * log2_scale - tl.where(log2_lse == -float("inf"), float("inf"), log2_lse))


@triton.jit
def row_delta(do, out, dlse_ptr, at, present):
    """δ = rowsum(dO ∘ O) - dlse [M], what is taken off every dP of a row; dlse is read at `at`, 0 where it is None."""
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=present, other=0.0)
    return delta
