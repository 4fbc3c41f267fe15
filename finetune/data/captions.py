"""Which video has which caption: JSON lines, or a text file beside each; read and checked before any work."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from vmonarch.configs import InputError
from vmonarch.finetune.config import require

# What is taken for a video where no file of captions says so.
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif")
_FORM = "must be UTF-8 JSON lines with text as file_name (a path within the folder of videos) and as caption"


def read_captions(videos: Path, path: str | None) -> dict[str, str]:
    """The captions of a folder's videos by their files, in the order of the file of captions, or by name.

    JSON lines are objects with `file_name` and `caption`. Other keys and empty lines are passed over. Without such a
    file, `sub/a.txt` holds the caption of `sub/a.mp4`, and all videos must have one. Names are the same that look so:
    of one name macOS writes another form of Unicode than other systems. Those returned are relative, with `/`, as they
    are on the disk.

    Raises:
        InputError: there is no such file, it is not UTF-8 or JSON lines, a row lacks one of the two, a video's
            path is absolute or leads out of its folder, a video is there twice or has no caption, or there is none.
    """
    on_disk = (file.relative_to(videos).as_posix() for file in sorted(videos.rglob("*")) if file.is_file())
    files = {unicodedata.normalize("NFC", file): file for file in on_disk}
    captions: dict[str, str] = {}
    for name, caption in _beside(videos, files) if path is None else _in_file(path):
        file = files.get(unicodedata.normalize("NFC", name), name)
        require(file not in captions, "captions", f"must name each video once; {file!r} is there twice")
        captions[file] = caption
    require(captions, "captions", f"must be of at least one video; {path or str(videos)!r} has none")
    return captions


def _beside(videos: Path, files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, file in files.items():
        path = PurePosixPath(name)
        if path.suffix.lower() in VIDEOS and not path.name.startswith("."):
            text = path.with_suffix(".txt")
            try:
                yield name, (videos / files.get(str(text), text)).read_text(encoding="utf-8-sig").strip()
            except (OSError, ValueError) as error:
                problem = f"must be given, or lie in a UTF-8 text file beside each video; that of {file!r} does not"
                raise InputError("captions", f"{problem}: {error}") from error


def _in_file(path: str) -> Iterator[tuple[str, str]]:
    done = 0
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        # Not splitlines: JSON may hold separators that it takes for ends of lines.
        for row in map(json.loads, filter(str.strip, text.split("\n"))):
            # Half a pair of UTF-16 cannot be stored.
            file, caption = PurePosixPath(row["file_name"]), row["caption"].encode().decode()
            if file.is_absolute() or ".." in file.parts:
                raise ValueError(f"it has {row!r}")
            yield str(file), caption
            done += 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("captions", f"{_FORM}; {path!r} is not, in row {done + 1}: {error}") from error
