"""`vmonarch compare`.

examples:
  vmonarch compare "a red circle moving right over a dark background"
  vmonarch compare "…" --methods full vmonarch vmonarch-t1 "vmonarch:num_iterations=4,exact=null"
  vmonarch compare --prompt-file prompts.txt --seed 0 1 2 --config exact

The reference (full attention) always runs, and every method is warmed up before it is timed. PSNR and SSIM are
measured on float frames, before mp4 encoding.
"""

from __future__ import annotations

import argparse

from vmonarch.cli.parser import add_options
from vmonarch.cli.sampling import (
    add_method_arguments,
    add_sampling_arguments,
    sampling_config,
)
from vmonarch.eval.settings import CompareConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch compare`."""
    add_sampling_arguments(parser, group="compare")
    add_method_arguments(parser)
    add_options(parser, CompareConfig, "strip_frames", "lpips")


def run(arguments: argparse.Namespace) -> None:
    """Compare the methods, print the table and where the pictures are.

    Raises:
        InputError, ModelError, GenerationError: see `vmonarch.eval.compare.compare`.
    """
    from vmonarch.eval.compare import compare
    from vmonarch.pipelines.environment import shown_command
    from vmonarch.pipelines.processes import check_alone

    check_alone()
    config = sampling_config(CompareConfig, arguments)
    comparison = compare(config, progress=not arguments.quiet, command=shown_command(("vmonarch",), arguments.words))
    if not arguments.quiet:
        print(comparison.table())
        print("PSNR and SSIM against the reference, on float frames before mp4 encoding; means over all videos")
        print(*sorted(comparison.folder.glob("0*-*")), sep="\n")
    print(comparison.folder / "evaluation.json")
    print(comparison.folder / "report.html")
