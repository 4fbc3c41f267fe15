"""The `vmonarch` command.

Exit codes: 0 done, 1 the run failed, 2 an argument cannot be used, 130 interrupted (Ctrl-C), 143 terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

from vmonarch import __version__
from vmonarch.cli.arguments import Parser
from vmonarch.configs import InputError
from vmonarch.requirements import check_versions

# Module here -> its commands. The docstring of `run_NAME(arguments)` is a command's help; `add_NAME(parser)`, if any,
# adds its arguments. Every command imports all modules, so none may import torch, or anything as slow, before it runs.
COMMANDS = {
    "generate": ("generate",),
    "evaluate": ("compare", "ui", "eval", "vbench", "calibrate"),
    "training": ("preprocess", "finetune", "export"),
    "bench": ("bench", "tune"),
    "info": ("info",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process by default) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, arguments = build_parser().parse(words)
        arguments.words = words
        return _run(parser, arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def build_parser() -> Parser:
    """The parser of `vmonarch` with all of its commands; the parsed `command` is the function to call."""
    parser = Parser(
        prog="vmonarch",
        description="VMonarch: structured attention that makes video diffusion transformers fast.",
        epilog="`vmonarch COMMAND --help` tells more about each.",
    )
    parser.add_argument("--version", action="version", version=f"vmonarch {__version__}")
    commands = parser.add_commands()
    for place, names in COMMANDS.items():
        module = importlib.import_module(f"vmonarch.cli.{place}")
        for name in names:
            run = getattr(module, f"run_{name}")
            line, _, epilog = inspect.cleandoc(run.__doc__).partition("\n\n")
            command = commands.add_parser(name, help=line, description=line, epilog=epilog)
            getattr(module, f"add_{name}", lambda parser: None)(command)
            for leaf in command.commands.values() or [command]:
                leaf.add_argument("--debug", action="store_true", help="show the traceback of an error")
                leaf.add_argument("--quiet", action="store_true", help="no progress; print paths only")
                # `info` must work with any installed versions of torch and diffusers.
                leaf.set_defaults(command=run, needs_versions=name != "info")
    return parser


def _run(parser: Parser, arguments: argparse.Namespace) -> int:
    # The libraries read these on first import. Their notices about missing extras do not concern the command.
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    form = warnings.formatwarning
    if not arguments.debug:
        # diffusers imports torchao wherever it is installed, and torchao warns of parts that it cannot load; nothing
        # here uses them.
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # Python may give these for sources of other packages that it compiles on their first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.formatwarning = lambda message, *_, **__: f"{parser.prog}: warning: {' '.join(str(message).split())}\n"
    # Only the main thread may set handlers. SIGTERM unwinds the stack as Ctrl-C does, so temporary files are removed.
    previous = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if arguments.needs_versions:
            check_versions()
        arguments.command(arguments)
        return 0
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted; nothing half-written is left", file=sys.stderr)
        return 130
    except Exception as error:
        message = str(error) or type(error).__name__
        # For our own errors, and those of files, the message is enough.
        explained = type(error).__module__.startswith("vmonarch") or isinstance(error, OSError)
        if isinstance(error, InputError):
            message = f"{parser.shown(error.argument)} {error.problem}"
        elif not explained:
            message = f"{type(error).__name__}: {message}"
        if arguments.debug or not explained:
            traceback.print_exc()
        print(f"{parser.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    finally:
        warnings.formatwarning = form
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, previous)
