"""The environment in which VBench runs, because its pins (numpy below 2, an old torch) conflict with ours; its weights.

The package downloads missing weights itself, but takes an interrupted download for a complete file, and stores some
files under names that it does not look for. Here it only runs with every file in its place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError, file_sha256
from vmonarch.files import AtomicFiles, write_json

VERSION = "0.1.5"
# Every package that the dimensions import, pinned; without what vbench's other dimensions need.
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# The files that each dimension loads: the path below the folder of weights where the package looks, the URL, the name
# inside a zip archive if there is one, and the SHA-256 if the authors publish it.
WEIGHTS: list[dict[str, str]] = json.loads(Path(__file__).with_name("weights.json").read_text(encoding="utf-8"))
# Imports a module that loads no weights, and prints the versions in its last line.
_VERSIONS = """
import importlib.metadata, json, platform, vbench.temporal_flickering
found = {package.name.lower(): package.version for package in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), **found}))
"""


class VBenchError(RuntimeError):
    """VBench could not be installed, lacks its weights, failed, or gave no usable scores."""


def default_folder() -> Path:
    """The default folder of the environment, below `$XDG_CACHE_HOME/vmonarch` or `~/.cache/vmonarch`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmonarch" / f"vbench-{VERSION}"


def default_weights() -> Path:
    """The default folder of weights, which is the package's own: `$VBENCH_CACHE_DIR` or `~/.cache/vbench`."""
    return Path(os.environ.get("VBENCH_CACHE_DIR") or Path.home() / ".cache" / "vbench")


def install(folder: Path | None = None, *, python: str | None = None, requirements: Path = REQUIREMENTS) -> Path:
    """Make the environment if it does not exist, complete or not at all, and return its folder.

    Args:
        folder: of the environment; default: `default_folder()`.
        python: interpreter to make it with, of a version that the requirements have packages for (3.10 to 3.12 for
            those shipped); default: the one that runs this.
        requirements: file of pinned packages, installed without their dependencies.

    Raises:
        InputError: `folder` holds something else, or there is no such file or interpreter.
        VBenchError: pip failed, or `vbench` does not import or is not VERSION; the message has the command's error.
    """
    folder = (folder or default_folder()).absolute()
    if not requirements.is_file():
        raise InputError("requirements", f"must be a file of pinned packages, got {str(requirements)!r}")
    wanted = file_sha256(requirements)
    if folder.exists():
        if manifest(folder)["requirements_sha256"] != wanted:
            raise InputError("folder", f"{folder} holds an environment of other requirements; give another folder")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        made = Path(temporary) / "environment"
        inside = [str(made / "bin" / "python"), "-I"]
        pip = [*inside, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--no-deps"]
        try:
            run([python or sys.executable, "-m", "venv", str(made)])
        except (FileNotFoundError, PermissionError) as error:
            raise InputError("python", f"must be a Python interpreter, got {python!r}") from error
        run([*pip, "--requirement", str(requirements)])
        versions = json.loads(run([*inside, "-c", _VERSIONS]).splitlines()[-1])
        if versions["vbench"] != VERSION:
            raise VBenchError(f"{requirements} must pin vbench=={VERSION}, not {versions['vbench']}")
        write_json(made / "environment.json", {"versions": versions, "requirements_sha256": wanted})
        os.rename(made, folder)
    return folder


def manifest(folder: Path) -> dict[str, Any]:
    """`versions` of Python and of every package in an environment, and the `requirements_sha256` that it was made from.

    Raises:
        InputError: `install` made no environment in the folder.
    """
    try:
        found = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        return {key: found[key] for key in ("versions", "requirements_sha256")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        made = "`vmonarch vbench install` makes one there" if not folder.exists() else "give another folder"
        raise InputError("environment", f"{folder} holds no environment of VBench; {made}") from error


def run(command: Sequence[str], *, timeout: float | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output.

    Args:
        timeout: seconds after which it is killed.
        variables: environment variables, added to ours.

    Raises:
        VBenchError: it failed or timed out; the message has the lines that pip marks as errors, or the last ones.
        OSError: it cannot be started.
    """
    environment = {**os.environ, **(variables or {})}
    # Not a pipe, which processes that the command has started would keep open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        told: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "env": environment}
        try:
            code = subprocess.run(command, timeout=timeout, **told).returncode
            reason = f"failed (exit code {code})" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"did not end within {timeout:g} s and was killed"
        output.seek(0)
        # Progress bars rewrite their line with carriage returns.
        lines = [line for line in output.read().replace("\r", "\n").splitlines() if line.strip()]
    if reason:
        raise VBenchError("\n".join([reason, *([line for line in lines if line.startswith("ERROR")] or lines[-20:])]))
    return "\n".join(lines)


def missing_weights(dimensions: Sequence[str], folder: Path) -> list[dict[str, str]]:
    """The entries of WEIGHTS for these dimensions that `folder` lacks."""
    return [file for file in WEIGHTS if file["dimension"] in dimensions and not (folder / file["path"]).is_file()]


def check_weights(dimensions: Sequence[str], folder: Path) -> None:
    """Raise VBenchError if there are `missing_weights`; the message says where each file belongs."""
    if missing := missing_weights(dimensions, folder):
        listed = "".join(f"\n  {file['dimension']}: {folder / file['path']}\n    {file['url']}" for file in missing)
        raise VBenchError(f"weights are missing; `vmonarch vbench weights` gets them, or put them there:{listed}")


def download_weights(dimensions: Sequence[str], folder: Path, report: Callable[[str], None]) -> None:
    """Download the files of the dimensions that `folder` lacks, each of them whole or not at all.

    Args:
        report: called with a line for each file.

    Raises:
        VBenchError: a file cannot be downloaded, or differs from its authors'; earlier files stay.
    """
    for file in missing_weights(dimensions, folder):
        path = folder / file["path"]
        report(f"{file['dimension']}: {file['url']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with AtomicFiles() as files, tempfile.TemporaryFile(dir=path.parent) as received:
                # A server that sends nothing for this many seconds counts as unreachable.
                with urllib.request.urlopen(file["url"], timeout=60) as response:
                    shutil.copyfileobj(response, received)
                announced = response.headers.get("Content-Length")
                if announced is not None and received.tell() != int(announced):
                    raise OSError(f"the download ended after {received.tell()} of {announced} bytes")
                received.seek(0)
                with open(staged := files.stage(path), "wb") as target:
                    member = file.get("member")
                    shutil.copyfileobj(zipfile.ZipFile(received).open(member) if member else received, target)
                if "sha256" in file and file_sha256(staged) != file["sha256"]:
                    raise OSError(f"it is another file than its authors': its SHA-256 is not {file['sha256']}")
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise VBenchError(f"{path} cannot be downloaded from {file['url']}: {error}") from error
