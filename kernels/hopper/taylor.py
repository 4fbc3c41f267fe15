"""Linear attention with the Taylor map on Hopper (`kernels/taylor/kernels.py` is the portable form), for d' up to 16.

A tile of tokens x̂ becomes features x̂⊗x̂ in shared memory, from where the tensor cores take them: with values into sums,
or with sums into outputs. Of the 16×16 pairs, those of the first half with all [64, 8·16] and of the second half with
itself [64, 8·8] are enough; those of the first with the second half count twice. Orders 0 and 1 are the products of
x₁ = [x̂ | 1 | 0 …] [64, 32]: of a state,
    Σ x₁ v is s₁ (and s₀ in row 16),    Σ c·x₁ x₁ᵀ is Z: z₂, z₁ in row 16 and z₀ in its corner.
Units are those of the portable form.
Several programs share a processor, so that one builds features while another multiplies.

Legend: B batch, S tokens, H heads, d' dims, E value dim, F = 1 + d' + d'² rows of a state; N = 64 tokens of a tile.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.tiles import strided
from vmonarch.kernels.hopper.attend import HALF, accumulator_layout, head_of, rows_descriptor, shared_layout
from vmonarch.kernels.hopper.gluon import async_load, reinterpret
from vmonarch.kernels.taylor import kernels as portable

# What the kernels take, and the place of the 1 in x₁.
MAX_DIM = 16
TILE = HALF

_DIM = gl.constexpr(MAX_DIM)
_HALF_DIM = gl.constexpr(MAX_DIM // 2)
_PAIRS = gl.constexpr(MAX_DIM**2)
_LOW = gl.constexpr(MAX_DIM * MAX_DIM // 2)
_HIGH = gl.constexpr(MAX_DIM * MAX_DIM // 4)
_ONE = gl.constexpr(2 * MAX_DIM)
# Tiles of values in shared memory.
_STAGES = gl.constexpr(3)
_TILE = gl.constexpr(TILE)

_inverse = gluon.jit(portable._inverse.fn)
_own_tiles = gluon.jit(portable._own_tiles.fn)
_unit_for = gluon.jit(portable._unit_for.fn)


@gluon.constexpr_function
def _pairs_layout(columns):
    """Registers of pairs [64, 8, 16 or 8]: a thread has eight second dims of a token."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 4 * lanes, 8], [16, 2 // lanes, lanes], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _rows_layout(columns):
    """Registers of a tile of rows on its way from or to memory, eight columns a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _load_tokens(
    ptr, stride, first, stop, D: gl.constexpr, FIRST_DIM: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):
    """Raw x [64, COLUMNS] of the dims from FIRST_DIM on in a layout, 0 where there is none."""
    n = first + gl.arange(0, _TILE, gl.SliceLayout(1, layout))
    i = FIRST_DIM + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    inside = (n < stop)[:, None] & (i < D)[None, :]
    return gl.load(ptr + n.to(gl.int64)[:, None] * stride + i[None, :], mask=inside, other=0.0)


@gluon.jit
def _largest(x):
    return gl.max(gl.max(gl.abs(x), 1), 0)


@gluon.jit
def _unit_of(largest, dtype: gl.constexpr):
    """The unit of numbers up to `largest`, as in the portable form."""
    if dtype == gl.float16:
        return _unit_for(largest) * (1.0 / 4096)
    else:
        return 1.0


@gluon.jit
def _units_of_queries(weight_ptr, c_ptr, start, stop, least_weight, dtype: gl.constexpr):
    """Units of 1 / weight and of c of the tokens from `start` to `stop`, as in the portable form."""
    if dtype == gl.float16:
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        block: gl.constexpr = 512
        of_inverse = gl.zeros([block], gl.float32, layout)
        of_c = gl.zeros([block], gl.float32, layout)
        for first in range(start, stop, block):
            n = first + gl.arange(0, block, layout)
            of_inverse = gl.maximum(of_inverse, gl.abs(_load_inverse(weight_ptr, n, stop, least_weight)))
            of_c = gl.maximum(of_c, gl.abs(gl.load(c_ptr + n, mask=n < stop, other=0.0)))
        return _unit_for(gl.max(of_inverse, 0)), _unit_for(gl.max(of_c, 0))
    else:
        return 1.0, 1.0


@gluon.jit
def _load_inverse(weight_ptr, n, stop, least_weight):
    """1 / weight of tokens n, 0 where there is none."""
    return _inverse(gl.load(weight_ptr + n, mask=n < stop, other=0.0), least_weight)


@gluon.jit
def _load_shares(weight_ptr, first, stop, factor, least_weight, layout: gl.constexpr):
    """factor / weight of the tokens of a tile, as a column [64, 1] for a layout of rows."""
    n = first + gl.arange(0, _TILE, gl.SliceLayout(1, layout))
    return (_load_inverse(weight_ptr, n, stop, least_weight) * factor)[:, None]


@gluon.jit
def _load_factors(ptr, stride, first, stop, D: gl.constexpr):
    """Raw x of a tile as the two sets of pairs take it: (first half, all), (second half, second half)."""
    low: gl.constexpr = _pairs_layout(_DIM)
    high: gl.constexpr = _pairs_layout(_HALF_DIM)
    return (
        _load_tokens(ptr, stride, first, stop, D, 0, _HALF_DIM, gl.SliceLayout(2, low)),
        _load_tokens(ptr, stride, first, stop, D, 0, _DIM, gl.SliceLayout(1, low)),
        _load_tokens(ptr, stride, first, stop, D, _HALF_DIM, _HALF_DIM, gl.SliceLayout(2, high)),
        _load_tokens(ptr, stride, first, stop, D, _HALF_DIM, _HALF_DIM, gl.SliceLayout(1, high)),
    )


@gluon.jit
def _with_one(x, first, stop, root_scale):
    """x₁ [64, COLUMNS] in float32 of raw x [64, COLUMNS]; the 1 only where there is a token."""
    layout: gl.constexpr = x.type.layout
    n = first + gl.arange(0, _TILE, gl.SliceLayout(1, layout))
    i = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    one = ((n < stop)[:, None] & (i == _DIM)[None, :]).to(gl.float32)
    return x.to(gl.float32) * root_scale + one


@gluon.jit
def _product(xa, xb, root_scale, dtype: gl.constexpr):
    """x̂a⊗x̂b [64, A·B] of raw factors [64, A] and [64, B]."""
    pairs = gl.expand_dims(xa.to(gl.float32) * root_scale, 2) * gl.expand_dims(xb.to(gl.float32) * root_scale, 1)
    return pairs.to(dtype).reshape([_TILE, xa.shape[1] * xb.shape[1]])


@gluon.jit
def _pairs(factors, root_scale, dtype: gl.constexpr):
    """The two sets of pairs, [64, 128] and [64, 64]."""
    return (
        _product(factors[0], factors[1], root_scale, dtype),
        _product(factors[2], factors[3], root_scale, dtype),
    )


@gluon.jit
def _place_in_z(i, j, D: gl.constexpr):
    """Which of the sums of c stands in row i and column j of Z, and whether one does."""
    at = gl.where(i == _DIM, gl.where(j == _DIM, 0, 1 + j), 1 + D + i * D + j)
    return at, ((i < D) & (j < D)) | ((i == _DIM) & ((j < D) | (j == _DIM)))


@gluon.jit
def _load_z(z_ptr, D: gl.constexpr, layout: gl.constexpr, factor: gl.constexpr):
    """Z [32, 32], order 2 times a factor."""
    i = gl.arange(0, _ONE, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, _ONE, gl.SliceLayout(0, layout))[None, :]
    at, inside = _place_in_z(i, j, D)
    return gl.load(z_ptr + at, mask=inside, other=0.0) * gl.where(i < D, factor, 1.0)


@gluon.jit
def _load_low_orders(s_ptr, first_e, D: gl.constexpr, E: gl.constexpr, layout: gl.constexpr):
    """Sums of orders 1 and, in row 16, 0: [32, 64]."""
    i = gl.arange(0, _ONE, gl.SliceLayout(1, layout))[:, None]
    e = first_e + gl.arange(0, _TILE, gl.SliceLayout(0, layout))[None, :]
    inside = ((i < D) | (i == _DIM)) & (e < E)
    return gl.load(s_ptr + gl.where(i == _DIM, 0, 1 + i) * E + e, mask=inside, other=0.0)


@gluon.jit
def _load_pair_sums(
    s_ptr, first_e, D: gl.constexpr, E: gl.constexpr,
    FIRST_DIM: gl.constexpr, A: gl.constexpr, B: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sums of order 2 of the dims from FIRST_DIM on, A of them with B: [A·B, 64]."""
    pair = gl.arange(0, A * B, gl.SliceLayout(1, layout))[:, None]
    e = first_e + gl.arange(0, _TILE, gl.SliceLayout(0, layout))[None, :]
    a = FIRST_DIM + pair // B
    b = FIRST_DIM + pair % B
    inside = (a < D) & (b < D) & (e < E)
    return gl.load(s_ptr + (1 + D + a * D + b) * E + e, mask=inside, other=0.0)


@gluon.jit
def _store_pair_sums(s_ptr, x, first_e, D: gl.constexpr, E: gl.constexpr, FIRST_DIM: gl.constexpr, B: gl.constexpr):
    """Write transposed sums [64, A·B] of order 2, and what symmetry makes equal to them."""
    layout: gl.constexpr = accumulator_layout(x.shape[1])
    e = first_e + gl.arange(0, _TILE, gl.SliceLayout(1, layout))[:, None]
    pair = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    a = FIRST_DIM + pair // B
    b = FIRST_DIM + pair % B
    inside = (a < D) & (b < D) & (e < E)
    gl.store(s_ptr + (1 + D + a * D + b) * E + e, x, mask=inside)
    if B == _DIM:
        gl.store(s_ptr + (1 + D + b * D + a) * E + e, x, mask=inside & (b >= _HALF_DIM))


@gluon.jit
def _store_parts(buffers, x):
    """x in two parts of 16 bit: of sums over all tokens one would keep too little."""
    high = x.to(buffers.dtype)
    buffers.index(0).store(high)
    buffers.index(1).store((x - high.to(gl.float32)).to(buffers.dtype))


@gluon.jit
def _copy_values(desc, b, h, row, column, barrier, buffer):
    """Start the copy of a tile of values [64, 64]."""
    mbarrier.expect(barrier, desc.block_type.nbytes)
    tile: gl.constexpr = desc.block_type.shape
    place = reinterpret(buffer, desc.dtype, tile, desc.layout)
    async_load(desc, [b, h, row, column], barrier, place)


@gluon.jit(do_not_specialize=["H", "S", "chunks", "chunk"])
def _hopper_state_kernel(
    xs, v_desc, c_ptr, weight_ptr, s_ptr, z_ptr, H, S, chunks, chunk, root_scale, least_weight,
    D: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """The sums of one chunk for 64 columns of the values, transposed: [E, rows]; as the portable kernel."""
    dtype: gl.constexpr = v_desc.dtype
    one_layout: gl.constexpr = _rows_layout(_ONE)
    low_layout: gl.constexpr = gl.SliceLayout(2, _pairs_layout(_DIM))
    high_layout: gl.constexpr = gl.SliceLayout(2, _pairs_layout(_HALF_DIM))
    column_tiles: gl.constexpr = (E + _TILE - 1) // _TILE
    pid = gl.program_id(0)
    first_e = pid % column_tiles * _TILE
    part = (pid // column_tiles).to(gl.int64)
    bh = part // chunks
    b = (bh // H).to(gl.int32)
    h = (bh % H).to(gl.int32)
    start = (part % chunks).to(gl.int32) * chunk
    stop = gl.minimum(start + chunk, S)
    x_ptr = head_of(xs, bh // H, bh % H)
    low_buf = gl.allocate_shared_memory(dtype, [_TILE, _LOW], shared_layout(_LOW))
    high_buf = gl.allocate_shared_memory(dtype, [_TILE, _HIGH], shared_layout(_HIGH))
    # x₁ twice: times c as the left side of a product, which has to have 64 rows, and over the weight as the right side.
    c_buf = gl.allocate_shared_memory(dtype, [_TILE, _TILE], shared_layout(_TILE))
    c_buf.store(gl.zeros([_TILE, _TILE], dtype, _rows_layout(_TILE)))
    x_buf = gl.allocate_shared_memory(dtype, [_TILE, _ONE], shared_layout(_ONE))
    v_bufs = gl.allocate_shared_memory(dtype, [_STAGES, _TILE, _TILE], shared_layout(_TILE))
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    s2_low = warpgroup_mma_init(gl.zeros([_TILE, _LOW], gl.float32, accumulator_layout(_LOW)))
    s2_high = warpgroup_mma_init(gl.zeros([_TILE, _HIGH], gl.float32, accumulator_layout(_HIGH)))
    s1 = warpgroup_mma_init(gl.zeros([_TILE, _ONE], gl.float32, accumulator_layout(_ONE)))
    z = warpgroup_mma_init(gl.zeros([_TILE, _ONE], gl.float32, accumulator_layout(_ONE)))
    unit, c_unit = 1.0, 1.0
    if c_ptr is not None:
        c_ptr += bh * S
        weight_ptr += bh * S
        unit, c_unit = _units_of_queries(weight_ptr, c_ptr, start, stop, least_weight, dtype)
    factor = 1.0 / unit
    c_factor = 1.0 / c_unit
    tiles = (stop - start + _TILE - 1) // _TILE
    for i in gl.static_range(_STAGES - 1):
        if i < tiles:
            _copy_values(v_desc, b, h, start + i * _TILE, first_e, full.index(i), v_bufs.index(i))
    factors = _load_factors(x_ptr, xs.stride_s, start, stop, D)
    x = _load_tokens(x_ptr, xs.stride_s, start, stop, D, 0, _ONE, one_layout)
    for tile in range(tiles):
        first = start + tile * _TILE
        x1 = _with_one(x, first, stop, root_scale)
        shared = x1
        if c_ptr is not None:
            n = first + gl.arange(0, _TILE, gl.SliceLayout(1, one_layout))
            shared *= _load_shares(weight_ptr, first, stop, factor, least_weight, one_layout)
            x1 *= (gl.load(c_ptr + n, mask=n < stop, other=0.0) * c_factor)[:, None]
            factors = (
                factors[0] * _load_shares(weight_ptr, first, stop, factor, least_weight, low_layout),
                factors[1],
                factors[2] * _load_shares(weight_ptr, first, stop, factor, least_weight, high_layout),
                factors[3],
            )
        low, high = _pairs(factors, root_scale, dtype)
        # The products of the tile before read the places that are written now.
        s2_low, s2_high, s1, z = warpgroup_mma_wait(0, [s2_low, s2_high, s1, z])
        low_buf.store(low)
        high_buf.store(high)
        x_buf.store(shared.to(dtype))
        c_buf.slice(0, _ONE, 1).store(x1.to(dtype))
        fence_async_shared()
        ahead = tile + _STAGES - 1
        if ahead < tiles:
            stage = ahead % _STAGES
            _copy_values(v_desc, b, h, start + ahead * _TILE, first_e, full.index(stage), v_bufs.index(stage))
        stage = tile % _STAGES
        mbarrier.wait(full.index(stage), tile // _STAGES & 1)
        v = v_bufs.index(stage).permute((1, 0))
        s2_low = warpgroup_mma(v, low_buf, s2_low, is_async=True)
        s2_high = warpgroup_mma(v, high_buf, s2_high, is_async=True)
        s1 = warpgroup_mma(v, x_buf, s1, is_async=True)
        z = warpgroup_mma(c_buf.permute((1, 0)), x_buf, z, is_async=True)
        factors = _load_factors(x_ptr, xs.stride_s, first + _TILE, stop, D)
        x = _load_tokens(x_ptr, xs.stride_s, first + _TILE, stop, D, 0, _ONE, one_layout)
    s2_low, s2_high, s1, z = warpgroup_mma_wait(0, [s2_low, s2_high, s1, z])
    F: gl.constexpr = 1 + D + D * D
    s_ptr += part * F * E
    z_ptr += part * F
    _store_pair_sums(s_ptr, s2_low * unit, first_e, D, E, 0, _DIM)
    _store_pair_sums(s_ptr, s2_high * unit, first_e, D, E, _HALF_DIM, _HALF_DIM)
    one: gl.constexpr = accumulator_layout(_ONE)
    i = gl.arange(0, _TILE, gl.SliceLayout(1, one))[:, None]
    j = gl.arange(0, _ONE, gl.SliceLayout(0, one))[None, :]
    inside = (first_e + i < E) & ((j < D) | (j == _DIM))
    gl.store(s_ptr + first_e + i + gl.where(j == _DIM, 0, 1 + j) * E, s1 * unit, mask=inside)
    at, inside = _place_in_z(i, j, D)
    gl.store(z_ptr + at, z * (unit * c_unit), mask=inside & (first_e == 0))


@gluon.jit(do_not_specialize=["H", "S", "chunks", "chunk", "programs"])
def _hopper_read_kernel(
    xs, s_ptr, z_ptr, output, weight_ptr, H, S, chunks, chunk, programs, root_scale, least_weight,
    D: gl.constexpr, E: gl.constexpr, OWN: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """φ(x)·state for some tiles of a chunk and 64 columns; as the portable kernel."""
    dtype: gl.constexpr = xs.ptr.dtype.element_ty
    one_layout: gl.constexpr = _rows_layout(_ONE)
    out_layout: gl.constexpr = _rows_layout(_TILE)
    sums: gl.constexpr = accumulator_layout(_TILE)
    low: gl.constexpr = accumulator_layout(_ONE)
    column_tiles: gl.constexpr = (E + _TILE - 1) // _TILE
    pid = gl.program_id(0)
    first_e = pid % column_tiles * _TILE
    part, bh, start, stop, first_tile, last_tile = _own_tiles(pid // column_tiles, chunks, chunk, S, programs, _TILE)
    x_ptr = head_of(xs, bh // H, bh % H)
    out_ptr = head_of(output, bh // H, bh % H)
    F: gl.constexpr = 1 + D + D * D
    read = part if OWN else bh
    s_ptr += read * F * E
    z_ptr += read * F
    low_buf = gl.allocate_shared_memory(dtype, [_TILE, _LOW], shared_layout(_LOW))
    high_buf = gl.allocate_shared_memory(dtype, [_TILE, _HIGH], shared_layout(_HIGH))
    x_buf = gl.allocate_shared_memory(dtype, [_TILE, _ONE], shared_layout(_ONE))
    s2_low_buf = gl.allocate_shared_memory(dtype, [_LOW, _TILE], shared_layout(_TILE))
    s2_high_buf = gl.allocate_shared_memory(dtype, [_HIGH, _TILE], shared_layout(_TILE))
    s1_bufs = gl.allocate_shared_memory(dtype, [2, _ONE, _TILE], shared_layout(_TILE))
    z_bufs = gl.allocate_shared_memory(dtype, [2, _ONE, _ONE], shared_layout(_ONE))
    s2_low = _load_pair_sums(s_ptr, first_e, D, E, 0, _HALF_DIM, _DIM, out_layout)
    s2_high = _load_pair_sums(s_ptr, first_e, D, E, _HALF_DIM, _HALF_DIM, _HALF_DIM, out_layout)
    s1 = _load_low_orders(s_ptr, first_e, D, E, out_layout)
    unit = _unit_of(gl.maximum(gl.maximum(_largest(s2_low), _largest(s2_high)), _largest(s1)), dtype)
    inverse = 1.0 / unit
    twice = gl.arange(0, _LOW, gl.SliceLayout(1, out_layout)) % _DIM >= _HALF_DIM
    s2_low_buf.store((s2_low * (gl.where(twice, 1.0, 0.5) * inverse)[:, None]).to(dtype))
    s2_high_buf.store((s2_high * (0.5 * inverse)).to(dtype))
    _store_parts(s1_bufs, s1 * inverse)
    if NORMALISE:
        z = _load_z(z_ptr, D, one_layout, 0.5)
        z_unit = _unit_of(_largest(z), dtype)
        _store_parts(z_bufs, z / z_unit)
    first = start + first_tile * _TILE
    factors = _load_factors(x_ptr, xs.stride_s, first, stop, D)
    x1 = _with_one(_load_tokens(x_ptr, xs.stride_s, first, stop, D, 0, _ONE, one_layout), first, stop, root_scale)
    low_pairs, high_pairs = _pairs(factors, root_scale, dtype)
    factors = _load_factors(x_ptr, xs.stride_s, first + _TILE, stop, D)
    x = _load_tokens(x_ptr, xs.stride_s, first + _TILE, stop, D, 0, _ONE, one_layout)
    for tile in range(first_tile, last_tile):
        first = start + tile * _TILE
        low_buf.store(low_pairs)
        high_buf.store(high_pairs)
        x_buf.store(x1.to(dtype))
        fence_async_shared()
        acc = gl.zeros([_TILE, _TILE], gl.float32, sums)
        acc = warpgroup_mma(low_buf, s2_low_buf, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma(high_buf, s2_high_buf, acc, is_async=True)
        acc = warpgroup_mma(x_buf, s1_bufs.index(0), acc, is_async=True)
        acc = warpgroup_mma(x_buf, s1_bufs.index(1), acc, is_async=True)
        if NORMALISE:
            y = gl.zeros([_TILE, _ONE], gl.float32, low)
            y = warpgroup_mma(x_buf, z_bufs.index(0), y, use_acc=False, is_async=True)
            y = warpgroup_mma(x_buf, z_bufs.index(1), y, is_async=True)
        # The pairs of the next tile while this one is multiplied.
        x1 = _with_one(x, first + _TILE, stop, root_scale)
        low_pairs, high_pairs = _pairs(factors, root_scale, dtype)
        factors = _load_factors(x_ptr, xs.stride_s, first + 2 * _TILE, stop, D)
        x = _load_tokens(x_ptr, xs.stride_s, first + 2 * _TILE, stop, D, 0, _ONE, one_layout)
        if NORMALISE:
            acc, y = warpgroup_mma_wait(0, [acc, y])
            weight = gl.sum(y * x_buf.load(low).to(gl.float32), 1) * z_unit
            n = first + gl.arange(0, _TILE, gl.SliceLayout(1, low))
            gl.store(weight_ptr + bh * S + n, weight, mask=(n < stop) & (first_e == 0))
            share = _inverse(weight, least_weight) * unit
            acc *= gl.convert_layout(share, gl.SliceLayout(1, sums))[:, None]
        else:
            acc = warpgroup_mma_wait(0, [acc]) * unit
        out = gl.convert_layout(acc.to(dtype), out_layout)
        n = first + gl.arange(0, _TILE, gl.SliceLayout(1, out_layout))
        e = first_e + gl.arange(0, _TILE, gl.SliceLayout(0, out_layout))
        inside = (n < stop)[:, None] & (e < E)[None, :]
        gl.store(out_ptr + n.to(gl.int64)[:, None] * output.stride_s + e[None, :], out, mask=inside)


@gluon.jit(do_not_specialize=["H", "S", "chunks", "chunk", "programs"])
def _hopper_gradient_kernel(
    xs, g_desc, h_ptr, weight_ptr, s_ptr, z_ptr, dx_ptr, H, S, chunks, chunk, programs, root_scale, least_weight,
    D: gl.constexpr, E: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """dx for some tiles of a chunk; as the portable kernel, divided by the weight where there is one."""
    dtype: gl.constexpr = g_desc.dtype
    one_layout: gl.constexpr = _rows_layout(_ONE)
    out_layout: gl.constexpr = _rows_layout(_TILE)
    low: gl.constexpr = accumulator_layout(_ONE)
    high: gl.constexpr = accumulator_layout(_PAIRS)
    e_tiles: gl.constexpr = (E + _TILE - 1) // _TILE
    pid = gl.program_id(0)
    part = (pid // programs).to(gl.int64)
    bh = part // chunks
    b = (bh // H).to(gl.int32)
    head = (bh % H).to(gl.int32)
    start = (part % chunks).to(gl.int32) * chunk
    stop = gl.minimum(start + chunk, S)
    tiles = (stop - start + _TILE - 1) // _TILE
    first_tile = tiles * (pid % programs) // programs
    last_tile = tiles * (pid % programs + 1) // programs
    x_ptr = head_of(xs, bh // H, bh % H)
    F: gl.constexpr = 1 + D + D * D
    read = part if OWN else bh
    s_ptr += read * F * E
    z_ptr += read * F
    x_buf = gl.allocate_shared_memory(dtype, [_TILE, _ONE], shared_layout(_ONE))
    g_bufs = gl.allocate_shared_memory(dtype, [e_tiles, _TILE, _TILE], shared_layout(_TILE))
    s2_bufs = gl.allocate_shared_memory(dtype, [e_tiles, _PAIRS, _TILE], shared_layout(_TILE))
    s1_bufs = gl.allocate_shared_memory(dtype, [e_tiles, _ONE, _TILE], shared_layout(_TILE))
    z_bufs = gl.allocate_shared_memory(dtype, [2, _ONE, _ONE], shared_layout(_ONE))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    largest = 0.0
    if dtype == gl.float16:
        for i in gl.static_range(e_tiles):
            largest = gl.maximum(largest, _largest(_load_pair_sums(s_ptr, i * _TILE, D, E, 0, _DIM, _DIM, out_layout)))
            largest = gl.maximum(largest, _largest(_load_low_orders(s_ptr, i * _TILE, D, E, out_layout)))
    unit = _unit_of(largest, dtype)
    inverse = 1.0 / unit
    for i in gl.static_range(e_tiles):
        s2 = _load_pair_sums(s_ptr, i * _TILE, D, E, 0, _DIM, _DIM, out_layout)
        s2_bufs.index(i).store((s2 * inverse).to(dtype))
        s1_bufs.index(i).store((_load_low_orders(s_ptr, i * _TILE, D, E, out_layout) * inverse).to(dtype))
    z = _load_z(z_ptr, D, one_layout, 1.0)
    z_unit = _unit_of(_largest(z), dtype)
    _store_parts(z_bufs, z / z_unit)
    inverse *= z_unit
    fence_async_shared()
    for tile in range(first_tile, last_tile):
        first = start + tile * _TILE
        mbarrier.expect(full, e_tiles * g_desc.block_type.nbytes)
        block: gl.constexpr = g_desc.block_type.shape
        for i in gl.static_range(e_tiles):
            place = reinterpret(g_bufs.index(i), dtype, block, g_desc.layout)
            async_load(g_desc, [b, head, first, i * _TILE], full, place)
        x = _load_tokens(x_ptr, xs.stride_s, first, stop, D, 0, _ONE, one_layout)
        x_buf.store(_with_one(x, first, stop, root_scale).to(dtype))
        fence_async_shared()
        y = gl.zeros([_TILE, _ONE], gl.float32, low)
        y = warpgroup_mma(x_buf, z_bufs.index(0), y, use_acc=False, is_async=True)
        y = warpgroup_mma(x_buf, z_bufs.index(1), y, is_async=True)
        pairs = gl.zeros([_TILE, _PAIRS], gl.float32, high)
        mbarrier.wait(full, (tile - first_tile) & 1)
        for i in gl.static_range(e_tiles):
            pairs = warpgroup_mma(
                g_bufs.index(i), s2_bufs.index(i).permute((1, 0)), pairs, use_acc=i > 0, is_async=True
            )
        y = warpgroup_mma_wait(e_tiles, [y])
        n = first + gl.arange(0, _TILE, gl.SliceLayout(1, low))
        y *= inverse
        if h_ptr is not None:
            y *= gl.load(h_ptr + bh * S + n, mask=n < stop, other=0.0)[:, None]
        for i in gl.static_range(e_tiles):
            y = warpgroup_mma(g_bufs.index(i), s1_bufs.index(i).permute((1, 0)), y, is_async=True)
        y, pairs = warpgroup_mma_wait(0, [y, pairs])
        # d/dx_b of ½ Σ_ab x_a x_b T_ab, T symmetric, is Σ_a x_a T_ab.
        pairs = pairs.reshape([_TILE, _DIM, _DIM])
        xa = _load_tokens(x_ptr, xs.stride_s, first, stop, D, 0, _DIM, gl.SliceLayout(2, pairs.type.layout))
        dx = gl.sum(pairs * gl.expand_dims(xa.to(gl.float32) * root_scale, 2), 1)
        out: gl.constexpr = _rows_layout(_DIM)
        n = first + gl.arange(0, _TILE, gl.SliceLayout(1, out))
        column = gl.arange(0, _DIM, gl.SliceLayout(0, out))
        inside = (n < stop)[:, None] & (column < D)[None, :]
        # The last 16 columns of y belong to nothing.
        halves = y.reshape([_TILE, 2, _DIM])
        is_first = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, halves.type.layout))) == 0
        y = gl.sum(gl.where(is_first[None, :, None], halves, 0.0), 1)
        dx = (gl.convert_layout(dx, out) + gl.convert_layout(y, out)) * unit
        if weight_ptr is not None:
            dx *= _load_inverse(weight_ptr + bh * S, n, stop, least_weight)[:, None]
        at = (((bh // H) * S + n) * H + bh % H)[:, None] * D + column[None, :]
        gl.store(dx_ptr + at, (dx * root_scale).to(dtype), mask=inside)


def states(
    x: torch.Tensor, v: torch.Tensor, c: torch.Tensor | None, weight: torch.Tensor | None, s: torch.Tensor,
    z: torch.Tensor, numbers: tuple[float, ...],
) -> None:  # fmt: skip
    """Write the sums of every chunk; arguments as in `kernels.taylor.op`, numbers those of the kernel from H on."""
    D, E = x.shape[3], v.shape[3]
    launcher(_hopper_state_kernel, (triton.cdiv(E, TILE) * z.shape[0] * z.shape[1],))(
        strided(x), rows_descriptor(v, TILE, TILE), c, weight, s, z, *numbers, D=D, E=E, num_warps=4
    )


def read(
    x: torch.Tensor, s: torch.Tensor, z: torch.Tensor, out: torch.Tensor, weight: torch.Tensor | None, programs: int,
    numbers: tuple[float, ...], own: bool,
) -> None:  # fmt: skip
    """φ(x)·state into out [B, S, H, E]; divided by the weight, which is written, if `weight` [B, H, S]."""
    D, E = x.shape[3], out.shape[3]
    launcher(_hopper_read_kernel, (triton.cdiv(E, TILE) * programs,))(
        strided(x), s, z, strided(out), weight, *numbers, D=D, E=E, OWN=own, NORMALISE=weight is not None, num_warps=4
    )


def gradient(
    x: torch.Tensor, g: torch.Tensor, h: torch.Tensor | None, weight: torch.Tensor | None, s: torch.Tensor,
    z: torch.Tensor, dx: torch.Tensor, programs: int, numbers: tuple[float, ...], own: bool,
) -> None:  # fmt: skip
    """dx [B, S, H, d'] of Σ (g·v + h·c)·w over the tokens of the state, divided by the weight [B, H, S] if there is
    one; arguments as in `read`.
    """
    launcher(_hopper_gradient_kernel, (programs,))(
        strided(x), rows_descriptor(g, TILE, TILE), h, weight, s, z, dx, *numbers, D=x.shape[3], E=g.shape[3], OWN=own,
        num_warps=4,
    )  # fmt: skip
