"""Exact attention in eight bits by kernels: the passes that make bytes, and the loops that take them.

Legend: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, N tokens of a tile; `padded` is Sk up to the
next multiple of N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim, hopper_enabled, positively_scaled
from vmonarch.kernels.common.operators import new_results, operator
from vmonarch.kernels.common.replay import launcher, replayed
from vmonarch.kernels.common.softmax import LOG2_E
from vmonarch.kernels.common.tiles import head_of, load_rows, nearest_int8, strided
from vmonarch.kernels.flash_entropy.forward import Bias, flash_forward
from vmonarch.kernels.flash_entropy.reference import SCALE_BLOCK
from vmonarch.kernels.flash_entropy.segments import all_pairs
from vmonarch.kernels.int8.reference import ROTATED, attended_first

HOPPER_DIMS = (64, 128)
# Tokens that one program adds up, and those of a tile of it.
_CHUNK, _ROWS = 256, 64


@dataclass(frozen=True)
class Quantised:
    """Queries, keys and values in bytes, and what these lack.

    Args:
        query: int8 [B, H, Sq, D], rotated as the keys are, see `reference.rotated`. query_scale: [B, H, Sq], with the
            softmax scale · log2 e in it.
        query_mean: [B, H, Sq], q · (mean of the keys) · scale · log2 e, which scores lack.
        key: int8 [B, H, padded, D], less its mean over tokens. key_scale: [B, H, padded / N].
        value: e4m3 [B, H, D, padded] for Hopper, in another order inside of 16 tokens; None elsewhere.
        value_scale: [B, H, D]. value_rest: [B, H, D], the mean over tokens of what rounding took from values.
        counts: int32 [B], keys of each sample; None if there are `keys` of each.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    query_mean: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor | None
    value_scale: torch.Tensor | None
    value_rest: torch.Tensor | None
    counts: torch.Tensor | None
    keys: int


@triton.jit
def _rows(x, bh, H, tokens, stop, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tokens of a head [N, BLOCK_D], zero from `stop` on."""
    return load_rows(head_of(x, bh // H, bh % H), x.stride_s, tokens, tokens < stop, D, BLOCK_D, True)


@triton.jit
def _hadamard(size: tl.constexpr, dtype: tl.constexpr):
    """√size · `reference.hadamard(size)`."""
    bits = tl.arange(0, size)[:, None] & tl.arange(0, size)[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return tl.where((bits & 1) == 0, 1.0, -1.0).to(dtype)


@triton.jit
def _rotated(x, turn, PRECISION: tl.constexpr):
    """Rows of x as `reference.rotated` turns them, in float32."""
    size: tl.constexpr = turn.shape[0]
    parts = x.reshape([x.shape[0] * (x.shape[1] // size), size])
    return (tl.dot(parts, turn, input_precision=PRECISION) * (size**-0.5)).reshape(x.shape)


@triton.jit
def key_of_place(place):
    """The key whose value lies at a place: a thread of the kernel for Hopper has its weights in this order."""
    return place // 16 * 16 + place % 16 // 4 * 2 + place // 2 % 2 * 8 + place % 2


@triton.jit
def _keys_of(counts_ptr, b, Sk):
    keys = Sk
    if counts_ptr is not None:
        keys = tl.load(counts_ptr + b)
    return keys


@triton.jit(do_not_specialize=["H", "Sk"])
def _statistics_kernel(
    key, value, counts_ptr, part_ptr, H, Sk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """part [B·H, chunks, 2, BLOCK_D]: the sum of the keys of a chunk, and the largest |value| of each channel."""
    bh = tl.program_id(0).to(tl.int64)
    keys = _keys_of(counts_ptr, bh // H, Sk)
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    largest = tl.zeros([BLOCK_D], tl.float32)
    for i in range(CHUNK // ROWS):
        tokens = tl.program_id(1) * CHUNK + i * ROWS + tl.arange(0, ROWS)
        total += tl.sum(_rows(key, bh, H, tokens, keys, D, BLOCK_D).to(tl.float32), 0)
        if value is not None:
            v = _rows(value, bh, H, tokens, keys, D, BLOCK_D)
            largest = tl.maximum(largest, tl.max(tl.abs(v), 0).to(tl.float32))
    part_ptr += (bh * tl.num_programs(1) + tl.program_id(1)) * 2 * BLOCK_D + dims
    tl.store(part_ptr, total)
    tl.store(part_ptr + BLOCK_D, largest)


@triton.jit(do_not_specialize=["parts", "H", "Sk"])
def _finish_kernel(
    part_ptr, counts_ptr, mean_ptr, largest_ptr, parts, H, Sk, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Reduce part [B·H, parts, COLUMNS, BLOCK_D]: the mean over keys of the first column, the maximum of the second.

    With ROTATED the mean is [2, B·H, BLOCK_D]: the second is rotated.
    """
    bh = tl.program_id(0).to(tl.int64)
    keys = _keys_of(counts_ptr, bh // H, Sk)
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    largest = tl.zeros([BLOCK_D], tl.float32)
    part_ptr += bh * parts * COLUMNS * BLOCK_D
    for first in range(0, parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows[:, None] * (COLUMNS * BLOCK_D) + dims[None, :]
        inside = (rows < parts)[:, None]
        total += tl.sum(tl.load(part_ptr + at, mask=inside, other=0.0), 0)
        if largest_ptr is not None:
            found = tl.load(part_ptr + at + BLOCK_D, mask=inside, other=0.0)
            largest = tl.maximum(largest, tl.max(found, 0))
    mean = total / tl.maximum(keys, 1)
    tl.store(mean_ptr + bh * BLOCK_D + dims, mean)
    if ROTATED > 0:
        size: tl.constexpr = BLOCK_D if BLOCK_D < ROTATED else ROTATED
        turned = tl.sum(mean.reshape([BLOCK_D // size, size, 1]) * _hadamard(size, tl.float32)[None, :, :], 1)
        turned = turned.reshape([BLOCK_D]) * (size**-0.5)
        tl.store(mean_ptr + (tl.num_programs(0) + bh) * BLOCK_D + dims, turned)
    if largest_ptr is not None:
        tl.store(largest_ptr + bh * BLOCK_D + dims, largest)


@triton.jit(do_not_specialize=["H", "Sq", "Sk", "padded"])
def _quantise_kernel(
    query, key, value, counts_ptr, mean_ptr, largest_ptr, q8_ptr, q_scale_ptr, q_mean_ptr, k8_ptr, k_scale_ptr,
    v8_ptr, v_scale_ptr, rest_ptr, H, Sq, Sk, padded, log2_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of N queries (program 0 of axis 2), of keys (1) or of values (2), which get other places inside of 16."""
    tile = tl.program_id(1)
    bh = tl.program_id(0).to(tl.int64)
    what = tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)
    keys = _keys_of(counts_ptr, bh // H, Sk)
    mean = tl.load(mean_ptr + bh * BLOCK_D + dims)
    turn = _hadamard(BLOCK_D if BLOCK_D < ROTATED else ROTATED, query.ptr.dtype.element_ty)
    if what == 0:
        for first in range(tile * N, min(tile * N + N, Sq), ROWS):
            tokens = first + tl.arange(0, ROWS)
            q = _rows(query, bh, H, tokens, Sq, D, BLOCK_D)
            rows = bh * Sq + tokens
            inside = tokens < Sq
            q_mean = tl.sum(q.to(tl.float32) * mean[None, :], 1) * log2_scale
            tl.store(q_mean_ptr + rows, q_mean, mask=inside)
            q = _rotated(q, turn, PRECISION)
            # A maximum leaves out NaN, which is to show.
            q_scale = tl.maximum(tl.max(tl.abs(q), 1), 1e-20) / 127.0 + 0.0 * q_mean
            tl.store(q_scale_ptr + rows, q_scale * log2_scale, mask=inside)
            q8 = nearest_int8(q * (1.0 / q_scale)[:, None])
            tl.store(q8_ptr + rows[:, None] * BLOCK_D + dims[None, :], q8, mask=inside[:, None])
    elif tile * N < padded:
        if what == 1:
            mean = tl.load(mean_ptr + (tl.num_programs(0) + bh) * BLOCK_D + dims)
            largest = 0.0
            for i in range(N // ROWS):
                tokens = tile * N + i * ROWS + tl.arange(0, ROWS)
                k = _rotated(_rows(key, bh, H, tokens, keys, D, BLOCK_D), turn, PRECISION) - mean[None, :]
                # Not of every row first, which Triton 3.7 cannot compile for sm_100.
                largest = tl.maximum(largest, tl.max(tl.where((tokens < keys)[:, None], tl.abs(k), 0.0)))
            k_scale = tl.maximum(largest, 1e-20) / 127.0 + 0.0 * tl.sum(mean, 0)
            tl.store(k_scale_ptr + bh * (padded // N) + tile, k_scale)
            for i in range(N // ROWS):
                tokens = tile * N + i * ROWS + tl.arange(0, ROWS)
                k = _rotated(_rows(key, bh, H, tokens, keys, D, BLOCK_D), turn, PRECISION) - mean[None, :]
                k8 = tl.where((tokens < keys)[:, None], nearest_int8(k * (1.0 / k_scale)), 0)
                tl.store(k8_ptr + (bh * padded + tokens)[:, None] * BLOCK_D + dims[None, :], k8)
        elif value is not None:
            v_scale = tl.maximum(tl.load(largest_ptr + bh * BLOCK_D + dims), 1e-20) / 448.0
            inverse = 1.0 / v_scale
            rest = tl.zeros([BLOCK_D], tl.float32)
            for i in range(N // ROWS):
                place = tile * N + i * ROWS + tl.arange(0, ROWS)
                tokens = key_of_place(place)
                v = _rows(value, bh, H, tokens, keys, D, BLOCK_D).to(tl.float32) * inverse[None, :]
                v8 = v.to(tl.float8e4nv)
                rest += tl.sum(v - v8.to(tl.float32), 0)
                tl.store(v8_ptr + (bh * BLOCK_D + dims)[None, :] * padded + place[:, None], v8)
            tl.store(rest_ptr + (bh * (padded // N) + tile) * BLOCK_D + dims, rest * v_scale)
            if tile == 0:
                tl.store(v_scale_ptr + bh * BLOCK_D + dims, v_scale)


def quantise(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    scale: float,
    values: bool,
) -> Quantised:
    """Bytes of query [B, Sq, H, D], key [B, Sk, H, D] and, with `values`, of value [B, Sk, H, D]."""
    B, Sq, H, D = query.shape
    Sk, N, BLOCK_D = key.shape[1], SCALE_BLOCK, block_dim(D)
    blocks, chunks = triton.cdiv(Sk, N), triton.cdiv(Sk, _CHUNK)
    padded = blocks * N

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query.new_empty(B, H, *shape, dtype=dtype)

    part, largest = new(chunks, 2, BLOCK_D), new(BLOCK_D) if values else None
    mean = query.new_empty(2, B, H, BLOCK_D, dtype=torch.float32)
    q8, k8 = new(Sq, BLOCK_D, dtype=torch.int8), new(padded, BLOCK_D, dtype=torch.int8)
    q_scale, q_mean, k_scale = new(Sq), new(Sq), new(blocks)
    v8 = v_scale = rests = rest = None
    if values:
        v8, v_scale = new(BLOCK_D, padded, dtype=torch.float8_e4m3fn), new(BLOCK_D)
        rests, rest = new(blocks, BLOCK_D), new(BLOCK_D)
    q, k, v = strided(query), strided(key), strided(value if values else None)
    sizes = {"D": D, "BLOCK_D": BLOCK_D}
    # Wide heads get fewer tokens at a time, which fit any chip.
    rows = min(_ROWS, 2**14 // (BLOCK_D * query.itemsize))
    launcher(_statistics_kernel, (B * H, chunks))(
        k, v, counts, part, H, Sk, CHUNK=_CHUNK, ROWS=_ROWS, num_warps=4, **sizes
    )
    finish = {"BLOCK_D": BLOCK_D, "ROWS": min(256, 2**15 // BLOCK_D), "num_warps": 8}
    launcher(_finish_kernel, (B * H,))(part, counts, mean, largest, chunks, H, Sk, COLUMNS=2, ROTATED=ROTATED, **finish)
    # For wide heads, prefetching loads takes too much room for the time that it saves.
    launcher(_quantise_kernel, (B * H, max(blocks, triton.cdiv(Sq, N)), 2 + values))(
        q, k, v, counts, mean, largest, q8, q_scale, q_mean, k8, k_scale, v8, v_scale, rests, H, Sq, Sk, padded,
        scale * LOG2_E, N=N, ROWS=rows, ROTATED=ROTATED, PRECISION="tf32x3", num_warps=4,
        num_stages=3 if BLOCK_D <= 64 else 1, **sizes,
    )  # fmt: skip
    if values:
        launcher(_finish_kernel, (B * H,))(rests, counts, rest, None, blocks, H, Sk, COLUMNS=1, ROTATED=0, **finish)
    return Quantised(q8, q_scale, q_mean, k8, k_scale, v8, v_scale, rest, counts, Sk)


@replayed
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq])."""
    key, value, counts = attended_first(key, value, key_mask)
    on_hopper = hopper_enabled("int8", query.device, query.dtype) and value.shape[3] == query.shape[3] in HOPPER_DIMS
    bytes_of = quantise(query, key, value, counts, scale=scale, values=on_hopper)
    if on_hopper:
        from vmonarch.kernels.hopper.int8 import attend

        out, lse = new_results(query, key, value)
        attend(bytes_of, out, lse)
        return out, lse
    q8, k8, *scales = (
        x.transpose(1, 2) for x in (bytes_of.query, bytes_of.key, bytes_of.query_scale, bytes_of.key_scale)
    )
    there = None if counts is None else torch.arange(key.shape[1], device=key.device) < counts[:, None]
    bias = Bias(key_mask=there, programs=0, scales=(scales[0], scales[1]))
    out = query.new_empty(*query.shape[:3], value.shape[3])
    # The scales make logits in units of log 2.
    _, lse, _ = flash_forward(
        q8, k8[:, : key.shape[1]], value, all_pairs(query.shape[1], key.shape[1]), scale=1 / LOG2_E, entropy=False,
        out=out, splits=1, bias=bias,
    )  # fmt: skip
    return out, lse.add_(bytes_of.query_mean, alpha=1 / LOG2_E)


_operator = operator(
    "vmonarch::int8", _forward, None, "Tensor query, Tensor key, Tensor value, Tensor? key_mask, float scale"
)


def int8_attention_triton(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the kernels; arguments as in `int8_attention`, already checked."""
    query, scale = positively_scaled(query, scale)
    return _operator(query, key, value, key_mask, scale)
