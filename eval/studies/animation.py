"""An animated picture of one video of a comparison: `python -m vmonarch.eval.studies.animation outputs/demo/0001-…`.

The folder is one that `vmonarch compare` has written. The methods stand side by side; the suffix of
--output decides between WebP and GIF.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vmonarch.eval.record import script_parser
from vmonarch.pipelines.video_io import read_video, side_by_side

LABELS = {"full": "full attention", "vmonarch": "VMonarch, every step"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; an error where the folder holds no finished comparison."""
    parser = script_parser("studies.animation", __doc__)
    parser.add_argument("folder", type=Path, help="a comparison")
    parser.add_argument("--width", type=int, default=900, help="pixels (default: 900)")
    parser.add_argument("--output", type=Path, default=Path("docs/images/demo.webp"))
    options = parser.parse_args(arguments)
    try:
        record = json.loads((options.folder / "evaluation.json").read_text(encoding="utf-8"))
        item = record["items"][0]
    except (OSError, KeyError) as error:
        parser.error(f"{options.folder} holds no finished comparison ({error})")
    folder = options.folder / item["folder"]
    videos = {row["method"]: read_video(folder / row["video"]) for row in item["results"]}
    frames = side_by_side({LABELS.get(method, method): video for method, (video, _) in videos.items()})
    size = (options.width, round(frames.shape[1] * options.width / frames.shape[2]))
    first, *more = (Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS) for frame in frames)
    duration = round(1000 / next(iter(videos.values()))[1])
    first.save(options.output, save_all=True, append_images=more, duration=duration, loop=0, quality=75, method=6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
