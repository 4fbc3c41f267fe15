"""`vmonarch preprocess`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vmonarch.cli.parser import add_options
from vmonarch.cli.sampling import config_layers, hide_loading_bars
from vmonarch.configs import InputError, is_override, preset_names
from vmonarch.pipelines.config import SamplingConfig

if TYPE_CHECKING:
    from vmonarch.finetune.data.preprocess import PreprocessConfig

_EPILOG = """\
examples:
  vmonarch preprocess clips --captions clips/captions.jsonl --output data/clips
  vmonarch preprocess clips --captions clips.csv --output data/wan --config wan2.1-1.3b rows_per_shard=16
  vmonarch preprocess --procedural 256 --output data/shapes seed=1

Captions are JSON lines ({"file_name": "a.mp4", "caption": "…"}) or CSV with these columns. Without --captions there
is a text file beside each video, a.txt of a.mp4. The same command goes on where it was broken off. Bad videos are
listed in quarantine.jsonl; to try one again, take out its line. buckets=[480x832x81,832x480x81] makes clips of several
sizes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch preprocess`."""
    parser.add_argument("videos", nargs="*", help="folder of the videos; key=value overrides may stand here too")
    parser.add_argument("--captions", metavar="FILE", help="JSON lines, or CSV (.csv): file_name and caption")
    parser.add_argument("--procedural", type=int, metavar="N", help="instead, N clips of the embedded model's shapes")
    add_options(parser, SamplingConfig, "model", "revision")
    parser.add_argument("--output", metavar="FOLDER", help="for shards, manifest and quarantine list (required)")
    known = ", ".join(preset_names("preprocess"))
    parser.add_argument("--config", metavar="FILE", help=f"YAML file, or one of {known}")
    parser.add_argument("--quiet", action="store_true", help="no progress; print the manifest's path only")
    parser.epilog = _EPILOG


def read_settings(arguments: argparse.Namespace) -> PreprocessConfig:
    """The settings that a command line asks for.

    Raises:
        InputError: one of its arguments cannot be used.
    """
    from vmonarch.finetune.data.preprocess import PreprocessConfig, preprocess_config

    words = arguments.videos
    arguments.videos, *more = [word for word in words if not is_override(word)] or [None]
    if more:
        raise InputError("videos", f"must be one folder, got {' '.join([arguments.videos, *more])}")
    return preprocess_config(*config_layers(PreprocessConfig, arguments, "preprocess", filter(is_override, words)))


def run(arguments: argparse.Namespace) -> None:
    """Prepare the clips and print where they are; see `vmonarch.finetune.data.preprocess.preprocess`."""
    from vmonarch.finetune.data.preprocess import preprocess

    config = read_settings(arguments)
    hide_loading_bars()
    counts = preprocess(config, progress=not arguments.quiet)
    bad = f", {counts['quarantined']} bad videos in quarantine.jsonl" if counts["quarantined"] else ""
    made = "" if arguments.quiet else f"  ({counts['clips']} clips in {counts['shards']} shards{bad})"
    print(f"{Path(config.output).expanduser() / 'manifest.json'}{made}")
