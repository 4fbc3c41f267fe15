"""Linear attention in Triton: sums over chunks, and what queries and gradients read off them (Based, Eq. 2-4, §5).

With q̂ = √scale·q, k̂ = √scale·k and s = q̂·k̂, a pair weighs w = 1 + s + s²/2. A state holds the sums of one side:
    order 0: Σ v, Σ c      order 1: Σ k̂ v, Σ k̂ c      order 2: Σ (k̂⊗k̂) v, Σ (k̂⊗k̂) c      with c = 1
The products k̂⊗k̂ of a tile of tokens never leave the chip. From a state of the keys come the outputs and the queries'
gradients; from the dual state of the queries, with (dO, h) / den in place of (v, c), the gradients of values and keys:
    out = num / den,  h = den·dden - dO·out,  dw = (dO·v + h) / den,  ds = (1 + s)·dw
CAUSAL: the state of a tile is that of the chunks before (or, seen from the keys, after) its own; the pairs inside a
chunk are taken one by one. OWN: every chunk reads a state of its own, else all read the same one.

float16 has a short range. What grows with the tokens or is as small as gradients may be enters a product divided by a
unit, and the result is multiplied by it: all sums of a state (`_unit_of`), each row of the pairs of a chunk
(`_product_in_range`), 1 / den and h of a chunk (`_units_of_queries`). In other dtypes these units are 1.

A program keeps its state and takes many tiles of tokens. Where d' is so large that the state is not held at once,
order 2 is taken BLOCK_A of its first dimension at a time.

Shapes: B batch, S tokens, H heads, d' dims, A of them, E value dim, C tokens per chunk; M or N rows of a tile. States
are float32, [B·H, chunks, 1 + d' + d'², E] and, for c, [B·H, chunks, 1 + d' + d'²]. `xs`, `vs`, … hold x, v, … of all
tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vmonarch.kernels.common.tiles import head_of, load_rows, store_rows


@triton.jit
def _pairs(xa, x):
    """xa⊗x of every row: [N, A], [N, d'] -> [N, A·d']."""
    return tl.reshape(xa[:, :, None] * x[:, None, :], [x.shape[0], xa.shape[1] * x.shape[1]])


@triton.jit
def _load_scaled(ptr, stride, rows, inside, first_a, root_scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """√scale·x of the dims from `first_a` on, in float32: [N, BLOCK]."""
    return _load_columns(ptr, stride, rows, inside, first_a, D, BLOCK).to(tl.float32) * root_scale


@triton.jit
def _load_columns(ptr, stride, rows, inside, first, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Columns from `first` on of rows [N, E]."""
    columns = first + tl.arange(0, BLOCK_E)
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=inside[:, None] & (columns < E)[None, :], other=0.0)


@triton.jit
def _rows_of_order(order: tl.constexpr, first_a, D: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a state that hold the sums of an order, and which of them there are."""
    if order == 2:
        pair = tl.arange(0, BLOCK_A * BLOCK_D)
        a, b = first_a + pair // BLOCK_D, pair % BLOCK_D
        return 1 + D + a * D + b, (a < D) & (b < D)
    else:
        i = tl.arange(0, BLOCK_D)
        return 1 + i, i < D


@triton.jit
def _load_state(
    s_ptr, order: tl.constexpr, first_a, first_e, D: tl.constexpr, E: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sums of an order, [d' or A·d', BLOCK_E]."""
    rows, inside = _rows_of_order(order, first_a, D, BLOCK_A, BLOCK_D)
    return _load_columns(s_ptr, E, rows, inside, first_e, E, BLOCK_E)


@triton.jit
def _load_sums(z_ptr, unit, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sums of c, divided by a unit: of order 1 [d'], and of order 2 [d', d']."""
    i = tl.arange(0, BLOCK_D)
    z1 = tl.load(z_ptr + 1 + i, mask=i < D, other=0.0)
    inside = (i < D)[:, None] & (i < D)[None, :]
    z2 = tl.load(z_ptr + 1 + D + i[:, None] * D + i[None, :], mask=inside, other=0.0)
    return z1 / unit, z2 / unit


@triton.jit
def _inverse(weight, least_weight):
    """1 / weight, 0 where that is about 0; NaN stays NaN."""
    none = tl.abs(weight) <= least_weight
    return tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, weight))


@triton.jit
def _unit_for(largest):
    """`largest`, or 1 where that is about 0 or NaN."""
    return tl.where(largest > 1e-20, largest, 1.0)


@triton.jit
def _unit_of(ptr, COUNT: tl.constexpr, dtype: tl.constexpr):
    """A unit of COUNT adjacent numbers in float32, in which the largest is 4096: small ones have room, too."""
    if dtype == tl.float16:
        BLOCK: tl.constexpr = 2048
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, COUNT, BLOCK):
            at = first + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(ptr + at, mask=at < COUNT, other=0.0)))
        return _unit_for(tl.max(largest, 0)) * (1.0 / 4096)
    else:
        return 1.0


@triton.jit
def _units_of_queries(weight_ptr, c_ptr, start, stop, least_weight, dtype: tl.constexpr):
    """Units of 1 / weight and of c of the tokens from `start` to `stop`, in which the largest are 1."""
    if dtype == tl.float16:
        BLOCK: tl.constexpr = 1024
        of_inverse = tl.zeros([BLOCK], tl.float32)
        of_c = tl.zeros([BLOCK], tl.float32)
        for first in range(start, stop, BLOCK):
            n = first + tl.arange(0, BLOCK)
            weight = tl.load(weight_ptr + n, mask=n < stop, other=0.0)
            of_inverse = tl.maximum(of_inverse, tl.abs(_inverse(weight, least_weight)))
            of_c = tl.maximum(of_c, tl.abs(tl.load(c_ptr + n, mask=n < stop, other=0.0)))
        return _unit_for(tl.max(of_inverse, 0)), _unit_for(tl.max(of_c, 0))
    else:
        return 1.0, 1.0


@triton.jit
def _product_in_range(x, y, acc, PRECISION: tl.constexpr):
    """acc + x·y for x [M, N] in float32, each row of it divided by a unit where that needs one."""
    if y.dtype == tl.float16:
        unit = _unit_for(tl.max(tl.abs(x), 1))[:, None] * (1.0 / 4096)
        return acc + tl.dot((x / unit).to(y.dtype), y, input_precision=PRECISION) * unit
    else:
        return tl.dot(x.to(y.dtype), y, acc, input_precision=PRECISION)


@triton.jit
def _times(x, z, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x·z in the precision of z, which is float32: of sums over all tokens, 16 bit would keep too little."""
    narrow = x.to(dtype)
    high = z.to(dtype)
    product = tl.dot(narrow, high, input_precision=PRECISION)
    if dtype != tl.float32:
        product = tl.dot(narrow, (z - high.to(tl.float32)).to(dtype), product, input_precision=PRECISION)
    return product


@triton.jit(do_not_specialize=["H", "S", "chunks", "chunk"])
def state_kernel(
    xs, vs, c_ptr, weight_ptr, s_ptr, z_ptr, H, S, chunks, chunk, root_scale, least_weight,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The sums of one chunk, for BLOCK_E columns of the values and BLOCK_A first dims of order 2.

    c and the weight, which divides what a token adds, are [B, H, S], or 1 where `c_ptr` is None. Sums are kept
    transposed, [E, rows]: products take the features of a tile from the right.
    """
    column_tiles: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    a_tiles: tl.constexpr = BLOCK_D // BLOCK_A
    pid = tl.program_id(0)
    first_e = pid % column_tiles * BLOCK_E
    first_a = pid // column_tiles % a_tiles * BLOCK_A
    part = (pid // (column_tiles * a_tiles)).to(tl.int64)
    bh = part // chunks
    b = bh // H
    h = bh % H
    start = (part % chunks).to(tl.int32) * chunk
    stop = tl.minimum(start + chunk, S)
    x_ptr = head_of(xs, b, h)
    v_ptr = head_of(vs, b, h)
    s1 = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    z1 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    s2 = tl.zeros([BLOCK_E, BLOCK_A * BLOCK_D], tl.float32)
    z2 = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    s0 = tl.zeros([BLOCK_E], tl.float32)
    # One sum for every row of a tile; the rows are added at the end.
    z0 = tl.zeros([BLOCK_N], tl.float32)
    unit, c_unit = 1.0, 1.0
    if c_ptr is not None:
        c_ptr += bh * S
        weight_ptr += bh * S
        unit, c_unit = _units_of_queries(weight_ptr, c_ptr, start, stop, least_weight, v_ptr.dtype.element_ty)
    factor = 1.0 / unit
    c_factor = 1.0 / c_unit
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < stop
        x = _load_scaled(x_ptr, xs.stride_s, n, inside, 0, root_scale, D, BLOCK_D)
        v = _load_columns(v_ptr, vs.stride_s, n, inside, first_e, E, BLOCK_E)
        c = inside.to(tl.float32)
        share = c
        shared = x
        if c_ptr is not None:
            c = tl.load(c_ptr + n, mask=inside, other=0.0) * c_factor
            share = _inverse(tl.load(weight_ptr + n, mask=inside, other=0.0), least_weight) * factor
            shared = x * share[:, None]
        narrow = shared.to(v.dtype)
        s1 = tl.dot(tl.trans(v), narrow, s1, input_precision=PRECISION)
        z1 += shared * c[:, None]
        if a_tiles > 1:
            shared = _load_scaled(x_ptr, xs.stride_s, n, inside, first_a, root_scale, D, BLOCK_A)
            if c_ptr is not None:
                shared *= share[:, None]
        s2 = tl.dot(tl.trans(v), _pairs(shared, x).to(v.dtype), s2, input_precision=PRECISION)
        z2 = tl.dot(tl.trans((x * c[:, None]).to(v.dtype)), narrow, z2, input_precision=PRECISION)
        of_v = v.to(tl.float32)
        if c_ptr is not None:
            of_v *= share[:, None]
        s0 += tl.sum(of_v, 0)
        z0 += share * c
    c_unit *= unit
    F: tl.constexpr = 1 + D + D * D
    s_ptr += part * F * E
    z_ptr += part * F
    columns = first_e + tl.arange(0, BLOCK_E)
    is_column = columns < E
    # What all programs of a chunk compute, the first of them writes.
    once = (first_e == 0) & (first_a == 0)
    rows, inside = _rows_of_order(1, 0, D, BLOCK_A, BLOCK_D)
    mask = is_column[:, None] & inside[None, :] & (first_a == 0)
    tl.store(s_ptr + columns[:, None] + rows[None, :] * E, s1 * unit, mask=mask)
    tl.store(z_ptr + rows, tl.sum(z1, 0) * c_unit, mask=inside & once)
    i = tl.arange(0, BLOCK_D)
    mask = (i < D)[:, None] & (i < D)[None, :] & once
    tl.store(z_ptr + 1 + D + i[:, None] * D + i[None, :], z2 * c_unit, mask=mask)
    tl.store(z_ptr, tl.sum(z0, 0) * c_unit, mask=once)
    tl.store(s_ptr + columns, s0 * unit, mask=is_column & (first_a == 0))
    rows, inside = _rows_of_order(2, first_a, D, BLOCK_A, BLOCK_D)
    tl.store(s_ptr + columns[:, None] + rows[None, :] * E, s2 * unit, mask=is_column[:, None] & inside[None, :])


@triton.jit
def _own_tiles(pid, chunks, chunk, S, programs, BLOCK_M: tl.constexpr):
    """(part, batch·heads, start and stop of the chunk, first tile, tile stop) of a program; `programs` per chunk."""
    part = (pid // programs).to(tl.int64)
    bh = part // chunks
    start = (part % chunks).to(tl.int32) * chunk
    stop = tl.minimum(start + chunk, S)
    tiles = tl.cdiv(stop - start, BLOCK_M)
    own = pid % programs
    return part, bh, start, stop, tiles * own // programs, tiles * (own + 1) // programs


@triton.jit(do_not_specialize=["H", "S", "chunks", "chunk", "programs"])
def read_kernel(
    xs, ys, vs, s_ptr, z_ptr, output, weight_ptr, H, S, chunks, chunk, programs, root_scale, least_weight,
    D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    BACK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """φ(x)·state for some tiles of a chunk and BLOCK_E columns; with CAUSAL also the pairs with y, v of that chunk.

    The sum of the weights [B, H, S] divides and is written. Or BACK: keys read what queries sum up, those of their own
    chunk divided by their weight, which is given, and tokens see those after them, not those before.
    """
    column_tiles: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    a_tiles: tl.constexpr = BLOCK_D // BLOCK_A
    pid = tl.program_id(0)
    first_e = pid % column_tiles * BLOCK_E
    part, bh, start, stop, first_tile, last_tile = _own_tiles(pid // column_tiles, chunks, chunk, S, programs, BLOCK_M)
    b = bh // H
    h = bh % H
    x_ptr = head_of(xs, b, h)
    y_ptr = head_of(ys, b, h)
    v_ptr = head_of(vs, b, h)
    out_ptr = head_of(output, b, h)
    dtype = x_ptr.dtype.element_ty
    F: tl.constexpr = 1 + D + D * D
    read = part if OWN else bh
    s_ptr += read * F * E
    z_ptr += read * F
    columns = first_e + tl.arange(0, BLOCK_E)
    weight_ptr += bh * S
    unit = _unit_of(s_ptr, F * E, dtype)
    inverse = 1.0 / unit
    s1 = (inverse * _load_state(s_ptr, 1, 0, first_e, D, E, BLOCK_A, BLOCK_D, BLOCK_E)).to(dtype)
    s0 = inverse * tl.load(s_ptr + columns, mask=columns < E, other=0.0)
    half = 0.5 * inverse
    s2 = (half * _load_state(s_ptr, 2, 0, first_e, D, E, BLOCK_A, BLOCK_D, BLOCK_E)).to(dtype)
    if not BACK:
        z_unit = _unit_of(z_ptr, F, dtype)
        z1, z2 = _load_sums(z_ptr, z_unit, D, BLOCK_D)
        z0 = tl.load(z_ptr)
    for tile in range(first_tile, last_tile):
        own_first = start + tile * BLOCK_M
        i = own_first + tl.arange(0, BLOCK_M)
        inside = i < stop
        x = _load_scaled(x_ptr, xs.stride_s, i, inside, 0, root_scale, D, BLOCK_D)
        narrow = x.to(dtype)
        acc = tl.dot(narrow, s1, input_precision=PRECISION)  # [M, E]
        acc += s0[None, :]
        xa = x
        if a_tiles > 1:
            xa = _load_scaled(x_ptr, xs.stride_s, i, inside, 0, root_scale, D, BLOCK_A)
        acc = tl.dot(_pairs(xa, x).to(dtype), s2, acc, input_precision=PRECISION)
        for a_tile in tl.static_range(1, a_tiles):
            first_a = a_tile * BLOCK_A
            xa = _load_scaled(x_ptr, xs.stride_s, i, inside, first_a, root_scale, D, BLOCK_A)
            more = half * _load_state(s_ptr, 2, first_a, first_e, D, E, BLOCK_A, BLOCK_D, BLOCK_E)
            acc = tl.dot(_pairs(xa, x).to(dtype), more.to(dtype), acc, input_precision=PRECISION)
        acc *= unit
        if not BACK:
            terms = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + z1[None, :]
            terms += 0.5 * _times(x, z2, dtype, PRECISION)
            weight = z0 + tl.sum(x * terms, 1) * z_unit
        if CAUSAL:
            raw = load_rows(x_ptr, xs.stride_s, i, inside, D, BLOCK_D, True)
            for first in range(own_first if BACK else start, stop if BACK else own_first + BLOCK_M, BLOCK_M):
                j = first + tl.arange(0, BLOCK_M)
                present = j < stop
                y = load_rows(y_ptr, ys.stride_s, j, present, D, BLOCK_D, True)
                s = tl.dot(raw, tl.trans(y), input_precision=PRECISION) * (root_scale * root_scale)
                seen = (j[None, :] >= i[:, None]) if BACK else (j[None, :] <= i[:, None])
                w = tl.where(seen & present[None, :], 1.0 + s + 0.5 * s * s, 0.0)
                if BACK:
                    w *= _inverse(tl.load(weight_ptr + j, mask=present, other=0.0), least_weight)[None, :]
                else:
                    weight += tl.sum(w, 1)
                v = _load_columns(v_ptr, vs.stride_s, j, present, first_e, E, BLOCK_E)
                acc = _product_in_range(w, v, acc, PRECISION)
        if not BACK:
            # With weights of frames, no key may weigh anything.
            none = tl.abs(weight) <= least_weight
            acc = tl.where(none[:, None], 0.0, acc / tl.where(none, 1.0, weight)[:, None])
            tl.store(weight_ptr + i, weight, mask=inside & (first_e == 0))
        pointers = out_ptr + i.to(tl.int64)[:, None] * output.stride_s + columns[None, :]
        tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < E)[None, :])


@triton.jit(do_not_specialize=["H", "S", "chunks", "chunk", "programs"])
def gradient_kernel(
    xs, gs, h_ptr, ys, vs, c_ptr, weight_ptr, s_ptr, z_ptr, dx_ptr,
    H, S, chunks, chunk, programs, root_scale, least_weight,
    D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    BACK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dx [B, S, H, d'], contiguous, of Σ (g·v + h·c)·w / weight over the state's tokens (v, c), for tiles of a chunk.

    g [B, S, H, E] and h [B, H, S] or 1 (None) are this side's, v and c the other's. The weight [B, H, S] is that of the
    queries: of this side, or BACK, of the other, where a state has been divided by it already.
    """
    e_tiles: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    a_tiles: tl.constexpr = BLOCK_D // BLOCK_A
    part, bh, start, stop, first_tile, last_tile = _own_tiles(
        tl.program_id(0), chunks, chunk, S, programs, BLOCK_M
    )  # fmt: skip
    b = bh // H
    head = bh % H
    x_ptr = head_of(xs, b, head)
    g_ptr = head_of(gs, b, head)
    y_ptr = head_of(ys, b, head)
    v_ptr = head_of(vs, b, head)
    dtype = x_ptr.dtype.element_ty
    F: tl.constexpr = 1 + D + D * D
    read = part if OWN else bh
    s_ptr += read * F * E
    z_ptr += read * F
    weight_ptr += bh * S
    unit = _unit_of(s_ptr, F * E, dtype)
    inverse = 1.0 / unit
    z_unit = _unit_of(z_ptr, F, dtype)
    z1, z2 = _load_sums(z_ptr, z_unit, D, BLOCK_D)
    for tile in range(first_tile, last_tile):
        own_first = start + tile * BLOCK_M
        i = own_first + tl.arange(0, BLOCK_M)
        inside = i < stop
        x = _load_scaled(x_ptr, xs.stride_s, i, inside, 0, root_scale, D, BLOCK_D)
        h = inside.to(tl.float32)
        if h_ptr is not None:
            h = tl.load(h_ptr + bh * S + i, mask=inside, other=0.0)
        dx = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + z1[None, :]  # [M, d']
        dx += _times(x, z2, dtype, PRECISION)
        dx *= (h * z_unit * inverse)[:, None]
        for e_tile in tl.static_range(e_tiles):
            first_e = e_tile * BLOCK_E
            g = _load_columns(g_ptr, gs.stride_s, i, inside, first_e, E, BLOCK_E)
            s1 = inverse * _load_state(s_ptr, 1, 0, first_e, D, E, BLOCK_A, BLOCK_D, BLOCK_E)
            dx = tl.dot(g, tl.trans(s1.to(dtype)), dx, input_precision=PRECISION)
            for a_tile in tl.static_range(a_tiles):
                first_a = a_tile * BLOCK_A
                s2 = inverse * _load_state(s_ptr, 2, first_a, first_e, D, E, BLOCK_A, BLOCK_D, BLOCK_E)
                # d/dx_b of ½ Σ_ab x_a x_b T_ab, T symmetric, is Σ_a x_a T_ab.
                pairs = tl.dot(g, tl.trans(s2.to(dtype)), input_precision=PRECISION)
                xa = x
                if a_tiles > 1:
                    xa = _load_scaled(x_ptr, xs.stride_s, i, inside, first_a, root_scale, D, BLOCK_A)
                dx += tl.sum(tl.reshape(pairs, [BLOCK_M, BLOCK_A, BLOCK_D]) * xa[:, :, None], 1)
        dx *= unit
        if CAUSAL:
            raw = load_rows(x_ptr, xs.stride_s, i, inside, D, BLOCK_D, True)
            for first in range(own_first if BACK else start, stop if BACK else own_first + BLOCK_M, BLOCK_M):
                j = first + tl.arange(0, BLOCK_M)
                present = j < stop
                y = load_rows(y_ptr, ys.stride_s, j, present, D, BLOCK_D, True)
                c = present.to(tl.float32)
                if c_ptr is not None:
                    c = tl.load(c_ptr + bh * S + j, mask=present, other=0.0)
                dw = h[:, None] * c[None, :]
                for e_tile in tl.static_range(e_tiles):
                    first_e = e_tile * BLOCK_E
                    g = _load_columns(g_ptr, gs.stride_s, i, inside, first_e, E, BLOCK_E)
                    v = _load_columns(v_ptr, vs.stride_s, j, present, first_e, E, BLOCK_E)
                    dw = tl.dot(g, tl.trans(v), dw, input_precision=PRECISION)
                s = tl.dot(raw, tl.trans(y), input_precision=PRECISION) * (root_scale * root_scale)
                dw *= 1.0 + s
                if BACK:
                    dw *= _inverse(tl.load(weight_ptr + j, mask=present, other=0.0), least_weight)[None, :]
                seen = (j[None, :] >= i[:, None]) if BACK else (j[None, :] <= i[:, None])
                ds = tl.where(seen & present[None, :], dw, 0.0) * root_scale
                dx = _product_in_range(ds, y, dx, PRECISION)
        if not BACK:
            dx *= _inverse(tl.load(weight_ptr + i, mask=inside, other=0.0), least_weight)[:, None]
        store_rows(dx_ptr, D, (b * S + i) * H + head, inside, dx * root_scale, D, BLOCK_D)
