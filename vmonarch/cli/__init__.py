"""The `vmonarch` command.

Exit codes: 0 done, 1 the run failed, 2 an argument cannot be used, 130 interrupted (Ctrl-C), 143 terminated.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn, Protocol

from vmonarch.configs import InputError, suggest

# Command -> module with `add_arguments(parser)` and `run(arguments)`, and its line in the help. A command's module is
# imported when it is called, and imports torch only after its arguments are parsed.
COMMANDS = {
    "generate": ("vmonarch.cli.generate", "make videos from prompts"),
    "compare": ("vmonarch.cli.compare", "the same videos through full attention and other methods, with the numbers"),
    "eval": ("vmonarch.cli.eval", "methods × prompts × seeds: quality against full attention, statistics, a report"),
    "calibrate": ("vmonarch.cli.calibrate", "what every head loses, and a plan of what every head computes"),
    "preprocess": ("vmonarch.cli.preprocess", "videos with captions to latents and text in parquet, for training"),
    "bench": (
        "vmonarch.cli.bench",
        "time kernels, or whole denoising steps, against full attention; results are checked",
    ),
    "tune": ("vmonarch.cli.tune", "find the kernels' launch options for the chip at hand"),
    "info": ("vmonarch.cli.info", "versions, devices, the embedded model, installed extras"),
}


class Command(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> Sequence[argparse.ArgumentParser] | None:
        """Declare the command's arguments; where it has commands of its own, return their parsers."""

    def run(self, arguments: argparse.Namespace) -> None:
        """Do it; errors are raised."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process by default) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in COMMANDS:
            return _run_command(words[0], words[1:])
        parser = _top_parser()
        if words and not words[0].startswith("-"):
            hint = suggest(words[0], COMMANDS)
            parser.error(f"there is no command {words[0]!r}{hint}; the commands are {', '.join(COMMANDS)}")
        parser.parse_args(words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 2


def _top_parser() -> argparse.ArgumentParser:
    """The parser that answers `vmonarch`, `--help`, `--version` and unknown commands."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="vmonarch",
        description="VMonarch: structured attention that makes video diffusion transformers fast.",
        epilog=f"commands:\n{listed}\n\n`vmonarch COMMAND --help` tells more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import vmonarch

        print(f"vmonarch {vmonarch.__version__}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Tells what a misspelt option may have meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        hints = (suggest(word.partition("=")[0], self._option_string_actions) for word in unknown if word[:1] == "-")
        super().error(message + "".join(hints))


def _run_command(name: str, words: Sequence[str]) -> int:
    module, line = COMMANDS[name]
    command: Command = importlib.import_module(module)
    parser = _Parser(prog=f"vmonarch {name}", description=line, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = command.add_arguments(parser)
    for each in subparsers or [parser]:
        each.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # Intermixed: prompts may follow options that take several values. Argparse cannot do that with subparsers.
    arguments = (parser.parse_args if subparsers else parser.parse_intermixed_args)(words)
    arguments.words = (name, *words)
    # Read when these libraries are first imported: their notices on missing extras are not about what was asked for.
    for library in ("DIFFUSERS", "TRANSFORMERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    previous = _on_terminate()
    try:
        command.run(arguments)
    except KeyboardInterrupt:
        print(f"\nvmonarch {name}: interrupted; nothing half-written is left", file=sys.stderr)
        return 130
    except InputError as error:
        message = f"{_flag(subparsers or [parser], error.argument)} {error.problem}"
        return _fail(name, message, 2, arguments.debug)
    except Exception as error:
        # Our own errors explain themselves; of any other the type is part of the message.
        known = type(error).__module__.startswith("vmonarch") or isinstance(error, OSError)
        text = str(error) or type(error).__name__
        return _fail(name, text if known else f"{type(error).__name__}: {text}", 1, arguments.debug)
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    return 0


def _on_terminate() -> signal.Handlers | None:
    """Let SIGTERM unwind the stack like Ctrl-C does, so that temporary files go; returns what to put back."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        return signal.signal(signal.SIGTERM, leave)  # type: ignore[return-value]
    except ValueError:
        # Only the main thread may set handlers.
        return None


def _flag(parsers: Sequence[argparse.ArgumentParser], argument: str) -> str:
    """How the user wrote `argument`: its option where there is one, else its key."""
    for action in (action for parser in parsers for action in parser._actions):
        if action.dest == argument:
            return action.option_strings[-1] if action.option_strings else str(action.metavar or argument)
    return argument


def _fail(name: str, message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"vmonarch {name}: error: {' '.join(message.split())}", file=sys.stderr)
    return code
