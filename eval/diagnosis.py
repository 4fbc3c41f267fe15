"""Where attention loses what: every step, layer and head of a model compared with full attention, on its own inputs.

The model runs with full attention. At every self-attention that is recorded, the candidates see the same queries, keys
and values, and what they give is compared with the exact output: relative error, and the mean row-KL, which is exact
because a Monarch row has a log-partition of its own (algorithm notes §4). Beside it stands what full attention does:
entropy, and how much of its mass lies on the first frame, on a query's own frame, and at every distance in time.

Shapes: B batch, S = T·H·W tokens, H heads, D head dim; statistics are [steps, layers, heads].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.plan import Options, method_flops, parse_method, plain_method
from vmonarch.processors import ForwardContext, VideoAttentionProcessor

FORMAT = "vmonarch-diagnosis-1"
# Columns of values that the kernels take at once.
_COLUMNS = 128


def distribution(
    query: torch.Tensor, key: torch.Tensor, bins: torch.Tensor, count: int, options: Options | None, grid: LatentGrid
) -> torch.Tensor:
    """Mass that every row of an attention map gives to bins of keys: [B, S, H, count], float32.

    Values that are 1 in a key's bin and 0 elsewhere make the output of attention this mass, exactly and without the
    map.

    Args:
        bins: int64 [S], the bin of every key, below `count`.
        options: of `vmonarch_attention`; None for exact attention.
    """
    B, S, H, _ = key.shape
    parts = []
    for start in range(0, count, _COLUMNS):
        columns = torch.arange(start, min(start + _COLUMNS, count), device=key.device)
        value = (bins.to(key.device)[:, None] == columns).to(key.dtype).view(1, S, 1, -1).expand(B, S, H, -1)
        # The kernels want consecutive columns.
        value = value.contiguous()
        if options is None:
            parts.append(flash_entropy_attention(query, key, value)[0].float())
        else:
            parts.append(vmonarch_attention(query, key, value, grid=grid, **options).float())
    return torch.cat(parts, -1)


def attention_map(
    query: torch.Tensor, key: torch.Tensor, options: Options | None, grid: LatentGrid, size: int = 300
) -> torch.Tensor:
    """The attention map of one head, downsampled to [size, size]: mean over queries of the mass on a bin of keys.

    Args:
        query, key: [1, S, 1, D].
        options: of `vmonarch_attention`; None for exact attention.
        size: rows and columns, at most S.
    """
    S = grid.tokens
    size = min(size, S)
    bins = torch.arange(S, device=query.device) * size // S
    mass = distribution(query, key, bins, size, options, grid)[0, :, 0]
    rows = torch.zeros(size, size, device=mass.device).index_add_(0, bins, mass)
    return rows / torch.bincount(bins, minlength=size)[:, None]


@dataclass
class Totals:
    """Sums of one layer at one step, [heads] each in float64, over prompts, guidance and rows.

    Args:
        rows: how many rows were summed.
        energy: squares of the exact output.
        entropy: of the rows of full attention, in nats. first, own: mass on the first frame, and on the query's own.
        distance: [heads, T], mass at |query frame - key frame| = 0 … T-1, and of how many rows each.
        squares, kl: by candidate: squares of the difference to the exact output; KL(Monarch row ‖ softmax row) in nats.
    """

    rows: int
    energy: torch.Tensor
    entropy: torch.Tensor
    first: torch.Tensor
    own: torch.Tensor
    distance: torch.Tensor
    squares: dict[str, torch.Tensor]
    kl: dict[str, torch.Tensor]

    def __iadd__(self, other: Totals) -> Totals:
        self.rows += other.rows
        for name in ("energy", "entropy", "first", "own", "distance"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, others in ((self.squares, other.squares), (self.kl, other.kl)):
            for name, tensor in others.items():
                mine[name] = mine[name] + tensor
        return self


def measure(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: LatentGrid,
    candidates: Mapping[str, Options],
) -> tuple[torch.Tensor, Totals]:
    """Exact output [B, S, H, D], and the sums of one call; query, key and value are [B, S, H, D]."""
    B, S, H, _ = query.shape
    T, P = grid.frames, S // grid.frames
    out, lse, entropy = flash_entropy_attention(query, key, value)
    exact = out.double()
    frames = torch.arange(S, device=query.device) // P
    # [B, T, P, H, T] -> mass [T, H, T] of the rows of every query frame
    mass = distribution(query, key, frames, T, None, grid).double().unflatten(1, (T, P)).sum((0, 2))
    distance = torch.zeros(H, T, dtype=torch.float64, device=query.device)
    gap = (torch.arange(T)[:, None] - torch.arange(T)).abs().to(query.device)
    for d in range(T):
        distance[:, d] = (mass * (gap == d)[:, None, :]).sum((0, 2))
    squares, kl = {}, {}
    for name, options in candidates.items():
        approximate, weight = vmonarch_attention(query, key, value, grid=grid, return_lse=True, **options)
        squares[name] = (approximate.double() - exact).square().sum((0, 1, 3)).cpu()
        kl[name] = (lse.double() - weight.double()).sum((0, 2)).cpu()
    totals = Totals(
        rows=B * S,
        energy=exact.square().sum((0, 1, 3)).cpu(),
        entropy=entropy.double().sum((0, 2)).cpu(),
        first=mass[:, :, 0].sum(0).cpu(),
        own=distance[:, 0].cpu(),
        distance=distance.cpu(),
        squares=squares,
        kl=kl,
    )
    return out, totals


@dataclass
class Recorder:
    """What is recorded while a pipeline runs.

    Args:
        candidates: options of `vmonarch_attention` by name.
        every: the steps 0, every, 2·every, … are recorded.
        maps: (layer, head) whose attention maps are kept, of the first video, at the recorded step nearest the middle.
        map_size: rows and columns of a map.

    Attributes:
        grid: of the videos. totals: by (transformer, step, layer).
        pictures: maps by (transformer, layer, head, method).
    """

    candidates: dict[str, Options]
    every: int = 1
    maps: tuple[tuple[int, int], ...] = ()
    map_size: int = 300
    grid: LatentGrid | None = None
    totals: dict[tuple[str, int, int], Totals] = field(default_factory=dict)
    pictures: dict[tuple[str, int, int, str], torch.Tensor] = field(default_factory=dict)


class DiagnosisProcessor(VideoAttentionProcessor):
    """Full attention that lets a `Recorder` see what candidates would have made of the same inputs.

    Apply it to a pipeline, and run that: `vmonarch.apply(pipe, DiagnosisProcessor(recorder))`.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._needs_apply = "a diagnosis"
        self._layer = 0

    def bind(self, context: ForwardContext | None, original: Any, attn: Any, layer: int, layers: int) -> Any:
        bound = super().bind(context, original, attn, layer, layers)
        bound._layer = layer
        return bound

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid) -> torch.Tensor:
        recorder, context = self.recorder, self._context
        assert context is not None
        step, steps = context.step("a diagnosis", "run the pipeline")
        if step % recorder.every:
            return flash_entropy_attention(query, key, value)[0]
        if recorder.grid not in (None, grid):
            raise ValueError(f"all videos must have one size: {tuple(recorder.grid or ())} and {tuple(grid)}")
        recorder.grid = grid
        out, totals = measure(query, key, value, grid, recorder.candidates)
        place = (context.component, step, self._layer)
        if place in recorder.totals:
            recorder.totals[place] += totals
        else:
            recorder.totals[place] = totals
        if abs(step - steps // 2) <= recorder.every // 2:
            self._keep_maps(context.component, query, key, grid)
        return out

    def _keep_maps(self, component: str, query: torch.Tensor, key: torch.Tensor, grid: LatentGrid) -> None:
        recorder = self.recorder
        for layer, head in recorder.maps:
            if layer != self._layer or (component, layer, head, "full") in recorder.pictures:
                continue
            q, k = (x[:1, :, head : head + 1] for x in (query, key))
            for name, options in {"full": None, **recorder.candidates}.items():
                picture = attention_map(q, k, options, grid, recorder.map_size)
                recorder.pictures[component, layer, head, name] = picture.cpu()


def document(recorder: Recorder) -> dict[str, Any]:
    """What was recorded, as JSON has it.

    Returns:
        {"format", "grid", "candidates": {name: {"options", "flops"}}, "transformers": {name: {"steps", "layers",
        "heads", "rows", "entropy", "first_frame_mass", "own_frame_mass", "distance_mass" [steps, layers, heads, T],
        "candidates": {name: {"error", "layer_error", "kl"}}}}}. Unless said, values are [steps, layers, heads]. `flops`
        are relative to full attention. "error" is ‖o - o*‖/‖o*‖ of a head's outputs over all rows; "layer_error" the
        share ‖o - o*‖²/Σ_heads ‖o*‖², which adds up over the heads of a layer; "kl" the mean over rows, in nats.

    Raises:
        ValueError: nothing was recorded.
    """
    grid = recorder.grid
    if grid is None or not recorder.totals:
        raise ValueError("nothing was recorded: the pipeline has run no step with self-attention")
    transformers = {}
    for component in dict.fromkeys(name for name, _, _ in recorder.totals):
        steps = sorted({step for name, step, _ in recorder.totals if name == component})
        layers = 1 + max(layer for name, _, layer in recorder.totals if name == component)
        found = [[recorder.totals[component, step, layer] for layer in range(layers)] for step in steps]
        rows = found[0][0].rows

        def of(name: str, found: list[list[Totals]] = found) -> torch.Tensor:
            return torch.stack([torch.stack([getattr(t, name) / t.rows for t in row]) for row in found])

        energy = torch.stack([torch.stack([t.energy for t in row]) for row in found])
        candidates = {}
        for name in recorder.candidates:
            squares = torch.stack([torch.stack([t.squares[name] for t in row]) for row in found])
            kl = torch.stack([torch.stack([t.kl[name] / t.rows for t in row]) for row in found])
            candidates[name] = {
                "error": _plain((squares / energy).sqrt()),
                "layer_error": _plain(squares / energy.sum(-1, keepdim=True)),
                "kl": _plain(kl),
            }
        transformers[component] = {
            "steps": steps,
            "layers": layers,
            "heads": energy.shape[-1],
            "rows": rows,
            "entropy": _plain(of("entropy")),
            "first_frame_mass": _plain(of("first")),
            "own_frame_mass": _plain(of("own")),
            "distance_mass": _plain(of("distance")),
            "candidates": candidates,
        }
    return {
        "format": FORMAT,
        "grid": list(grid),
        "candidates": {
            name: {
                "options": plain_method(options),
                "flops": method_flops(options, grid, 1) / method_flops(None, grid, 1),
            }
            for name, options in recorder.candidates.items()
        },
        "transformers": transformers,
    }


def _plain(tensor: torch.Tensor) -> list[Any]:
    """Lists of numbers with six significant digits.

    Raises:
        ValueError: a number is not finite.
    """
    if not tensor.isfinite().all():
        raise ValueError("a statistic is not finite: the model gives NaN or infinity, or an output that is all zero")

    def rounded(value: Any) -> Any:
        return [rounded(entry) for entry in value] if isinstance(value, list) else float(f"{value:.6g}")

    return rounded(tensor.tolist())


def parse_candidates(candidates: Mapping[str, Any]) -> dict[str, Options]:
    """Candidates by name with checked options.

    Raises:
        TypeError, ValueError: options that `vmonarch_attention` does not take, or exact attention as a candidate.
    """
    parsed = {}
    for name, options in candidates.items():
        found = parse_method(name, options)
        if found is None:
            raise ValueError(f"candidate {name!r} is exact attention, which is what candidates are compared with")
        parsed[name] = found
    return parsed
