"""Which device and which precision, and waiting for the one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmonarch.configs import InputError

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")


def choose_device(device: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:N`; auto takes CUDA when there is any.

    Raises:
        InputError: CUDA was asked for and is not there, or has no device of that number.
    """
    import torch

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
    chosen = getattr(torch, dtype)
    assert isinstance(chosen, torch.dtype)
    return chosen


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device's queue; nothing on the CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
