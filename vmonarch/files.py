"""Files that appear complete or not at all, and names for them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError


class AtomicFiles(contextlib.AbstractContextManager["AtomicFiles"]):
    """Files, and folders of them, that appear complete or not at all.

    Each is written under a hidden temporary name in its folder. When the block ends without an error, they are flushed
    to disk and renamed in the order of staging: if the last one is there, all are. An error or Ctrl-C leaves nothing
    half-written behind. Each name always holds the old file or the new one, even if the process is killed.

        with AtomicFiles() as files:
            files.stage(folder / "0001.json").write_text(text)

    Args:
        overwrite: replace existing files; otherwise they cause an error and stay as they are.
    """

    def __init__(self, *, overwrite: bool = False) -> None:
        self._overwrite = overwrite
        self._staged: list[tuple[Path, Path]] = []

    def stage(self, path: Path) -> Path:
        """The temporary path to write to, with the suffix of `path`.

        Raises:
            FileExistsError: `path` exists and must not be overwritten.
        """
        self._check_free(path)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
        self._staged.append((temporary, path))
        return temporary

    def _check_free(self, path: Path) -> None:
        if not self._overwrite and path.exists():
            raise FileExistsError(f"{path} exists and is not overwritten")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for temporary, path in self._staged:
                    flush_all(temporary)
                    self._check_free(path)
                for temporary, path in self._staged:
                    os.replace(temporary, path)
                for folder in {path.parent for _, path in self._staged}:
                    flush(folder)
        finally:
            for temporary, _ in self._staged:
                if temporary.is_dir():
                    shutil.rmtree(temporary)
                temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Force a folder and all in it, or a file, to disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def short_hash(*parts: Any) -> str:
    """Eight hexadecimal digits that distinguish settings in file names."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]


def file_name(label: str) -> str:
    """A method's label as part of a file name; labels with parameters get a hash, so that no two share a name."""
    plain = re.sub(r"[^\w.-]+", "-", label)[:40]
    return plain if plain == label else f"{plain}-{short_hash(label)}"


def prepare_output_dir(output_dir: str | Path, argument: str = "output_dir") -> Path:
    """The folder for outputs, created when missing.

    Raises:
        InputError: the path is a file, or files cannot be created there.
    """
    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError(argument, f"must be a folder; {str(output_dir)!r} is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The only reliable test: permission bits say nothing about read-only file systems, quotas or root.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(argument, f"{str(output_dir)!r} cannot be written to: {error.strerror or error}") from error
    return folder


def check_output(path: Path) -> None:
    """Check that a file or a new folder can be written there, before anything is computed.

    Raises:
        InputError: the path is a folder, or lies in one that cannot be written to.
    """
    if path.is_dir() or not path.name:
        raise InputError("output", f"must be a file, got the folder {str(path)!r}")
    # A "~" is a name here.
    prepare_output_dir(path.absolute().parent, "output")


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Replace the file as a whole: readers see the old one or the new one."""
    with AtomicFiles(overwrite=True) as files:
        files.stage(path).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
