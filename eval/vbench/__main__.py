"""VBench's scores of videos: `python -m vmonarch.eval.vbench {install,weights,prompts,score}`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vmonarch.configs import InputError
from vmonarch.eval.vbench.dimensions import DIMENSIONS, PAPER_DIMENSIONS, check_dimensions
from vmonarch.eval.vbench.environment import (
    REQUIREMENTS,
    VERSION,
    VBenchError,
    default_folder,
    install,
    load_environment,
)
from vmonarch.eval.vbench.scoring import score_videos
from vmonarch.eval.vbench.suite import VIDEOS_PER_PROMPT, custom_suite, read_videos, standard_suite, suite_videos
from vmonarch.eval.vbench.weights import check_weights, default_weights, download_weights
from vmonarch.files import AtomicFiles
from vmonarch.pipelines.config import read_prompts
from vmonarch.pipelines.video_io import VideoError

_EPILOG = """\
examples:
  python -m vmonarch.eval.vbench install
  python -m vmonarch.eval.vbench weights --dimensions imaging_quality dynamic_degree
  python -m vmonarch.eval.vbench prompts --dimensions imaging_quality --output prompts.jsonl
  python -m vmonarch.eval.vbench score videos.jsonl --dimensions imaging_quality --output scores.json

videos.jsonl has a line like {"file": "a.mp4", "prompt": "a lighthouse in a storm", "index": 0} for every video.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if VBench cannot do it, 2 if an argument cannot be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # So that what runs in the environment ends with us.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        options.run(options)
    except InputError as error:
        parser.error(str(error))
    except (VBenchError, VideoError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vmonarch.eval.vbench",
        description=f"Score videos by the official package of VBench, version {VERSION}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    dimensions, environment, weights = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    dimensions.add_argument(
        "--dimensions",
        nargs="+",
        default=list(PAPER_DIMENSIONS),
        metavar="DIMENSION",
        help=f"of {', '.join(DIMENSIONS)} (default: the five of the VMonarch paper, {', '.join(PAPER_DIMENSIONS)})",
    )
    environment.add_argument("--environment", type=Path, metavar="FOLDER", help=f"default: {default_folder()}")
    weights.add_argument("--weights", type=Path, metavar="FOLDER", help=f"default: {default_weights()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("install", help="make the environment that VBench runs in (about 6 GB)")
    command.set_defaults(run=_install)
    command.add_argument("--python", help="interpreter to make it with, 3.10 to 3.12 (default: this one)")
    command.add_argument("--folder", type=Path, help=f"of the environment (default: {default_folder()})")
    command.add_argument(
        "--requirements", type=Path, default=REQUIREMENTS, help="other pinned packages, for another torch, say"
    )

    told = "download the files that dimensions load, where they are missing"
    commands.add_parser("weights", help=told, parents=[dimensions, weights]).set_defaults(run=_weights)

    told = "write what to generate: prompt, index and seed of every video"
    command = commands.add_parser("prompts", help=told, parents=[dimensions, environment])
    command.set_defaults(run=_prompts)
    command.add_argument("--prompt-file", type=Path, help="a prompt per line, instead of VBench's")
    command.add_argument("--videos-per-prompt", type=int, default=VIDEOS_PER_PROMPT, metavar="N", help="default 5")
    command.add_argument("--seed", type=int, default=0, help="first seed; every video has its own (default 0)")
    command.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")

    command = commands.add_parser("score", help="score videos", parents=[dimensions, environment, weights])
    command.set_defaults(run=_score)
    command.add_argument("list", type=Path, help="JSON Lines file, or JSON list, of file, prompt and index")
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
    return parser


def _install(options: argparse.Namespace) -> None:
    print("making the environment; this takes minutes", file=sys.stderr)
    print(install(options.folder, python=options.python, requirements=options.requirements).folder)


def _weights(options: argparse.Namespace) -> None:
    download_weights(options.dimensions, options.weights, report=lambda line: print(line, file=sys.stderr))
    print(options.weights or default_weights())


def _prompts(options: argparse.Namespace) -> None:
    if options.prompt_file is None:
        items = standard_suite(
            options.dimensions,
            load_environment(options.environment),
            videos_per_prompt=options.videos_per_prompt,
            seed=options.seed,
        )
    else:
        prompts = read_prompts(str(options.prompt_file))
        items = custom_suite(prompts, videos_per_prompt=options.videos_per_prompt, seed=options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFiles() as files:
        text = "".join(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n" for item in items)
        files.stage(options.output).write_text(text, encoding="utf-8")
    print(f"{len(items)} videos: {options.output}")


def _score(options: argparse.Namespace) -> None:
    if options.output.exists():
        raise InputError("--output", f"{options.output} exists and is not overwritten")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    environment = load_environment(options.environment)
    videos = read_videos(options.list, options.videos)
    check_dimensions(options.dimensions)
    # All of them, before hours go into the first dimension.
    check_weights(options.dimensions, options.weights or default_weights())
    sets = {name: videos for name in options.dimensions}
    if options.standard:
        suite = standard_suite(options.dimensions, environment, videos_per_prompt=options.videos_per_prompt)
        sets = {name: suite_videos(videos, suite, name) for name in options.dimensions}
    result = {}
    for name, chosen in sets.items():
        score = score_videos(
            chosen,
            [name],
            work_dir=options.work_dir,
            timeout=options.timeout,
            device=options.device,
            environment=environment,
            weights=options.weights,
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
        files.stage(options.output).write_text(
            json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    print(options.output)


if __name__ == "__main__":
    sys.exit(main())
