"""Whether what compiles kernels makes right ones: a version of Triton that they were not tested with, an assembler.

Versions of Triton have miscompiled kernels before. With one of `TESTED_TRITON`, nothing here does anything. With any
other, the first call of an op on a GPU runs a tiny case, forward and, if it has gradients, backward, and
compares it with plain torch in float64: what fails to compile or to agree is not used by this process. Kernels for
Hopper are checked apart, where they would be used first.

ptxas 12.8, which comes with Triton 3.6 and 3.7, makes wrong code for Hopper where two products of a kernel read tiles
of different widths from the same place in shared memory: it computes the second tile's descriptor from a register that
nothing has written. On an H200 that gave wrong outputs, and accesses out of bounds, for 16-bit values of at most 32
dimensions that are narrower than the keys. ptxas 12.9 and later make right code of the same input.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

# With each of these the kernels compile for all architectures; docs/kernels.md says which ran on a GPU.
# The extra `tested` in pyproject.toml has their bounds.
TESTED_TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
# Largest error of a tensor by the largest entry of it.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
# Version of ptxas.
FIRST_SOUND = (12, 9)
HOPPER = 90
Shapes = Mapping[str, tuple[int, ...]]


class Case(NamedTuple):
    """The tiny case of an op, by which its kernels are checked: `tiny_case(gpu)` in the op's `api.py` gives it.

    On a GPU it is as large as kernels for Hopper want it, in the interpreter as small as can be.
    `call(*inputs, implementation=…)` gives the results; all inputs get gradients if there are any.
    """

    inputs: Shapes
    call: Callable[..., tuple[torch.Tensor, ...]]
    gradients: bool = True


def qkv_shapes(queries: int, keys: int, head_dim: int) -> Shapes:
    """Query, key and value [1, S, 2, D]."""
    return {"query": (1, queries, 2, head_dim), "key": (1, keys, 2, head_dim), "value": (1, keys, 2, head_dim)}


@dataclass(frozen=True)
class Kernels:
    """The subject of a verdict: the kernels of an op, portable or for Hopper, for a dtype on a device."""

    op: str
    hopper: bool
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        form, dtype = "Hopper" if self.hopper else "portable", str(self.dtype).removeprefix("torch.")
        return f"the {form} kernels of {self.op} for {dtype}"


_verdicts: dict[Kernels, str | None] = {}
_lock = threading.Lock()
# The kernels that this thread is checking.
_checking: ContextVar[Kernels | None] = ContextVar("checking", default=None)


def triton_is_tested() -> bool:
    """Whether the installed version of Triton is one of `TESTED_TRITON`."""
    return _triton_version() in TESTED_TRITON


def _triton_version() -> str:
    import triton

    return triton.__version__


def is_checking() -> bool:
    """Whether this thread runs a check, in which other kernels are used than before and after."""
    return _checking.get() is not None


def why_distrusted(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the portable kernels of an op are not used, or None if they are; they are checked if no verdict is known.

    Raises:
        RuntimeError: kernels have to be checked, and a CUDA graph is being captured.
    """
    return None if is_checking() else _failure(Kernels(op, False, dtype, device))


def hopper_is_trusted(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of an op for Hopper may be used; they are checked if no verdict is known.

    Raises:
        RuntimeError: kernels have to be checked, and a CUDA graph is being captured.
    """
    checking = _checking.get()
    # A check is of the portable kernels alone, or of those for Hopper together with all that run beside them.
    return checking.hopper if checking else _failure(Kernels(op, True, dtype, device)) is None


def _failure(kernels: Kernels) -> str | None:
    """What is wrong with kernels, or None: an earlier finding, or that of `check`, with a warning."""
    if triton_is_tested():
        return None
    with _lock:
        if kernels not in _verdicts:
            failure = _checked(kernels)
            version = _triton_version()
            why = f"{kernels} failed a check with Triton {version}, which is not tested: {failure}" if failure else None
            _verdicts[kernels] = why
            if why is not None:
                instead = "The portable kernels are" if kernels.hopper else "Plain torch is"
                warnings.warn(
                    f"{why}. {instead} used instead, which is slower. Tested versions of Triton:"
                    f" {', '.join(TESTED_TRITON)}. Please report this message together with what"
                    " `vmonarch info` prints.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return _verdicts[kernels]


def _checked(kernels: Kernels) -> str | None:
    """`check`, in a thread of its own.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if kernels.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{kernels} are not tested with Triton {_triton_version()} and have to be checked, which cannot be done"
            " while a CUDA graph is captured: call the function once before"
        )

    def check_here() -> str | None:
        _checking.set(kernels)
        # The backward pass in this thread, too: autograd's own would not see what it is checking.
        with torch.autograd.set_multithreading_enabled(False):
            return check(kernels)

    # A thread of its own has none of the caller's autocast, inference mode, fake tensors and launch overrides.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(check_here).result()


def check(kernels: Kernels) -> str | None:
    """What is wrong with kernels in the tiny case of their op, or None if they agree with plain torch."""
    # The op asks here, so it is loaded.
    api = import_module(f"..{kernels.op}.api", __package__)
    case: Case = api.tiny_case(kernels.device.type == "cuda")

    def random(shapes: Iterable[tuple[int, ...]], seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(kernels.dtype) for shape in shapes]

    def results(implementation: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(device, dtype).requires_grad_(case.gradients) for x in random(case.inputs.values(), 0)]
        found = case.call(*leaves, implementation=implementation)
        if case.gradients:
            cotangents = random((x.shape for x in found), 1)
            found += torch.autograd.grad(found, leaves, [g.to(x) for g, x in zip(cotangents, found, strict=True)])
        return [x.detach().to("cpu", torch.float64) for x in found]

    expected = results("torch", torch.device("cpu"), torch.float64)
    try:
        actual = results("triton", kernels.device, kernels.dtype)
    except torch.OutOfMemoryError:
        # This says nothing of the kernels.
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:500]}"
    of_gradients = [f"the gradient of {name}" for name in case.inputs if case.gradients]
    of_results = [f"result {n}" for n in range(len(expected) - len(of_gradients))]
    for name, got, want in zip(of_results + of_gradients, actual, expected, strict=True):
        off, largest = (got - want).abs().max().item(), want.abs().max().item()
        # Not `off > …`, which is false for NaN.
        if not off <= TOLERANCES[kernels.dtype] * largest:
            return f"{name} is off by {off:.2g} from plain torch, whose largest entry is {largest:.2g}"
    return None


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
