"""`vmonarch export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from vmonarch.pipelines.environment import DTYPES

_EPILOG = """\
examples:
  vmonarch export outputs/run --output my-model                 full weights: a pipeline folder
  vmonarch export outputs/run --output layers.safetensors       LoRA: for pipe.load_lora_weights
  vmonarch export outputs/run --output layers.safetensors --names comfyui

LoRA layers of Wan2.2's two transformers become a folder with a file for each. With an attention that learns
(attention=based) the file is one for vmonarch.load_adapter.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch export`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of the run")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PATH", help="folder, or .safetensors file for LoRA layers"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest)")
    parser.add_argument(
        "--weights", default="auto", metavar="WHICH", help="ema, last, or auto (default: ema if the run has it)"
    )
    parser.add_argument(
        "--names", default="diffusers", metavar="WHOSE", help="of LoRA layers: diffusers (default) or comfyui"
    )
    parser.add_argument("--dtype", choices=DTYPES[1:], help="to store in (default: the model's own)")
    parser.add_argument("--model", metavar="FOLDER", help="where the model is, if it was moved")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Export, and print what was written.

    Raises:
        InputError, CheckpointError, ModelError: see `vmonarch.finetune.export.export`.
    """
    import torch

    from vmonarch.finetune.export import export

    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    given = {name: getattr(arguments, name) for name in ("step", "weights", "names", "model")}
    print(export(arguments.run, arguments.output, dtype=dtype, **given))
