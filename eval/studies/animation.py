"""An animated picture of one video of a comparison: `python -m vmonarch.eval.studies.animation outputs/demo/0001-…`.

The folder is one that `vmonarch compare` has written. The methods stand side by side under plain
names; the suffix of --output decides between WebP and GIF.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vmonarch.files import AtomicFiles
from vmonarch.pipelines.video_io import read_video, side_by_side

ROOT = Path(__file__).resolve().parents[2]
LABELS = {
    "full": "full attention",
    "vmonarch": "VMonarch, every step",
    "near-lossless": "VMonarch, near-lossless",
    "fast": "VMonarch, fast",
}


def frames_of(folder: Path, number: int = 1) -> tuple[NDArray[np.uint8], float]:
    """All methods side by side, [F, H, W, 3], and frames per second.

    Raises:
        ValueError: the folder is none of `vmonarch compare`.
    """
    try:
        record = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        item = record["items"][number - 1]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{folder} holds no finished comparison with a video {number}: {error}") from error
    found = {row["method"]: read_video(folder / item["folder"] / row["video"]) for row in item["results"]}
    fps = next(iter(found.values()))[1]
    return side_by_side({LABELS.get(method, method): video for method, (video, _) in found.items()}), fps


def save_animation(path: Path, frames: NDArray[np.uint8], fps: float, *, width: int, quality: int) -> None:
    """Write the frames, scaled to `width`, as an endless animation.

    Args:
        quality: of WebP, 0 to 100.
    """
    size = (width, round(frames.shape[1] * width / frames.shape[2]))
    pictures = [Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS) for frame in frames]
    with AtomicFiles(overwrite=True) as files:
        pictures[0].save(
            files.stage(path),
            format=path.suffix.lstrip(".").upper(),
            save_all=True,
            append_images=pictures[1:],
            duration=round(1000 / fps),
            loop=0,
            quality=quality,
            method=6,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 2 if the folder cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.animation", description=__doc__)
    parser.add_argument("folder", type=Path, help="a comparison")
    parser.add_argument("--number", type=int, default=1, help="of the video in the comparison (default: 1)")
    parser.add_argument("--width", type=int, default=900, help="pixels (default: 900)")
    parser.add_argument("--quality", type=int, default=75, help="of WebP (default: 75)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "demo.webp")
    options = parser.parse_args(arguments)
    try:
        frames, fps = frames_of(options.folder, options.number)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    save_animation(options.output, frames, fps, width=options.width, quality=options.quality)
    print(f"{options.output}: {len(frames)} frames, {options.output.stat().st_size / 2**10:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
