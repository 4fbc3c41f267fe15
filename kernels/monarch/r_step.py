"""R-steps in Triton: plain attention inside every key block, with the key as its own value (`reference.r_step`).

They are flash attention (`flash_entropy`) in which a block's positions attend to its keys alone; here are what finds
the blocks, and the pooled keys.

Legend: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, c pooled cells per block.
Tokens are [B, S, H, D] with any strides but the last; block tensors are [B·H·m, b, D], contiguous; row statistics are
[B·H·m, b], float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.launch import block_dim, hopper_fits, launch_options, unspecialised
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.tiles import head_of, load_rows, store_rows, strided
from vmonarch.kernels.flash_entropy.backward import Portable, row_deltas
from vmonarch.kernels.flash_entropy.forward import Bias, launch_forward
from vmonarch.kernels.flash_entropy.segments import Segment, row_work
from vmonarch.kernels.monarch.call import MonarchCall


@triton.jit
def _cells_of(places, heads, cell_tiles, BLOCK_N: tl.constexpr):
    """A program's group, block, head and batch entry, its pooled cells [BLOCK_N], and whether they exist."""
    group = tl.program_id(0) // cell_tiles
    cell = tl.program_id(0) % cell_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    head, batch = group // places.blocks % heads, group // places.blocks // heads
    return group, group % places.blocks, head, batch, cell, cell < places.cells


@triton.jit
def _token_in_cell(places, block, cell, step_h, step_w, COARSE: tl.constexpr):
    """Token at offset (step_h, step_w) inside pooled `cell` of a frame, and whether there is one."""
    row = cell // places.cells_w * COARSE + step_h
    column = cell % places.cells_w * COARSE + step_w
    return (block * places.height + row) * places.width + column, (row < places.height) & (column < places.width)


@triton.jit(do_not_specialize=["heads", "cell_tiles"])
def _pool_kernel(
    key, pooled_ptr, bias_ptr, heads, places, cell_tiles,
    D: tl.constexpr, COARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean key of every cell, and log2 of the number of its keys."""
    places = Places(*[number >> 4 for number in places])
    group, block, head, batch, cell, inside = _cells_of(places, heads, cell_tiles, BLOCK_N)
    k_ptr = head_of(key, batch, head)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.static_range(COARSE * COARSE):
        token, valid = _token_in_cell(places, block, cell, step // COARSE, step % COARSE, COARSE)
        valid = valid & inside
        total += load_rows(k_ptr, key.stride_s, token, valid, D, BLOCK_D, True).to(tl.float32)
        count += valid.to(tl.float32)
    mean = total / tl.maximum(count, 1.0)[:, None]
    row = group.to(tl.int64) * places.cells + cell
    store_rows(pooled_ptr, D, row, inside, mean, D, BLOCK_D)
    if group < places.blocks:
        bias = tl.where(count > 0, tl.log2(tl.maximum(count, 1.0)), -float("inf"))
        tl.store(bias_ptr + group * places.cells + cell, bias, mask=inside)


@triton.jit(do_not_specialize=["heads", "cell_tiles"])
def _unpool_kernel(
    grad_key, d_pooled_ptr, bias_ptr, heads, places, cell_tiles,
    D: tl.constexpr, COARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to every key's gradient its share of its cell's."""
    places = Places(*[number >> 4 for number in places])
    group, block, head, batch, cell, inside = _cells_of(places, heads, cell_tiles, BLOCK_N)
    dk_ptr = head_of(grad_key, batch, head)
    row = group.to(tl.int64) * places.cells + cell
    d_pooled = load_rows(d_pooled_ptr, D, row, inside, D, BLOCK_D, True).to(tl.float32)
    bias = tl.load(bias_ptr + block * places.cells + cell, mask=inside, other=0.0)
    share = d_pooled * tl.exp2(-tl.where(bias == -float("inf"), 0.0, bias))[:, None]
    for step in tl.static_range(COARSE * COARSE):
        token, valid = _token_in_cell(places, block, cell, step // COARSE, step % COARSE, COARSE)
        store_rows(dk_ptr, grad_key.stride_s, token, valid & inside, share, D, BLOCK_D, ADD=True)


@dataclass(frozen=True)
class RStep:
    """Everything that all R-steps of one call share: keys, values and how to find them.

    Args:
        key: [B, S, H, D]. value: [B, S, H, E]. key_mask: [B, S] bool or None.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    call: MonarchCall

    @property
    def groups(self) -> int:
        return self.key.shape[0] * self.key.shape[2] * self.call.places.blocks

    def pooled(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(mean key of every cell [B·H·m, c, D], log2 of the number of its keys [m, c]); None without `coarse`."""
        if self.call.options.coarse == 1:
            return None
        places = self.call.places
        pooled = self.key.new_empty(self.groups, places.cells, self.key.shape[3])
        bias = self.key.new_empty(places.blocks, places.cells, dtype=torch.float32)
        self._launch(_pool_kernel, self.key, (pooled, bias), places.cells, COARSE=self.call.options.coarse)
        return pooled, bias

    def unpool(self, d_pooled: torch.Tensor, bias: torch.Tensor, dk: torch.Tensor) -> None:
        """Add the gradient of the pooled keys to dk [B, S, H, D]."""
        self._launch(_unpool_kernel, dk, (d_pooled, bias), self.call.places.cells, COARSE=self.call.options.coarse)

    def _launch(self, kernel, tokens: torch.Tensor, tensors: tuple[torch.Tensor, ...], rows: int, **options) -> None:
        """Launch a kernel that works on this many rows of every block."""
        D = tokens.shape[3]
        block = 32
        tiles = triton.cdiv(rows, block)
        launcher(kernel, (tiles * self.groups,))(
            strided(tokens), *tensors, self.key.shape[2], unspecialised(self.call.places), tiles,
            D=D, BLOCK_N=block, BLOCK_D=block_dim(D), num_warps=4, **options,
        )  # fmt: skip

    def _options(self, kernel: str) -> dict[str, int]:
        return launch_options(kernel, self.key.device, self.key.dtype, max(self.key.shape[3], self.value.shape[3]))

    def _blocks(self, pooled: bool) -> tuple[Segment, ...]:
        """The keys, or pooled keys, to which the positions of every block attend."""
        places = self.call.places
        if pooled:
            bounds = ((l * places.cells, (l + 1) * places.cells) for l in range(places.blocks))
        else:
            starts = (l * places.positions - places.offset for l in range(places.blocks))
            bounds = ((max(0, start), min(start + places.positions, places.tokens)) for start in starts)
        return tuple(
            Segment(l * places.positions, (l + 1) * places.positions, (keys,)) for l, keys in enumerate(bounds)
        )

    def _rows(self, blocks: Any) -> Any:
        """A block tensor [B·H·m, ·, D] as [B, m·(·), H, D]; None for none."""
        B, _, H, _ = self.key.shape
        return None if blocks is None else blocks.view(B, H, -1, blocks.shape[2]).transpose(1, 2)

    def _positions(self, z: torch.Tensor) -> torch.Tensor:
        """z [B, m·b, H, D] of all positions: those without a query have zeros."""
        if z.ndim == 3:
            return self._rows(z)
        places = self.call.places
        before, all_of_them = places.offset, places.blocks * places.positions
        if all_of_them == places.tokens:
            return z
        return torch.nn.functional.pad(z, (0, 0, 0, 0, before, all_of_them - places.tokens - before))

    def _keys(self, pooled: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, Bias]:
        """Keys [B, ·, H, D], and what the kernels have to know of them."""
        if pooled is None:
            return self.key, Bias(key_mask=self.key_mask, programs=0)
        return self._rows(pooled[0]), Bias(log2_number=pooled[1], programs=0)

    def _cells_are_full(self) -> bool:
        """Whether every pooled key is the mean of coarse × coarse keys."""
        places = self.call.places
        return places.blocks * places.cells * self.call.options.coarse**2 == places.tokens

    def forward(
        self,
        z: torch.Tensor,
        pooled: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        aL: torch.Tensor | None = None,
        cL: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Write what is given of aL and cL, which go together, y (the last iteration) and lse.

        `z` is the query [B, S, H, D] in the first iteration, else [B·H·m, b, D]; `y` may be the memory of such a z.
        """
        written = aL if aL is not None else y
        assert written is not None
        # Pooled keys have rows like those of aL and y: contiguous.
        if self.key_mask is None and hopper_fits("monarch", z, self.key, self.value, written):
            from vmonarch.kernels.hopper.r_step import r_step

            key, bias, keys_per_key = self.key, None, 1
            if pooled is not None:
                key, bias = pooled
                if self._cells_are_full():
                    bias, keys_per_key = None, self.call.options.coarse**2
            if y is not None:
                stage = "r_step_last" if aL is not None else "r_step_values"
            else:
                stage = "r_step" if pooled is None else "r_step_pooled"
            r_step(
                z, key, self.value, aL=aL, cL=cL, y=y, lse=lse, bias=bias, keys_per_key=keys_per_key,
                places=self.call.places, heads=self.key.shape[2], scale=self.call.scale,
                options=self._options(f"hopper_{stage}"),
            )  # fmt: skip
            return
        options = self._options("r_step" if y is None else "r_step_last")
        if self.key_mask is None:
            # Keys after the last whole tile go through in one tile of as few as hold them.
            left = (self.call.places.positions if pooled is None else self.call.places.cells) % options["BLOCK_N"]
            options["BLOCK_TAIL"] = min(options["BLOCK_N"], max(16, triton.next_power_of_2(left)))
        work = row_work(self._blocks(pooled is not None), options["BLOCK_M"], options["BLOCK_N"], 1, 1, 1, z.device)
        keys, bias_of_keys = self._keys(pooled)
        launch_forward(
            self._positions(z), keys, None if y is None else self.value, work, options, self.call.scale,
            self._rows(y), lse, bias=bias_of_keys, aL=self._rows(aL), cL=cL,
        )  # fmt: skip

    def backward(
        self,
        z: torch.Tensor,
        pooled: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        lse: torch.Tensor,
        daL: torch.Tensor | None,
        dy: torch.Tensor | None,
        delta: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        cR: torch.Tensor | None = None,
        daR: torch.Tensor | None = None,
        dcR: torch.Tensor | None = None,
    ) -> None:
        """Write dk and dv if dy is given (the last iteration), else add to dk; add to dq where z is the query, else
        write daR and dcR.

        `daL` is None for y alone; `delta` = daL·aL + dy·y, one number per row. No gradient flows through cL.
        """
        key, bias = (self.key, None) if pooled is None else pooled
        d_key = dk if pooled is None else torch.empty_like(key)
        loaded = [x for x in (key, z, daL, dy, None if dy is None else self.value) if x is not None]
        even = pooled is None or self._cells_are_full()
        if even and self.key_mask is None and hopper_fits("monarch", *loaded):
            from vmonarch.kernels.hopper import backward as hopper_kernels

            tile, places = hopper_kernels.TILE, self.call.places
            b, keys_of_a_block = places.positions, places.positions if pooled is None else places.cells
            per_key = 1 if pooled is None else self.call.options.coarse**2
            folded = hopper_kernels.fold(lse, delta, b, self.call.scale, keys_per_key=per_key)
            shared: dict[str, Any] = dict(heads=self.key.shape[2], scale=self.call.scale, places=places)
            hopper_kernels.launch_keys(
                z, key, self.value, daL, dy, folded, d_key, None if dy is None else dv,
                tiles=(triton.cdiv(keys_of_a_block, tile), self.groups), add=(dy is None and pooled is None, False),
                half_tiles=0 < keys_of_a_block % tile <= tile // 2, **shared,
            )  # fmt: skip
            hopper_kernels.launch_rows(
                z, key, self.value, daL, dy, folded, dq, tiles=(triton.cdiv(b, tile), self.groups),
                cR=cR, daR=daR, dcR=dcR, min_mass=self.call.min_mass,
                ragged=pooled is None and b * places.blocks != places.tokens,
                half_tiles=0 < b % tile <= tile // 2, **shared,
            )  # fmt: skip
            if bias is not None:
                self.unpool(d_key, bias, dk)
            return
        positions, (keys, bias_of_keys) = self._positions(z), self._keys(pooled)
        kernels = Portable(
            positions, keys, None if dy is None else self.value, self._rows(dy), lse, delta, self.call.scale,
            bias=bias_of_keys, daL=self._rows(daL),
        )  # fmt: skip
        segments = self._blocks(pooled is not None)
        options = self._options("r_backward_keys")
        columns = tuple(Segment(*of, ((s.query_start, s.query_stop),)) for s in segments for of in s.key_ranges)
        work = row_work(columns, options["BLOCK_N"], options["BLOCK_M"], 1, 1, 1, key.device)
        target = d_key if pooled is None else self._rows(d_key)
        # The last iteration is differentiated first.
        add = pooled is None and dy is None
        kernels.columns(work, options, target, None if dy is None else dv, add=(add, False))
        if bias is not None:
            self.unpool(d_key, bias, dk)
        options = self._options("r_backward_z")
        work = row_work(segments, options["BLOCK_M"], options["BLOCK_N"], 1, 1, 1, key.device)
        if z.ndim == 3:
            assert daR is not None
            kernels.rows(work, options, self._rows(daR), add=False, cR=cR, dcR=dcR, min_mass=self.call.min_mass)
        elif positions is z:
            kernels.rows(work, options, dq, add=True)
        else:
            of_positions = torch.empty_like(positions, dtype=torch.float32)
            kernels.rows(work, options, of_positions, add=False)
            dq += of_positions[:, self.call.places.offset :][:, : z.shape[1]]

    def row_dots(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a·b of every row of two block tensors, [B·H·m, b] in float32; every block is a frame."""
        B, S, H, _ = self.key.shape
        dots = a.new_empty(a.shape[:2], dtype=torch.float32)
        a, b = (blocks.view(B, H, S, -1).transpose(1, 2) for blocks in (a, b))
        row_deltas(a, b, None, None, None, dots.view(B, H, S))
        return dots
