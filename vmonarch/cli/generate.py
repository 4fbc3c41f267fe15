"""Videos: `vmonarch generate`, and the arguments of all commands that sample."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from vmonarch.cli.arguments import add_config, add_options, read_config
from vmonarch.configs import InputError, preset_names
from vmonarch.pipelines.config import GenerateConfig, SamplingConfig, read_prompts

Config = TypeVar("Config", bound=SamplingConfig)
# A single word in a script that puts blanks between words: Latin, Greek, Cyrillic.
_BARE_WORD = re.compile(r"[!-\u052f]+")
_SIZES = (
    *("height", "width", "num_frames", "steps", "guidance", "true_guidance", "guidance_2", "scheduler", "sigmas"),
    *("flow_shift", "negative_prompt", "fps", "max_sequence_length"),
)
# Options that `vmonarch ui` has, too.
MACHINE = ("dtype", "device", "offload")


def add_sampling(parser: argparse.ArgumentParser, *, group: str) -> None:
    """Declare prompts, seeds, sizes, devices and outputs.

    Args:
        group: the file of `configs/` whose entries --config knows.
    """
    about = "what the video shows; key=value overrides may stand here too"
    parser.add_argument("prompts", nargs="*", metavar="prompt", help=about)
    parser.add_argument("--prompt-file", metavar="FILE", help="a prompt a line, UTF-8")
    add_options(parser, SamplingConfig, "model", "revision", "lora", "lora_2", "image", "seeds")
    add_options(parser.add_argument_group("sampling (default: what the model recommends)"), SamplingConfig, *_SIZES)
    add_options(parser.add_argument_group("machine"), SamplingConfig, *MACHINE, "batch_size")
    output = parser.add_argument_group("configuration and output")
    add_config(output, group)
    output.add_argument("--output-dir", metavar="FOLDER", help=f"created when missing (default: outputs/{group})")


def add_methods(parser: argparse.ArgumentParser, name: str, default: str, several: str | None = None) -> None:
    """Declare the option for the method that samples, or for several."""
    known, recipes = (", ".join(preset_names(group)) for group in ("attention", "recipes"))
    about = f"{known}, a recipe ({recipes}), or METHOD:key=value,… (default {default})"
    parser.add_argument(f"--{name}", "--recipe", nargs=several, metavar="METHOD", help=about)


def sampling_config(schema: type[Config], arguments: argparse.Namespace, recorded: Mapping[str, Any] = {}) -> Config:
    """The settings of a command that samples, as `read_config` reads them.

    Raises:
        InputError: no prompt, a prompt without quotes, an unreadable file, or a value that cannot be used.
    """
    prompts = arguments.prompts or []
    if len(prompts) > 1 and all(map(_BARE_WORD.fullmatch, prompts)):
        problem = f"must stand in quotes, or each word is a prompt of its own: {' '.join(prompts)!r}"
        raise InputError("prompts", f"{problem}; for prompts of one word use --prompt-file")
    if arguments.prompt_file is not None:
        arguments.prompts = [*prompts, *read_prompts(arguments.prompt_file)]
    config = read_config(schema, arguments, recorded)
    if not config.prompts:
        raise InputError("prompts", "is missing: give one or more prompts, or --prompt-file")
    return config


def add_generate(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser, group="generate")
    add_methods(parser, "attention", "near-lossless")
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
        # Videos that were made before the error are shown, too.
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
