"""Attention in two resolutions as a torch operator.

Shapes: B batch, S tokens, H heads, D head dim, E value dim; n tiles of queries, m tiles of keys. An operator
takes numbers, not objects: a `Tiling` travels as a list of integers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from vmonarch.kernels.common.launch import (
    block_dim,
    dot_precision,
    hopper_fits,
    launch_options,
    positively_scaled,
    unit_stride,
    unspecialised,
)
from vmonarch.kernels.common.operators import new_results, operator
from vmonarch.kernels.common.replay import launcher, replayed
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.common.tiles import strided
from vmonarch.kernels.flash_entropy.segments import processors
from vmonarch.kernels.two_resolution.kernels import (
    GAINS,
    best_kernel,
    lists_kernel,
    means_kernel,
    two_resolution_kernel,
    two_resolution_keys_kernel,
    two_resolution_means_kernel,
    two_resolution_rows_kernel,
)
from vmonarch.kernels.two_resolution.reference import best_of
from vmonarch.kernels.two_resolution.tiling import Box, Tiling, exact_tiles
from vmonarch.options import TwoResolutionOptions

# Tokens of which a program takes the sum at a time, and those that a warp of it does.
_MEANS_BLOCK = 128
_MEANS_WARP = 16
# The longest row of scores that a program takes.
_MAX_SCORES = 2**14


def _box(box: Box, block: int) -> dict[str, int]:
    """A box in parts of at most `block` places."""
    BT, BH, BW = box
    places = math.prod(box)
    block = min(block, block_dim(places))
    return {"BT": BT, "BH": BH, "BW": BW, "BLOCK": block, "PARTS": -(-places // block)}


def _constants(name: str, query: torch.Tensor, value: torch.Tensor, n: Tiling) -> dict[str, Any]:
    """Of a kernel."""
    D, E = query.shape[3], value.shape[3]
    options = launch_options(name, query.device, query.dtype, max(D, E))
    of_queries = {"BT": "QT", "BH": "QH", "BW": "QW", "BLOCK": "BLOCK_M", "PARTS": "PARTS_M"}
    constants: dict[str, Any] = {
        "D": D, "E": E, "BLOCK_D": block_dim(D), "BLOCK_E": block_dim(E), "PRECISION": dot_precision(query.dtype),
        **options, **{of_queries[name]: size for name, size in _box(n.of_queries.box, options["BLOCK_M"]).items()},
    }  # fmt: skip
    block = constants.pop("BLOCK", None)
    return constants if block is None else {**constants, **_box(n.box, block)}


class Pooled(NamedTuple):
    """Means of all tiles, and log2 of their tokens [B, m]: keys [B, m, H, D] in float32, values in their dtype."""

    k: torch.Tensor
    v: torch.Tensor | None
    log2_number: torch.Tensor


def pool(key: torch.Tensor, value: torch.Tensor | None, n: Tiling, key_mask: torch.Tensor | None) -> Pooled:
    """The means of all tiles; those of the keys choose tiles, too, as exactly as the reference does."""
    B, N, H, D = key.shape
    E = D if value is None else value.shape[3]
    k = key.new_empty(B, n.tiles, H, D, dtype=torch.float32)
    v = None if value is None else value.new_empty(B, n.tiles, H, E)
    log2_number = key.new_empty(B, n.tiles, dtype=torch.float32)
    constants = _box(n.box, _MEANS_BLOCK)
    launcher(means_kernel, (B * n.tiles * H,))(
        strided(key), strided(value), key_mask, k, v, log2_number, H, N, unspecialised(n),
        D=D, E=E, BLOCK_D=block_dim(D), BLOCK_E=block_dim(E), **constants,
        num_warps=max(1, constants["BLOCK"] // _MEANS_WARP),
    )  # fmt: skip
    return Pooled(k, v, log2_number)


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    n: Tiling,
    share: float,
    key_mask: torch.Tensor | None,
    pooled: Pooled | None,
) -> torch.Tensor:
    """The exact tiles [B, H, n, m], as `reference.chosen_tiles`."""
    q_mean = pool(query, None, n.of_queries, None).k
    k_mean = pool(key, None, n, key_mask).k if pooled is None else pooled.k
    return best(q_mean.transpose(1, 2) @ k_mean.permute(0, 2, 3, 1), exact_tiles(n, share))


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each score [B, H, n, m] is among the `count` largest of its row."""
    *lead, m = scores.shape
    if block_dim(m) > _MAX_SCORES:
        return best_of(scores, count)
    scores = scores.contiguous()
    exact = torch.empty_like(scores, dtype=torch.bool)
    block = block_dim(m)
    launcher(best_kernel, (math.prod(lead),))(scores, exact, m, count, BLOCK=block, num_warps=8 if block > 1024 else 4)
    return exact


def _rest(
    pooled: Pooled | None, key: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What is attended to in place of tiles that are not exact: mean keys, now in their dtype too, values, numbers."""
    return (None, None, None) if pooled is None else (pooled.k.to(key.dtype), *pooled[1:])


def _lists(
    exact: torch.Tensor, width: int, log2_number: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The true columns of every row of exact [B, H, n, m], in order: [B, H, n, width]; and their number [B, H, n].

    With log2_number [B, m], also what the logits of all means gain for every tile of queries [B, H, n, ≥ m].
    """
    B, H, n, m = exact.shape
    exact = exact.flatten(0, 1)
    lists = exact.new_empty(B, H, n, width, dtype=torch.int16 if m < 2**15 else torch.int32)
    number = exact.new_empty(B, H, n, dtype=torch.int32)
    padded = triton.cdiv(m, GAINS.value) * GAINS.value
    gain = None if log2_number is None else exact.new_empty(B, H, n, padded, dtype=torch.float32)
    block = min(1024, block_dim(m))
    launcher(lists_kernel, (B * H * n,))(
        exact, log2_number, lists, number, gain, *exact.stride(), n, m, width, padded, H, BLOCK=block,
        BLOCK_PAD=GAINS.value, num_warps=4,
    )  # fmt: skip
    return lists, number, gain


def _full(n: Tiling) -> bool:
    """Whether every place of every tile, of keys and of queries, holds a token."""
    return all(
        math.prod(cut.box) == block_dim(math.prod(cut.box))
        and all(length % tiles == 0 for length, tiles in zip(cut[:3], cut[3:6], strict=True))
        for cut in (n, n.of_queries)
    )


@replayed
def _forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [B, S, H, E], lse [B, H, S], the exact tiles [B, H, n, m], empty if they are given); see `attend`."""
    query, key, value, exact, key_mask, numbers, share, rest, scale = inputs
    n = Tiling(*numbers)
    pooled = pool(key, value, n, key_mask) if rest else None
    given = exact is not None
    if not given:
        exact = choose(query, key, n, share, key_mask, pooled)
    out, lse = new_results(query, key, value)
    attend(query, key, value, exact, _width(n, share, given), key_mask, n, pooled, scale, out, lse)
    return out, lse, exact.new_empty(0) if given else exact


def _width(n: Tiling, share: float, given: bool) -> int:
    """At least the most exact tiles of a tile of queries."""
    return n.tiles if given else exact_tiles(n, share)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    exact: torch.Tensor,
    width: int,
    key_mask: torch.Tensor | None,
    n: Tiling,
    pooled: Pooled | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out [B, S, H, E] and lse [B, H, S], with the exact tiles [B, H, n, m].

    They are consecutive tokens of contiguous tensors. A row has at most `width` exact tiles; without `pooled` the
    others leave nothing.
    """
    B, _, H, _ = query.shape
    k_mean, v_mean, log2_number = _rest(pooled, key)
    lists, number, gain = _lists(exact, width, log2_number)
    if key_mask is None and hopper_fits("two_resolution", query, key, value):
        # Where there is no GPU for them, these kernels cannot even be imported.
        from vmonarch.kernels.hopper.two_resolution import two_resolution, two_resolution_fits

        if two_resolution_fits(n, query, key, value):
            two_resolution(query, key, value, k_mean, v_mean, gain, lists, number, out, lse, tiling=n, scale=scale)
            return
    constants = _constants("two_resolution", query, value, n)
    out_rows = (stride // out.shape[3] for stride in out.stride()[:3])
    launcher(two_resolution_kernel, (n.of_queries.tiles * constants["PARTS_M"] * B * H,))(
        strided(query), strided(key), strided(value), k_mean, v_mean, gain, lists, number, key_mask, out, lse,
        *out_rows, *lse.stride()[:2], H, width, unspecialised(n), log2_scale_of(scale),
        REST=pooled is not None, FULL=_full(n) and key_mask is None, **constants,
    )  # fmt: skip


def _fake(query: torch.Tensor, key: Any, value: torch.Tensor, exact: Any, _mask: Any, numbers: Any, *_: Any) -> Any:
    n = Tiling(*numbers)
    chosen = (0,) if exact is not None else (query.shape[0], query.shape[2], n.of_queries.tiles, n.tiles)
    return *new_results(query, key, value), query.new_empty(chosen, dtype=torch.bool)


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), contiguous, each in the shape and dtype of its input."""
    *gradients, query, key, value, exact, key_mask, out, lse, chosen, numbers, share, rest, scale = inputs
    n, given = Tiling(*numbers), exact is not None
    width, pooled = _width(n, share, given), pool(key, value, n, key_mask) if rest else None
    exact = exact if given else chosen
    return backward(*gradients, query, key, value, exact, width, key_mask, out, lse, n, pooled, scale)


def backward(
    *inputs: Any, added: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operator computes; with a `Tiling` for the numbers, and for `rest` the means or None.

    Args:
        added: dk and dv, contiguous, to which the gradients of keys and values are added; None for new ones.
    """
    grad_out, grad_lse, query, key, value, exact, width, key_mask, out, lse, n, pooled, scale = inputs
    B, S, H, D = query.shape
    E = value.shape[3]
    grad_out = unit_stride(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.to(torch.float32).contiguous()
    out = unit_stride(out)
    delta = torch.empty_like(lse)
    dk, dv = added or (x.new_empty(x.shape) for x in (key, value))
    rest = pooled is not None
    k_mean, v_mean, log2_number = _rest(pooled, key)
    dk_mean = dv_mean = None
    q, k, v, grad_output = strided(query), strided(key), strided(value), strided(grad_out)
    tiling, log2_scale, queries = unspecialised(n), log2_scale_of(scale), n.of_queries.tiles
    lists, number, gain = _lists(exact, width, log2_number)
    on_hopper = key_mask is None and hopper_fits("two_resolution", query, key, value, grad_out)
    if on_hopper:
        from vmonarch.kernels.hopper.backward import two_resolution as hopper_kernels

        on_hopper = hopper_kernels.backward_fits(n, query, key, value, grad_out)
    if on_hopper:
        dq, folded = hopper_kernels.launch_queries(
            query, key, value, k_mean, v_mean, gain, lists, number, grad_out, out.contiguous(), lse, grad_lse,
            delta, tiling=n, scale=scale,
        )  # fmt: skip
    else:
        dq = query.new_empty(query.shape)
        constants = _constants("two_resolution_rows", query, value, n)
        launcher(two_resolution_rows_kernel, (queries * constants["PARTS_M"] * B * H,))(
            k_mean, v_mean, gain, lists, number, key_mask, lse, grad_lse, delta, dq,
            q, k, v, grad_output, strided(out), H, S, width, tiling, scale, log2_scale,
            REST=rest, FULL=_full(n) and key_mask is None, **constants,
        )  # fmt: skip
    if rest:
        constants = _constants("two_resolution_means", query, value, n)
        blocks = triton.cdiv(n.tiles, constants["BLOCK_N"]) * B * H
        # Few means see many queries: those are split, until there is work for the whole chip.
        splits = max(1, min(queries, 4 * processors(query.device) // blocks))
        dk_mean, dv_mean = (query.new_empty(splits, B * H, n.tiles, dim, dtype=torch.float32) for dim in (D, E))
        launcher(two_resolution_means_kernel, (blocks * splits,))(
            q, k_mean, v_mean, gain, grad_output, lse, delta, dk_mean, dv_mean,
            H, S, splits, triton.cdiv(queries, splits), tiling, scale, log2_scale, **constants,
        )  # fmt: skip
        dk_mean, dv_mean = dk_mean.sum(0), dv_mean.sum(0)
    lists, number, _ = _lists(exact.transpose(2, 3), queries)
    if on_hopper:
        hopper_kernels.launch_keys(
            query, key, value, log2_number, lists, number, grad_out, folded, dk_mean, dv_mean, dk, dv,
            tiling=n, scale=scale, add=added is not None,
        )  # fmt: skip
    else:
        constants = _constants("two_resolution_keys", query, value, n)
        launcher(two_resolution_keys_kernel, (n.tiles * constants["PARTS"] * B * H,))(
            q, k, v, log2_number, lists, number, key_mask, grad_output, lse, delta, dk_mean, dv_mean,
            dk, dv, H, S, tiling, scale, log2_scale, REST=rest, ADD=added is not None, **constants,
        )  # fmt: skip
    return dq, dk, dv


_operator = operator(
    "vmonarch::two_resolution",
    _forward,
    _backward,
    "Tensor query, Tensor key, Tensor value, Tensor? exact, Tensor? key_mask,"
    " int[] numbers, float share, bool rest, float scale",
    fake=_fake,
    results=3,
    gradients=3,
)


def two_resolution_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiling: Tiling,
    options: TwoResolutionOptions,
    *,
    selection: torch.Tensor | None,
    scale: float,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the kernels; arguments as in `two_resolution_attention`, already checked."""
    query, scale = positively_scaled(query, scale)
    B, _, H, _ = query.shape
    exact = None if selection is None else selection.expand(B, H, -1, -1).contiguous()
    mask = None if key_mask is None else key_mask.contiguous()
    numbers = list(tiling), options.share, options.rest, scale
    out, lse, _ = _operator(query, key, value, exact, mask, *numbers)
    return out, lse
