"""Videos from prompts: `vmonarch generate` and the web page of `vmonarch ui`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading

from vmonarch.cli.arguments import (
    MACHINE,
    add_options,
    add_recipe_argument,
    add_sampling_arguments,
    given_options,
    hide_loading_bars,
    method_help,
    sampling_config,
)
from vmonarch.pipelines.config import GenerateConfig, SamplingConfig


class MissingExtra(RuntimeError):
    """What a command needs is not installed."""


def add_generate(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser, group="generate")
    parser.add_argument("--attention", metavar="METHOD", help=f"{method_help()} (default vmonarch)")
    add_recipe_argument(parser, "attention")
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
    if failure is not None:
        raise failure


def add_ui(parser: argparse.ArgumentParser) -> None:
    models = "one or several to choose from: embedded (default), folders of pipelines, hub ids"
    parser.add_argument("--model", dest="models", nargs="+", metavar="MODEL", help=models)
    add_options(parser.add_argument_group("machine"), SamplingConfig, *MACHINE)
    server = parser.add_argument_group("server")
    server.add_argument("--output-dir", metavar="FOLDER", help="default: outputs/ui; the page shows all that is in it")
    server.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="default 127.0.0.1: this machine alone")
    server.add_argument("--port", type=int, metavar="N", default=7860, help="default 7860; 0 for a free one")


def run_ui(arguments: argparse.Namespace) -> None:
    """a web page: from prompts to videos

    examples:
      vmonarch ui
      vmonarch ui --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers embedded --offload model
      ssh -L 7860:localhost:7860 gpu-machine vmonarch ui        # then http://localhost:7860 here

    The page needs the extra ui: pip install 'vmonarch[ui]'. It has no password: whoever reaches it can use it.
    """
    try:
        from vmonarch.eval.ui import Studio, is_local, launch
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the page needs {error.name}, which the extra ui has: pip install 'vmonarch[ui]'"
        ) from error
    hide_loading_bars()
    studio = Studio(**given_options(arguments, "models", "output_dir", *MACHINE))
    page, address = launch(studio, arguments.host, arguments.port)
    if not is_local(arguments.host):
        print(f"vmonarch ui: warning: whoever reaches {arguments.host} can use the page; no password", file=sys.stderr)
    print(f"{address}  (videos in {studio.output}; Ctrl-C ends it)", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    finally:
        for stop in list(studio.stops.values()):
            stop.set()
        page.close(verbose=False)
