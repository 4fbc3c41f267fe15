"""Which video has which caption: JSON lines, CSV, or a text file beside each; read and checked before any work."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from vmonarch.configs import InputError

# The first of these that a row has is taken.
FILE_KEYS = ("file_name", "video", "path")
CAPTION_KEYS = ("caption", "text", "prompt")
# What is taken for a video where no file of captions says so.
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif")


@dataclass(frozen=True)
class Captioned:
    """A video to prepare.

    Args:
        file: relative to the folder of videos, with `/`, as it is written on the disk.
        caption: may be empty.
        source: the line of the file of captions, or the text file.
    """

    file: str
    caption: str
    source: str

    @property
    def stem(self) -> str:
        """The file's part of a clip's id: its name; where characters had to go, with a hash that tells it apart."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.file)
        return name if name == self.file else f"{name}-{hashlib.sha256(self.file.encode()).hexdigest()[:8]}"


def read_captions(videos: Path, path: str | None) -> list[Captioned]:
    """The videos of a folder and their captions, in the order of the file of captions, or by name.

    JSON lines (.jsonl) are objects, CSV (.csv) has a header; the file's name is `file_name`, `video` or `path`, the
    caption `caption`, `text` or `prompt`. Other keys and empty lines are passed over. Without such a file, `sub/a.txt`
    holds the caption of `sub/a.mp4`, and all videos must have one. Names are the same that look so: of one name macOS
    writes another form of Unicode than other systems.

    Raises:
        InputError: there is no such file, it is not UTF-8, JSON lines or CSV, a row lacks one of the two, a video's
            path is absolute or leads out of its folder, a video is there twice or has no caption, or there is none.
    """
    found = list(_beside(videos) if path is None else _in_file(path, _by_name(videos)))
    seen: dict[str, str] = {}
    for entry in found:
        if entry.stem in seen:
            raise InputError("captions", f"names {entry.file!r} twice: in {seen[entry.stem]} and {entry.source}")
        seen[entry.stem] = entry.source
    if not found:
        raise InputError("captions", f"must be of at least one video; {path or str(videos)!r} has none")
    return found


def _by_name(folder: Path) -> dict[str, str]:
    """The files of a folder as they are written, by the form that all systems share."""
    files = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return {unicodedata.normalize("NFC", file): file for file in files}


def _beside(folder: Path) -> Iterator[Captioned]:
    files = _by_name(folder)
    for name, file in files.items():
        path = PurePosixPath(name)
        if path.suffix.lower() not in VIDEOS or path.name.startswith("."):
            continue
        text = files.get(str(path.with_suffix(".txt")))
        if text is None:
            raise InputError("captions", f"must be given, or lie in a text file beside each video; {file!r} has none")
        yield Captioned(file, _read_text(str(folder / text)).strip(), text)


def _in_file(path: str, files: Mapping[str, str]) -> Iterator[Captioned]:
    readers = {".jsonl": _json_lines, ".csv": _csv_rows}
    if (suffix := Path(path).suffix.lower()) not in readers:
        raise InputError("captions", f"must be a file in {' or '.join(readers)}, got {path!r}")
    for line, values in readers[suffix](_read_text(path)):
        file, caption = (_text(line, values, keys) for keys in (FILE_KEYS, CAPTION_KEYS))
        name = PurePosixPath(file)
        if name.is_absolute() or PureWindowsPath(file).drive or ".." in name.parts or not name.name.strip("\0 "):
            raise InputError("captions", f"must name videos by paths within their folder; line {line} has {file!r}")
        yield Captioned(files.get(unicodedata.normalize("NFC", str(name)), str(name)), caption, f"line {line}")


def _read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise InputError("captions", f"must be UTF-8; {path!r} is not in line {line}") from error
    except (OSError, ValueError) as error:
        raise InputError("captions", f"must be a file of text; {path!r} cannot be read: {error}") from error


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
        for values in reader:
            if None in values:
                raise InputError("captions", f"has more fields than its header in line {reader.reader.line_num}")
            yield reader.reader.line_num, values
    except csv.Error as error:
        raise InputError("captions", f"must be CSV; line {reader.reader.line_num} is none: {error}") from error


def _text(line: int, values: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    value = next((values[key] for key in keys if values.get(key) is not None), None)
    try:
        if isinstance(value, str):
            return value.encode().decode()
    except UnicodeEncodeError:
        pass
    raise InputError("captions", f"must have text as {' or '.join(keys)} in each row; line {line} has {value!r}")
