"""The picture of `docs/architecture.md`: `python -m vmonarch.eval.studies.architecture`.

Three rows: the way of one attention call, of `vmonarch generate` and of `vmonarch eval`. Every box names a file, which
has to exist.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from vmonarch.eval.render.plot import write_pngs

ROOT = Path(__file__).resolve().parents[2]
# Heading, colour, and the boxes from left to right: what happens, and the file in which.
WAYS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "one attention call",
        "#D6E8F5",
        (
            ("a hook notes grid\nand step", "vmonarch/installation.py"),
            ("project, norm, rotate;\nexact? residual? split?", "vmonarch/video_processor.py"),
            ("check the tensors,\nchoose an implementation", "kernels/monarch/api.py"),
            ("exact part, R, L, R, L\nas operators of torch", "kernels/monarch/fused.py"),
            ("the same stages\nin plain torch", "kernels/monarch/reference.py"),
        ),
    ),
    (
        "vmonarch generate",
        "#E3F1DC",
        (
            ("arguments", "vmonarch/cli/generate.py"),
            ("YAML and overrides\non typed dataclasses", "configs/__init__.py"),
            ("a name becomes\na method", "configs/methods.py"),
            ("load, sample, decode", "pipelines/sampling.py"),
            ("mp4, contact sheet", "pipelines/video_io.py"),
        ),
    ),
    (
        "vmonarch eval",
        "#FBE9D0",
        (
            ("arguments", "vmonarch/cli/eval.py"),
            ("items, resuming,\nseveral processes", "eval/evaluate.py"),
            ("PSNR, SSIM, LPIPS", "eval/similarity.py"),
            ("means, intervals,\ndifferences", "eval/summary.py"),
            ("HTML report", "eval/report.py"),
        ),
    ),
)
_WIDTH, _HEIGHT, _GAP = 2.5, 1.0, 0.45


def draw(path: Path) -> None:
    """Write the picture.

    Raises:
        FileNotFoundError: a box names a file that does not exist.
    """
    columns = max(len(boxes) for _, _, boxes in WAYS)
    figure = Figure(figsize=(12, 4.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-_GAP, columns * (_WIDTH + _GAP))
    axes.set_ylim(-(len(WAYS) - 1) * (_HEIGHT + 0.75) - 0.2, _HEIGHT + 0.5)
    axes.set_axis_off()
    for row, (heading, colour, boxes) in enumerate(WAYS):
        y = -row * (_HEIGHT + 0.75)
        axes.text(0, y + _HEIGHT + 0.12, heading, fontsize=12, fontweight="bold", va="bottom")
        for column, (what, file) in enumerate(boxes):
            if not (ROOT / file).is_file():
                raise FileNotFoundError(f"{file}, in the row of {heading!r}, does not exist")
            x = column * (_WIDTH + _GAP)
            box = FancyBboxPatch((x, y), _WIDTH, _HEIGHT, boxstyle="round,pad=0.02", fc=colour, ec="#666666")
            axes.add_patch(box)
            axes.text(x + _WIDTH / 2, y + 0.63, what, ha="center", va="center", fontsize=9.5)
            axes.text(x + _WIDTH / 2, y + 0.14, file, ha="center", va="center", fontsize=8, color="#444444")
            last_is_other_way = row == 0 and column == len(boxes) - 1
            if column:
                label = "or" if last_is_other_way else ""
                axes.annotate(
                    "",
                    xy=(x - 0.03, y + _HEIGHT / 2),
                    xytext=(x - _GAP + 0.03, y + _HEIGHT / 2),
                    arrowprops={"arrowstyle": "-" if label else "->", "color": "#333333"},
                )
                axes.text(x - _GAP / 2, y + _HEIGHT / 2 + 0.12, label, ha="center", fontsize=9)
    write_pngs({path: figure})


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.architecture", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "architecture.png")
    options = parser.parse_args(arguments)
    draw(options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
