"""L-steps in Triton: at every position, T×T attention of the queries over the centroids (`reference.l_step`).

Legend: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, l query block, k key
block. Tokens are [B, S, H, D] with any strides but the last; block tensors are [B·H·m, b, D], contiguous; cL, cR and
δ of the R-step are [B·H·m, b]; lse and δ of the rows of L are [B, H, S]; all of them float32.

A program serves one position after the other. Where all m blocks fit one tile, which is always so for whole frames of
usual videos, the centroid kernel computes the softmax itself; beyond, `rows` gives it the log-partitions first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim, dot_precision, launch_options
from vmonarch.kernels.common.softmax import log2_partition, log2_scale_of, online_softmax
from vmonarch.kernels.common.tiles import add_rows, load_rows, store_rows
from vmonarch.kernels.monarch.places import Places, plain_places, token_at


@triton.jit
def _program(position_groups, tiles, POSITIONS: tl.constexpr, BLOCK: tl.constexpr):
    """First position, tile of blocks and (batch, head) of this program."""
    pid = tl.program_id(0)
    blocks = pid // position_groups % tiles * BLOCK + tl.arange(0, BLOCK)
    return pid % position_groups * POSITIONS, blocks, pid // position_groups // tiles


@triton.jit
def _block_rows(places, bh, k, j):
    """Row (b·h, k, j) in the block tensors, and whether there is a block k."""
    return (bh.to(tl.int64) * places.blocks + k) * places.positions + j, k < places.blocks


@triton.jit
def _frame_of(places, block, j):
    """Latent frame of position j in `block`."""
    tile_positions = places.tile_height * places.tile_width
    return block // (places.tiles_h * places.tiles_w) * places.block_frames + j // tile_positions


@triton.jit
def _is_exact(exact_ptr, places, l, valid, k, j):
    """[l, k] true in exact blocks; `exact_ptr` is an int8 table [T, m]."""
    pointers = exact_ptr + (_frame_of(places, l, j) * places.blocks)[:, None] + k[None, :]
    return tl.load(pointers, mask=valid[:, None] & (k < places.blocks)[None, :], other=0) != 0


@triton.jit(do_not_specialize=["heads", "row_tiles", "position_groups"])
def _l_rows_kernel(
    q_ptr, aL_ptr, cL_ptr, y_ptr, exact_ptr, lse_exact_ptr, out_exact_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_eb, stride_es, stride_eh, stride_ob, stride_os, stride_oh,
    heads, places, position_groups, row_tiles, log2_scale,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, HAS_EXACT: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Log-partition of the rows of L; in the last iteration also o[l] = Σ_k L[l,k] y[k], merged with the exact part."""
    places = plain_places(places)
    first_position, l, bh = _program(position_groups, row_tiles, POSITIONS, BLOCK_M)
    head = bh % heads
    batch = bh // heads
    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    lse_ptr += bh.to(tl.int64) * places.tokens
    if LAST:
        out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    if HAS_EXACT:
        lse_exact_ptr += bh.to(tl.int64) * places.tokens
        if LAST:
            out_exact_ptr += batch.to(tl.int64) * stride_eb + head.to(tl.int64) * stride_eh
    for p in range(POSITIONS):
        j = first_position + p
        token, valid = token_at(places, l, j, TILED)
        valid = valid & (l < places.blocks) & (j < places.positions)
        q = load_rows(q_ptr, stride_qs, token, valid, D, BLOCK_D, True)  # [M, D]
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for first in range(0, places.blocks, BLOCK_N):
            k = first + tl.arange(0, BLOCK_N)
            row, inside = _block_rows(places, bh, k, j)
            inside = inside & (j < places.positions)
            aL = load_rows(aL_ptr, D, row, inside, D, BLOCK_D, True)  # [N, D]
            cL = tl.load(cL_ptr + row, mask=inside, other=float("inf"))
            Z = tl.dot(q, tl.trans(aL), input_precision=PRECISION) * log2_scale - (cL * 1.4426950408889634)[None, :]
            if HAS_EXACT:
                Z = tl.where(_is_exact(exact_ptr, places, l, valid, k, j), -float("inf"), Z)
            L, alpha, row_max, row_sum, _ = online_softmax(Z, row_max, row_sum, row_sum, 1.0, False, True)
            if LAST:
                y = load_rows(y_ptr, E, row, inside, E, BLOCK_E, True)  # [N, E]
                acc = tl.dot(L.to(y.dtype), y, acc * alpha[:, None], input_precision=PRECISION)
        if HAS_EXACT:
            # The exact part is one more column, with its log-weight as logit (algorithm notes §6).
            logit = tl.load(lse_exact_ptr + token, mask=valid, other=-float("inf")) * 1.4426950408889634
            new_max = tl.maximum(row_max, logit)
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)
            alpha = tl.exp2(row_max - shift)
            weight = tl.exp2(logit - shift)
            row_sum = row_sum * alpha + weight
            row_max = new_max
            if LAST:
                # Rows without exact keys may hold anything, so they are not read.
                out_exact = load_rows(out_exact_ptr, stride_es, token, valid & (weight > 0), E, BLOCK_E, True)
                acc = acc * alpha[:, None] + out_exact.to(tl.float32) * weight[:, None]
        tl.store(lse_ptr + token, log2_partition(row_max, row_sum) * 0.6931471805599453, mask=valid)
        if LAST:
            out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
            store_rows(out_ptr, stride_os, token, valid, out, E, BLOCK_E)


@triton.jit(do_not_specialize=["heads", "column_tiles", "position_groups"])
def _l_centroids_kernel(
    q_ptr, aL_ptr, cL_ptr, exact_ptr, lse_exact_ptr, lse_ptr, z_ptr, cR_ptr,
    stride_qb, stride_qs, stride_qh, heads, places, position_groups, column_tiles, log2_scale, min_mass,
    D: tl.constexpr, HAS_EXACT: tl.constexpr, TILED: tl.constexpr, ONE_TILE: tl.constexpr,
    STORE_STATISTICS: tl.constexpr, PRECISION: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Centroid queries: αR[k] = Σ_l L[l,k] q[l], cR[k] = Σ_l L[l,k], z = αR / max(cR, min_mass).

    Works on Zᵀ [k, l], so that L is never transposed. ONE_TILE: all blocks are in the tile, the softmax is done here.
    """
    places = plain_places(places)
    first_position, k, bh = _program(position_groups, column_tiles, POSITIONS, BLOCK_N)
    head = bh % heads
    batch = bh // heads
    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    lse_ptr += bh.to(tl.int64) * places.tokens
    if HAS_EXACT:
        lse_exact_ptr += bh.to(tl.int64) * places.tokens
    for p in range(POSITIONS):
        j = first_position + p
        row, inside = _block_rows(places, bh, k, j)
        inside = inside & (j < places.positions)
        aL = load_rows(aL_ptr, D, row, inside, D, BLOCK_D, True)  # [N, D]
        cL = tl.load(cL_ptr + row, mask=inside, other=float("inf")) * 1.4426950408889634
        aR = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        cR = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, places.blocks, BLOCK_M):
            l = first + tl.arange(0, BLOCK_M)
            token, valid = token_at(places, l, j, TILED)
            valid = valid & (l < places.blocks) & (j < places.positions)
            q = load_rows(q_ptr, stride_qs, token, valid, D, BLOCK_D, True)  # [M, D]
            Z = tl.dot(aL, tl.trans(q), input_precision=PRECISION) * log2_scale - cL[:, None]  # [N, M]
            if HAS_EXACT:
                pointers = exact_ptr + (_frame_of(places, l, j) * places.blocks)[None, :] + k[:, None]
                exact = tl.load(pointers, mask=valid[None, :] & (k < places.blocks)[:, None], other=0) != 0
                Z = tl.where(exact, -float("inf"), Z)
            if ONE_TILE:
                row_max = tl.max(Z, 0)
                logit = row_max
                if HAS_EXACT:
                    logit = tl.load(lse_exact_ptr + token, mask=valid, other=-float("inf")) * 1.4426950408889634
                    row_max = tl.maximum(row_max, logit)
                shift = tl.where(row_max == -float("inf"), 0.0, row_max)
                L = tl.exp2(Z - shift[None, :])
                row_sum = tl.sum(L, 0)
                if HAS_EXACT:
                    row_sum += tl.exp2(logit - shift)
                L = L / tl.where(row_sum > 0, row_sum, 1.0)[None, :]
                if STORE_STATISTICS:
                    tl.store(lse_ptr + token, log2_partition(shift, row_sum) * 0.6931471805599453, mask=valid)
            else:
                lse = tl.load(lse_ptr + token, mask=valid, other=float("inf")) * 1.4426950408889634
                L = tl.exp2(Z - tl.where(lse == -float("inf"), float("inf"), lse)[None, :])
            # A place without a query counts for nothing.
            L = tl.where(valid[None, :], L, 0.0)
            cR += tl.sum(L, 1)
            aR = tl.dot(L.to(q.dtype), q, aR, input_precision=PRECISION)
        z = aR / tl.maximum(cR, min_mass)[:, None]
        store_rows(z_ptr, D, row, inside, z, D, BLOCK_D)
        if STORE_STATISTICS:
            tl.store(cR_ptr + row, cR, mask=inside)


@triton.jit(do_not_specialize=["heads", "row_tiles", "position_groups"])
def _l_backward_rows_kernel(
    q_ptr, aL_ptr, cL_ptr, lse_ptr, y_ptr, do_ptr, out_ptr, daR_ptr, dcR_ptr, dlse_ptr,
    exact_ptr, lse_exact_ptr, out_exact_ptr, dq_ptr, delta_ptr, dlse_exact_ptr, do_exact_ptr,
    stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh,
    stride_eb, stride_es, stride_eh, stride_dqb, stride_dqs, stride_dqh,
    heads, places, position_groups, row_tiles, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, HAS_EXACT: tl.constexpr, HAS_DLSE: tl.constexpr,
    TILED: tl.constexpr, PRECISION: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add to dq what the rows of L give, and write δ of every row and the gradients of the exact part.

    The last iteration has dL = do·yᵀ and δ = do·o - dlse; the others dL = daR·qᵀ + dcR and δ = Σ_k L dL.
    """
    places = plain_places(places)
    first_position, l, bh = _program(position_groups, row_tiles, POSITIONS, BLOCK_M)
    head = bh % heads
    batch = bh // heads
    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    dq_ptr += batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
    lse_ptr += bh.to(tl.int64) * places.tokens
    delta_ptr += bh.to(tl.int64) * places.tokens
    if LAST:
        do_ptr += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
        out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    if HAS_DLSE:
        dlse_ptr += bh.to(tl.int64) * places.tokens
    if HAS_EXACT:
        lse_exact_ptr += bh.to(tl.int64) * places.tokens
        dlse_exact_ptr += bh.to(tl.int64) * places.tokens
        if LAST:
            out_exact_ptr += batch.to(tl.int64) * stride_eb + head.to(tl.int64) * stride_eh
        if do_exact_ptr is not None:
            do_exact_ptr += batch.to(tl.int64) * stride_eb + head.to(tl.int64) * stride_eh
    for p in range(POSITIONS):
        j = first_position + p
        token, valid = token_at(places, l, j, TILED)
        valid = valid & (l < places.blocks) & (j < places.positions)
        q = load_rows(q_ptr, stride_qs, token, valid, D, BLOCK_D, True)  # [M, D]
        lse = tl.load(lse_ptr + token, mask=valid, other=float("inf")) * 1.4426950408889634
        lse = tl.where(lse == -float("inf"), float("inf"), lse)
        do = q
        delta = tl.zeros([BLOCK_M], tl.float32)
        if LAST:
            do = load_rows(do_ptr, stride_gs, token, valid, E, BLOCK_E, True)
            out = load_rows(out_ptr, stride_os, token, valid, E, BLOCK_E, True)
            delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + token, mask=valid, other=0.0)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for sweep in tl.static_range(0 if not LAST else 1, 2):
            for first in range(0, places.blocks, BLOCK_N):
                k = first + tl.arange(0, BLOCK_N)
                row, inside = _block_rows(places, bh, k, j)
                inside = inside & (j < places.positions)
                aL = load_rows(aL_ptr, D, row, inside, D, BLOCK_D, True)  # [N, D]
                cL = tl.load(cL_ptr + row, mask=inside, other=float("inf")) * 1.4426950408889634
                Z = tl.dot(q, tl.trans(aL), input_precision=PRECISION) * log2_scale - cL[None, :]
                if HAS_EXACT:
                    Z = tl.where(_is_exact(exact_ptr, places, l, valid, k, j), -float("inf"), Z)
                L = tl.exp2(Z - lse[:, None])
                if LAST:
                    y = load_rows(y_ptr, E, row, inside, E, BLOCK_E, True)
                    dL = tl.dot(do, tl.trans(y), input_precision=PRECISION)
                else:
                    daR = load_rows(daR_ptr, D, row, inside, D, BLOCK_D, True)
                    dcR = tl.load(dcR_ptr + row, mask=inside, other=0.0)
                    dL = tl.dot(q, tl.trans(daR), input_precision=PRECISION) + dcR[None, :]
                if sweep == 0:
                    delta += tl.sum(L * dL, 1)
                else:
                    dZ = L * (dL - delta[:, None]) * scale
                    dq = tl.dot(dZ.to(aL.dtype), aL, dq, input_precision=PRECISION)
                    if not LAST:
                        dq = tl.dot(L.to(daR.dtype), daR, dq, input_precision=PRECISION)
        tl.store(delta_ptr + token, delta, mask=valid)
        if HAS_EXACT:
            logit = tl.load(lse_exact_ptr + token, mask=valid, other=-float("inf")) * 1.4426950408889634
            weight = tl.exp2(logit - lse)
            d_logit = -weight * delta
            if LAST:
                out_exact = load_rows(out_exact_ptr, stride_es, token, valid & (weight > 0), E, BLOCK_E, True)
                d_logit += weight * tl.sum(do.to(tl.float32) * out_exact.to(tl.float32), 1)
                if do_exact_ptr is not None:
                    do_exact = do.to(tl.float32) * weight[:, None]
                    store_rows(do_exact_ptr, stride_es, token, valid, do_exact, E, BLOCK_E)
            else:
                d_logit += tl.load(dlse_exact_ptr + token, mask=valid, other=0.0)
            tl.store(dlse_exact_ptr + token, d_logit, mask=valid)
        if LAST:
            store_rows(dq_ptr, stride_dqs, token, valid, dq, D, BLOCK_D)
        else:
            add_rows(dq_ptr, stride_dqs, token, valid, dq, D, BLOCK_D)


@triton.jit(do_not_specialize=["heads", "column_tiles", "position_groups"])
def _l_backward_columns_kernel(
    q_ptr, aL_ptr, cL_ptr, lse_ptr, y_ptr, do_ptr, daR_ptr, dcR_ptr, exact_ptr, delta_ptr,
    daL_ptr, dcL_ptr, dy_ptr, delta_r_ptr,
    stride_qb, stride_qs, stride_qh, stride_gb, stride_gs, stride_gh,
    heads, places, position_groups, column_tiles, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, HAS_EXACT: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Gradients of aL, cL and y, and δ = daL·aL + dy·y for the R-step's backward. Works on Zᵀ [k, l]."""
    places = plain_places(places)
    first_position, k, bh = _program(position_groups, column_tiles, POSITIONS, BLOCK_N)
    head = bh % heads
    batch = bh // heads
    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    lse_ptr += bh.to(tl.int64) * places.tokens
    delta_ptr += bh.to(tl.int64) * places.tokens
    if LAST:
        do_ptr += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
    for p in range(POSITIONS):
        j = first_position + p
        row, inside = _block_rows(places, bh, k, j)
        inside = inside & (j < places.positions)
        aL = load_rows(aL_ptr, D, row, inside, D, BLOCK_D, True)  # [N, D]
        cL = tl.load(cL_ptr + row, mask=inside, other=float("inf")) * 1.4426950408889634
        if LAST:
            y = load_rows(y_ptr, E, row, inside, E, BLOCK_E, True)
        else:
            daR = load_rows(daR_ptr, D, row, inside, D, BLOCK_D, True)
            dcR = tl.load(dcR_ptr + row, mask=inside, other=0.0)
        daL = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dy = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
        dcL = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, places.blocks, BLOCK_M):
            l = first + tl.arange(0, BLOCK_M)
            token, valid = token_at(places, l, j, TILED)
            valid = valid & (l < places.blocks) & (j < places.positions)
            q = load_rows(q_ptr, stride_qs, token, valid, D, BLOCK_D, True)  # [M, D]
            # A place without a query gets lse = inf, hence L = 0.
            lse = tl.load(lse_ptr + token, mask=valid, other=float("inf")) * 1.4426950408889634
            lse = tl.where(lse == -float("inf"), float("inf"), lse)
            delta = tl.load(delta_ptr + token, mask=valid, other=0.0)
            Z = tl.dot(aL, tl.trans(q), input_precision=PRECISION) * log2_scale - cL[:, None]  # [N, M]
            if HAS_EXACT:
                pointers = exact_ptr + (_frame_of(places, l, j) * places.blocks)[None, :] + k[:, None]
                exact = tl.load(pointers, mask=valid[None, :] & (k < places.blocks)[:, None], other=0) != 0
                Z = tl.where(exact, -float("inf"), Z)
            L = tl.exp2(Z - lse[None, :])
            if LAST:
                do = load_rows(do_ptr, stride_gs, token, valid, E, BLOCK_E, True)
                dL = tl.dot(y, tl.trans(do), input_precision=PRECISION)
                dy = tl.dot(L.to(do.dtype), do, dy, input_precision=PRECISION)
            else:
                dL = tl.dot(daR, tl.trans(q), input_precision=PRECISION) + dcR[:, None]
            dZ = L * (dL - delta[None, :])
            dcL -= tl.sum(dZ, 1)
            daL = tl.dot((dZ * scale).to(q.dtype), q, daL, input_precision=PRECISION)
        daL = daL.to(daL_ptr.dtype.element_ty)
        delta_r = tl.sum(daL.to(tl.float32) * aL.to(tl.float32), 1)
        store_rows(daL_ptr, D, row, inside, daL, D, BLOCK_D)
        if LAST:
            dy = dy.to(dy_ptr.dtype.element_ty)
            delta_r += tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
            store_rows(dy_ptr, E, row, inside, dy, E, BLOCK_E)
        tl.store(dcL_ptr + row, dcL, mask=inside)
        tl.store(delta_r_ptr + row, delta_r, mask=inside)


MAX_TILE = 128
"""Blocks that one tile of the L-step may hold."""


@dataclass(frozen=True)
class LStep:
    """What all L-steps of one call share.

    Args:
        query: [B, S, H, D].
        tiled: whether tokens of a block are anything but consecutive.
        exact: int8 table [T, m], 1 where key block k is answered exactly for query frame l; or None.
    """

    query: torch.Tensor
    places: Places
    tiled: bool
    scale: float
    exact: torch.Tensor | None

    def _launch(self, kernel, name: str, tensors: tuple, strides: tuple, numbers: tuple, **constants) -> None:
        """Start one program per group of positions and tile of blocks."""
        B, _, H, D = self.query.shape
        m, b = self.places.blocks, self.places.positions
        options = launch_options(name, self.query.device, self.query.dtype, D)
        # One tile for all blocks if they fit, else tiles of the table's size.
        one_tile = m <= options.pop("MAX_TILE", MAX_TILE)
        tile = max(16, triton.next_power_of_2(m)) if one_tile else options["BLOCK"]
        options.pop("BLOCK")
        options["num_warps"] = min(8, max(1, tile // options.pop("ROWS_PER_WARP")))
        tiles = triton.cdiv(m, tile)
        positions = min(options.pop("POSITIONS"), b)
        position_groups = triton.cdiv(b, positions)
        if kernel is _l_centroids_kernel:
            constants["ONE_TILE"] = one_tile
        kernel[(position_groups * tiles * B * H,)](
            *tensors, *strides, H, self.places.unspecialised(), position_groups, tiles, *numbers,
            D=D, TILED=self.tiled, PRECISION=dot_precision(self.query.dtype), POSITIONS=positions,
            BLOCK_M=tile, BLOCK_N=tile, BLOCK_D=block_dim(D), **constants, **options,
        )  # fmt: skip

    def _needs_rows_first(self) -> bool:
        options = launch_options("l_centroids", self.query.device, self.query.dtype, self.query.shape[3])
        return self.places.blocks > options.get("MAX_TILE", MAX_TILE)

    def centroids(
        self,
        aL: torch.Tensor,
        cL: torch.Tensor,
        *,
        z: torch.Tensor,
        lse: torch.Tensor,
        cR: torch.Tensor | None,
        lse_exact: torch.Tensor | None,
        min_mass: float,
    ) -> None:
        """Write z [B·H·m, b, D] and, where cR is given (training), cR and the log-partitions lse [B, H, S]."""
        if self._needs_rows_first():
            self._rows("l_rows", aL, cL, None, lse=lse, lse_exact=lse_exact, out_exact=None, out=None)
        self._launch(
            _l_centroids_kernel,
            "l_centroids",
            (self.query, aL, cL, None if lse_exact is None else self.exact, lse_exact, lse, z, cR),
            self.query.stride()[:3],
            (log2_scale_of(self.scale), min_mass),
            HAS_EXACT=lse_exact is not None,
            STORE_STATISTICS=cR is not None,
        )

    def output(
        self,
        aL: torch.Tensor,
        cL: torch.Tensor,
        y: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        lse_exact: torch.Tensor | None,
        out_exact: torch.Tensor | None,
    ) -> None:
        """Write out [B, S, H, E] and lse [B, H, S]; `out_exact` [B, S, H, E] may be `out` itself."""
        self._rows("l_output", aL, cL, y, lse=lse, lse_exact=lse_exact, out_exact=out_exact, out=out)

    def _rows(self, name: str, aL, cL, y, *, lse, lse_exact, out_exact, out) -> None:
        E = self.query.shape[3] if y is None else y.shape[-1]
        none = (0, 0, 0)
        self._launch(
            _l_rows_kernel,
            name,
            (self.query, aL, cL, y, None if lse_exact is None else self.exact, lse_exact, out_exact, out, lse),
            (
                *self.query.stride()[:3],
                *(none if out_exact is None else out_exact.stride()[:3]),
                *(none if out is None else out.stride()[:3]),
            ),
            (log2_scale_of(self.scale),),
            E=E,
            BLOCK_E=block_dim(E) if y is not None else 16,
            LAST=y is not None,
            HAS_EXACT=lse_exact is not None,
        )

    def backward(
        self,
        aL: torch.Tensor,
        cL: torch.Tensor,
        lse: torch.Tensor,
        *,
        dq: torch.Tensor,
        daL: torch.Tensor,
        dcL: torch.Tensor,
        delta_r: torch.Tensor,
        y: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        do: torch.Tensor | None = None,
        dlse: torch.Tensor | None = None,
        dy: torch.Tensor | None = None,
        daR: torch.Tensor | None = None,
        dcR: torch.Tensor | None = None,
        lse_exact: torch.Tensor | None = None,
        out_exact: torch.Tensor | None = None,
        dlse_exact: torch.Tensor | None = None,
        do_exact: torch.Tensor | None = None,
    ) -> None:
        """Backward of `output` (which has y, out, do and dy) or of `centroids` (which has daR and dcR).

        Writes daL, dcL, delta_r and dy. Of the output, dq, dlse_exact and do_exact are written; of centroids added to.
        """
        last = y is not None
        E = y.shape[-1] if y is not None else self.query.shape[3]
        none = (0, 0, 0)
        exact = None if lse_exact is None else self.exact
        delta = torch.empty_like(lse)
        constants = dict(E=E, BLOCK_E=block_dim(E) if last else 16, LAST=last, HAS_EXACT=exact is not None)
        query_strides = self.query.stride()[:3]
        do_strides = none if do is None else do.stride()[:3]
        self._launch(
            _l_backward_rows_kernel,
            "l_backward_rows",
            (
                self.query, aL, cL, lse, y, do, out, daR, dcR, dlse, exact, lse_exact, out_exact,
                dq, delta, dlse_exact, do_exact,
            ),
            (
                *query_strides,
                *(none if out is None else out.stride()[:3]),
                *do_strides,
                *(none if out_exact is None else out_exact.stride()[:3]),
                *dq.stride()[:3],
            ),
            (self.scale, log2_scale_of(self.scale)),
            HAS_DLSE=dlse is not None,
            **constants,
        )  # fmt: skip
        self._launch(
            _l_backward_columns_kernel,
            "l_backward_columns",
            (self.query, aL, cL, lse, y, do, daR, dcR, exact, delta, daL, dcL, dy, delta_r),
            (*query_strides, *do_strides),
            (self.scale, log2_scale_of(self.scale)),
            **constants,
        )
