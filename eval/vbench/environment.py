"""The virtual environment in which VBench runs: its pins (numpy below 2, an old torch) do not go with ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vmonarch.configs import InputError, file_sha256

VERSION = "0.1.5"
# Every package that the dimensions import, pinned; without what vbench's other dimensions need.
REQUIREMENTS = Path(__file__).with_name("requirements.txt")

_MANIFEST = "environment.json"
# Imports what loads no weights, and tells the versions in its last line.
_VERSIONS = """
import importlib.metadata, json, platform, vbench.temporal_flickering
found = {package.name.lower(): package.version for package in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), **found}))
"""
_TAIL = 20


class VBenchError(RuntimeError):
    """VBench could not be installed, misses its weights, failed, or gave no usable scores."""


@dataclass(frozen=True)
class VBenchEnvironment:
    """An environment that `install` made.

    Args:
        folder: of the virtual environment.
        versions: of Python and of every package in it.
    """

    folder: Path
    versions: Mapping[str, str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def full_info(self) -> Path:
        """The package's list of prompts and their dimensions.

        Raises:
            VBenchError: it is gone.
        """
        found = sorted(self.folder.glob("lib/python3*/site-packages/vbench/VBench_full_info.json"))
        if not found:
            raise VBenchError(f"{self.folder} holds no VBench_full_info.json; delete the folder and install again")
        return found[0]


def default_folder() -> Path:
    """The environment's folder unless one is given: below `$XDG_CACHE_HOME/vmonarch` or `~/.cache/vmonarch`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmonarch" / f"vbench-{VERSION}"


def install(
    folder: Path | None = None, *, python: str | None = None, requirements: Path = REQUIREMENTS
) -> VBenchEnvironment:
    """Make the environment, or return the one in `folder` if it is of the same requirements.

    It is made beside `folder` and renamed when `vbench` imports, so that half of one is never taken for a whole.

    Args:
        folder: of the environment; default: `default_folder()`.
        python: interpreter that it is made with, of a version for which the requirements have packages (3.10 to 3.12
            for those shipped); default: the one that runs this.
        requirements: file of pinned packages, installed without their dependencies.

    Raises:
        InputError: `folder` holds something else, there is no such file or interpreter.
        VBenchError: pip failed, or `vbench` of VERSION does not import; tells pip's line.
    """
    folder = (folder or default_folder()).absolute()
    if not requirements.is_file():
        raise InputError("requirements", f"must be a file of pinned packages, got {str(requirements)!r}")
    wanted = file_sha256(requirements)
    if folder.exists():
        versions, present = _manifest(folder)
        if present != wanted:
            raise InputError("folder", f"{folder} holds an environment of other requirements; give another folder")
        return VBenchEnvironment(folder, versions)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        made = Path(temporary) / "environment"
        try:
            versions = _make(made, python or sys.executable, requirements)
        except (FileNotFoundError, PermissionError) as error:
            raise InputError("python", f"must be a Python interpreter, got {python!r}") from error
        except VBenchError as error:
            raise VBenchError(f"the environment cannot be made of {requirements}: {error}") from error
        manifest = {"versions": versions, "requirements_sha256": wanted}
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        os.rename(made, folder)
    return VBenchEnvironment(folder, versions)


def _make(folder: Path, python: str, requirements: Path) -> dict[str, str]:
    """Make an environment, see that the package imports, and return the versions of Python and of all packages."""
    run([python, "-m", "venv", str(folder)])
    inside = [str(folder / "bin" / "python"), "-I"]
    pip = [*inside, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run([*pip, "install", "--no-deps", "--requirement", str(requirements)])
    versions: dict[str, str] = json.loads(run([*inside, "-c", _VERSIONS]).splitlines()[-1])
    if versions["vbench"] != VERSION:
        raise VBenchError(f"it must pin vbench=={VERSION}, not {versions['vbench']}")
    return versions


def load_environment(folder: Path | None = None) -> VBenchEnvironment:
    """The environment in `folder`, or in `default_folder()`.

    Raises:
        InputError: there is none, or not a whole one.
    """
    folder = (folder or default_folder()).absolute()
    return VBenchEnvironment(folder, _manifest(folder)[0])


def _manifest(folder: Path) -> tuple[dict[str, str], str]:
    """Versions in an environment, and the SHA-256 of the requirements that it was made of."""
    command = "vmonarch vbench install"
    if not folder.exists():
        raise InputError("environment", f"{folder} does not exist; `{command}` makes it")
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return dict(manifest["versions"]), manifest["requirements_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("environment", f"{folder} was not made by `{command}`; give another folder") from error


def run(command: Sequence[str], *, timeout: float | None = None, variables: Mapping[str, str] | None = None) -> str:
    """What a command writes, which runs in a process group of its own that ends with it or with us.

    Args:
        timeout: seconds after which the group is killed.
        variables: of the environment, added to ours.

    Raises:
        VBenchError: it failed or ran into the time-out; tells the lines that pip marks as errors, or the last ones.
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(variables or {})},
            process_group=0,
        )
        try:
            code = process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise VBenchError(f"did not end within {timeout:g} s and was killed\n{_tail(output)}") from error
            raise
        if code:
            reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            raise VBenchError(f"failed ({reason})\n{_tail(output)}")
        return _text(output)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _tail(file: IO[bytes]) -> str:
    # Progress bars rewrite their line with carriage returns.
    lines = [line for line in _text(file).replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join([line for line in lines if line.startswith("ERROR")] or lines[-_TAIL:])
