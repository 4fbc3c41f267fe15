"""The files that VBench loads: where they belong, which are missing, and their download.

The package downloads by itself where a file is missing, but takes an interrupted download for a whole file, and keeps
some under names that it does not look for. Here it only ever runs with every file in its place.
"""

from __future__ import annotations

import os
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copyfileobj

from vmonarch.configs import file_sha256
from vmonarch.eval.vbench.dimensions import DIMENSIONS, WeightFile, check_dimensions
from vmonarch.eval.vbench.environment import VBenchError
from vmonarch.files import AtomicFiles

# Seconds without a byte after which a server counts as out of reach.
_PATIENCE = 60


def default_weights() -> Path:
    """The folder of weights unless one is given, the package's own: `$VBENCH_CACHE_DIR` or `~/.cache/vbench`."""
    return Path(os.environ.get("VBENCH_CACHE_DIR") or Path.home() / ".cache" / "vbench")


def missing_weights(dimensions: Sequence[str], folder: Path) -> list[tuple[str, WeightFile]]:
    """Each dimension's files that `folder` lacks."""
    return [
        (dimension, file)
        for dimension in dimensions
        for file in DIMENSIONS[dimension].weights
        if not (folder / file.path).is_file()
    ]


def check_weights(dimensions: Sequence[str], folder: Path) -> None:
    """Check that every file of the dimensions is in `folder`.

    Raises:
        VBenchError: tells each that is missing, of which dimension it is, where it belongs and where it is from.
    """
    missing = missing_weights(dimensions, folder)
    if missing:
        listed = "\n".join(f"  {name}: {folder / file.path}\n    {_source(file)}" for name, file in missing)
        command = "vmonarch vbench weights"
        raise VBenchError(f"weights are missing; `{command}` downloads them, or put them there:\n{listed}")


def weights_identity(dimension: str, folder: Path) -> dict[str, str]:
    """SHA-256 of each file that a dimension loads."""
    return {file.path: file_sha256(folder / file.path) for file in DIMENSIONS[dimension].weights}


def download_weights(
    dimensions: Sequence[str] = tuple(DIMENSIONS),
    folder: Path | None = None,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Download the files of the dimensions that `folder` lacks, each of them whole or not at all.

    Args:
        folder: of weights; default: `default_weights()`.
        report: is called with a line for each file.

    Raises:
        InputError: no or unknown dimensions.
        VBenchError: a file cannot be had, or is another than its authors'; those before it stay.
    """
    check_dimensions(dimensions)
    folder = folder or default_weights()
    for dimension, file in missing_weights(dimensions, folder):
        path = folder / file.path
        report(f"{dimension}: {file.url}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with AtomicFiles() as files:
            _download(file, files.stage(path), path)


def _download(file: WeightFile, temporary: Path, path: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=path.parent) as received, open(temporary, "wb") as target:
            with urllib.request.urlopen(file.url, timeout=_PATIENCE) as response:
                copyfileobj(response, received)
            announced = response.headers.get("Content-Length")
            if announced is not None and received.tell() != int(announced):
                raise OSError(f"the download ended after {received.tell()} of {announced} bytes")
            received.seek(0)
            copyfileobj(zipfile.ZipFile(received).open(file.member) if file.member else received, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise VBenchError(f"{path} could not be downloaded; put it there by hand: {_source(file)}\n{error}") from error
    if file.sha256 and file_sha256(temporary) != file.sha256:
        raise VBenchError(f"{file.url} gave another file than its authors': its SHA-256 is not {file.sha256}")


def _source(file: WeightFile) -> str:
    return f"{file.member} of {file.url}" if file.member else file.url
