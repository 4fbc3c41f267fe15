"""What a result was computed with: versions, devices, commit. Saved beside every output, shown by `vmonarch info`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "torchmetrics",
    "omegaconf",
    "imageio-ffmpeg",
)
EXTRAS = {
    "parallel": ("xfuser",),
    "eval": ("torchvision",),
    "ui": ("gradio",),
    "float8": ("torchao",),
    "dev": ("pytest", "ruff", "mypy"),
}


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each distribution, None where it is missing; nothing is imported."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


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
        program: what is called, such as ("python", "-m", "vmonarch.eval.studies.mqar").
        arguments: of it; None for those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return shlex.join([*program, *(Path(word).name if Path(word).is_absolute() else word for word in words)])


def processor_name() -> str:
    """Marketing name of the CPU where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def device_name(device: Any) -> str:
    """Name of a torch device, such as `NVIDIA H200`."""
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def environment(device: Any) -> dict[str, Any]:
    """All that bears on whether a run on `device` can be repeated bit for bit."""
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


def memory_bytes() -> int:
    """Main memory that this process may use: the machine's, or what its control group is limited to."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):
        # No control groups here, or "max".
        return total


def peak_memory_bytes(device: Any) -> dict[str, int]:
    """Peak so far of the process's resident memory, and of the CUDA device's allocations since they were last reset."""
    import torch

    device = torch.device(device)
    # Linux counts in KiB, macOS in bytes.
    peak = {
        "process_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    }
    if device.type == "cuda":
        peak["cuda_allocated"] = torch.cuda.max_memory_allocated(device)
    return peak


def seconds(value: float) -> str:
    """A duration for people: 0.123 s, 12.3 s, 3 min 20 s, 1 h 7 min."""
    whole = round(value)
    if whole >= 3600:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    if whole >= 120:
        return f"{whole // 60} min {whole % 60} s"
    return f"{value:.3g} s"
