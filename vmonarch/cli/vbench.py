"""`vmonarch vbench`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vmonarch.cli.parser import Parser
from vmonarch.configs import InputError
from vmonarch.eval.vbench import installation, scoring
from vmonarch.files import AtomicFiles, write_json

_EPILOG = """\
examples:
  vmonarch vbench install
  vmonarch vbench weights --dimensions imaging_quality dynamic_degree
  vmonarch vbench prompts --dimensions imaging_quality --output prompts.jsonl
  vmonarch vbench score videos.jsonl --dimensions imaging_quality --output scores.json

videos.jsonl has a line like {"file": "a.mp4", "prompt": "a lighthouse in a storm"} for every video, whose path is
relative to the list. With the lines of `prompts`, and a "file" added to each, a dimension sees the videos of its own
prompts.
"""


def add_arguments(parser: Parser) -> None:
    """Declare the commands of `vmonarch vbench` and their arguments."""
    parser.description = f"Score videos by the official package of VBench, version {installation.VERSION}."
    parser.epilog = _EPILOG
    commands = parser.add_commands()
    install = commands.add_parser("install", help="make the environment that VBench runs in (about 6 GB)")
    weights = commands.add_parser("weights", help="download the files that dimensions load, where they are missing")
    prompts = commands.add_parser("prompts", help="write what to generate: prompt, index and seed of every video")
    score = commands.add_parser("score", help="score videos")
    for command, do in ((install, _install), (weights, _weights), (prompts, _prompts), (score, _score)):
        command.set_defaults(do=do)
    install.add_argument("--python", help="interpreter to make it with, 3.10 to 3.12 (default: this one)")
    install.add_argument("--folder", type=Path, help=f"of the environment (default: {installation.default_folder()})")
    about = "other pinned packages, for another torch, say"
    install.add_argument("--requirements", type=Path, default=installation.REQUIREMENTS, help=about)
    paper = scoring.PAPER_DIMENSIONS
    about = f"of {', '.join(scoring.DIMENSIONS)} (default: the five of the VMonarch paper, {', '.join(paper)})"
    for command in (weights, prompts, score):
        command.add_argument("--dimensions", nargs="+", default=list(paper), metavar="DIMENSION", help=about)
    kept: dict[str, Any] = {"type": Path, "metavar": "FOLDER", "help": "default: %(default)s"}
    for command in (weights, score):
        command.add_argument("--weights", default=installation.default_weights(), **kept)
    for command in (prompts, score):
        command.add_argument("--environment", default=installation.default_folder(), **kept)
    prompts.add_argument("--prompt-file", type=Path, help="a prompt per line, instead of VBench's")
    prompts.add_argument("--seed", type=int, default=0, help="first seed; every video has its own (default 0)")
    prompts.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")
    score.add_argument("list", type=Path, help="JSON Lines file of file and prompt, and of dimensions if not of all")
    about = "default 5, as VBench asks"
    prompts.add_argument("--videos-per-prompt", type=int, default=5, metavar="N", help=about)
    score.add_argument("--device", default="auto", help="auto (default: cuda where there is one), cpu, cuda, cuda:N")
    about = "that a dimension may take (default 7200)"
    score.add_argument("--timeout", type=float, default=7200, metavar="SECONDS", help=about)
    about = "of the scores that need not be computed again (default outputs/vbench)"
    score.add_argument("--work-dir", type=Path, default=Path("outputs/vbench"), metavar="FOLDER", help=about)
    score.add_argument("--output", type=Path, required=True, help="JSON to write")


def run(arguments: argparse.Namespace) -> None:
    """Do what the command of `vmonarch vbench` says, and print where the result is.

    Raises:
        InputError, VBenchError, VideoError: see the functions of `vmonarch.eval.vbench`.
    """
    if hasattr(arguments, "dimensions"):
        scoring.check_dimensions(arguments.dimensions)
    if (output := getattr(arguments, "output", None)) is not None:
        if output.exists():
            raise InputError("output", f"{output} exists and is not overwritten")
        output.parent.mkdir(parents=True, exist_ok=True)
    arguments.do(arguments)


def _install(arguments: argparse.Namespace) -> None:
    print("making the environment; this takes minutes", file=sys.stderr)
    print(installation.install(arguments.folder, python=arguments.python, requirements=arguments.requirements))


def _weights(arguments: argparse.Namespace) -> None:
    report = lambda line: print(line, file=sys.stderr)
    installation.download_weights(arguments.dimensions, arguments.weights, report)
    print(arguments.weights)


def _prompts(arguments: argparse.Namespace) -> None:
    from vmonarch.pipelines.config import read_prompts

    own = None if arguments.prompt_file is None else read_prompts(str(arguments.prompt_file))
    number, seed = arguments.videos_per_prompt, arguments.seed
    items = scoring.suite(arguments.dimensions, number, seed, arguments.environment, own)
    with AtomicFiles() as files:
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in items]
        files.stage(arguments.output).write_text("".join(lines), encoding="utf-8")
    print(f"{len(items)} videos: {arguments.output}")


def _score(arguments: argparse.Namespace) -> None:
    settings = {key: getattr(arguments, key) for key in ("work_dir", "timeout", "device", "environment", "weights")}
    videos = scoring.read_videos(arguments.list)
    results = {}
    for name, found in scoring.score_videos(videos, arguments.dimensions, **settings, report=print).items():
        rows = zip(found.videos, found.per_video, strict=True)
        listed = [{"file": str(video.path), "prompt": video.prompt, "score": score} for video, score in rows]
        results[name] = {"score": found.score, "videos": listed}
    write_json(arguments.output, {"vbench": installation.VERSION, "dimensions": results})
    print(arguments.output)
