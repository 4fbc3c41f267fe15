"""`vmonarch tune`.

examples:
  vmonarch tune                                          all kernels, d=128 and 64, within 8 minutes on an H200
  vmonarch tune --kernels r_step r_step_last --head-dims 128 --budget 120
  vmonarch tune --output my-chip.json                    a table of its own, to look at first

Options that do not compile or change a result are rejected. Entries of other kernels in the table stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vmonarch.cli.bench import DEVICE, Words, above_0, teller
from vmonarch.cli.parser import given_options

_SEVERAL: dict[str, Any] = {"nargs": "+", "metavar": "NAME", "action": Words}
_OPTIONS: dict[str, dict[str, Any]] = {
    "kernels": _SEVERAL | {"help": "such as r_step l_output (default: all; an unknown one lists them)"},
    "head-dims": _SEVERAL | {"help": "default: 128 64"},
    "dtype": {"help": "bfloat16 (default), float16, float32"},
    "shapes": _SEVERAL | {"help": "latent grids to time on in place of those that stand for all"},
    "budget": {"type": above_0(float), "metavar": "SECONDS", "help": "begin no kernel after this time (default 480)"},
    "output": {"type": Path, "metavar": "FILE", "help": "table to write or extend (default: the chip's own)"},
    "device": DEVICE,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch tune`."""
    for name, told in _OPTIONS.items():
        parser.add_argument(f"--{name}", **told)
    parser.add_argument("--quiet", action="store_true", help="no progress; print the path only")


def run(arguments: argparse.Namespace) -> None:
    """Tune, write the table, print times before and after.

    Raises:
        InputError: an argument cannot be used.
    """
    from vmonarch.eval.bench.tune import run_tune
    from vmonarch.eval.render.table import aligned

    given = given_options(arguments, *(name.replace("-", "_") for name in _OPTIONS))
    results = run_tune(**given, say=teller(arguments.quiet))
    if not arguments.quiet:
        (table,) = results["tables"]
        print(aligned(table["header"], table["rows"]))
    print(results["table"])
