"""Adapt a Wan model to VMonarch: `accelerate launch -m vmonarch.finetune --config NAME key=value …`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vmonarch.configs import InputError, is_override, parse_overrides, preset_names, read_yaml


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit codes: 0 done, 1 the run failed, 2 an argument cannot be used."""
    known = ", ".join(preset_names("finetune"))
    parser = argparse.ArgumentParser(prog="python -m vmonarch.finetune", description=__doc__)
    parser.add_argument("--config", help=f"YAML file, or one of {known} (with or without finetune/ before it)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as steps=800 optimizer.clip=0.5")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_intermixed_args(arguments)
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    from vmonarch.finetune.config import finetune_config

    try:
        layers = []
        if options.config is not None:
            layers.append(read_yaml(options.config.removeprefix("finetune/"), group="finetune"))
        for word in options.overrides:
            if not is_override(word):
                raise InputError(word, "is no override; overrides look like steps=800 or optimizer.clip=0.5")
            layers.append(parse_overrides([word]))
        config = finetune_config(*layers)
        from vmonarch.finetune.trainer import Trainer

        Trainer(config).run()
    except Exception as error:
        ours = isinstance(error, InputError | OSError) or type(error).__module__.startswith("vmonarch")
        if options.debug or not ours:
            raise
        print(f"vmonarch finetune: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
