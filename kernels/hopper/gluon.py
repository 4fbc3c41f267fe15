"""What Gluon calls differently in the versions of Triton that are supported, 3.6 to 3.9: here by its newest names."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma


def _either(owner: object, name: str, older_name: str):
    return getattr(owner, name if hasattr(owner, name) else older_name)


# Copies of a tile by the copy engine, from and to where a descriptor points.
async_load = _either(tma, "async_load", "async_copy_global_to_shared")
async_store = _either(tma, "async_store", "async_copy_shared_to_global")
# Copies of numbers from pointers, by the threads themselves.
async_load_numbers = _either(async_copy, "async_load", "async_copy_global_to_shared")
# (buffer, dtype, shape, layout): the same shared memory, of the same size, seen in another shape.
reinterpret = _either(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
