"""Peers of VMonarch that are trained, as attention processors of a Wan model: for `studies.trained` alone.

Most have exact attention to the tiles of keys with the best mean scores, and differ in what stands for the others. The
tiles are those of `two_resolution_attention`, whose kernels they run in. `Tempered` is VMonarch with more to learn.

Legend: B videos, S tokens, H heads, D head dim, m tiles of keys, n tiles of queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vmonarch.configs import InputError
from vmonarch.finetune.embedded.transformer import project
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.reference import to_groups
from vmonarch.kernels.monarch.blocks import exact_key_frames, grid_layout
from vmonarch.kernels.monarch.reference import centroids, exact_blocks, exact_part, output, position_major, r_step
from vmonarch.kernels.two_resolution.api import two_resolution_attention
from vmonarch.kernels.two_resolution.reference import chosen_tiles, tile_means
from vmonarch.kernels.two_resolution.tiling import places_of, tiling_of
from vmonarch.options import VMonarchOptions
from vmonarch.precision import own_precision
from vmonarch.two_resolution_options import TwoResolutionOptions


class Peer(nn.Module):
    """What one attention module of a Wan model has in place of full attention.

    Args:
        attn: the module.
        grid: of the tokens.
        options: of the method.
    """

    def __init__(self, attn: Any, grid: LatentGrid, options: Any) -> None:
        super().__init__()
        self.grid, self.options = grid, options

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        query, key, value = project(attn, hidden_states, hidden_states, rotary_emb)
        out = self.attend(hidden_states, query, key, value)
        projected: torch.Tensor = attn.to_out[0](out.to(value.dtype).flatten(2, 3))
        return projected

    def attend(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """[B, S, H, D] of as many queries, keys and values."""
        raise NotImplementedError


class Control(Peer):
    """Exact attention to the best tiles of keys, and nothing else; the options say how many of them are exact."""

    def __init__(self, attn: Any, grid: LatentGrid, options: TwoResolutionOptions) -> None:
        super().__init__(attn, grid, options)
        self.tiling = tiling_of(grid, options)

    def attend(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)
        exact = chosen_tiles(query, key, self.tiling, self.options, scale=query.shape[-1] ** -0.5).exact
        out = two_resolution_attention(
            query, key, value, grid=self.grid, options=self.options, selection=exact.contiguous()
        )
        far = self.far(hidden_states, query, key, value, exact)
        return out if far is None else out + far.to(out.dtype)

    def far(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exact: Any
    ) -> torch.Tensor | None:
        """[B, S, H, D] that is added for the tiles that are not chosen (`exact` [B, H, n, m]); None for nothing."""
        return None

    def to_tokens(self, of_tiles: torch.Tensor) -> torch.Tensor:
        """[B, H, n, …] of tiles of queries as [B, S, H, …] of the tokens."""
        places = places_of(self.tiling.of_queries, of_tiles.device)
        tile = places.place // places.token.shape[1]
        return of_tiles[:, :, tile].transpose(1, 2)


class VSA(Control):
    """The compressed branch: attention between the means of cubes, times a gate of the token's own.

    The gate is linear in the token and 0 at first, as where the authors finetune.

    Source: Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention (2025), §3.
    """

    def __init__(self, attn: Any, grid: LatentGrid, options: TwoResolutionOptions) -> None:
        super().__init__(attn, grid, options)
        width = attn.to_q.in_features
        self.gate = nn.Linear(width, width).to(attn.to_q.weight)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def far(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exact: Any
    ) -> torch.Tensor:
        q, k, v = (tile_means(x, self.tiling) for x in (query, key, value))
        compressed = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
        return self.to_tokens(compressed) * self.gate(hidden_states).unflatten(2, (query.shape[2], -1))


class SLA(Control):
    """Linear attention to the tiles that are not chosen, with softmax as feature map, and a projection, 0 at first.

    No tile is left out; the paper's share of negligible ones saves nothing in a linear part.

    Source: Zhang et al., SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear Attention
    (2025).
    """

    def __init__(self, attn: Any, grid: LatentGrid, options: TwoResolutionOptions) -> None:
        super().__init__(attn, grid, options)
        dim = attn.to_q.out_features // attn.heads
        self.projection = nn.Linear(dim, dim, bias=False).to(attn.to_q.weight)
        nn.init.zeros_(self.projection.weight)

    def far(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exact: Any
    ) -> torch.Tensor:
        q, k = (torch.softmax(x.float(), -1) for x in (query, key))
        places = places_of(self.tiling, key.device)
        present = places.present[None, :, :, None, None]
        of_tiles = lambda x: torch.where(present, x[:, places.token], 0)  # [B, m, b, H, …]
        keys = of_tiles(k)
        sums = torch.einsum("bmphd,bmphe->bhmde", keys, of_tiles(value.float()))
        rest = (~exact).float()  # [B, H, n, m]
        states = torch.einsum("bhnm,bhmde->bhnde", rest, sums)
        totals = torch.einsum("bhnm,bhmd->bhnd", rest, keys.sum(2).transpose(1, 2))
        there = places_of(self.tiling.of_queries, key.device)
        queries = q[:, there.token]  # [B, n, a, H, D]
        mass = torch.einsum("bnahd,bhnd->bnah", queries, totals)
        linear = torch.einsum("bnahd,bhnde->bnahe", queries, states) / mass.clamp(min=1e-6).unsqueeze(-1)
        return self.projection(linear.flatten(1, 2)[:, there.place])


class Tempered(Peer):
    """Monarch attention; heads learn the temperatures of R and L, and the weight of the exact part, all 1 at first.

    It is `monarch_attention_reference` for blocks of one frame, in its stages.

    Raises:
        InputError: blocks that are not whole frames, or coarse ones.
    """

    def __init__(self, attn: Any, grid: LatentGrid, options: VMonarchOptions) -> None:
        super().__init__(attn, grid, options)
        supported = VMonarchOptions(num_iterations=options.num_iterations, exact=options.exact)
        if options != supported:
            raise InputError("tempered", f"supports num_iterations and exact alone, got {options}")
        self.logs = nn.Parameter(torch.zeros(3, attn.heads, device=attn.to_q.weight.device))

    def attend(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return tempered_attention(query, key, value, self.logs, self.grid, self.options)


@own_precision
def tempered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    logs: torch.Tensor,
    grid: LatentGrid,
    options: VMonarchOptions,
) -> torch.Tensor:
    """[B, S, H, D] of `Tempered`, in float32; logs: [3, H] of R's and L's inverse temperatures and of the weight."""
    layout = grid_layout(grid, **options.cut(grid.frames), device=query.device)
    inverse_r, inverse_l = logs[:2].exp()[:, :, None, None, None]
    query, key, value = query.float() * query.shape[-1] ** -0.5, key.float(), value.float()
    q, k, v = (layout.to_blocks(x) for x in (query, key, value))
    exact_table = out_exact = lse_exact = None
    if options.pattern is not None:
        assert layout.frame is not None
        key_frames = exact_key_frames(options.pattern, grid.frames, 1)
        exact_table = exact_blocks(key_frames, layout.frame)
        parts = exact_part(to_groups(query), to_groups(key), to_groups(value), key_frames)
        out, lse = (x.unflatten(0, (len(q), -1)) for x in parts)
        lse = lse + logs[2, :, None]
        out_exact, lse_exact = (position_major(x.unflatten(2, (grid.frames, -1))) for x in (out, lse))

    of_l = position_major(q * inverse_l)
    blocks = lambda x: x.unflatten(0, q.shape[:2]).transpose(2, 3)
    z = q
    for _ in range(options.num_iterations - 1):
        aL, cL, _ = r_step(z * inverse_r, k, None, None, True)
        aL, cL = position_major(aL), position_major(cL * inverse_l[..., 0])
        known = (exact_table, lse_exact) if options.pattern is not None and options.pattern.aware else (None, None)
        z = blocks(centroids(of_l, aL, cL, *known, None, options)) / inverse_l
    aL, cL, y = r_step(z * inverse_r, k, None, v, True)
    assert y is not None
    aL, cL, y = position_major(aL), position_major(cL * inverse_l[..., 0]), position_major(y)
    o, _ = output(of_l, aL, cL, y, exact_table, lse_exact, out_exact)
    return layout.to_tokens(blocks(o)).transpose(1, 2)


# What makes each, and the method whose options it takes.
PEERS: dict[str, tuple[type[Peer], str]] = {
    "topk": (Control, "two-resolution:rest=false"),
    "vsa": (VSA, "two-resolution:rest=false"),
    "sla": (SLA, "two-resolution:rest=false"),
    "tempered": (Tempered, "vmonarch"),
}
