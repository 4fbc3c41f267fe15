"""`vmonarch vbench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from vmonarch.cli.parser import Parser
from vmonarch.configs import InputError
from vmonarch.eval import vbench
from vmonarch.eval.vbench.environment import REQUIREMENTS, VERSION, default_folder
from vmonarch.eval.vbench.suite import VIDEOS_PER_PROMPT
from vmonarch.eval.vbench.weights import check_weights, default_weights
from vmonarch.files import AtomicFiles

_EPILOG = """\
examples:
  vmonarch vbench install
  vmonarch vbench weights --dimensions imaging_quality dynamic_degree
  vmonarch vbench prompts --dimensions imaging_quality --output prompts.jsonl
  vmonarch vbench score videos.jsonl --dimensions imaging_quality --output scores.json

videos.jsonl has a line like {"file": "a.mp4", "prompt": "a lighthouse in a storm", "index": 0} for every video.
"""


def add_arguments(parser: Parser) -> None:
    """Declare the commands of `vmonarch vbench` and their arguments."""
    parser.description = f"Score videos by the official package of VBench, version {VERSION}."
    parser.epilog = _EPILOG
    commands = parser.add_commands()

    command = commands.add_parser("install", help="make the environment that VBench runs in (about 6 GB)")
    command.set_defaults(do=_install)
    command.add_argument("--python", help="interpreter to make it with, 3.10 to 3.12 (default: this one)")
    command.add_argument("--folder", type=Path, help=f"of the environment (default: {default_folder()})")
    command.add_argument(
        "--requirements", type=Path, default=REQUIREMENTS, help="other pinned packages, for another torch, say"
    )

    command = commands.add_parser("weights", help="download the files that dimensions load, where they are missing")
    command.set_defaults(do=_weights)
    _add_dimensions(command)
    _add_weights(command)

    command = commands.add_parser("prompts", help="write what to generate: prompt, index and seed of every video")
    command.set_defaults(do=_prompts)
    _add_dimensions(command)
    _add_environment(command)
    command.add_argument("--prompt-file", type=Path, help="a prompt per line, instead of VBench's")
    command.add_argument("--videos-per-prompt", type=int, default=VIDEOS_PER_PROMPT, metavar="N", help="default 5")
    command.add_argument("--seed", type=int, default=0, help="first seed; every video has its own (default 0)")
    command.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")

    command = commands.add_parser("score", help="score videos")
    command.set_defaults(do=_score)
    command.add_argument("list", type=Path, help="JSON Lines file, or JSON list, of file, prompt and index")
    _add_dimensions(command)
    _add_environment(command)
    _add_weights(command)
    command.add_argument("--videos", type=Path, metavar="FOLDER", help="of the files (default: that of the list)")
    command.add_argument(
        "--standard",
        action="store_true",
        help="the videos are VBench's standard suite: score each by the dimensions of its prompt, and miss none",
    )
    command.add_argument(
        "--videos-per-prompt", type=int, default=VIDEOS_PER_PROMPT, metavar="N", help="of --standard (default 5)"
    )
    command.add_argument("--device", default="auto", help="auto (default: cuda where there is one), cpu, cuda, cuda:N")
    command.add_argument(
        "--timeout", type=float, default=7200, metavar="SECONDS", help="that a dimension may take (default 7200)"
    )
    command.add_argument(
        "--work-dir",
        type=Path,
        default=Path("outputs/vbench"),
        metavar="FOLDER",
        help="of the scores that need not be computed again (default outputs/vbench)",
    )
    command.add_argument("--output", type=Path, required=True, help="JSON to write")


def _add_dimensions(command: argparse.ArgumentParser) -> None:
    paper = ", ".join(vbench.PAPER_DIMENSIONS)
    command.add_argument(
        "--dimensions",
        nargs="+",
        default=list(vbench.PAPER_DIMENSIONS),
        metavar="DIMENSION",
        help=f"of {', '.join(vbench.DIMENSIONS)} (default: the five of the VMonarch paper, {paper})",
    )


def _add_environment(command: argparse.ArgumentParser) -> None:
    command.add_argument("--environment", type=Path, metavar="FOLDER", help=f"default: {default_folder()}")


def _add_weights(command: argparse.ArgumentParser) -> None:
    command.add_argument("--weights", type=Path, metavar="FOLDER", help=f"default: {default_weights()}")


def run(arguments: argparse.Namespace) -> None:
    """Do what the command of `vmonarch vbench` says, and print where the result is.

    Raises:
        InputError, VBenchError, VideoError: see the functions of `vmonarch.eval.vbench`.
    """
    arguments.do(arguments)


def _install(arguments: argparse.Namespace) -> None:
    print("making the environment; this takes minutes", file=sys.stderr)
    made = vbench.install(arguments.folder, python=arguments.python, requirements=arguments.requirements)
    print(made.folder)


def _weights(arguments: argparse.Namespace) -> None:
    vbench.download_weights(arguments.dimensions, arguments.weights, report=lambda line: print(line, file=sys.stderr))
    print(arguments.weights or default_weights())


def _prompts(arguments: argparse.Namespace) -> None:
    from vmonarch.pipelines.config import read_prompts

    wanted = {"videos_per_prompt": arguments.videos_per_prompt, "seed": arguments.seed}
    if arguments.prompt_file is None:
        items = vbench.standard_suite(arguments.dimensions, vbench.load_environment(arguments.environment), **wanted)
    else:
        items = vbench.custom_suite(read_prompts(str(arguments.prompt_file)), **wanted)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFiles() as files:
        text = "".join(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n" for item in items)
        files.stage(arguments.output).write_text(text, encoding="utf-8")
    print(f"{len(items)} videos: {arguments.output}")


def _score(arguments: argparse.Namespace) -> None:
    from vmonarch.eval.vbench.dimensions import check_dimensions

    if arguments.output.exists():
        raise InputError("output", f"{arguments.output} exists and is not overwritten")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    environment = vbench.load_environment(arguments.environment)
    videos = vbench.read_videos(arguments.list, arguments.videos)
    check_dimensions(arguments.dimensions)
    # All of them, before hours go into the first dimension.
    check_weights(arguments.dimensions, arguments.weights or default_weights())
    sets = {name: videos for name in arguments.dimensions}
    if arguments.standard:
        suite = vbench.standard_suite(arguments.dimensions, environment, videos_per_prompt=arguments.videos_per_prompt)
        sets = {name: vbench.suite_videos(videos, suite, name) for name in arguments.dimensions}
    result: dict[str, Any] = {}
    for name, chosen in sets.items():
        score = vbench.score_videos(
            chosen,
            [name],
            work_dir=arguments.work_dir,
            timeout=arguments.timeout,
            device=arguments.device,
            environment=environment,
            weights=arguments.weights,
        )[name]
        result[name] = {
            "score": score.score,
            "videos": [
                {"file": str(video.path), "prompt": video.prompt, "index": video.index, "score": value}
                for video, value in zip(chosen, score.per_video, strict=True)
            ],
            "record": str(score.record),
        }
        print(f"{name:<24} {score.score:.4f}  {len(chosen)} videos", flush=True)
    with AtomicFiles() as files:
        contents = {"vbench": environment.versions["vbench"], "dimensions": result}
        files.stage(arguments.output).write_text(
            json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    print(arguments.output)
