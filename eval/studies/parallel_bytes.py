"""Count what ranks send by heads and by frames: `python -m vmonarch.eval.studies.parallel_bytes --output FILE`.

Nothing runs: the counts are those of `ulysses_bytes`, `frame_parallel_bytes` and, for tokens between the borders of a
rank's part and those of its frames, `places_leaving`; the tests compare them with what ranks send.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.context_parallel import whole_frames
from vmonarch.eval.bench.parallel import sent_by_frames, sent_by_heads
from vmonarch.eval.record import script_parser
from vmonarch.eval.render.table import markdown
from vmonarch.eval.wan_models import read_model_config
from vmonarch.files import check_output, write_json
from vmonarch.kernels.distributed.exchange import split_evenly

# Models at a size of theirs: name, (frames, height, width), numbers of ranks.
VIDEOS = (
    ("wan2.1-1.3b", (81, 480, 832), (2, 4, 8, 16)),
    ("wan2.1-14b", (81, 720, 1280), (8, 16)),
    ("wan2.2-5b", (121, 704, 1280), (8, 16)),
)
ITERATIONS = 2


def count_all() -> dict[str, Any]:
    """What is written: {"command", "settings", "cases": [{"model", …, "ranks", "by_heads", "by_frames"}]}.

    Both of the rank that has most and of the one that sends most; `by_heads` is None for more ranks than heads.
    """
    cases = []
    for name, video, numbers in VIDEOS:
        model = read_model_config(name)
        grid = model.grid(model.latents(*video, argument="video"))
        heads, head_dim = model.transformer["num_attention_heads"], model.transformer["attention_head_dim"]
        sizes: dict[str, Any] = dict(heads=heads, head_dim=head_dim, dtype=torch.bfloat16, batch=1)
        for ranks in numbers:
            tokens = split_evenly(grid.tokens, ranks)
            by_heads = None
            if ranks <= heads:
                by_heads = {"heads": split_evenly(heads, ranks)[0], "bytes": max(sent_by_heads(tokens, **sizes))}
            by_frames = {
                "frames": max(whole_frames(tokens, grid)) // grid.tokens_per_frame,
                "bytes": max(sent_by_frames(grid, tokens, num_iterations=ITERATIONS, **sizes)),
            }
            cases.append(
                {"model": name, "video": video, "grid": grid, "heads": heads, "ranks": ranks}
                | {"by_heads": by_heads, "by_frames": by_frames}
            )
    return {
        "command": "python -m vmonarch.eval.studies.parallel_bytes",
        "settings": {"dtype": "bfloat16", "num_iterations": ITERATIONS, "exact": "first_frame", "batch": 1},
        "cases": cases,
    }


def parallel_bytes_table(results: dict[str, Any]) -> str:
    """What the busiest rank sends and computes, by heads and by frames."""

    def cells(part: dict[str, int] | None, what: str, case: dict[str, Any], total: int) -> list[str]:
        if part is None:
            return ["not possible", "–"]
        more = part[what] * case["ranks"] / total - 1
        return [f"{part[what]} (+{100 * more:.0f} %)", f"{part['bytes'] / 1e6:.1f}"]

    rows = []
    for case in results["cases"]:
        frames, height, width = case["grid"]
        rows.append(
            [
                f"{case['model']}, {'×'.join(map(str, case['video']))}",
                f"{case['heads']}",
                f"{frames}×{height}×{width}",
                f"{case['ranks']}",
                *cells(case["by_heads"], "heads", case, case["heads"]),
                *cells(case["by_frames"], "frames", case, frames),
            ]
        )
    heading = ["model, video", "heads", "grid", "ranks", "heads of a rank", "MB sent", "frames of a rank", "MB sent"]
    settings = results["settings"]
    about = (
        "The heads or frames of the rank that has most, and how far they exceed an even share; MB of the rank that"
        f" sends most, in a forward pass of one layer, {settings['dtype']}, {settings['num_iterations']} iterations,"
        f" exact: {settings['exact']}. Counted, not measured, by `{results['command']}`."
    )
    return f"{markdown(heading, rows)}\n{about}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.parallel_bytes", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = parser.parse_args(arguments)
    try:
        check_output(options.output)
    except InputError as error:
        parser.error(str(error))
    results = count_all()
    write_json(options.output, results)
    print(parallel_bytes_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
