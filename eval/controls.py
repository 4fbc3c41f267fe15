"""Controls for quality tables: the paper's variants, attention at equal work, trained peers, and exact attention by
other kernels than the model's, because their different rounding alone changes videos.

    vmonarch.apply(pipe, ControlProcessor("controlled", fix_cr="first", fix_cl="first"))

They are not fast: kernels compute what they can, plain torch the rest, and sums are at least float32.

Shapes: B batch, S = T·P tokens, P = H·W positions of a frame, H heads, D head dim, E value dim, G = B·H groups; m
blocks or tiles of keys, n tiles of queries, b positions of a block or tile. query, key, value and results are
[B, S, H, D].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.attend import Attend, Exact, Result
from vmonarch.autocast import without_autocast
from vmonarch.base import Layer, VideoAttentionProcessor
from vmonarch.based import LearningLayer
from vmonarch.call import Call
from vmonarch.configs import as_json, build, check_choice
from vmonarch.flops import pair_flops, vmonarch_flops
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.blocks import BlockLayout, block_layout, grid_places
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.monarch.reference import l_step, last_l_step, monarch_attention_reference, r_step
from vmonarch.kernels.two_resolution.api import two_resolution_attention
from vmonarch.kernels.two_resolution.reference import best_of, chosen_tiles, tile_means
from vmonarch.kernels.two_resolution.tiling import Tiling, exact_tiles, tile_layout, tiling_of
from vmonarch.options import ExactBlocks, Options, TwoResolutionOptions, VMonarchOptions, check_share
from vmonarch.own import Own, Rotary, project, run_stack
from vmonarch.validation import check_flag, check_integer, check_number, check_positive_integer

# The frames for which a term is held at its initial value: the paper's superscripts 0, 1 and * (Table 5).
FIXED = ("none", "first", "all")
# Axes of the grid, as the paper names them.
AXES = ("T", "H", "W")


class Control(Options):
    """A control as an element of the attention stack: its options, checked on construction, and what it computes."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        if call.lse:
            raise NotImplementedError("controls do not support joint attention, of the video and other tokens")
        return self.attend(query, key, value, call.grid), None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        """The output [B, S, H, E] in the dtype of the query."""
        raise NotImplementedError

    def flops(self, grid: LatentGrid, head_dim: int) -> float | None:
        """FLOPs of one head, counted as in `vmonarch.flops`; None if they are not known."""
        return None

    def of_layer(self, place: int) -> Control:
        """The control for layer `place` of the transformer."""
        return self


def _exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention of any number of queries over any number of keys."""
    return flash_entropy_attention(query, key, value)[0]


def _recompute_first_frame(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid
) -> torch.Tensor:
    """`out` with exact rows for the queries of the first frame (VMonarch, Eq. 8)."""
    P = grid.tokens_per_frame
    return torch.cat([_exact(query[:, :P], key, value), out[:, P:]], 1)


@dataclass(frozen=True, kw_only=True)
class Iterative(Control):
    """A control that iterates as VMonarch does: num_iterations and min_mass are those of `vmonarch_attention`."""

    num_iterations: int = 2
    min_mass: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        VMonarchOptions(num_iterations=self.num_iterations, min_mass=self.min_mass)

    def flops(self, grid: LatentGrid, head_dim: int) -> float:
        """FLOPs of VMonarch without exact rows."""
        return vmonarch_flops(grid, head_dim, VMonarchOptions(num_iterations=self.num_iterations, exact=None))


@dataclass(frozen=True, kw_only=True)
class Controlled(Iterative):
    """VMonarch attention with cR or cL held at its initial value, for the first key frame or for all.

    cR starts at 1 (L is the identity). The "initial expected value log(M)" of cL is read as -log P: a row of R that is
    uniform over the P keys of its frame has cL = Σ R log R = -log P; the paper gives the size without the sign. With
    this sign, a held first frame gains weight, which agrees with the paper's table, where the variant with one
    iteration then has a better first frame.

    Args:
        fix_cr: "none", "first" (frame) or "all", applied after every L-step; no effect with one iteration.
        fix_cl: the same for cL, applied after every R-step.
        recompute: compute the rows of the first frame exactly.

    Source: VMonarch, App. J and Table 5.
    """

    fix_cr: str = "none"
    fix_cl: str = "none"
    recompute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fix_cr", "fix_cl"):
            if getattr(self, name) not in FIXED:
                raise ValueError(f"{name} must be one of {', '.join(FIXED)}, got {getattr(self, name)!r}")
        check_flag("recompute", self.recompute)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        layout = block_layout(grid_places(grid, coarse=1), 1, query.device)
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (layout.to_blocks(x.to(dtype)) for x in (query, key, value))  # [B, H, m, b, D]
        q = q * query.shape[-1] ** -0.5
        lead = q.shape[:2]
        by_position = lambda blocks: blocks.transpose(2, 3).flatten(0, 1)  # [B, H, m, b, …] -> [G, b, m, …]
        by_block = lambda positions: positions.unflatten(0, lead).transpose(2, 3)
        q_positions = by_position(q)
        z = q
        for _ in range(self.num_iterations - 1):
            aL, cL, _ = r_step(z, k, None, None)
            cL = _hold(cL, -math.log(layout.positions), self.fix_cl)
            aR, cR = (by_block(x) for x in l_step(q_positions, by_position(aL), by_position(cL), None, None, None))
            least = max(self.min_mass, torch.finfo(dtype).tiny)
            z = aR / _hold(cR, 1.0, self.fix_cr).clamp(min=least).unsqueeze(-1)
        aL, cL, y = r_step(z, k, None, v)
        assert y is not None
        cL = _hold(cL, -math.log(layout.positions), self.fix_cl)
        o, _ = last_l_step(q_positions, by_position(aL), by_position(cL), by_position(y), None, None, None)
        out = layout.to_tokens(by_block(o)).transpose(1, 2).to(query.dtype).contiguous()
        return _recompute_first_frame(out, query, key, value, grid) if self.recompute else out

    def flops(self, grid: LatentGrid, head_dim: int) -> float:
        exact = "first_frame" if self.recompute else None
        return vmonarch_flops(grid, head_dim, VMonarchOptions(num_iterations=self.num_iterations, exact=exact))


def _hold(term: torch.Tensor, value: float, fixed: str) -> torch.Tensor:
    """`term` [B, H, m, b], set to `value` in the frames (along m) that `fixed` names."""
    if fixed == "none":
        return term
    held = torch.full_like(term, value)
    return held if fixed == "all" else torch.cat([held[:, :, :1], term[:, :, 1:]], 2)


@dataclass(frozen=True, kw_only=True)
class SinkAverage(Iterative):
    """The mean of exact attention to the first frame's keys and of VMonarch attention without exact rows (‡).

    Source: VMonarch, §4.4 and Table 3.
    """

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        P = grid.tokens_per_frame
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (x.to(dtype) for x in (query, key, value))
        rest = vmonarch_attention(q, k, v, grid=grid, exact=None, **vars(self))
        return ((_exact(q, k[:, :P], v[:, :P]) + rest) / 2).to(query.dtype)

    def flops(self, grid: LatentGrid, head_dim: int) -> float:
        return super().flops(grid, head_dim) + pair_flops(grid.tokens * grid.tokens_per_frame, head_dim)


@dataclass(frozen=True, kw_only=True)
class Factorised(Iterative):
    """Monarch attention with blocks other than frames: the paper's (4, HWT/4), (4, WHT/4), (4, THW/4), and its "F".

    One axis is cut into blocks, and unused places of a block are masked. The rows of the first frame are exact, as in
    the default method. It runs in plain torch.

    Args:
        axis: "T", "H" or "W".
        blocks: m; their lengths along the axis differ by at most one. On the axis "T", half the number of latent frames
            gives the paper's "F", with two frames in a block.

    Source: VMonarch, App. K and Fig. 12, and Table 2 ("F").
    """

    axis: str = "H"
    blocks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis not in AXES:
            raise ValueError(f"axis must be one of {', '.join(AXES)}, got {self.axis!r}")
        check_positive_integer("blocks", self.blocks)

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if there are more blocks than places along the axis."""
        length = grid[AXES.index(self.axis)]
        if self.blocks > length:
            raise ValueError(f"blocks must not exceed the axis {self.axis}, which is {length} long, got {self.blocks}")

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        self.check_grid(grid)
        layout = self._layout(grid, query.device)
        options = VMonarchOptions(num_iterations=self.num_iterations, min_mass=self.min_mass, exact=None)
        out, _ = monarch_attention_reference(query, key, value, layout, options, scale=query.shape[-1] ** -0.5)
        return _recompute_first_frame(out, query, key, value, grid)

    def _layout(self, grid: LatentGrid, device: torch.device) -> BlockLayout:
        tiles = [self.blocks if axis == self.axis else 1 for axis in AXES]
        numbers = (*grid, *tiles, *tiles, grid.frames)
        return tile_layout(Tiling(*numbers), device)

    def flops(self, grid: LatentGrid, head_dim: int) -> float:
        layout = self._layout(grid, torch.device("cpu"))
        places = LatentGrid(layout.blocks, 1, layout.positions)
        return super().flops(places, head_dim) + pair_flops(grid.tokens * grid.tokens_per_frame, head_dim)


@dataclass(frozen=True, kw_only=True)
class Local(Control):
    """The exact blocks of a pattern and nothing else: softmax over those keys, all others dropped.

    Args:
        exact: `ExactBlocks`, or a mapping with rows, columns and band of frames; `aware` has no effect here.
    """

    exact: Any = ExactBlocks(band=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.exact, (ExactBlocks, Mapping)):
            raise TypeError(f"exact must be a mapping with rows, columns or band, got {self.exact!r}")
        pattern = ExactBlocks.of(self.exact) if isinstance(self.exact, Mapping) else self.exact
        if pattern.band is None and not pattern.columns:
            raise ValueError(f"exact must have a band or columns, or frames have no keys; got {pattern}")
        object.__setattr__(self, "exact", pattern)

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if the pattern names a frame that the grid lacks."""
        self.exact.key_frames(grid.frames)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        frames = lambda x: x.unflatten(1, (grid.frames, -1))
        parts = []
        for l, attended in enumerate(self.exact.key_frames(grid.frames)):
            keys, values = (frames(x)[:, list(attended)].flatten(1, 2) for x in (key, value))
            parts.append(_exact(frames(query)[:, l], keys, values))
        return torch.cat(parts, 1)

    def flops(self, grid: LatentGrid, head_dim: int) -> float:
        blocks = sum(map(len, self.exact.key_frames(grid.frames)))
        return pair_flops(blocks * grid.tokens_per_frame**2, head_dim)


@dataclass(frozen=True, kw_only=True)
class Nothing(Control):
    """Zeros. With `refresh`, the residual is then the whole exact output, which is reused from step to step."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        return query.new_zeros(*query.shape[:3], value.shape[3])

    def flops(self, grid: LatentGrid, head_dim: int) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Sol(Control):
    """Sol-Attn: of blocks of 64 consecutive tokens, key blocks with a high score are exact; the others count as means.

    A score is the product of the mean of a query block and the mean of a key block, the latter centred over all blocks.
    It is high beyond `tau` standard deviations, estimated from the variance of the mean keys in each channel. A block
    itself and its neighbours are always exact.

    Args:
        tau: threshold in standard deviations; the larger, the less is exact. None with `share`.
        share: the share of blocks with the highest scores that are exact, rounded up; None with `tau`.
        rest: whether blocks that are not exact count as means; otherwise they are dropped.

    Source: Li et al., Sol-Attn (2026, arXiv:2607.24027).
    """

    tau: float | None = 1.0
    share: float | None = None
    rest: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("rest", self.rest)
        if self.share is None:
            check_number("tau", self.tau)
            return
        check_share("share", self.share)
        if self.tau is not None:
            raise ValueError(f"tau must be None with share, got {self.tau}")

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        line, tile = LatentGrid(1, 1, grid.tokens), (1, 1, 64)
        options = TwoResolutionOptions(tile=tile, query_tile=tile, rest=self.rest)
        tiling = tiling_of(line, options)
        layout = tile_layout(tiling, query.device)
        (q, _), (k, _) = tile_means(query, layout), tile_means(key, layout)  # [B, H, m, D]
        k = k - k.mean(2, keepdim=True)
        if self.tau is not None:
            deviation = (q.square() @ k.square().mean(2).unsqueeze(-1)).sqrt()  # [B, H, m, 1]
            high = q @ k.mT > self.tau * deviation
        else:
            assert self.share is not None
            high = best_of(q @ k.mT, exact_tiles(tiling, self.share))
        block = torch.arange(tiling.tiles, device=query.device)
        near = (block[:, None] - block).abs() <= 1
        return two_resolution_attention(query, key, value, grid=line, options=options, selection=near | high)


@dataclass(frozen=True, kw_only=True)
class VMoBA(Control):
    """VMoBA: every query attends to its own block of keys and to the blocks of the best query-block pairs.

    The score of a pair is the product of the query and the block's mean key, rescaled to [0, 1] over a head. Own blocks
    come first, then the highest scores, until the scores add up to `threshold` of their sum. The rest is dropped.

    Args:
        threshold: share of the sum of scores that is attended.
        boxes: (frames, rows, columns) of a block; the layers use them in turn, cyclically. 0 is the whole axis. Axes
            are cut evenly.

    Source: Wu et al., VMoBA: Mixture-of-Block Attention for Video Diffusion Models (2025, arXiv:2506.23858); sizes as
    in FastVideo for Wan.
    """

    threshold: float = 0.25
    boxes: Any = ((2, 0, 0), (0, 3, 4), (4, 6, 4))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("threshold", self.threshold)
        boxes = self.boxes if isinstance(self.boxes, tuple) else ()
        if not boxes or any(not isinstance(box, tuple) or len(box) != 3 for box in boxes):
            raise ValueError(f"boxes must be one or several of (frames, rows, columns), got {self.boxes!r}")
        for edge in sum(boxes, ()):
            check_integer("an edge in boxes", edge)

    def of_layer(self, place: int) -> VMoBA:
        return dataclasses.replace(self, boxes=(self.boxes[place % len(self.boxes)],))

    def _tiling(self, grid: LatentGrid) -> Tiling:
        edges = (edge or size for edge, size in zip(self.boxes[0], grid, strict=True))
        return tiling_of(grid, TwoResolutionOptions(tile=LatentGrid(*edges)))

    def _mask(self, query: torch.Tensor, key: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        """[B, H, S, S], true where a query attends to a key."""
        means, _ = tile_means(key, layout)  # [B, H, m, D]
        scores = means @ query.transpose(1, 2).to(means.dtype).mT
        low, high = (bound(scores, (2, 3), keepdim=True) for bound in (torch.amin, torch.amax))
        scores = (scores - low) / (high - low).clamp(min=torch.finfo(scores.dtype).tiny)
        block = layout.place // layout.positions  # [S]
        own = block == torch.arange(layout.blocks, device=query.device)[:, None]  # [m, S]
        order = scores.masked_fill(own, torch.inf).flatten(2).argsort(descending=True)
        ranked = scores.flatten(2).gather(-1, order).double()
        before = ranked.cumsum(-1) - ranked
        reached = before < self.threshold * ranked.sum(-1, keepdim=True)
        exact = own | torch.zeros_like(reached).scatter(-1, order, reached).view_as(scores)
        return exact[:, :, block].mT

    @without_autocast
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        layout = tile_layout(self._tiling(grid), query.device)
        found = []
        # The masks of all samples together would not fit into memory.
        for x in zip(query.split(1), key.split(1), value.split(1), strict=True):
            q, k, v = (y.transpose(1, 2) for y in x)
            mask = self._mask(*x[:2], layout)
            found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2))
        return torch.cat(found)

    def flops(self, grid: LatentGrid, head_dim: int) -> float:
        """An upper bound: the highest scores reach a share of the sum with at most that share of the pairs."""
        tiling = self._tiling(grid)
        keys = math.prod(tiling.box) * (1 + self.threshold * (tiling.tiles - 1))
        return pair_flops(grid.tokens * (keys + tiling.tiles / 2), head_dim)


@dataclass(frozen=True, kw_only=True)
class Trained(TwoResolutionOptions, Control):
    """Block-sparse attention and a learnt linear layer, 0 at first, for the tiles of keys that are not exact.

    The options of `TwoResolutionOptions` choose the exact tiles. Subclasses define `learnt`, the layer of a module,
    `far`, the branch for the other tiles [B, S, H, D] in at least float32, and `weighed`, the branch after the layer.
    """

    rest: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rest:
            raise ValueError("rest must be False: what is learnt stands for the tiles that are not exact")


@dataclass(frozen=True, kw_only=True)
class VSA(Trained):
    """The compressed branch: attention between the means of cubes, times a gate for each token.

    The gate is linear in the token and 0 at first, as in the authors' finetuning.

    Source: Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention (2025), §3.
    """

    def learnt(self, attn: Any) -> torch.nn.Linear:
        return torch.nn.Linear(attn.to_q.in_features, attn.to_q.out_features)

    @without_autocast
    def far(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        of_keys, of_queries = tile_layout(tiling, key.device), tile_layout(tiling.of_queries, key.device)
        (q, _), (k, _), (v, _) = tile_means(query, of_queries), tile_means(key, of_keys), tile_means(value, of_keys)
        compressed = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v  # [B, H, n, D]
        return compressed[:, :, of_queries.place // of_queries.positions].transpose(1, 2)

    def weighed(self, learnt: torch.nn.Linear, far: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return far * learnt(hidden_states.to(learnt.weight.dtype)).unflatten(2, (far.shape[2], -1))


@dataclass(frozen=True, kw_only=True)
class SLA(Trained):
    """Linear attention to the tiles that are not exact, with softmax as feature map, and a projection, 0 at first.

    No tile is skipped, because skipping the paper's share of negligible tiles would save nothing in a linear part.

    Source: Zhang et al., SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear Attention
    (2025).
    """

    def learnt(self, attn: Any) -> torch.nn.Linear:
        dim = attn.to_q.out_features // attn.heads
        return torch.nn.Linear(dim, dim, bias=False)

    @without_autocast
    def far(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        exact = chosen_tiles(query, key, tiling, self.share, scale=query.shape[-1] ** -0.5)
        q, k = (torch.softmax(x.float(), -1) for x in (query, key))
        of_keys, of_queries = tile_layout(tiling, key.device), tile_layout(tiling.of_queries, key.device)
        present = of_keys.valid[None, :, :, None, None]
        of_tiles = lambda x: torch.where(present, x[:, of_keys.index], 0)  # [B, m, b, H, …]
        keys = of_tiles(k)
        sums = torch.einsum("bmphd,bmphe->bhmde", keys, of_tiles(value.float()))
        rest = (~exact).float()  # [B, H, n, m]
        states = torch.einsum("bhnm,bhmde->bhnde", rest, sums)
        totals = torch.einsum("bhnm,bhmd->bhnd", rest, keys.sum(2).transpose(1, 2))
        queries = q[:, of_queries.index]  # [B, n, b, H, D]
        mass = torch.einsum("bnahd,bhnd->bnah", queries, totals)
        linear = torch.einsum("bnahd,bhnde->bnahe", queries, states) / mass.clamp(min=1e-6).unsqueeze(-1)
        return linear.flatten(1, 2)[:, of_queries.place]

    def weighed(self, learnt: torch.nn.Linear, far: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return learnt(far.to(learnt.weight.dtype))


CONTROLS: dict[str, type[Options]] = {
    "controlled": Controlled,
    "sink_average": SinkAverage,
    "factorised": Factorised,
    "local": Local,
    "none": Nothing,
    "sol": Sol,
    "vmoba": VMoBA,
    "vsa": VSA,
    "sla": SLA,
    "exact": Options,
}


@dataclass(frozen=True)
class KernelExact(Exact):
    """Exact attention by our own op, whichever backend was chosen; a request for the log-partition selects the op."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        return super().__call__(query, key, value, call._replace(lse=True, backend=None))


class ControlProcessor(VideoAttentionProcessor):
    """One of `CONTROLS` for the video transformers of diffusers; those that learn support only the Wan family.

    `vmonarch.apply` gives every module a layer of its own if the control is `Trained`, as with `BasedProcessor`.

    Args:
        control: its name.
        dense_steps, dense_layers, refresh, grid: as in `VMonarchProcessor`.
        implementation: of the kernels in "exact", "vsa" and "sla"; as in `two_resolution_attention`.
        **options: options of the control.

    Raises:
        TypeError, ValueError: an option is unknown or has an unsupported value.
    """

    def __init__(self, control: str, **options: Any) -> None:
        check_choice("control", control, CONTROLS)
        self.control = control
        of_all = [option.name for option in dataclasses.fields(VideoAttentionProcessor) if option.name in options]
        super().__init__(**{name: options.pop(name) for name in of_all})
        object.__setattr__(self, "options", build(CONTROLS[control], options))
        self.LEARNS = isinstance(self.options, Trained)
        if self.LEARNS and self.refresh is not None:
            raise ValueError(f"refresh must be None with {control!r}, got {self.refresh}")

    def changed(self) -> dict[str, Any]:
        return {"control": self.control} | self.options.changed() | super().changed()

    @property
    def config(self) -> dict[str, Any]:
        return {"control": self.control} | as_json(vars(self.options)) | super().config

    def attention(self, layer: Layer) -> Attend:
        return KernelExact(self.implementation) if self.control == "exact" else self.options.of_layer(layer.place)

    def bind(self, layer: Layer, original: Any) -> Any:
        bound = TrainedLayer(self, layer.attn, original) if self.LEARNS else super().bind(layer, original)
        return StockLayer(self, bound.attend, original) if self.control == "exact" and type(bound) is Own else bound

    def check_context_parallel(self, config: Any, heads: int, joint: bool = False) -> None:
        if self.LEARNS:
            raise NotImplementedError(f"context parallelism is not supported with {self.control!r}")
        super().check_context_parallel(config, heads, joint)


class StockLayer(Own):
    """A module of the Wan family where only the softmax is ours: all else rounds as in the model's own processor."""

    def mix(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Rotary, call: Call) -> torch.Tensor:
        query, key, value = project(attn, hidden_states, rotary_emb, "torch")
        return run_stack(self.attend, query, key, value, call).flatten(2, 3)


class TrainedLayer(LearningLayer):
    """A `ControlProcessor` that learns, bound to one attention module, with the layer of that module."""

    # Whoever applies it in inference mode may train it later.
    @torch.inference_mode(False)
    def __init__(self, spec: ControlProcessor, attn: Any, original: Any) -> None:
        super().__init__(spec, spec.options, original)
        # Norms keep a floating-point dtype where other weights are quantised or stored in float8.
        self.learnt = spec.options.learnt(attn).to(attn.norm_q.weight)
        for parameter in self.learnt.parameters():
            torch.nn.init.zeros_(parameter)

    def mix(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Rotary, call: Call) -> torch.Tensor:
        control, by = self.spec.options, self.spec.implementation
        query, key, value = project(attn, hidden_states, rotary_emb, by)
        near = two_resolution_attention(query, key, value, grid=call.grid, options=control, implementation=by)
        far = control.far(query, key, value, tiling_of(call.grid, control))
        return (near + control.weighed(self.learnt, far, hidden_states).to(near.dtype)).flatten(2, 3)
