"""`vmonarch generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vmonarch.cli.parser import add_options
from vmonarch.cli.sampling import (
    add_recipe_argument,
    add_sampling_arguments,
    hide_loading_bars,
    method_help,
    sampling_config,
    sampling_layers,
)
from vmonarch.pipelines.config import GenerateConfig

if TYPE_CHECKING:
    from vmonarch.pipelines.outputs import GeneratedVideo

_EPILOG = """\
examples:
  vmonarch generate "a red circle moving right over a dark background"
  vmonarch generate "first prompt" "second prompt" --seed 1 2 3 --attention full
  vmonarch generate "…" attention.num_iterations=3 attention.exact.band=1
  vmonarch generate "…" --config wan2.1-t2v-1.3b --offload model
  vmonarch generate "…" --config wan2.1-t2v-14b --recipe stack-fast
  vmonarch generate --from-json outputs/generate/0001-1f3b9c8e.json
  torchrun --nproc-per-node 4 -m vmonarch generate "…"   # every video on four GPUs

Each video gets a number and a short hash for a name, with a contact sheet (.png) and a record (.json) beside it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch generate`."""
    add_sampling_arguments(parser, group="generate")
    parser.add_argument("--attention", metavar="METHOD", help=f"{method_help()} (default vmonarch)")
    add_recipe_argument(parser, "attention")
    parser.add_argument("--from-json", metavar="FILE", help="make the video of this record again")
    add_options(parser, GenerateConfig, "contact_sheet")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Generate the videos and print where they are.

    Raises:
        InputError, ModelError, GenerationError: see `vmonarch.pipelines.generation.generate`.
    """
    from vmonarch.pipelines.generation import generate
    from vmonarch.pipelines.outputs import GenerationError, load_record
    from vmonarch.pipelines.processes import Shard

    layers = sampling_layers(GenerateConfig, arguments)
    recorded = None if arguments.from_json is None else load_record(arguments.from_json)
    below = [] if recorded is None else [recorded.values]
    config = sampling_config(GenerateConfig, below + layers, "--prompt-file", "--from-json")
    hide_loading_bars()
    shard = Shard.of_environment()
    try:
        videos = generate(config, recorded=recorded, progress=not arguments.quiet and shard.rank == 0, shard=shard)
    except GenerationError as error:
        _report(error.videos, config, quiet=arguments.quiet)
        raise
    _report(videos, config, quiet=arguments.quiet)


def _report(videos: Sequence[GeneratedVideo], config: GenerateConfig, *, quiet: bool) -> None:
    """Print where the videos are."""
    from vmonarch.pipelines.environment import seconds

    for video in videos:
        if quiet:
            print(video.video)
            continue
        spent = seconds(video.record["seconds"]["total"])
        print(f"{video.video}  (seed {video.record['seed']}, {config.attention.label} attention, {spent})")
        if video.contact_sheet is not None:
            print(video.contact_sheet)
