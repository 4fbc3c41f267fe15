"""`vmonarch ui`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading

from vmonarch.cli.parser import add_options, given_options
from vmonarch.cli.sampling import MACHINE, hide_loading_bars
from vmonarch.pipelines.config import SamplingConfig

_EPILOG = """\
examples:
  vmonarch ui
  vmonarch ui --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers embedded --offload model
  ssh -L 7860:localhost:7860 gpu-machine vmonarch ui        # then http://localhost:7860 here

The page needs the extra ui: pip install 'vmonarch[ui]'. It has no password: whoever reaches it can use it.
"""


class MissingExtra(RuntimeError):
    """What a command needs is not installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch ui`."""
    models = "one or several to choose from: embedded (default), folders of pipelines, hub ids"
    parser.add_argument("--model", dest="models", nargs="+", metavar="MODEL", help=models)
    add_options(parser.add_argument_group("machine"), SamplingConfig, *MACHINE)
    server = parser.add_argument_group("server")
    server.add_argument("--output-dir", metavar="FOLDER", help="default: outputs/ui; the page shows all that is in it")
    server.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="default 127.0.0.1: this machine alone")
    server.add_argument("--port", type=int, metavar="N", default=7860, help="default 7860; 0 for a free one")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Print where the page is, and serve it until Ctrl-C.

    Raises:
        InputError, ModelError: an argument cannot be used, or a model cannot be found.
        MissingExtra: what the page is made with is not installed.
    """
    try:
        from vmonarch.eval.ui import Studio, is_local, launch
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the page needs {error.name}, which the extra ui has: pip install 'vmonarch[ui]'"
        ) from error
    hide_loading_bars()
    studio = Studio(**given_options(arguments, "models", "output_dir", *MACHINE))
    page, address = launch(studio, arguments.host, arguments.port)
    if not is_local(arguments.host):
        print(f"vmonarch ui: warning: whoever reaches {arguments.host} can use the page; no password", file=sys.stderr)
    print(f"{address}  (videos in {studio.output}; Ctrl-C ends it)", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    finally:
        for stop in list(studio.stops.values()):
            stop.set()
        page.close(verbose=False)
