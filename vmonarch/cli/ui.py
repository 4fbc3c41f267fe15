"""`vmonarch ui`."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from vmonarch.cli.sampling import add_machine_arguments, hide_loading_bars

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
    parser.add_argument(
        "--model",
        dest="models",
        nargs="+",
        metavar="MODEL",
        help="one or several to choose from: embedded (default), folders of pipelines, hub ids",
    )
    add_machine_arguments(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--output-dir", metavar="FOLDER", help="default: outputs/ui; the page shows all that is in it")
    server.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1: this machine alone)"
    )
    server.add_argument("--port", type=int, metavar="N", help="default 7860; 0 for a free one")
    parser.epilog = _EPILOG


def run(arguments: argparse.Namespace) -> None:
    """Load the model, print where the page is, and serve it until Ctrl-C.

    Raises:
        InputError, ModelError: an argument cannot be used, or a model cannot be loaded.
        MissingExtra: what the page is made with is not installed.
    """
    try:
        from vmonarch.eval.ui import PageConfig, PageServer
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the page needs {error.name}, which the extra ui has: pip install 'vmonarch[ui]'"
        ) from error
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(PageConfig)}
    config = PageConfig(**{name: value for name, value in given.items() if value is not None})
    hide_loading_bars()
    server = PageServer(config)
    if not config.local:
        print(f"vmonarch ui: warning: whoever reaches {config.host} can use the page; no password", file=sys.stderr)
    print(f"{server.url}  (videos in {server.studio.output}; Ctrl-C ends it)", flush=True)
    server.serve_forever()
