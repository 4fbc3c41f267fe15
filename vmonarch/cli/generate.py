"""Videos from prompts: `vmonarch generate`."""

from __future__ import annotations

import argparse

from vmonarch.cli.arguments import add_options, add_sampling_arguments, method_help, sampling_config
from vmonarch.pipelines.config import GenerateConfig


def add_generate(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser, group="generate")
    parser.add_argument("--attention", "--recipe", metavar="METHOD", help=f"{method_help()} (default near-lossless)")
    parser.add_argument("--from-json", metavar="FILE", help="make the video of this record again")
    add_options(parser, GenerateConfig, "contact_sheet")


def run_generate(arguments: argparse.Namespace) -> None:
    """make videos from prompts

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
    from vmonarch.pipelines.environment import seconds
    from vmonarch.pipelines.generation import generate
    from vmonarch.pipelines.outputs import GenerationError, load_record
    from vmonarch.pipelines.processes import Shard

    recorded = None if arguments.from_json is None else load_record(arguments.from_json)
    config = sampling_config(GenerateConfig, arguments, recorded["config"] if recorded else {})
    shard = Shard.of_environment()
    failure = None
    try:
        videos = generate(config, recorded=recorded, progress=not arguments.quiet and shard.rank == 0, shard=shard)
    except GenerationError as error:
        # What was made before it is shown, too.
        failure, videos = error, list(error.videos)
    for video in videos:
        spent = seconds(video.record["seconds"]["total"])
        about = f"  (seed {video.record['seed']}, {config.attention.label} attention, {spent})"
        print(video.video if arguments.quiet else f"{video.video}{about}")
        if video.contact_sheet is not None and not arguments.quiet:
            print(video.contact_sheet)
        if video.record["attention"] is not None and not arguments.quiet:
            print(video.record["attention"]["text"])
    if failure is not None:
        raise failure
