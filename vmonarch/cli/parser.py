"""The parser of `vmonarch`, of its commands and of theirs: argparse, with hints and the names that users know.

Options of a command are fields of its config, by the same name: `add_options` declares them, `given_options` reads
them.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from vmonarch.configs import suggest


class Parser(argparse.ArgumentParser):
    """The parser of a command or, after `add_commands`, of a group of commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.commands: dict[str, Parser] = {}
        self.called = "command"

    def add_commands(self, called: str = "command") -> argparse._SubParsersAction[Parser]:
        """Make it a group of commands that are `called` so in its help, and return what they are added to."""
        commands = self.add_subparsers(title=f"{called}s", metavar=called.upper(), required=True)
        self.called, self.commands = called, commands.choices
        return commands

    def leaves(self) -> Iterator[Parser]:
        """The parsers of the commands in it that are no groups; of a command itself."""
        if not self.commands:
            yield self
        for command in self.commands.values():
            yield from command.leaves()

    def parse(self, words: Sequence[str]) -> tuple[Parser, argparse.Namespace]:
        """(parser of the command that `words` begin with, its arguments), which may stand in any order.

        Prompts may follow options that take several values, which argparse cannot do for a whole tree of commands.
        """
        if not self.commands:
            return self, self.parse_intermixed_args(words)
        if words and words[0] in self.commands:
            return self.commands[words[0]].parse(words[1:])
        if words and words[0].startswith("-"):
            # Help, the version, or the error that a command is missing.
            self.parse_args(words[:1])
        said = f"there is no {self.called} {words[0]!r}" if words else f"a {self.called} is missing"
        hint = suggest(words[0], self.commands) if words else ""
        self.error(f"{said}{hint}; the {self.called}s are {', '.join(self.commands)}")

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message`, with what a misspelt option may have meant, and exit with code 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        hints = (suggest(word.partition("=")[0], self._option_string_actions) for word in unknown if word[:1] == "-")
        super().error(message + "".join(hints))

    def shown(self, argument: str) -> str:
        """How the help calls a setting: by its option (`--seed` for `seeds`), as a word (`prompt`), else by its key."""
        key = argument.replace("_", "-")
        one = key.removesuffix("s")
        words = {*self._option_string_actions, *(action.metavar or action.dest for action in self._actions)}
        return next((word for word in (f"--{key}", f"--{one}", one) if word in words), argument)


def add_options(parser: argparse._ActionsContainer, schema: type, *names: str) -> None:
    """Declare options for fields of a config: `--num-frames` for `num_frames`, `--no-…` for what is on by default.

    The help is what the docstring of the dataclass says under Args. Values stay text, whose type the config checks;
    several words make up a tuple. The metadata `option` of a field holds arguments of `add_argument` that differ.
    """
    about: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        for entry in re.finditer(r"^    ([a-z_0-9, ]+): (.+(?:\n {8}.+)*)", inspect.getdoc(cls) or "", re.MULTILINE):
            about |= dict.fromkeys(entry[1].split(", "), " ".join(entry[2].split()).rstrip(".").replace("%", "%%"))
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for name in names:
        default, given = fields[name].default, dict(fields[name].metadata.get("option", {}))
        option = name.replace("_", "-")
        if isinstance(default, bool):
            option = f"no-{option}" if default else option
            about[name] = "without " * default + about[name]
            given |= {"action": "store_const", "const": not default}
        else:
            several = "+" if isinstance(default, tuple) else None
            number = "N" if re.search("int|float", str(fields[name].type)) else name.rpartition("_")[2].upper()
            given = {"nargs": several, "metavar": number} | given
        parser.add_argument(*given.pop("also", ()), f"--{option}", dest=name, help=about.get(name), **given)


def given_options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of these arguments that the command line gives, by their names."""
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
