"""Softmax attention with log-partition and entropy in plain torch: the specification of the fused kernels.

Shapes: G groups (batch × heads, or batch × heads × frames), M query rows, N keys, D head dim, E value dim.
Nothing of size M×N lives longer than one chunk of rows; with gradients, chunks are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

# Scores that one chunk may hold: 2**25 elements are 128 MiB in float32.
MAX_CHUNK_SCORES = 2**25
# Keys that share a scale in eight bits.
SCALE_BLOCK = 256


def in_row_chunks(
    function,
    query: torch.Tensor,
    key: torch.Tensor,
    *others: torch.Tensor | None,
    by_row: Sequence[torch.Tensor | None] = (),
):
    """Apply `function(query, key, *others, *by_row)` a chunk of scores at a time.

    Args:
        function: maps query [G, M, D], key [G, N, D], `others` [G, …] and `by_row` [G, M, …] to a tuple of tensors
            [G, M, …], row by row.

    Returns:
        What `function` would return on the whole.
    """
    G, M, N = query.shape[0], query.shape[1], key.shape[1]
    rows = min(M, max(1, MAX_CHUNK_SCORES // N))
    groups = min(G, max(1, MAX_CHUNK_SCORES // (rows * N)))
    if rows == M and groups == G:
        return function(query, key, *others, *by_row)
    parts = []
    for g in range(0, G, groups):
        grouped = [None if tensor is None else tensor[g : g + groups] for tensor in (key, *others)]
        for r in range(0, M, rows):
            q, *of_rows = (None if x is None else x[g : g + groups, r : r + rows] for x in (query, *by_row))
            parts.append(recomputed(function, q, *grouped, *of_rows))
    # A chunk holds either whole groups or rows of one group, so concatenation keeps the order [G, M].
    return tuple(
        torch.cat([part.flatten(0, 1) for part in column]).unflatten(0, (G, M)) for column in zip(*parts, strict=True)
    )


def recomputed(function, *tensors):
    """Call `function`; in training, recompute its intermediates in the backward pass instead of keeping them.

    Under forward-mode AD and transforms of torch.func they are kept: their backward pass may run when tangents have
    gone, and torch.func refuses checkpoints.
    """
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled() and not transformed:
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return function(*tensors)


def softmax_parts(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split softmax over the last axis into the monoid's sums (paper, Eq. 9).

    Args:
        scores: logits […, N], -inf where a key is masked.

    Returns:
        (p […, N] = exp(scores - row_max), row_sum […, 1] with 1 in place of an empty row's 0, lse […]). The lse of a
        row without any key is -inf and its p is 0.
    """
    row_max = scores.detach().amax(-1, keepdim=True)
    row_max = torch.where(torch.isneginf(row_max), torch.zeros_like(row_max), row_max)
    p = torch.exp(scores - row_max)
    row_sum = p.sum(-1, keepdim=True)
    empty = row_sum == 0
    row_sum = torch.where(empty, torch.ones_like(row_sum), row_sum)
    lse = torch.where(empty, torch.full_like(row_sum, -torch.inf), row_max + torch.log(row_sum))
    return p, row_sum, lse.squeeze(-1)


def attend(
    query: torch.Tensor, key: torch.Tensor, key_bias: torch.Tensor | None, *values: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Softmax attention against several values that share one set of scores.

    Args:
        query: [G, M, D], already multiplied by the softmax scale.
        key: [G, N, D].
        key_bias: [G, N], added to every score of a key; -inf masks it.
        values: each [G, N, E].

    Returns:
        (lse [G, M], then one out [G, M, E] for every value).
    """
    scores = query @ key.transpose(-1, -2)
    if key_bias is not None:
        scores = scores + key_bias.unsqueeze(-2)
    p, row_sum, lse = softmax_parts(scores)
    return lse, *(p @ value / row_sum for value in values)


def attend_with_entropy(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention, its log-partition and its entropy H = lse - Σ P·s (paper, Eq. 12).

    Args:
        query: [G, M, D], already multiplied by the softmax scale.
        key: [G, N, D].
        value: [G, N, E].

    Returns:
        (lse [G, M], out [G, M, E], entropy [G, M]).
    """
    scores = query @ key.transpose(-1, -2)
    p, row_sum, lse = softmax_parts(scores)
    entropy = -((p / row_sum) * (scores - lse.unsqueeze(-1))).sum(-1)
    return lse, p @ value / row_sum, entropy


def to_groups(tensor: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D] -> [B·H, S, D] in at least float32, the precision of the specification."""
    compute_dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(compute_dtype).transpose(1, 2).flatten(0, 1)


def flash_entropy_attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flash-Entropy-Attention (VMonarch, Algorithms 1 and 2); arguments as in `flash_entropy_attention`."""
    B, _, H, _ = query.shape
    lse, out, entropy = in_row_chunks(attend_with_entropy, to_groups(query) * scale, to_groups(key), to_groups(value))
    out = out.unflatten(0, (B, H)).transpose(1, 2).to(query.dtype)
    entropy = entropy.unflatten(0, (B, H))
    return out, lse.unflatten(0, (B, H)), entropy if entropy_grad else entropy.detach()
