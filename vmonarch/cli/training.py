"""From videos to a finetuned model: `vmonarch preprocess`, `vmonarch finetune` and `vmonarch export`."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from vmonarch.cli.arguments import add_config, add_options, read_config
from vmonarch.configs import InputError
from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.environment import DTYPES


def add_preprocess(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", nargs="*", help="folder of the videos; key=value overrides may stand here too")
    parser.add_argument("--captions", metavar="FILE", help="JSON lines: file_name and caption")
    parser.add_argument("--procedural", type=int, metavar="N", help="instead, N clips of the embedded model's shapes")
    add_options(parser, SamplingConfig, "model", "revision")
    parser.add_argument("--output", metavar="FOLDER", help="for shards and manifest (default: outputs/preprocess)")
    add_config(parser, "preprocess")


def run_preprocess(arguments: argparse.Namespace) -> None:
    """videos with captions to latents and text in parquet, for training

    examples:
      vmonarch preprocess clips --captions clips/captions.jsonl --output data/clips
      vmonarch preprocess clips --captions wan.jsonl --output data/wan --config wan2.1-1.3b rows_per_shard=16
      vmonarch preprocess --procedural 256 --output data/shapes seed=1

    Captions are JSON lines ({"file_name": "a.mp4", "caption": "…"}). Without --captions there must be a text file
    beside each video, a.txt for a.mp4. The same command continues where it was interrupted. Bad videos are listed in
    quarantine.jsonl; to try one again, take out its line.
    """
    from vmonarch.finetune.data.preprocess import PreprocessConfig, preprocess

    arguments.videos, *more = arguments.videos or [None]
    if more:
        raise InputError("videos", f"must be one folder, got {' '.join([arguments.videos, *more])}")
    config = read_config(PreprocessConfig, arguments)
    counts = preprocess(config, progress=not arguments.quiet)
    bad = f", {counts['quarantined']} bad videos in quarantine.jsonl" if counts["quarantined"] else ""
    made = "" if arguments.quiet else f"  ({counts['clips']} clips in {counts['shards']} shards{bad})"
    print(f"{Path(config.output).expanduser() / 'manifest.json'}{made}")


def add_finetune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as steps=800 optimizer.clip=0.5")
    add_config(parser, "finetune")


def run_finetune(arguments: argparse.Namespace) -> None:
    """adapt a Wan model to VMonarch

    examples:
      vmonarch finetune --config wan2.1-1.3b data.path=data/clips output_dir=outputs/run
      accelerate launch --num_processes 8 -m vmonarch.finetune --config wan2.1-1.3b data.path=data/clips

    This is one process, with one GPU where there is one. `accelerate launch` starts the same code on several GPUs. The
    same command continues from the newest checkpoint.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A process that waits for one that has failed never gets to run the handler of `main`.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from vmonarch.finetune.config import FinetuneConfig

    config = read_config(FinetuneConfig, arguments)
    from vmonarch.finetune.trainer import Trainer

    trainer = Trainer(config)
    trainer.run()
    if trainer.accelerator.is_main_process:
        print(f"step {trainer.step} is saved; to export it: vmonarch export {trainer.output} --output …")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of the run")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PATH", help="folder, or .safetensors file for LoRA layers"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest)")
    parser.add_argument(
        "--names", default="diffusers", metavar="WHOSE", help="of LoRA layers: diffusers (default) or comfyui"
    )
    parser.add_argument("--dtype", choices=DTYPES[1:], help="to store in (default: the model's own)")
    parser.add_argument("--model", metavar="FOLDER", help="where the model is, if it was moved")


def run_export(arguments: argparse.Namespace) -> None:
    """from a checkpoint of `vmonarch finetune` to what others load

    examples:
      vmonarch export outputs/run --output my-model                 full weights: a pipeline folder
      vmonarch export outputs/run --output layers.safetensors       LoRA: for pipe.load_lora_weights
      vmonarch export outputs/run --output layers.safetensors --names comfyui

    LoRA layers of Wan2.2's two transformers become a folder with a file for each. With an attention that learns
    (attention=based) the file is one for vmonarch.load_adapter.
    """
    import torch

    from vmonarch.finetune.export import export

    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    given = {name: getattr(arguments, name) for name in ("step", "names", "model")}
    print(export(arguments.run, arguments.output, dtype=dtype, **given))
