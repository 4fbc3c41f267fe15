"""Linear attention as a torch operator.

Shapes: B batch, S tokens, H heads, d' dims of query and key, E value dim, F rows of a state, T frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vmonarch.kernels.common.launch import block_dim, dot_precision, launch_options, unit_stride
from vmonarch.kernels.common.operators import operator
from vmonarch.kernels.common.replay import launcher, replayed
from vmonarch.kernels.common.tiles import strided
from vmonarch.kernels.flash_entropy.backward import row_deltas
from vmonarch.kernels.taylor.kernels import gradient_kernel, read_kernel, state_kernel
from vmonarch.kernels.taylor.reference import LEAST_WEIGHT, log_partition

# Programs that the tokens are spread over, at least: several times the processors of any chip. The fewer, the less is
# written and read of sums; these are four for every processor of an H200.
PROGRAMS = 528


@dataclass(frozen=True)
class _Launch:
    """What the kernels of one call share.

    Args:
        like: a tensor [B, S, H, d'] of the call. width: E. frame_weights: [H, T, T] or None.
        scale: of q·k.
    """

    like: torch.Tensor
    width: int
    frame_weights: torch.Tensor | None
    scale: float
    causal: bool

    @property
    def frames(self) -> int:
        """0, or how many frames the tokens are, each with sums of its own."""
        return 0 if self.frame_weights is None else self.frame_weights.shape[1]

    @property
    def rows(self) -> int:
        """F."""
        dims = self.like.shape[3]
        return 1 + dims + dims**2

    def options(self) -> dict[str, int]:
        # The tables have four warps for tiles of 64 rows: with eight, Triton 3.6 shares products 16 wide out among two
        # warpgroups of Hopper, which then read beyond their memory.
        return launch_options("taylor", self.like.device, self.like.dtype, self.like.shape[3])

    def blocks(self) -> dict[str, Any]:
        dims, options = self.like.shape[3], self.options()
        BLOCK_D = block_dim(dims)
        return {
            "D": dims, "E": self.width, "PRECISION": dot_precision(self.like.dtype),
            "BLOCK_D": BLOCK_D, "BLOCK_A": min(options["BLOCK_A"], BLOCK_D),
            "BLOCK_E": min(options["BLOCK_E"], block_dim(self.width)),
            "num_warps": options["num_warps"], "num_stages": options["num_stages"],
        }  # fmt: skip

    def chunk(self, tokens: int) -> int:
        """Tokens per chunk: a frame; or if causal as many as a tile can afford to meet one by one; or a part of all."""
        if self.frames:
            return tokens // self.frames
        if self.causal:
            return self.options()["CHUNK"]
        B, _, H, _ = self.like.shape
        block = self.options()["BLOCK_N"]
        return block * max(1, triton.cdiv(tokens * B * H, PROGRAMS * block))

    def states(
        self, x: torch.Tensor, v: torch.Tensor, c: torch.Tensor | None = None, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of every chunk: [B·H, chunks, F, E] and [B·H, chunks, F].

        Args:
            x: [B, S, H, d']. v: [B, S, H, E].
            c, weight: [B, H, S], the second divides what a token adds; or both None, for 1.
        """
        B, S, H, _ = x.shape
        chunk = self.chunk(S)
        chunks = triton.cdiv(S, chunk)
        s = x.new_empty(B * H, chunks, self.rows, self.width, dtype=torch.float32)
        z = x.new_empty(B * H, chunks, self.rows, dtype=torch.float32)
        numbers = (H, S, chunks, chunk, math.sqrt(self.scale), LEAST_WEIGHT)
        blocks = self.blocks()
        a_tiles = blocks["BLOCK_D"] // blocks["BLOCK_A"]
        launcher(state_kernel, (triton.cdiv(self.width, blocks["BLOCK_E"]) * a_tiles * chunks * B * H,))(
            strided(x), strided(v), c, weight, s, z, *numbers, BLOCK_N=self.options()["BLOCK_N"], **blocks
        )
        return s, z

    def seen(self, sums: torch.Tensor, *, back: bool) -> torch.Tensor:
        """What tokens read of the sums of all chunks [B·H, chunks, …]: each frame a mixture of those of all, causal
        tokens those before their chunk, or `back`, after it; else their sum [B·H, …].
        """
        if self.frame_weights is not None:
            weights = self.frame_weights.mT if back else self.frame_weights
            weights = weights.float().repeat(sums.shape[0] // weights.shape[0], 1, 1)
            return (weights @ sums.flatten(2)).view(sums.shape)
        if self.causal:
            sums = sums.flip(1) if back else sums
            before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1].cumsum(1)], 1)
            return before.flip(1) if back else before
        return sums.sum(1)

    def read(
        self, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, s: torch.Tensor,
        z: torch.Tensor, *, back: bool,
    ) -> torch.Tensor:  # fmt: skip
        """φ(x)·state [B, S, H, E], of x's dtype, divided by the weight [B, H, S], which is written; or see `back`.

        Args:
            back: x is a key, which reads what queries y sum up, divided by their weight, which is given.
        """
        out = x.new_empty(*x.shape[:3], self.width)
        own, programs, numbers = self._numbers(x)
        blocks = self.blocks()
        columns = triton.cdiv(self.width, blocks["BLOCK_E"])
        launcher(read_kernel, (columns * programs,))(
            strided(x), strided(y), strided(v), s, z, strided(out), weight, *numbers,
            CAUSAL=self.causal, OWN=own, BACK=back, BLOCK_M=self.options()["BLOCK_M"], **blocks,
        )  # fmt: skip
        return out

    def gradient(
        self, x: torch.Tensor, g: torch.Tensor, h: torch.Tensor | None, y: torch.Tensor, v: torch.Tensor,
        c: torch.Tensor | None, weight: torch.Tensor, s: torch.Tensor, z: torch.Tensor, *, back: bool,
    ) -> torch.Tensor:  # fmt: skip
        """dx [B, S, H, d'] of Σ (g·v + h·c)·w / weight.

        Args:
            x, g, h: of one side. y, v, c, s, z: of the other. weight: of the queries, which are x, or y if `back`.
        """
        dx = x.new_empty(x.shape)
        own, programs, numbers = self._numbers(x)
        blocks = self.blocks()
        # Pairs are results there, and need twice the registers; the sums of all of them lie in shared memory.
        blocks |= {"BLOCK_A": max(1, blocks["BLOCK_A"] // 2), "num_stages": 1}
        launcher(gradient_kernel, (programs,))(
            strided(x), strided(g), h, strided(y), strided(v), c, weight, s, z, dx, *numbers,
            CAUSAL=self.causal, OWN=own, BACK=back, BLOCK_M=self.options()["BLOCK_M"], **blocks,
        )  # fmt: skip
        return dx

    def _numbers(self, x: torch.Tensor) -> tuple[bool, int, tuple[float, ...]]:
        """Whether each chunk of the tokens reads its own state, the programs of all, and a kernel's numbers from H on.

        A program begins by loading a state, so there are no more of them than keep the chip busy.
        """
        B, S, H, _ = x.shape
        own = self.causal or self.frames > 0
        chunk = self.chunk(S) if own else S
        chunks, tiles = triton.cdiv(S, chunk), triton.cdiv(chunk, self.options()["BLOCK_M"])
        programs = min(tiles, triton.cdiv(PROGRAMS, chunks * B * H))
        return own, programs * chunks * B * H, (H, S, chunks, chunk, programs, math.sqrt(self.scale), LEAST_WEIGHT)


@replayed
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    frame_weights: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], weight [B, H, Sq])."""
    B, Sq, H, _ = query.shape
    launch = _Launch(query, value.shape[3], frame_weights, scale, causal)
    s, z = (launch.seen(x, back=False) for x in launch.states(key, value))
    weight = query.new_empty(B, H, Sq, dtype=torch.float32)
    out = launch.read(query, key, value, weight, s, z, back=False)
    return out, weight


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, gradient of the frames' weights), each like its input; the last one is empty without them."""
    grad_out, grad_weight, query, key, value, frame_weights, out, weight, *numbers = inputs
    launch = _Launch(query, value.shape[3], frame_weights, *numbers)
    d_frames = query.new_empty(0)
    grad_out = unit_stride(grad_out)
    # h = weight·grad_weight - grad_out·out [B, H, S]: the weight times all that comes to it.
    h = torch.empty_like(weight)
    of_weight = None if grad_weight is None else (weight * grad_weight).contiguous()
    row_deltas(grad_out, unit_stride(out), of_weight, None, None, h)
    h.neg_()
    # Sums of the keys, which queries read, and of the queries, which keys read.
    s_keys, z_keys = launch.states(key, value)
    s_queries, z_queries = launch.states(query, grad_out, h, weight)
    if frame_weights is not None:
        of_row = s_keys.new_ones(launch.rows, 1)
        of_row[1 + query.shape[3] :] = 0.5
        products = (s_queries * of_row).flatten(2) @ s_keys.flatten(2).mT
        products += (z_queries * of_row[:, 0]) @ z_keys.mT
        d_frames = products.unflatten(0, (-1, frame_weights.shape[0])).sum(0).to(frame_weights.dtype)
    s_keys, z_keys = (launch.seen(x, back=False) for x in (s_keys, z_keys))
    s_queries, z_queries = (launch.seen(x, back=True) for x in (s_queries, z_queries))
    dq = launch.gradient(query, grad_out, h, key, value, None, weight, s_keys, z_keys, back=False)
    dk = launch.gradient(key, value, None, query, grad_out, h, weight, s_queries, z_queries, back=True)
    dv = launch.read(key, query, grad_out, weight, s_queries, z_queries, back=True)
    return dq, dk, dv, d_frames


_operator = operator(
    "vmonarch::taylor",
    _forward,
    _backward,
    "Tensor query, Tensor key, Tensor value, Tensor? frame_weights, float scale, bool causal",
    gradients=4,
)


def taylor_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    frame_weights: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) by the kernels, the latter if asked for; arguments are checked already."""
    out, weight = _operator(query, key, value, frame_weights, scale, causal)
    return out, log_partition(weight) if return_lse else None
