"""The parser of `vmonarch` and of its commands, the arguments that several share, and the settings that they make up.

It is argparse, with hints and the names that users know. Options of a command are fields of its config, by the same
name: `add_options` declares them, `given_options` reads them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from vmonarch.configs import Settings, described, is_override, parse_override, preset_names, read_yaml, suggest
from vmonarch.pipelines.config import build_config

# Arguments of several words, among which overrides may stand.
_WITH_OVERRIDES = ("prompts", "videos", "methods", "candidates", "vbench", "seeds")


class Parser(argparse.ArgumentParser):
    """The parser of a command or, after `add_commands`, of a group of commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.commands: dict[str, Parser] = {}

    def add_commands(self) -> argparse._SubParsersAction[Parser]:
        """Make it a group of commands, and return what they are added to."""
        commands = self.add_subparsers(title="commands", metavar="COMMAND", required=True)
        self.commands = commands.choices
        return commands

    def parse(self, words: Sequence[str]) -> tuple[Parser, argparse.Namespace]:
        """(parser of the command that `words` begin with, its arguments), which may stand in any order.

        Prompts may follow options that take several values, which argparse cannot do for a whole tree of commands.
        `key=value` overrides are taken out from among prompts and such values, none of which is named like one.
        """
        if words and words[0] in self.commands:
            return self.commands[words[0]].parse(words[1:])
        if self.commands:
            # Help, the version, or the error that the command is missing or unknown.
            return self, self.parse_args(words[:1])
        arguments = self.parse_intermixed_args(words)
        arguments.overrides = getattr(arguments, "overrides", [])
        for name in filter(functools.partial(hasattr, arguments), _WITH_OVERRIDES):
            given = getattr(arguments, name) or ()
            arguments.overrides += filter(is_override, given)
            setattr(arguments, name, [word for word in given if not is_override(word)] or None)
        return self, arguments

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message`, with what a misspelt word may have meant, and exit with code 2."""
        unknown = re.findall(r" (-[^ =]+)", message.partition("unrecognized arguments:")[2])
        unknown += re.findall(r"^argument COMMAND: invalid choice: '(.*?)'", message)
        super().error(message + "".join(suggest(x, [*self._option_string_actions, *self.commands]) for x in unknown))

    def shown(self, argument: str) -> str:
        """The name of a setting in the help: its option (`--seed` for `seeds`), a word (`prompt`), or its key."""
        key = argument.replace("_", "-")
        one = key.removesuffix("s")
        words = {*self._option_string_actions, *(action.metavar or action.dest for action in self._actions)}
        return next((word for word in (f"--{key}", f"--{one}", one) if word in words), argument)


def add_options(parser: argparse._ActionsContainer, schema: type, *names: str) -> None:
    """Declare options for fields of a config: `--num-frames` for `num_frames`, `--no-…` for what is on by default.

    The help is what the docstring of the dataclass says under Args. Values stay text, whose type the config checks;
    several words make up a tuple. The metadata `option` of a field holds arguments of `add_argument` that differ.
    """
    about = {name: text.replace("%", "%%") for name, text in described(schema).items()}
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


Config = TypeVar("Config", bound=Settings)


def add_config(parser: argparse._ActionsContainer, group: str) -> None:
    """Declare what names a YAML file, or an entry of `configs/<group>.yaml`."""
    parser.add_argument("--config", metavar="FILE", help=f"YAML file, or one of {', '.join(preset_names(group))}")


def read_config(schema: type[Config], arguments: argparse.Namespace, recorded: Mapping[str, Any] = {}) -> Config:
    """Settings: what is recorded, below the YAML file, the options that are fields of `schema`, and the overrides.

    Raises:
        InputError: an unreadable file, or a key or a value that cannot be used.
    """
    layers = [recorded] if arguments.config is None else [recorded, read_yaml(arguments.config, arguments.words[0])]
    layers.append(given_options(arguments, *(field.name for field in dataclasses.fields(schema))))  # type: ignore[arg-type]
    # A layer each: `attention=full attention.coarse=2` has to be read in that order.
    config = build_config(schema, *layers, *map(parse_override, arguments.overrides))
    hide_loading_bars()
    return config


def hide_loading_bars() -> None:
    """Switch off the bars that diffusers and transformers show for every file they load; ours say what matters."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
