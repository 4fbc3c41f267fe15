"""`vmonarch tune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vmonarch.cli.bench import Words, above_0, teller

_EPILOG = """\
examples:
  vmonarch tune                                          all kernels, d=128 and 64, within 8 minutes on an H200
  vmonarch tune --kernels r_step r_step_last --head-dims 128 --budget 120
  vmonarch tune --output my-chip.json                    a table of its own, to look at first

Options that do not compile or change a result are rejected. Entries of other kernels in the table stay.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch tune`."""
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME", "action": Words}
    parser.add_argument(
        "--kernels", **several, help="such as r_step l_output (default: all; an unknown one lists them)"
    )
    parser.add_argument("--head-dims", **several, help="default: 128 64")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16, float32")
    parser.add_argument("--shapes", **several, help="latent grids to time on in place of those that stand for all")
    parser.add_argument(
        "--budget",
        type=above_0(float),
        default=480.0,
        metavar="SECONDS",
        help="begin no kernel after this time (default 480)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="table to write or extend (default: the chip's, in the package)"
    )
    parser.add_argument(
        "--device", default="cuda", metavar="DEVICE", help="cuda (default), cuda:N; cpu with TRITON_INTERPRET=1"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress; print the path only")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Tune, write the table, print times before and after.

    Raises:
        InputError: an argument cannot be used.
    """
    from vmonarch.eval.bench.tune import run_tune
    from vmonarch.eval.render.table import aligned

    names = ("kernels", "head_dims", "shapes", "dtype", "budget", "output", "device")
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    results = run_tune(**given, say=teller(arguments.quiet))
    if not arguments.quiet:
        (table,) = results["tables"]
        print(aligned(table["header"], table["rows"]))
    print(results["table"])
