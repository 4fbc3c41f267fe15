"""The machine: device and precision, and the environment of a result (versions, devices, commit).

The environment is saved beside every output and shown by `vmonarch info`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "peft", "omegaconf", "imageio-ffmpeg")


def choose_device(device: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:N`; auto takes CUDA when there is any.

    Raises:
        InputError: it is none of these, or CUDA was asked for and is not there, or has no device of that number.
    """
    import torch

    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise InputError("device", f"must be auto, cpu, cuda or cuda:N, got {device!r}")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen, count = torch.device(device), torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        known = f"cuda:0 to cuda:{count - 1}" if count else "auto or cpu, as this torch sees no CUDA device"
        raise InputError("device", f"must be {known}; got {device}")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype for `auto` or a name: float32 on the CPU, bfloat16 on CUDA (float16 where that is missing).

    Raises:
        InputError: float16 on the CPU.
    """
    import torch

    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if dtype == "float16" and device.type == "cpu":
        raise InputError("dtype", "float16 cannot be used on the CPU; supported there: auto, float32, bfloat16")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each distribution, None where it is missing; nothing is imported."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def missing_packages() -> dict[str, list[str]]:
    """Missing packages of each extra of vmonarch, except "tested", which only sets bounds."""
    found: dict[str, list[str]] = {}
    # A checkout that was never installed has no metadata.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for needed in importlib.metadata.requires("vmonarch") or ():
            if line := re.fullmatch(r"([\w-]+)[^;]*; extra == \"(.+)\"", needed):
                missing = [name for name, version in package_versions([line[1]]).items() if version is None]
                found[line[2]] = found.get(line[2], []) + missing
    return {extra: missing for extra, missing in found.items() if extra != "tested"}


def git_commit() -> str | None:
    """Commit of the checkout that vmonarch runs from, with `-dirty` when tracked files differ; None outside one."""
    import vmonarch

    root = Path(vmonarch.__file__).resolve().parent.parent
    # An environment inside somebody else's repository must not be taken for a checkout of ours.
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def shown_command(program: Sequence[str], arguments: Sequence[str] | None) -> str:
    """A command line as documents show it: folders of this machine are nobody else's.

    Args:
        program: what is called, such as ("vmonarch",).
        arguments: of it; None for those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return shlex.join([*program, *(Path(word).name if Path(word).is_absolute() else word for word in words)])


def device_name(device: Any) -> str:
    """Name of a torch device, such as `NVIDIA H200`; of the CPU its marketing name where the system tells it."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        named = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if named:
            return named[1]
    return platform.processor() or platform.machine()


def environment(device: Any) -> dict[str, Any]:
    """Everything that decides whether a run on `device` can be repeated bit for bit."""
    import torch

    import vmonarch

    return {
        "vmonarch": vmonarch.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": package_versions(),
        "device": str(device),
        "device_name": device_name(device),
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
    }


def seconds(value: float) -> str:
    """A duration for people: 0.123 s, 12.3 s, 3 min 20 s, 1 h 7 min."""
    whole = round(value)
    if whole >= 3600:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    if whole >= 120:
        return f"{whole // 60} min {whole % 60} s"
    return f"{value:.3g} s"
