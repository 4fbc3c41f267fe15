"""Exact attention with int8 scores and fp8 (e4m3) weights and values, on Hopper; `kernels/int8/op.py` makes its bytes.

Two blocks of N keys at a time share a maximum and a promotion: S = Q·Kᵀ in int32, P in e4m3, T = P·V by tensor cores,
which add fp8 products with about 14 bits; so every pair begins a T of its own, and O = O·α + T in float32.

A weight 2^x is not computed but written down: the e4m3 byte of 2^x is round(8·(x + 7)), with the mantissa by a straight
line. It is up to 6 % too large, in P·V and in the sum of weights (P·1 by the tensor cores) alike. Weights are relative
to the maximum of their own pair of blocks, which is byte 126: 448 for 2^8.75.

Legend: M query rows of a program, two warpgroups of 64; N keys of a block; D head dim, 64 or 128.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.tiles import strided
from vmonarch.kernels.hopper.attend import BLOCK_M, HALF, allocate_barriers, head_of
from vmonarch.kernels.hopper.gluon import async_load
from vmonarch.kernels.int8 import op

# Keys of a block; a pair of blocks has one scale.
BLOCK_N = 128
# By head dimension: pairs of blocks in shared memory, and registers of a thread that consumes.
_STAGES, _REGISTERS = {64: 4, 128: 3}, {64: 240, 128: 216}
_HALF, _N = gl.constexpr(HALF), gl.constexpr(BLOCK_N)
# The reference of weights is at most so far below the running maximum (in units of log 2), which keeps O finite.
_DEEPEST = gl.constexpr(40.0)
# log2 of the largest weight, and of how much too large weights are in the mean: ∫ (1 + f)·2^-f over f in [0, 1).
_LARGEST, _EXCESS = gl.constexpr(8.75), gl.constexpr(0.057534)

key_of_place = gluon.jit(op.key_of_place.fn)


@gluon.constexpr_function
def _accumulator(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.constexpr_function
def _bytes_layout(columns):
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns), element_bitwidth=8, rank=2)


@gluon.jit
def _keys_of(counts_ptr, Sk, H):
    """How many keys this program's sample has, and the pairs of blocks that they take, at least one."""
    keys = Sk
    if counts_ptr is not None:
        keys = gl.load(counts_ptr + gl.program_id(1) // H)
    return keys, gl.maximum((keys + 2 * _N - 1) // (2 * _N), 1)


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, full, empty, counts_ptr, H, Sq, Sk, padded,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer: stage u has the keys of pair u and the values of pair u - 1; the last keys, perhaps few, come first."""
    bh = gl.program_id(1)
    _, pairs = _keys_of(counts_ptr, Sk, H)
    row = bh * Sq + gl.program_id(0) * (2 * _HALF)
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    for half in gl.static_range(2):
        async_load(q_desc, [row + half * _HALF, 0], q_full, q_bufs.index(half))
    for u in range(pairs + 1):
        stage = u % STAGES
        barrier = full.index(stage)
        mbarrier.wait(empty.index(stage), (u // STAGES & 1) ^ 1)
        has_k = u < pairs
        has_v = u > 0
        mbarrier.expect(barrier, 2 * k_desc.block_type.nbytes, pred=u == 0)
        mbarrier.expect(barrier, 2 * v_desc.block_type.nbytes, pred=u == pairs)
        mbarrier.expect(barrier, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes), pred=has_k & has_v)
        keys = gl.where(u == 0, pairs - 1, u - 1) * (2 * _N)
        values = gl.where(u == 1, pairs - 1, u - 2) * (2 * _N)
        for i in gl.static_range(2):
            async_load(k_desc, [bh * padded + keys + i * _N, 0], barrier, k_bufs.index(2 * stage + i), pred=has_k)
        for i in gl.static_range(2):
            async_load(v_desc, [bh * D, values + i * _N], barrier, v_bufs.index(2 * stage + i), pred=has_v)


@gluon.jit
def _scores(q, k_bufs, stage):
    """q·kᵀ of a pair of blocks, [64, N] each, begun."""
    zeros = gl.zeros([_HALF, _N], gl.int32, _accumulator(_N))
    s0 = warpgroup_mma(q, k_bufs.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s1 = warpgroup_mma(q, k_bufs.index(2 * stage + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return s0, s1


@gluon.jit
def _weights(s, slope, offset, D: gl.constexpr):
    """The e4m3 bytes round(s·slope + offset) [64, N], as the left side of a product.

    Values are stored in the order in which a thread has these (`key_of_place`): no number moves to another thread.
    """
    p = s.to(gl.float32) * slope[:, None] + offset[:, None]
    p = p.reshape([_HALF, _N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([_HALF, _N])
    # First the layout: in it, and not before, four registers that follow each other are four keys of a row.
    p = gl.convert_layout(p, gl.DotOperandLayout(0, _accumulator(D), k_width=4), assert_trivial=True)
    return gl.inline_asm_elementwise(
        "{ .reg .s32 a, b, c, d, t; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; cvt.rni.s32.f32 c, $3;"
        " cvt.rni.s32.f32 d, $4; cvt.pack.sat.u8.s32.b32 t, d, c, 0; cvt.pack.sat.u8.s32.b32 $0, b, a, t; }",
        "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _softmax(s0, s1, reference, row_max, scale, D: gl.constexpr):
    """Weights of a pair of blocks, α, what they are relative to, and the running maximum (all in units of log 2)."""
    best = gl.maximum(gl.max(s0, 1), gl.max(s1, 1)).to(gl.float32) * scale
    row_max = gl.maximum(row_max, best)
    new_reference = gl.maximum(best, row_max - _DEEPEST)
    alpha = gl.exp2(reference - new_reference)
    slope = 8.0 * scale
    offset = 8.0 * (_LARGEST + 7.0 - new_reference)
    return _weights(s0, slope, offset, D), _weights(s1, slope, offset, D), alpha, new_reference, row_max


@gluon.jit
def _sum(p0, p1, v_bufs, ones, stage, which, acc, row_sum, alpha):
    """O·α + P·V, and the same of the sum of weights: P·1, with 0 in place of 1 for keys that are not there."""
    D: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    narrow: gl.constexpr = row_sum.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, narrow, k_width=4)
    t = gl.zeros([_HALF, D], gl.float32, layout)
    t = warpgroup_mma(p0, v_bufs.index(2 * stage).permute((1, 0)), t, use_acc=False, is_async=True)
    t = warpgroup_mma(p1, v_bufs.index(2 * stage + 1).permute((1, 0)), t, is_async=True)
    r = gl.zeros([_HALF, 8], gl.float32, narrow)
    q0 = gl.convert_layout(p0, operand, assert_trivial=True)
    q1 = gl.convert_layout(p1, operand, assert_trivial=True)
    r = warpgroup_mma(q0, ones.index(2 * which).permute((1, 0)), r, use_acc=False, is_async=True)
    r = warpgroup_mma(q1, ones.index(2 * which + 1).permute((1, 0)), r, is_async=True)
    t, r = warpgroup_mma_wait(0, [t, r])
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, narrow))[:, None] + r
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None] + t, row_sum


@gluon.jit
def _attend(
    half: gl.constexpr, q_bufs, k_bufs, v_bufs, ones, q_full, full, empty, turn, q_scale_ptr, q_mean_ptr, k_scale_ptr,
    v_scale_ptr, v_rest_ptr, output, lse_ptr, counts_ptr, H, Sq, Sk, padded,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: one warpgroup of 64 rows. While one has the tensor cores, the other has its softmax."""
    layout: gl.constexpr = _accumulator(D)
    stats: gl.constexpr = gl.SliceLayout(1, _accumulator(_N))
    bh = gl.program_id(1)
    _, pairs = _keys_of(counts_ptr, Sk, H)
    row = gl.program_id(0) * (2 * _HALF) + half * _HALF
    stat_rows = row + gl.arange(0, _HALF, stats)
    k_scale_ptr += bh * (padded // (2 * _N))
    q_scale = gl.load(q_scale_ptr + bh * Sq + stat_rows, mask=stat_rows < Sq, other=0.0)
    acc = gl.zeros([_HALF, D], gl.float32, layout)
    row_sum = gl.zeros([_HALF, 8], gl.float32, _accumulator(8))
    row_max = gl.full([_HALF], -float("inf"), gl.float32, stats)
    reference = row_max
    mbarrier.wait(q_full, 0)
    q = q_bufs.index(half)
    mbarrier.wait(full.index(0), 0)
    k_scale = gl.load(k_scale_ptr + pairs - 1)
    s0, s1 = _scores(q, k_bufs, 0)
    s0, s1 = warpgroup_mma_wait(0, [s0, s1])
    mbarrier.arrive(empty.index(0))
    for u in range(1, pairs):
        stage = u % STAGES
        p0, p1, alpha, reference, row_max = _softmax(s0, s1, reference, row_max, q_scale * k_scale, D)
        k_scale = gl.load(k_scale_ptr + u - 1)
        mbarrier.wait(full.index(stage), u // STAGES & 1)
        mbarrier.wait(turn.index(half), (u - 1 & 1) ^ (1 - half))
        acc, row_sum = _sum(p0, p1, v_bufs, ones, stage, gl.where(u == 1, 0, 1), acc, row_sum, alpha)
        s0, s1 = _scores(q, k_bufs, stage)
        # The other's products begin when these are done, not when this warpgroup has seen that they are.
        mbarrier.arrive(turn.index(1 - half))
        s0, s1 = warpgroup_mma_wait(0, [s0, s1])
        mbarrier.arrive(empty.index(stage))
    stage = pairs % STAGES
    p0, p1, alpha, reference, row_max = _softmax(s0, s1, reference, row_max, q_scale * k_scale, D)
    mbarrier.wait(full.index(stage), pairs // STAGES & 1)
    acc, row_sum = _sum(p0, p1, v_bufs, ones, stage, gl.where(pairs == 1, 0, 1), acc, row_sum, alpha)
    # The eight columns are alike.
    sums = gl.max(row_sum, 1)
    no_keys = sums == 0
    safe_sums = gl.where(no_keys, 1.0, sums)

    rows = row + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    v_scale = gl.load(v_scale_ptr + bh * D + columns)
    v_rest = gl.load(v_rest_ptr + bh * D + columns)
    inverse = gl.convert_layout(1.0 / safe_sums, gl.SliceLayout(1, layout))
    out = acc * inverse[:, None] * v_scale[None, :] + v_rest[None, :]
    out_ptr = head_of(output, bh // H, bh % H)
    at = rows.to(gl.int64)[:, None] * output.stride_s + columns[None, :]
    gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(rows < Sq)[:, None])
    if lse_ptr is not None:
        # What the mean of the keys, which scores lack, adds to all logits of a row.
        q_mean = gl.load(q_mean_ptr + bh * Sq + stat_rows, mask=stat_rows < Sq, other=0.0)
        log2_sums = gl.convert_layout(gl.log2(safe_sums), stats)
        lse = (reference + log2_sums - (_LARGEST + _EXCESS) + q_mean) * 0.6931471805599453
        lse = gl.where(gl.convert_layout(no_keys, stats), -float("inf"), lse)
        gl.store(lse_ptr + bh.to(gl.int64) * Sq + stat_rows, lse, mask=stat_rows < Sq)


@gluon.jit(do_not_specialize=["H", "Sq", "Sk", "padded"])
def _hopper_int8_kernel(
    q_desc, k_desc, v_desc, q_scale_ptr, q_mean_ptr, k_scale_ptr, v_scale_ptr, v_rest_ptr, output, lse_ptr, counts_ptr,
    H, Sq, Sk, padded, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """A program for 128 rows of a head."""
    q_bufs = gl.allocate_shared_memory(gl.int8, [2, _HALF, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(gl.int8, [2 * STAGES, _N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, D, _N], v_desc.layout)
    # Ones for the last pair of blocks, with zeros for keys that are not there, and for all others.
    ones = gl.allocate_shared_memory(gl.float8e4nv, [4, 8, _N], _bytes_layout(_N))
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    keys, pairs = _keys_of(counts_ptr, Sk, H)
    place = gl.arange(0, _N, gl.SliceLayout(0, blocked))
    key = key_of_place(place)
    for i in gl.static_range(4):
        left = keys - ((pairs - 1) * (2 * _N) + i * _N) if i < 2 else _N
        one = gl.where(key < left, 1.0, 0.0)[None, :] + gl.zeros([8, _N], gl.float32, blocked)
        ones.index(i).store(one.to(gl.float8e4nv))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    full, empty = allocate_barriers(STAGES)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                half, q_bufs, k_bufs, v_bufs, ones, q_full, full, empty, turn, q_scale_ptr, q_mean_ptr, k_scale_ptr,
                v_scale_ptr, v_rest_ptr, output, lse_ptr, counts_ptr, H, Sq, Sk, padded, D, STAGES,
            )) if half is not None else (_load, (
                q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, full, empty, counts_ptr, H, Sq, Sk, padded,
                D, STAGES,
            ))
            for half in (0, 1, None)
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def _descriptor(rows: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    return TensorDescriptor(rows, [*rows.shape], [*rows.stride()], tile, _bytes_layout.fn(tile[1]))


def attend(quantised: op.Quantised, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Attend in eight bits; arguments are not checked.

    Args:
        quantised: with values.
        out: [B, Sq, H, D], any strides but the last. lse: [B, H, Sq] or None.
    """
    assert quantised.value is not None
    B, Sq, H, D = out.shape
    padded = quantised.key.shape[2]
    launcher(_hopper_int8_kernel, (-(-Sq // BLOCK_M), B * H))(
        _descriptor(quantised.query.view(-1, D), [HALF, D]),
        _descriptor(quantised.key.view(-1, D), [BLOCK_N, D]),
        _descriptor(quantised.value.view(-1, padded), [D, BLOCK_N]),
        quantised.query_scale, quantised.query_mean, quantised.key_scale, quantised.value_scale, quantised.value_rest,
        strided(out), lse, quantised.counts, H, Sq, quantised.keys, padded, D=D, STAGES=_STAGES[D],
        REGISTERS=_REGISTERS[D], num_warps=4, maxnreg=168,
    )  # fmt: skip
