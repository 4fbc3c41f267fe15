"""Linear attention as a torch operator: opaque to torch.compile, differentiable, without views of its inputs.

Shapes: B batch, S tokens, H heads, d' dims of query and key, E value dim, F rows of a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vmonarch.kernels.common.launch import block_dim, dot_precision, launch_options
from vmonarch.kernels.taylor.kernels import gradient_kernel, read_kernel, state_kernel
from vmonarch.kernels.taylor.reference import LEAST_WEIGHT, LinearState

# Programs that the sums of all tokens are spread over, at least; several times the processors of any chip.
PROGRAMS = 1024


@dataclass(frozen=True)
class _Launch:
    """What the kernels of one call share.

    Args:
        like: a tensor [B, S, H, d'] of the call. width: E.
        scale: of q·k; 1 where features were made beforehand.
        taylor: whether weights are 1 + s + s²/2.
    """

    like: torch.Tensor
    width: int
    scale: float
    causal: bool
    taylor: bool

    @property
    def rows(self) -> int:
        """F."""
        dims = self.like.shape[3]
        return 1 + dims + dims**2 if self.taylor else dims

    def options(self) -> dict[str, int]:
        # The tables have four warps for tiles of 64 rows: with eight, Triton 3.6 shares products 16 wide out among two
        # warpgroups of Hopper, which then read beyond their memory.
        return launch_options("taylor", self.like.device, self.like.dtype, self.like.shape[3])

    def blocks(self) -> dict[str, Any]:
        dims = self.like.shape[3]
        BLOCK_D = block_dim(dims)
        widest = self.options()["BLOCK_E"]
        return {
            "D": dims, "E": self.width, "TAYLOR": self.taylor, "PRECISION": dot_precision(self.like.dtype),
            "BLOCK_D": BLOCK_D, "BLOCK_P": BLOCK_D**2 if self.taylor else 16,
            "BLOCK_E": min(widest, block_dim(self.width)),
            "num_warps": self.options()["num_warps"], "num_stages": self.options()["num_stages"],
        }  # fmt: skip

    def chunk(self, tokens: int) -> int:
        """Tokens per chunk: causal, as many as a tile can afford to meet one by one; else as many as fill the chip."""
        if self.causal:
            return self.options()["CHUNK"]
        B, _, H, _ = self.like.shape
        block = self.options()["BLOCK_N"]
        return block * max(1, triton.cdiv(tokens * B * H, PROGRAMS * block))

    def states(self, x: torch.Tensor, v: torch.Tensor, c: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of every chunk: [B·H, chunks, F, E] and [B·H, chunks, F]; x [B, S, H, d'], v [B, S, H, E]."""
        B, S, H, _ = x.shape
        chunk = self.chunk(S)
        chunks = triton.cdiv(S, chunk)
        s = x.new_empty(B * H, chunks, self.rows, self.width, dtype=torch.float32)
        z = x.new_empty(B * H, chunks, self.rows, dtype=torch.float32)
        blocks = self.blocks()
        columns = triton.cdiv(self.width, blocks["BLOCK_E"])
        state_kernel[(columns * chunks * B * H,)](
            x, v, c, s, z, *x.stride()[:3], *v.stride()[:3], H, S, chunks, chunk, math.sqrt(self.scale),
            BLOCK_N=self.options()["BLOCK_N"], **blocks,
        )  # fmt: skip
        return s, z

    def read(
        self, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor, s: torch.Tensor, z: torch.Tensor, *, back: bool,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """φ(x)·state [B, S, H, E], of x's dtype; divided by the weight, which is written, if `weight` [B, H, S]."""
        B, S, H, _ = x.shape
        out = x.new_empty(B, S, H, self.width)
        blocks, (chunks, chunk, tiles) = self.blocks(), self._tiles(S)
        columns = triton.cdiv(self.width, blocks["BLOCK_E"])
        read_kernel[(columns * tiles * chunks * B * H,)](
            x, y, v, s, z, out, weight, *x.stride()[:3], *y.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            H, S, chunks, chunk, tiles, math.sqrt(self.scale), LEAST_WEIGHT,
            CAUSAL=self.causal, BACK=back, NORMALISE=weight is not None, BLOCK_M=self.options()["BLOCK_M"], **blocks,
        )  # fmt: skip
        return out

    def gradient(
        self, x: torch.Tensor, g: torch.Tensor, h: torch.Tensor | None, y: torch.Tensor, v: torch.Tensor,
        c: torch.Tensor | None, s: torch.Tensor, z: torch.Tensor, *, back: bool,
    ) -> torch.Tensor:  # fmt: skip
        """dx [B, S, H, d'] of Σ (g·v + h·c)·w; x, g and h are of one side, y, v, c and the state of the other."""
        B, S, H, _ = x.shape
        dx = x.new_empty(x.shape)
        chunks, chunk, tiles = self._tiles(S)
        gradient_kernel[(tiles * chunks * B * H,)](
            x, g, h, y, v, c, s, z, dx, *x.stride()[:3], *g.stride()[:3], *y.stride()[:3], *v.stride()[:3],
            H, S, chunks, chunk, tiles, math.sqrt(self.scale),
            CAUSAL=self.causal, BACK=back, BLOCK_M=self.options()["BLOCK_M"], **self.blocks(),
        )  # fmt: skip
        return dx

    def _tiles(self, tokens: int) -> tuple[int, int, int]:
        """Chunks of the tokens that are read for, tokens per chunk and tiles per chunk; one chunk if not causal."""
        block = self.options()["BLOCK_M"]
        chunk = self.chunk(tokens) if self.causal else triton.cdiv(tokens, block) * block
        return triton.cdiv(tokens, chunk), chunk, triton.cdiv(chunk, block)


def _before(sums: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """Sums of all chunks before each, [B·H, chunks, …], beginning with `first` [B·H, …]."""
    first = torch.zeros_like(sums[:, 0]) if first is None else first
    return torch.cat([first[:, None], first[:, None] + sums[:, :-1].cumsum(1)], 1)


def _after(sums: torch.Tensor) -> torch.Tensor:
    """Sums of all chunks after each."""
    return _before(sums.flip(1), None).flip(1)


def _of_keys(
    launch: _Launch, key: torch.Tensor, value: torch.Tensor, s: torch.Tensor | None, z: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """What queries read: sums of the keys before their chunk if causal, else of all; and the sums after all keys."""
    sums, weights = launch.states(key, value, None)
    s_after, z_after = sums.sum(1), weights.sum(1)
    if s is not None and z is not None:
        s_after, z_after = s_after + s, z_after + z
    if launch.causal:
        return _before(sums, s), _before(weights, z), s_after, z_after
    return s_after, z_after, s_after, z_after


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? s, Tensor? z, float scale, bool causal, bool taylor"


@torch.library.custom_op(
    "vmonarch::taylor_forward", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def taylor_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    s: torch.Tensor | None,
    z: torch.Tensor | None,
    scale: float,
    causal: bool,
    taylor: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], weight [B, H, Sq], s [B·H, F, E] and z [B·H, F] after all keys)."""
    B, Sq, H, _ = query.shape
    launch = _Launch(query, value.shape[3], scale, causal, taylor)
    with torch.cuda.device_of(query):
        s_read, z_read, s_after, z_after = _of_keys(launch, key, value, s, z)
        weight = query.new_empty(B, H, Sq, dtype=torch.float32)
        out = launch.read(query, key, value, s_read, z_read, back=False, weight=weight)
    return out, weight, s_after, z_after


@taylor_forward.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    s: Any,
    z: Any,
    scale: float,
    causal: bool,
    taylor: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    B, Sq, H, _d = query.shape
    E = value.shape[3]
    F = _Launch(query, E, scale, causal, taylor).rows
    wide = query.new_empty(0, dtype=torch.float32)
    return (
        query.new_empty(B, Sq, H, E),
        wide.new_empty(B, H, Sq),
        wide.new_empty(B * H, F, E),
        wide.new_empty(B * H, F),
    )


@torch.library.custom_op(
    "vmonarch::taylor_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor weight, float scale,"
    " bool causal, bool taylor) -> (Tensor, Tensor, Tensor)",
)
def taylor_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    causal: bool,
    taylor: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    launch = _Launch(query, value.shape[3], scale, causal, taylor)
    inverse = torch.where(weight.abs() > LEAST_WEIGHT, 1.0 / weight, 0.0)  # [B, H, Sq]
    wide = grad_out.float()
    h = -(wide * out.float()).sum(-1).transpose(1, 2) * inverse
    g = (wide * inverse.transpose(1, 2).unsqueeze(-1)).to(query.dtype)
    with torch.cuda.device_of(query):
        s, z, _, _ = _of_keys(launch, key, value, None, None)
        dq = launch.gradient(query, g, h.contiguous(), key, value, None, s, z, back=False)
        s, z = launch.states(query, g, h.contiguous())
        s, z = (_after(s), _after(z)) if causal else (s.sum(1), z.sum(1))
        dk = launch.gradient(key, value, None, query, g, h.contiguous(), s, z, back=True)
        dv = launch.read(key, query, g, s, z, back=True)
    return dq, dk, dv


@taylor_backward.register_fake
def _(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, _, _, *ctx.numbers = inputs
    out, weight, s, z = output
    ctx.mark_non_differentiable(weight, s, z)
    ctx.save_for_backward(query, key, value, out, weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    query, key, value, out, weight = ctx.saved_tensors
    gradients = taylor_backward(grad_out, query, key, value, out, weight, *ctx.numbers)
    return *gradients, None, None, None, None, None


taylor_forward.register_autograd(_backward, setup_context=_setup_context)


def taylor_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    taylor: bool,
    state: LinearState | None,
) -> tuple[torch.Tensor, LinearState]:
    """(out, state) by the kernels; query and key are features unless `taylor`; arguments are checked already."""
    B, H, dims = key.shape[0], key.shape[2], key.shape[3]
    # The reference's features have the ½ of s²/2 in them, a root on each side; the sums here have not.
    pairs = 1 + dims
    s = z = None
    if state is not None:
        s, z = (x.float().flatten(0, 1).clone() for x in (state.kv, state.k))
        if taylor:
            s[:, pairs:] *= math.sqrt(2.0)
            z[:, pairs:] *= math.sqrt(2.0)
    out, _, s, z = taylor_forward(query, key, value, s, z, scale, causal, taylor)
    if taylor:
        halves = s.new_ones(s.shape[1])
        halves[pairs:] = math.sqrt(0.5)
        s, z = s * halves[:, None], z * halves
    tokens = key.shape[1] + (0 if state is None else state.tokens)
    return out, LinearState(s.unflatten(0, (B, H)), z.unflatten(0, (B, H)), tokens)
