"""Adapt a Wan model to VMonarch: `accelerate launch -m vmonarch.finetune --config NAME key=value …`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vmonarch.configs import InputError, is_override, parse_overrides, preset_names, read_yaml

if TYPE_CHECKING:
    from vmonarch.finetune.config import FinetuneConfig

PROGRAM = "python -m vmonarch.finetune"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit codes: 0 done, 1 the run failed, 2 an argument cannot be used, 130 interrupted (Ctrl-C)."""
    known = ", ".join(preset_names("finetune"))
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--config", help=f"YAML file, or one of {known} (with or without finetune/ before it)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as steps=800 optimizer.clip=0.5")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_intermixed_args(arguments)
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        config = read_settings(options.config, options.overrides)
        from vmonarch.finetune.trainer import Trainer

        trainer = Trainer(config)
        trainer.run()
        if trainer.accelerator.is_main_process:
            newest = trainer.checkpoints.latest()
            print(f"{newest} is complete; to export it: {PROGRAM}.export {trainer.output} --output …")
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        return 130
    except Exception as error:
        ours = isinstance(error, InputError | OSError) or type(error).__module__.startswith("vmonarch")
        if options.debug or not ours:
            raise
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def read_settings(preset: str | None, overrides: Sequence[str]) -> FinetuneConfig:
    """The settings that a command line asks for.

    Args:
        preset: the name of a preset or a YAML file.
        overrides: words like `steps=800`, later ones over earlier ones.

    Raises:
        InputError: one of these cannot be used.
    """
    from vmonarch.finetune.config import finetune_config

    layers = [] if preset is None else [read_yaml(preset.removeprefix("finetune/"), group="finetune")]
    for word in overrides:
        if not is_override(word):
            raise InputError(word, "is no override; overrides look like steps=800 or optimizer.clip=0.5")
        layers.append(parse_overrides([word]))
    return finetune_config(*layers)


if __name__ == "__main__":
    sys.exit(main())
