"""Linear attention in Triton: sums over chunks, and what queries and gradients read off them (Based, Eq. 2-4, §5).

With q̂ = √scale·q, k̂ = √scale·k and s = q̂·k̂, a pair weighs w = 1 + s + s²/2 (TAYLOR), or w = s where features were made
beforehand. A state holds the sums of one side:
    order 0: Σ v, Σ c      order 1: Σ k̂ v, Σ k̂ c      order 2: Σ (k̂⊗k̂) v, Σ (k̂⊗k̂) c      with c = 1
The products k̂⊗k̂ live in registers. From a state of the keys come the outputs and the queries' gradients; from the dual
state of the queries, with (g, h) in place of (v, c), the gradients of values and keys:
    out = num / den,  g = dO / den,  h = -(dO·out) / den,  dw = g·v + h,  ds = (1 + s)·dw
CAUSAL: the state of a tile is that of the chunks before (or, seen from the keys, after) its own; the pairs inside a
chunk are taken one by one.

Shapes: B batch, S tokens, H heads, d' dims (P = d'² pairs), E value dim, C tokens per chunk; M or N rows of a tile.
States are float32, [B·H, chunks, 1 + d' + P or d', E] and, for c, [B·H, chunks, 1 + d' + P or d'].
"""

from __future__ import annotations

import triton
import triton.language as tl

from vmonarch.kernels.common.tiles import load_rows, store_rows


@triton.jit
def _squares(x, BLOCK_P: tl.constexpr):
    """x⊗x of every row [N, d'] -> [N, P]."""
    return tl.reshape(x[:, :, None] * x[:, None, :], [x.shape[0], BLOCK_P])


@triton.jit
def _state_rows(order, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, TAYLOR: tl.constexpr):
    """Rows of a state that hold the sums of an order, and which of them there are. Pairs are numbered in BLOCK_D²."""
    if order == 2:
        pair = tl.arange(0, BLOCK_P)
        a, b = pair // BLOCK_D, pair % BLOCK_D
        return 1 + D + a * D + b, (a < D) & (b < D)
    else:
        i = tl.arange(0, BLOCK_D)
        return (1 if TAYLOR else 0) + i, i < D


@triton.jit
def _load_state(
    s_ptr, order: tl.constexpr, first, E: tl.constexpr, D: tl.constexpr, TAYLOR: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sums of an order [d' or P, E], columns from `first` on."""
    rows, inside = _state_rows(order, D, BLOCK_D, BLOCK_P, TAYLOR)
    columns = first + tl.arange(0, BLOCK_E)
    return tl.load(
        s_ptr + rows[:, None] * E + columns[None, :], mask=inside[:, None] & (columns < E)[None, :], other=0.0
    )


@triton.jit
def _load_sums(
    z_ptr, order: tl.constexpr, D: tl.constexpr, TAYLOR: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Sums of c of an order [d' or P]."""
    rows, inside = _state_rows(order, D, BLOCK_D, BLOCK_P, TAYLOR)
    return tl.load(z_ptr + rows, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["H", "S", "chunks", "chunk"])
def state_kernel(
    x_ptr, v_ptr, c_ptr, s_ptr, z_ptr, stride_xb, stride_xs, stride_xh, stride_vb, stride_vs, stride_vh,
    H, S, chunks, chunk, root_scale,
    D: tl.constexpr, E: tl.constexpr, TAYLOR: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The sums of one chunk, for BLOCK_E columns of the values. c is 1 where `c_ptr` is None, else [B, H, S]."""
    column_tiles: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    first_e = pid % column_tiles * BLOCK_E
    part = (pid // column_tiles).to(tl.int64)
    bh = part // chunks
    b = bh // H
    h = bh % H
    start = (part % chunks).to(tl.int32) * chunk
    stop = tl.minimum(start + chunk, S)
    x_ptr += b * stride_xb + h * stride_xh
    v_ptr += b * stride_vb + h * stride_vh + first_e
    columns = tl.arange(0, BLOCK_E)
    s1 = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    z1 = tl.zeros([BLOCK_D], tl.float32)
    if TAYLOR:
        s2 = tl.zeros([BLOCK_P, BLOCK_E], tl.float32)
        z2 = tl.zeros([BLOCK_P], tl.float32)
        s0 = tl.zeros([BLOCK_E], tl.float32)
        z0 = 0.0
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < stop
        # Transposed as it is loaded: products never take the transpose of what was computed.
        dims = tl.arange(0, BLOCK_D)
        x_pointers = x_ptr + n.to(tl.int64)[None, :] * stride_xs + dims[:, None]
        x = tl.load(x_pointers, mask=inside[None, :] & (dims < D)[:, None], other=0.0)  # [d', N]
        x = x.to(tl.float32) * root_scale
        v_pointers = v_ptr + n.to(tl.int64)[:, None] * stride_vs + columns[None, :]
        v = tl.load(v_pointers, mask=inside[:, None] & (first_e + columns < E)[None, :], other=0.0)
        c = inside.to(tl.float32)
        if c_ptr is not None:
            c = tl.load(c_ptr + bh * S + n, mask=inside, other=0.0)
        s1 = tl.dot(x.to(v.dtype), v, s1, input_precision=PRECISION)
        z1 += tl.sum(x * c[None, :], 1)
        if TAYLOR:
            xx = tl.reshape(x[:, None, :] * x[None, :, :], [BLOCK_P, BLOCK_N])
            s2 = tl.dot(xx.to(v.dtype), v, s2, input_precision=PRECISION)
            z2 += tl.sum(xx * c[None, :], 1)
            s0 += tl.sum(v.to(tl.float32), 0)
            z0 += tl.sum(c, 0)
    F: tl.constexpr = 1 + D + D * D if TAYLOR else D
    s_ptr += part * F * E
    z_ptr += part * F
    is_column = first_e + columns < E
    rows, inside = _state_rows(1, D, BLOCK_D, BLOCK_P, TAYLOR)
    pointers = s_ptr + rows[:, None] * E + (first_e + columns)[None, :]
    tl.store(pointers, s1, mask=inside[:, None] & is_column[None, :])
    tl.store(z_ptr + rows, z1, mask=inside & (first_e == 0))
    if TAYLOR:
        rows, inside = _state_rows(2, D, BLOCK_D, BLOCK_P, TAYLOR)
        pointers = s_ptr + rows[:, None] * E + (first_e + columns)[None, :]
        tl.store(pointers, s2, mask=inside[:, None] & is_column[None, :])
        tl.store(z_ptr + rows, z2, mask=inside & (first_e == 0))
        tl.store(s_ptr + first_e + columns, s0, mask=is_column)
        tl.store(z_ptr, z0, mask=first_e == 0)


@triton.jit
def _weights(s, TAYLOR: tl.constexpr):
    if TAYLOR:
        return 1.0 + s + 0.5 * s * s
    else:
        return s


@triton.jit(do_not_specialize=["H", "S", "chunks", "chunk", "tiles_per_chunk"])
def read_kernel(
    x_ptr, y_ptr, v_ptr, s_ptr, z_ptr, out_ptr, weight_ptr,
    stride_xb, stride_xs, stride_xh, stride_yb, stride_ys, stride_yh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, H, S, chunks, chunk, tiles_per_chunk, root_scale, least_weight,
    D: tl.constexpr, E: tl.constexpr, TAYLOR: tl.constexpr, CAUSAL: tl.constexpr, BACK: tl.constexpr,
    NORMALISE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """φ(x)·state for one tile of tokens and BLOCK_E columns; with CAUSAL also the pairs with y, v of its own chunk.

    NORMALISE: divide by the weight, and write that [B, H, S]. BACK: tokens see those after them, not those before.
    """
    column_tiles: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    first_e = pid % column_tiles * BLOCK_E
    tile = pid // column_tiles % tiles_per_chunk
    part = (pid // column_tiles // tiles_per_chunk).to(tl.int64)
    bh = part // chunks
    b = bh // H
    h = bh % H
    start = (part % chunks).to(tl.int32) * chunk
    stop = tl.minimum(start + chunk, S)
    i = start + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < stop
    raw = load_rows(x_ptr + b * stride_xb + h * stride_xh, stride_xs, i, inside, D, BLOCK_D, True)
    x = raw.to(tl.float32) * root_scale
    dtype = raw.dtype
    F: tl.constexpr = 1 + D + D * D if TAYLOR else D
    # Without CAUSAL all chunks read the same sums.
    own = part if CAUSAL else bh
    s_ptr += own * F * E
    z_ptr += own * F
    columns = first_e + tl.arange(0, BLOCK_E)
    s1 = _load_state(s_ptr, 1, first_e, E, D, TAYLOR, BLOCK_D, BLOCK_P, BLOCK_E)
    acc = tl.dot(x.to(dtype), s1.to(dtype), input_precision=PRECISION)  # [M, E]
    weight = tl.sum(x * _load_sums(z_ptr, 1, D, TAYLOR, BLOCK_D, BLOCK_P)[None, :], 1)
    if TAYLOR:
        xx = _squares(x, BLOCK_P) * 0.5
        s2 = _load_state(s_ptr, 2, first_e, E, D, TAYLOR, BLOCK_D, BLOCK_P, BLOCK_E)
        acc = tl.dot(xx.to(dtype), s2.to(dtype), acc, input_precision=PRECISION)
        acc += tl.load(s_ptr + columns, mask=columns < E, other=0.0)[None, :]
        weight += tl.sum(xx * _load_sums(z_ptr, 2, D, TAYLOR, BLOCK_D, BLOCK_P)[None, :], 1) + tl.load(z_ptr)
    if CAUSAL:
        y_ptr += b * stride_yb + h * stride_yh
        v_ptr += b * stride_vb + h * stride_vh
        own_first = start + tile * BLOCK_M
        for first in range(own_first if BACK else start, stop if BACK else own_first + BLOCK_M, BLOCK_M):
            j = first + tl.arange(0, BLOCK_M)
            present = j < stop
            y = load_rows(y_ptr, stride_ys, j, present, D, BLOCK_D, True)
            s = tl.dot(raw, tl.trans(y), input_precision=PRECISION) * (root_scale * root_scale)
            seen = (j[None, :] >= i[:, None]) if BACK else (j[None, :] <= i[:, None])
            w = tl.where(seen & present[None, :], _weights(s, TAYLOR), 0.0)
            v_pointers = v_ptr + j.to(tl.int64)[:, None] * stride_vs + columns[None, :]
            v = tl.load(v_pointers, mask=present[:, None] & (columns < E)[None, :], other=0.0)
            acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
            weight += tl.sum(w, 1)
    if NORMALISE:
        # Weights of given features may be 0, or below.
        some = tl.abs(weight) > least_weight
        acc = tl.where(some[:, None], acc / tl.where(some, weight, 1.0)[:, None], 0.0)
        tl.store(weight_ptr + bh * S + i, weight, mask=inside & (first_e == 0))
    pointers = out_ptr + b * stride_ob + h * stride_oh + i.to(tl.int64)[:, None] * stride_os + columns[None, :]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < E)[None, :])


@triton.jit(do_not_specialize=["H", "S", "chunks", "chunk", "tiles_per_chunk"])
def gradient_kernel(
    x_ptr, g_ptr, h_ptr, y_ptr, v_ptr, c_ptr, s_ptr, z_ptr, dx_ptr,
    stride_xb, stride_xs, stride_xh, stride_gb, stride_gs, stride_gh,
    stride_yb, stride_ys, stride_yh, stride_vb, stride_vs, stride_vh,
    H, S, chunks, chunk, tiles_per_chunk, root_scale,
    D: tl.constexpr, E: tl.constexpr, TAYLOR: tl.constexpr, CAUSAL: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dx [B, S, H, d'], contiguous, of Σ (g·v + h·c)·w over the state's tokens (v, c), for one tile of tokens.

    g [B, S, H, E] and h [B, H, S] or 1 (None) are this side's, v and c the other's.
    """
    pid = tl.program_id(0)
    tile = pid % tiles_per_chunk
    part = (pid // tiles_per_chunk).to(tl.int64)
    bh = part // chunks
    b = bh // H
    head = bh % H
    start = (part % chunks).to(tl.int32) * chunk
    stop = tl.minimum(start + chunk, S)
    i = start + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < stop
    raw = load_rows(x_ptr + b * stride_xb + head * stride_xh, stride_xs, i, inside, D, BLOCK_D, True)
    x = raw.to(tl.float32) * root_scale
    dtype = raw.dtype
    h = inside.to(tl.float32)
    if h_ptr is not None:
        h = tl.load(h_ptr + bh * S + i, mask=inside, other=0.0)
    F: tl.constexpr = 1 + D + D * D if TAYLOR else D
    own = part if CAUSAL else bh
    s_ptr += own * F * E
    z_ptr += own * F
    g_ptr += b * stride_gb + head * stride_gh
    dx = h[:, None] * _load_sums(z_ptr, 1, D, TAYLOR, BLOCK_D, BLOCK_P)[None, :]  # [M, d']
    if TAYLOR:
        pairs = h[:, None] * _load_sums(z_ptr, 2, D, TAYLOR, BLOCK_D, BLOCK_P)[None, :]  # [M, P]
    for first_e in range(0, E, BLOCK_E):
        columns = first_e + tl.arange(0, BLOCK_E)
        g_pointers = g_ptr + i.to(tl.int64)[:, None] * stride_gs + columns[None, :]
        g = tl.load(g_pointers, mask=inside[:, None] & (columns < E)[None, :], other=0.0)
        s1 = _load_state(s_ptr, 1, first_e, E, D, TAYLOR, BLOCK_D, BLOCK_P, BLOCK_E)
        dx = tl.dot(g, tl.trans(s1.to(dtype)), dx, input_precision=PRECISION)
        if TAYLOR:
            s2 = _load_state(s_ptr, 2, first_e, E, D, TAYLOR, BLOCK_D, BLOCK_P, BLOCK_E)
            pairs = tl.dot(g, tl.trans(s2.to(dtype)), pairs, input_precision=PRECISION)
    if TAYLOR:
        # d/dx_a of ½ Σ_ab x_a x_b T_ab, T symmetric, is Σ_b x_b T_ab.
        dx += tl.sum(tl.reshape(pairs, [BLOCK_M, BLOCK_D, BLOCK_D]) * x[:, None, :], 2)
    if CAUSAL:
        y_ptr += b * stride_yb + head * stride_yh
        v_ptr += b * stride_vb + head * stride_vh
        own_first = start + tile * BLOCK_M
        for first in range(own_first if BACK else start, stop if BACK else own_first + BLOCK_M, BLOCK_M):
            j = first + tl.arange(0, BLOCK_M)
            present = j < stop
            y = load_rows(y_ptr, stride_ys, j, present, D, BLOCK_D, True)
            c = present.to(tl.float32)
            if c_ptr is not None:
                c = tl.load(c_ptr + bh * S + j, mask=present, other=0.0)
            dw = h[:, None] * c[None, :]
            for first_e in range(0, E, BLOCK_E):
                columns = first_e + tl.arange(0, BLOCK_E)
                g_pointers = g_ptr + i.to(tl.int64)[:, None] * stride_gs + columns[None, :]
                g = tl.load(g_pointers, mask=inside[:, None] & (columns < E)[None, :], other=0.0)
                v_pointers = v_ptr + j.to(tl.int64)[:, None] * stride_vs + columns[None, :]
                v = tl.load(v_pointers, mask=present[:, None] & (columns < E)[None, :], other=0.0)
                dw = tl.dot(g, tl.trans(v), dw, input_precision=PRECISION)
            if TAYLOR:
                s = tl.dot(raw, tl.trans(y), input_precision=PRECISION) * (root_scale * root_scale)
                dw *= 1.0 + s
            seen = (j[None, :] >= i[:, None]) if BACK else (j[None, :] <= i[:, None])
            ds = tl.where(seen & present[None, :], dw, 0.0) * root_scale
            dx = tl.dot(ds.to(dtype), y, dx, input_precision=PRECISION)
    store_rows(dx_ptr, D, (b * S + i) * H + head, inside, dx * root_scale, D, BLOCK_D)
