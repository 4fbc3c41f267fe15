"""YAML files, `key=value` overrides and JSON records, merged onto frozen dataclasses and checked.

`methods.py` has attention methods and recipes by name. Every package but `kernels` may import both. A wrong key or type
is an `InputError` that names the key. Interpolations (`${…}`) are never evaluated: a prompt may contain any text, and a
record must not read the environment of its reader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vmonarch.validation import plain

FOLDER = Path(__file__).parent

# `key=value` with a dotted lower-case key: what tells an override from a prompt such as "E=mc² on a blackboard".
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_-]*(\.[a-z_][a-z0-9_-]*)*=", re.ASCII)

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
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def parse_override(override: str) -> dict[str, Any]:
    """Nested dictionary of a `key=value` string; the value is YAML, dots descend, and hyphens are underscores.

    Raises:
        InputError: it has no `key=`, or a value that is not YAML.
    """
    if not is_override(override):
        raise InputError(override, "is no override; overrides look like steps=20 or attention.num_iterations=3")
    key, _, value = override.partition("=")
    key = key.replace("-", "_")
    try:
        return _yaml([f"{key}={value}"])
    except ValueError as error:
        raise InputError(key, f"has a value that is not YAML: {value!r}") from error


def _yaml(given: str | list[str]) -> Any:
    """Parse a text or overrides by OmegaConf, for which, unlike PyYAML, 1e-6 is a number and a date is text.

    Raises:
        ValueError: it is not YAML.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        read: Any = OmegaConf.create if isinstance(given, str) else OmegaConf.from_dotlist
        return OmegaConf.to_container(read(given), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from error


def deep_merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `top` laid over it, mappings merged recursively.

    `steps` and `tolerance`, which exclude each other in `refresh`, replace each other.
    """
    merged = dict(base)
    for name, other in (("steps", "tolerance"), ("tolerance", "steps")):
        if top.get(name) is not None:
            merged.pop(other, None)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = deep_merge(below, value)
        merged[key] = value
    return merged


def read_document(argument: str, path: str | Path, form: str, what: str) -> dict[str, Any]:
    """The mapping in a JSON file of ours, whose "format" must be `form`.

    Args:
        argument: the user's argument, for the errors.
        what: the kind of file that is expected, also for the errors, such as "diagnosis of `vmonarch calibrate`".

    Raises:
        InputError: the file cannot be read, or is something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(argument, f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != form:
        raise InputError(argument, f"{str(path)!r} is no {what} (format {form})")
    return found


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def preset_names(group: str) -> list[str]:
    """Names of the entries of `configs/<group>.yaml`."""
    # Reading them as YAML takes longer than all of a command's help.
    return sorted(re.findall(r"^([\w.-]+):$", (FOLDER / f"{group}.yaml").read_text(encoding="utf-8"), re.M))


@functools.cache
def presets(group: str) -> dict[str, dict[str, Any]]:
    """The entries of `configs/<group>.yaml`, by their names; not to be changed."""
    import yaml

    return yaml.safe_load((FOLDER / f"{group}.yaml").read_text(encoding="utf-8"))


def read_yaml(name: str, group: str, argument: str = "config") -> dict[str, Any]:
    """Contents of a YAML file at a path, or the entry of this name in `configs/<group>.yaml`.

    Raises:
        InputError: there is no such file, or it is not a YAML mapping in UTF-8, or one of presets.
    """
    if name in (known := preset_names(group)):
        return dict(presets(group)[name])
    try:
        contents = _yaml(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"must be a YAML file or one of {', '.join(known)}, got {name!r}: {error}"
        raise InputError(argument, problem) from error
    if not isinstance(contents, dict | None):
        raise InputError(argument, f"{name!r} must hold a mapping of keys to values, got {type(contents).__name__}")
    if contents and known and contents.keys() <= set(known):
        raise InputError(argument, f"{name!r} holds presets: give one by its name, {', '.join(contents)}")
    return contents or {}


def check_choice(argument: str, word: object, known: Iterable[str]) -> None:
    """Raise InputError unless a word is one of those that are known."""
    known = list(known)
    if word not in known:
        raise InputError(argument, f"must be one of {', '.join(known)}, got {word!r}{suggest(str(word), known)}")


class Settings:
    """Base of frozen dataclasses that convert values to the types of their hints and check them when they are made.

    Fields may be settings themselves, which are then made from mappings.

    Raises:
        InputError: a value has another type, or lies outside the interval or the choices of its field.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, hint, value = field.name, hints[field.name], getattr(self, field.name)
            if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
                with naming_the_option(f"{name}."):
                    value = build(typing.cast(type, hint), value)
            try:
                value = _as(hint, value)
            except (TypeError, ValueError) as error:
                raise InputError(name, f"must be {_describe(hint)}, got {value!r}") from error
            object.__setattr__(self, name, value)
            for one in value if isinstance(value, tuple) else () if value is None else (value,):
                _check(name, one, **field.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Every setting as a JSON value, methods with all their parameters."""
        return {name: as_json(value) for name, value in vars(self).items()}


def as_json(value: Any) -> Any:
    """Settings, options, methods and plans as JSON values."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    return [as_json(entry) for entry in value] if isinstance(value, tuple | list) else plain(value)


def build(schema: type[Config], values: Mapping[str, Any], *, prefix: str = "") -> Config:
    """Settings, or options, with `values` over their defaults; errors name keys with the prefix.

    Raises:
        InputError: an unknown key, or a value that the settings refuse.
    """
    parameters = inspect.signature(schema).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in () if open_ended else map(str, values):
        if key not in parameters:
            raise InputError(prefix + key, f"is no known key{suggest(key, parameters)}; known: {', '.join(parameters)}")
    return schema(**values)


@contextlib.contextmanager
def naming_the_option(prefix: str = "") -> Iterator[None]:
    """Turn errors of checks, which name the option first ("coarse must be at least 1, got 0"), into `InputError`s."""
    try:
        yield
    except InputError as error:
        raise InputError(prefix + error.argument, error.problem) from error
    except (TypeError, ValueError, NotImplementedError) as error:
        option, _, problem = str(error).partition(" ")
        raise InputError(prefix + option.rstrip(":"), problem) from error


def number(default: Any, interval: str = "(-inf, inf)", **metadata: Any) -> Any:
    """A field with a number, or several, in an interval, such as "[0, 1)"."""
    return dataclasses.field(default=default, metadata=metadata | {"interval": interval})


def choice(default: Any, *choices: str) -> Any:
    """A field whose value, or each entry of it, is one of `choices`."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def _check(name: str, value: Any, choices: Sequence[str] = (), interval: str = "", **_: Any) -> None:
    """Check a value, or an entry of one, by the metadata of its field."""
    if choices:
        check_choice(name, value, choices)
    if interval:
        low, high = map(float, interval[1:-1].split(","))
        at_end = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
        if not (low < value < high or at_end):
            raise InputError(name, f"must be in {interval}, got {value}")


def described(schema: type) -> dict[str, str]:
    """The text on each field under Args in the docstrings of a dataclass and its bases, without the last full stop."""
    found: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        for entry in re.finditer(r"^    ([a-z_0-9, ]+): (.+(?:\n {8}.+)*)", inspect.getdoc(cls) or "", re.MULTILINE):
            found |= dict.fromkeys(entry[1].split(", "), " ".join(entry[2].split()).rstrip("."))
    return found


def _as(hint: Any, value: Any) -> Any:
    """Convert `value` to the type of a hint: lists to tuples, text to numbers, numbers to text.

    Raises:
        TypeError, ValueError: the value is of another type.
    """
    parts, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        # A value that has one of the types already is not converted.
        for part in sorted(parts, key=lambda part: type(value) is not part):
            with contextlib.suppress(TypeError, ValueError):
                return _as(part, value)
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            items = parts[:1] * len(value) if Ellipsis in parts else parts
            return tuple(_as(item, entry) for item, entry in zip(items, value, strict=True))
    elif hint in (int, float, str):
        value = plain(value)
        if isinstance(value, str) or type(value) is int or type(value) is float and hint is not int:
            return hint(value)
    elif hint is Any or isinstance(value, origin or hint):
        return value
    raise TypeError


def _describe(hint: Any) -> str:
    """A type hint in words a user understands."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    parts = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "a mapping of keys to values"
    if typing.get_origin(hint) is tuple:
        return f"a list{'' if Ellipsis in parts else f' of {len(parts)} entries'}, each {_describe(parts[0])}"
    return names[hint] if hint in names else " or ".join(map(_describe, parts)) or str(hint)
