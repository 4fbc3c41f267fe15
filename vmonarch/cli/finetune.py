"""`vmonarch finetune`."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vmonarch.finetune.config import FinetuneConfig

_EPILOG = """\
examples:
  vmonarch finetune --config wan2.1-1.3b data.path=data/clips output_dir=outputs/run
  accelerate launch --num_processes 8 -m vmonarch.finetune --config wan2.1-1.3b data.path=data/clips

This is one process, with one GPU where there is one. `accelerate launch` starts the same code on several GPUs. The same
command goes on from the newest checkpoint.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch finetune`."""
    from vmonarch.configs import preset_names

    known = ", ".join(preset_names("finetune"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as steps=800 optimizer.clip=0.5")
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file, or one of {known} (with or without finetune/ before it)"
    )
    parser.epilog = _EPILOG


def read_settings(preset: str | None, overrides: Sequence[str]) -> FinetuneConfig:
    """The settings that a command line asks for.

    Args:
        preset: the name of a preset or a YAML file.
        overrides: words like `steps=800`, later ones over earlier ones.

    Raises:
        InputError: one of these cannot be used.
    """
    from vmonarch.configs import parse_overrides, read_yaml
    from vmonarch.finetune.config import finetune_config

    layers = [] if preset is None else [read_yaml(preset.removeprefix("finetune/"), group="finetune")]
    return finetune_config(*layers, *(parse_overrides([word]) for word in overrides))


def run(arguments: argparse.Namespace) -> None:
    """Train, and say how to export what was learnt.

    Raises:
        InputError, ModelError, CheckpointError, …: see `vmonarch.finetune.trainer.Trainer`.
    """
    from vmonarch.cli import is_explained

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A process that waits for one which has failed never comes to an exception.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        config = read_settings(arguments.config, arguments.overrides)
        from vmonarch.finetune.trainer import Trainer

        trainer = Trainer(config)
        trainer.run()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("the same command goes on from the newest checkpoint") from stop
    except Exception as error:
        # Hours may have gone into the run.
        arguments.debug |= not is_explained(error)
        raise
    if trainer.accelerator.is_main_process:
        print(f"step {trainer.step} is saved; to export it: vmonarch export {trainer.output} --output …")
