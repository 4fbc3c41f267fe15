"""Whether the kernels for Hopper can run; imports nothing that older versions of Triton lack."""

from __future__ import annotations

import functools

import torch
import triton

from vmonarch.kernels.common.launch import tma_fits


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return device.type == "cuda" and version >= (3, 6) and torch.cuda.get_device_capability(device) == (9, 0)


def backward_fits(*tensors: torch.Tensor) -> bool:
    """Whether the backward kernels for Hopper take these: 16 bit, rows of 64 or 128, loaded by the copy engine."""
    first = tensors[0]
    return (
        _is_hopper(first.device)
        and first.dtype in (torch.float16, torch.bfloat16)
        and first.shape[-1] in (64, 128)
        and all(tensor.shape[-1] == first.shape[-1] and tensor.dtype == first.dtype for tensor in tensors)
        # An expanded tensor has strides of zero, which the copy engine may refuse.
        and all(tensor.stride(i) > 0 or tensor.shape[i] == 1 for tensor in tensors for i in range(tensor.ndim))
        and tma_fits(*tensors)
    )
