"""Which video has which caption: JSON lines or CSV, read whole and checked before any work is done."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from vmonarch.configs import InputError

# The first of these that a row has is taken.
FILE_KEYS = ("file_name", "video", "path")
CAPTION_KEYS = ("caption", "text", "prompt")
SUFFIXES = (".jsonl", ".csv")


@dataclass(frozen=True)
class Captioned:
    """A video to prepare.

    Args:
        file: relative to the folder of videos, with `/`.
        caption: may be empty.
        line: where the captions file says so, from 1.
    """

    file: str
    caption: str
    line: int

    @property
    def stem(self) -> str:
        """The file's part of a clip's id: its name; where characters had to go, with a hash that tells it apart."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.file)
        return name if name == self.file else f"{name}-{hashlib.sha256(self.file.encode()).hexdigest()[:8]}"


def read_captions(path: str) -> list[Captioned]:
    """The rows of a captions file, in its order.

    JSON lines (.jsonl) are objects, CSV (.csv) has a header; the file's name is `file_name`, `video` or `path`, the
    caption `caption`, `text` or `prompt`. Other keys and empty lines are passed over.

    Raises:
        InputError: there is no such file, it is not UTF-8, JSON lines or CSV, a row lacks one of the two, a video's
            path is absolute or leads out of its folder, a video is there twice, or there is no row. The line is named.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError("captions", f"must be a file in {' or '.join(SUFFIXES)}, got {path!r}")
    text = _read_text(path)
    captioned: list[Captioned] = []
    seen: dict[str, int] = {}
    for line, values in _json_lines(text) if suffix == ".jsonl" else _csv_rows(text):
        entry = _entry(line, values)
        if entry.stem in seen:
            raise InputError("captions", f"names {entry.file!r} twice: in lines {seen[entry.stem]} and {line}")
        seen[entry.stem] = line
        captioned.append(entry)
    if not captioned:
        raise InputError("captions", f"must have at least one row; {path!r} has none")
    return captioned


def _read_text(path: str) -> str:
    try:
        data = Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError("captions", f"must be a file of JSON lines or CSV; there is no file {path!r}") from error
    except (OSError, ValueError) as error:
        raise InputError("captions", f"{path!r} cannot be read: {error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise InputError("captions", f"must be UTF-8; {path!r} is not in line {line}") from error


def _json_lines(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Not splitlines: JSON may hold separators that it takes for ends of lines.
    for line, row in enumerate(text.split("\n"), start=1):
        if not row.strip():
            continue
        try:
            values = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise InputError("captions", f"must hold JSON lines; line {line} is none: {error}") from error
        if not isinstance(values, dict):
            raise InputError("captions", f"must hold a JSON object a line; line {line} is a {type(values).__name__}")
        yield line, values


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = reader.fieldnames or []
        for name, keys in (("a video", FILE_KEYS), ("a caption", CAPTION_KEYS)):
            if not set(keys) & set(header):
                raise InputError("captions", f"must have a column for {name} ({', '.join(keys)}); line 1 has {header}")
        for values in reader:
            if None in values:
                raise InputError("captions", f"has more fields than its header in line {reader.reader.line_num}")
            yield reader.line_num, values
    except csv.Error as error:
        raise InputError("captions", f"must be CSV; line {reader.reader.line_num} is none: {error}") from error


def _entry(line: int, values: Mapping[str, Any]) -> Captioned:
    file = _text(line, values, "file_name", FILE_KEYS)
    caption = _text(line, values, "caption", CAPTION_KEYS)
    path = PurePosixPath(file)
    if not file.strip() or path == PurePosixPath("."):
        raise InputError("captions", f"must name a video in each row; line {line} has an empty file_name")
    if path.is_absolute() or PureWindowsPath(file).drive or ".." in path.parts:
        raise InputError("captions", f"must name videos by paths within their folder; line {line} has {file!r}")
    return Captioned(path.as_posix(), caption, line)


def _text(line: int, values: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> str:
    value = next((values[key] for key in keys if values.get(key) is not None), None)
    if value is None:
        raise InputError("captions", f"must have {name} (or {' or '.join(keys[1:])}) in each row; line {line} has none")
    if not isinstance(value, str):
        raise InputError("captions", f"must have text as {name}; line {line} has {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError("captions", f"must be Unicode text; {name} in line {line} is not: {value!r}") from error
    if name == "file_name" and "\0" in value:
        raise InputError("captions", f"must name videos without null characters; line {line} has {value!r}")
    return value
