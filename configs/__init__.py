"""YAML files, `key=value` overrides and JSON records, merged by OmegaConf onto typed, frozen dataclasses.

Every wrong key or type is an `InputError` that names the key. Interpolations (`${…}`) are never evaluated: prompts may
contain any text, and a recorded file must not reach the environment of who reads it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent

# `key=value` with a dotted lower-case key: what tells an override from a prompt such as "E=mc² on a blackboard".
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*=", re.ASCII)

Config = TypeVar("Config")


class InputError(ValueError):
    """An argument that cannot be used: `argument` is its name, the message says why and what is supported."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)
        self.argument = argument
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.argument} {self.problem}"


def is_override(text: str) -> bool:
    """Whether `text` reads as a `key=value` override."""
    return _OVERRIDE.match(text) is not None


def suggest(word: str, known: Iterable[str]) -> str:
    """' (did you mean …?)' when a known word is close to `word`, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Nested dictionary from `key=value` strings; values are YAML, dots descend.

    Raises:
        InputError: an override has no `key=`, or a value that is not YAML.
    """
    import yaml
    from omegaconf import OmegaConf

    merged: dict[str, Any] = {}
    for override in overrides:
        if not is_override(override):
            raise InputError(override, "is no override; overrides look like steps=20 or attention.num_iterations=3")
        key = override.partition("=")[0]
        try:
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False)
        except yaml.YAMLError as error:
            raise InputError(key, f"has a value that is not YAML: {override.partition('=')[2]!r}") from error
        assert isinstance(parsed, dict)
        merged = deep_merge(merged, {str(name): value for name, value in parsed.items()})
    return merged


def deep_merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `top` laid over it, mappings merged recursively."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = deep_merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_document(argument: str, path: str | Path, form: str, kind: str) -> dict[str, Any]:
    """The mapping in a JSON file of ours, whose "format" must be `form`.

    Args:
        argument: of the user, for the errors.
        kind: what the file should be, likewise, such as "diagnosis of `vmonarch calibrate`".

    Raises:
        InputError: the file cannot be read, or is something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(argument, f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != form:
        raise InputError(argument, f"{str(path)!r} is no {kind} (format {form})")
    return found


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def preset_names(group: str) -> list[str]:
    """Names of the YAML files that ship in `configs/<group>/`."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def read_yaml(name: str, *, group: str, argument: str = "config") -> dict[str, Any]:
    """Contents of a YAML file: a path, or the name of one that ships in `configs/<group>/`.

    Raises:
        InputError: there is no such file, or it is not a YAML mapping in UTF-8.
    """
    import yaml

    shipped = FOLDER / group / f"{name}.yaml"
    path = shipped if name in preset_names(group) else Path(name)
    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        known = ", ".join(preset_names(group))
        raise InputError(argument, f"must be a YAML file or one of {known}, got {name!r}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(argument, f"{name!r} cannot be read as YAML: {reason}") from error
    if contents is None:
        return {}
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise InputError(argument, f"{name!r} must hold a mapping of keys to values, got {type(contents).__name__}")
    return contents


def check_keys(schema: type, values: Mapping[str, Any], *, prefix: str = "") -> None:
    """Raise InputError for the first key of `values` that is no field of the dataclass `schema`."""
    known = [field.name for field in dataclasses.fields(schema)]
    for key in values:
        if key not in known:
            listed = ", ".join(known) if known else "none"
            raise InputError(prefix + str(key), f"is no known key{suggest(str(key), known)}; known: {listed}")


def build(schema: type[Config], values: Mapping[str, Any], *, prefix: str = "") -> Config:
    """Instance of the dataclass `schema` with `values` merged over its defaults, types checked by OmegaConf.

    Args:
        prefix: put before a key's name in errors (`attention.` for the parameters of a method).

    Raises:
        InputError: an unknown key, a value of another type, or one that the dataclass itself refuses.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_keys(schema, values, prefix=prefix)
    hints = typing.get_type_hints(schema)
    base = OmegaConf.structured(schema)
    checked: dict[str, Any] = {}
    # One key at a time: OmegaConf does not always say which key an error belongs to.
    for key, value in values.items():
        if _needs_no_conversion(value, hints[key]):
            # Past OmegaConf, to which `???` is a missing value and `${` the start of an expression.
            checked[key] = tuple(value) if _is_tuple(hints[key]) else value
            continue
        if value == "???":
            raise InputError(prefix + key, f"must be {_describe(hints[key])}, got {value!r}")
        try:
            merged = OmegaConf.merge(base, {key: value})
            plain = OmegaConf.to_container(merged, resolve=False)
        except OmegaConfBaseException as error:
            raise InputError(prefix + key, f"must be {_describe(hints[key])}, got {value!r}") from error
        assert isinstance(plain, dict)
        if not _text_allowed(hints[key]) and _contains_text(plain[key]):
            raise InputError(prefix + key, f"must be {_describe(hints[key])}, got {value!r}")
        checked[key] = _tuples(plain[key]) if _is_tuple(hints[key]) else plain[key]
    try:
        return schema(**checked)
    except InputError as error:
        raise InputError(prefix + error.argument, error.problem) from error


def _describe(hint: Any) -> str:
    """A type hint in words a user understands."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in names:
        return names[hint]
    arguments = typing.get_args(hint)
    if _is_tuple(hint):
        if Ellipsis in arguments:
            return f"a list, each entry {_describe(arguments[0])}"
        return f"a list of {len(arguments)} entries, each {_describe(arguments[0])}"
    return " or ".join(_describe(argument) for argument in arguments) if arguments else str(hint)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _needs_no_conversion(value: Any, hint: Any) -> bool:
    """Whether the type hint takes `value` as it is: text where text is asked for, anything where anything is."""
    if _is_tuple(hint):
        item, *more = typing.get_args(hint)
        return (
            more == [Ellipsis]
            and isinstance(value, (list, tuple))
            and all(_needs_no_conversion(v, item) for v in value)
        )
    return hint is Any or (isinstance(value, str) and (hint is str or str in typing.get_args(hint)))


def _text_allowed(hint: Any) -> bool:
    return hint in (str, Any) or any(_text_allowed(argument) for argument in typing.get_args(hint))


def _contains_text(value: Any) -> bool:
    """Whether a string hides in `value`: an interpolation or `???`, which OmegaConf lets through for any type."""
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and any(map(_contains_text, value)))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
