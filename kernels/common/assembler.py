"""Which assembler turns the kernels for Hopper into machine code.

ptxas 12.8, which comes with Triton 3.6 and 3.7, makes wrong code where two products of a kernel read tiles of different
widths from the same place in shared memory: it computes the second tile's descriptor from a register that nothing has
written. On an H200 that gave wrong outputs, and accesses out of bounds, for 16-bit values of at most 32 dimensions that
are narrower than the keys. ptxas 12.9 and later make right code of the same input.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch

FIRST_SOUND = (12, 9)
HOPPER = 90


@functools.cache
def why_unsound() -> str | None:
    """Let Triton assemble for Hopper with a sound ptxas. None if it does from now on, else why not, with a warning.

    If Triton's own choice is too old, torch's ptxas takes its place, which fits the driver; else the one that Triton
    brings for later chips. This holds for all of the process, as torch's own compiler does it, too.
    """
    from triton import knobs
    from triton.backends.nvidia import compiler

    chosen = compiler.get_ptxas(HOPPER)
    if _version(chosen) >= FIRST_SOUND:
        return None
    of_torch = knobs.NvidiaTool.from_path(str(Path(torch.__file__).parent / "bin" / "ptxas"))
    for tool in (of_torch, knobs.nvidia.ptxas_blackwell):
        if tool is not None and _version(tool) >= FIRST_SOUND:
            knobs.nvidia.ptxas = tool.path
            # Triton remembers the version, and takes what an older one made from its cache of kernels.
            compiler.get_ptxas_version.cache_clear()
            compiler.CUDABackend.hash.cache_clear()
            return None
    reason = (
        f"ptxas {chosen.version} makes wrong code for Hopper, and there is no later one (supported: from"
        f" {'.'.join(map(str, FIRST_SOUND))} on; set TRITON_PTXAS_PATH to one)"
    )
    warnings.warn(f"{reason}. Plain torch is used in place of kernels, which is slower.", RuntimeWarning, stacklevel=2)
    return reason


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))
