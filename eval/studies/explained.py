"""The pictures of `docs/how-it-works.md`: `python -m vmonarch.eval.studies.explained`.

One shows an attention map of a tiny video, the factors R and L and their product, computed here step by step and
checked against `vmonarch_attention`. The other shows which denoising steps `refresh` computes exactly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vmonarch import LatentGrid, Refresh, VMonarchOptions, vmonarch_attention
from vmonarch.eval.render.plot import COLOURS, tidy, write_pngs
from vmonarch.plan import method_flops

ROOT = Path(__file__).resolve().parents[2]
# T frames of b = H·W positions.
T, H, W = 4, 3, 4
b = H * W
N = T * b
STEPS, SHARE = 20, 0.28


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [N, D] that look at what is near in space, and a little at what is near in time."""
    t, y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in (T, H, W)), indexing="ij")
    waves = [f(a * w) for a, w in ((y, 0.9), (x, 0.9), (t, 0.5)) for f in (torch.sin, torch.cos)]
    noise = torch.randn(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    features = torch.cat([torch.stack(waves, -1).reshape(N, -1) * 1.6, noise * 0.7], 1)
    return features, features


def factors(q: torch.Tensor, k: torch.Tensor, iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """R [k, j, i] and L [j, l, k] of docs/attention.md, "What VMonarch attention computes"."""
    q, k = q.view(T, b, -1), k.view(T, b, -1)
    z = q
    for _ in range(iterations):
        scores = z @ k.transpose(1, 2)
        R = scores.softmax(-1)
        aL = R @ k
        cL = (z * aL).sum(-1) - scores.logsumexp(-1)
        L = (torch.einsum("ljd,kjd->jlk", q, aL) - cL.T[:, None]).softmax(-1)
        z = torch.einsum("jlk,ljd->kjd", L, q) / L.sum(1).T.clamp(min=0.1)[..., None]
    return R, L


def as_maps(R: torch.Tensor, L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """R, L and their product as N×N maps: R mixes positions within a frame, L frames at a position."""
    R_map = torch.block_diag(*R)
    L_map = torch.einsum("jlk,ji->ljki", L, torch.eye(b, dtype=L.dtype)).reshape(N, N)
    return R_map, L_map, L_map @ R_map


def check(q: torch.Tensor, k: torch.Tensor, product: torch.Tensor) -> None:
    """Check that the product is the map of `vmonarch_attention`.

    Raises:
        ArithmeticError: it is another one.
    """
    values = torch.eye(N, dtype=q.dtype)
    found = vmonarch_attention(
        *(x[None, :, None] for x in (q, k, values)), grid=(T, H, W), exact=None, num_iterations=2, scale=1.0
    )
    if not torch.allclose(found[0, :, 0], product, atol=1e-10):
        raise ArithmeticError("the factors drawn here are not those of vmonarch_attention")


def _map(axes: Axes, values: torch.Tensor, title: str, below: str) -> None:
    axes.imshow(values.sqrt().numpy(), cmap="Blues", vmin=0, vmax=0.8)
    for frame in range(1, T):
        for line in (axes.axhline, axes.axvline):
            line(frame * b - 0.5, color="#bbbbbb", lw=0.6)
    axes.set_xticks([f * b + b / 2 - 0.5 for f in range(T)], [f"frame {f}" for f in range(T)])
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(below, fontsize=9)


def draw_factors() -> Figure:
    """The map of full attention, R, L and L·R side by side."""
    q, k = tokens()
    R_map, L_map, product = as_maps(*factors(q, k, 2))
    check(q, k, product)
    figure = Figure(figsize=(13, 3.9), layout="constrained")
    panels = figure.subplots(1, 4)
    _map(panels[0], (q @ k.T).softmax(-1), "full attention", f"N² = {N * N:,} numbers")
    _map(panels[1], R_map, "R: where in each frame", f"T blocks of HW × HW: {T * b * b:,} numbers")
    _map(panels[2], L_map, "L: how much of each frame", f"HW blocks of T × T: {b * T * T:,} numbers")
    _map(panels[3], product, "L·R: VMonarch attention", "never formed")
    panels[0].set_ylabel("queries", fontsize=9)
    return figure


def draw_refresh() -> Figure:
    """Attention work of every denoising step with `near-lossless`, and how long each residual is used."""
    grid, options = LatentGrid(21, 30, 52), VMonarchOptions(num_iterations=1, exact=None)
    cheap = method_flops(options, grid, 128) / method_flops(None, grid, 128)
    exact = Refresh(SHARE).schedule(STEPS)
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots()
    tidy(axes, "y")
    for step in range(STEPS):
        # An exact step also computes VMonarch attention, to know what it lacks, if a later step adds the residual.
        kept = step in exact and step + 1 not in exact and step + 1 < STEPS
        axes.bar(step, 1.0 if step in exact else cheap, color=COLOURS[0 if step in exact else 1], width=0.8)
        if kept:
            axes.bar(step, cheap, bottom=1.0, color=COLOURS[1], width=0.8)
    for begin, end in zip(exact, [*exact[1:], STEPS], strict=True):
        if end > begin + 1:
            axes.annotate(
                "",
                xy=(end - 0.6, 0.5),
                xytext=(begin + 0.45, 0.5),
                arrowprops={"arrowstyle": "->", "color": COLOURS[2], "lw": 1.6},
            )
    legend = (
        (0, "exact attention"),
        (1, "VMonarch attention"),
        (2, "the residual, exact minus VMonarch, is added in these steps"),
    )
    for number, label in legend:
        axes.plot([], [], "s" if number < 2 else "-", color=COLOURS[number], label=label)
    axes.legend(loc="upper right", fontsize=9, frameon=False)
    axes.set(xlim=(-0.6, STEPS - 0.4), ylim=(0, 1.45), xticks=range(STEPS))
    axes.set_xlabel("denoising step", fontsize=9)
    axes.set_ylabel("attention work", fontsize=9)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.explained", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", metavar="FOLDER")
    folder = parser.parse_args(arguments).output
    write_pngs({folder / "factors.png": draw_factors(), folder / "refresh.png": draw_refresh()})
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
