"""What generation leaves on disk, and where: nothing is overwritten or lost."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError


@dataclass(frozen=True)
class GeneratedVideo:
    """A video on disk.

    Args:
        video, contact_sheet, record_path: its mp4, PNG (None if not asked for) and JSON.
        record: contents of the JSON.
    """

    video: Path
    contact_sheet: Path | None
    record_path: Path
    record: dict[str, Any]


class GenerationError(RuntimeError):
    """Generation ran, but some of what it should have made could not be made or written; `videos` are those on disk."""

    def __init__(self, message: str, videos: Sequence[GeneratedVideo] = ()) -> None:
        super().__init__(message)
        self.videos = tuple(videos)


def prepare_output_dir(output_dir: str) -> Path:
    """The folder for outputs, created when missing.

    Raises:
        InputError: the path is a file, or files cannot be created there.
    """
    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError("output_dir", f"must be a folder; {output_dir!r} is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The one sure test; permission bits say nothing about read-only file systems, quotas or root.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError("output_dir", f"{output_dir!r} cannot be written to: {error.strerror or error}") from error
    return folder


@contextlib.contextmanager
def reserve_number(folder: Path, number: int | None = None) -> Iterator[str]:
    """A four-digit output number that nothing else in `folder` has, held against other processes while in use.

    Args:
        number: take this one, whatever has it.
    """
    if number is not None:
        yield f"{number:04d}"
        return
    taken = [int(found.group(1)) for path in folder.iterdir() if (found := re.match(r"\.?(\d{4,})[-.]", path.name))]
    number = max(taken, default=0) + 1
    while True:
        mark = folder / f".{number:04d}.reserved"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            number += 1
    try:
        yield f"{number:04d}"
    finally:
        mark.unlink(missing_ok=True)


def keep_elsewhere(name: str, write: Callable[[Path], object]) -> str:
    """Write what its folder has no room for into a folder of its own among the system's temporary ones; says where."""
    try:
        path = Path(tempfile.mkdtemp(prefix="vmonarch-")) / name
        write(path)
    except Exception:
        # safetensors reports a full disk by an exception of its own; whatever it is, the first error matters more.
        return f"there was no room to keep {name}"
    return f"{name} is kept at {path}"
