"""Where the Triton kernels can run, and with which launch options."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import resources
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from vmonarch.kernels.common import trust

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
# Largest head dimension and dtypes of the kernels for Hopper.
HOPPER_HEAD_DIM = 128
HOPPER_DTYPES = (torch.float16, torch.bfloat16)
# A constant, because torch.compile would have to trace the search.
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
Numbers = TypeVar("Numbers", bound=tuple[int, ...])
_overrides: ContextVar[Mapping[str, Mapping[str, int]] | None] = ContextVar("launch_overrides", default=None)


def interpreted() -> bool:
    """Whether kernels run on the CPU through Triton's interpreter (TRITON_INTERPRET=1)."""
    # Not triton.knobs.runtime.interpret, which torch.compile cannot trace.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def why_not_triton(*tensors: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot take these tensors [B, S, H, D], or None if they can."""
    first = tensors[0]
    if not TRITON_INSTALLED:
        return "the package triton (on Windows triton-windows) is not installed"
    if first.device.type == "cpu":
        if not interpreted():
            return "the tensors are on the CPU (supported: CUDA; the CPU only through TRITON_INTERPRET=1)"
        if first.dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 products wrongly (supported there: float16, float32)"
    elif first.device.type != "cuda":
        return f"the tensors are on {first.device.type} (supported: CUDA)"
    if first.dtype not in KERNEL_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in KERNEL_DTYPES)
        return f"the dtype is {str(first.dtype).removeprefix('torch.')} (supported: {supported})"
    for tensor in tensors:
        if tensor.shape[-1] > MAX_HEAD_DIM:
            return f"a head dimension is {tensor.shape[-1]} (supported: up to {MAX_HEAD_DIM})"
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return "the head dimension of a tensor is not contiguous (supported: stride 1)"
    return None


def use_triton(
    name: str,
    implementation: str,
    *tensors: torch.Tensor,
    op: str,
    unless: str | None = None,
    why_not: Callable[..., str | None] = why_not_triton,
    others: Iterable[torch.Tensor | None] = (),
) -> bool:
    """Decide between Triton and torch.

    "auto" is the kernels for all CUDA tensors that they can take, see `why_not_triton`, else plain torch. With a Triton
    that is not tested, it is only those kernels that pass a check, see `trust`. Forward-mode AD is plain torch.

    Args:
        name: of the function, for the error.
        op: whose kernels they are, the name of a folder in `kernels`, whose `api` has its `tiny_case`.
        unless: another reason why the kernels cannot take this call, or None.
        why_not: says which tensors they cannot take.
        others: tensors of the call that `why_not` does not look at, but that have derivatives.

    Raises:
        NotImplementedError: implementation="triton", and the kernels cannot take the tensors or fail the check; the
            message says why.
    """
    first = tensors[0]
    if implementation == "torch" or (implementation == "auto" and not auto_takes_kernels(first.device)):
        return False
    reason = why_not(*tensors) or unless
    if reason is None and carry_tangents(*tensors, *(tensor for tensor in others if tensor is not None)):
        reason = "forward-mode AD goes through the tensors (supported there: torch)"
    reason = reason or _why_not_compiled(op, first.device, first.dtype)
    if reason and implementation == "triton":
        raise NotImplementedError(f'{name} with implementation="triton": {reason}')
    return reason is None


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a contiguous last dimension: gradients of sums and of slices come expanded or strided."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def positively_scaled(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """A query and a softmax scale with the same logits, the scale not negative.

    Only such a scale keeps raw scores, of which the kernels take the maximum, in the order of the logits.
    """
    return (-query, -scale) if scale < 0 else (query, scale)


def learns(*tensors: torch.Tensor) -> bool:
    """Whether gradients of any of these are recorded."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def carry_tangents(*tensors: torch.Tensor) -> bool:
    """Whether forward-mode AD (`torch.func.jvp`, dual numbers) goes through any of these.

    Under transforms of torch.func and in torch.compile, where tensors hide their tangents, it counts as going through.
    """
    if forward_ad._current_level < 0:
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def needs_operator(*tensors: torch.Tensor) -> bool:
    """Whether torch must see a call as an operator: to differentiate, compile or transform it (`torch.func`), or if a
    tensor is no plain one.

    For all other calls its dispatcher would only cost time.
    """
    if learns(*tensors) or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any(type(tensor) is not torch.Tensor for tensor in tensors)


def auto_takes_kernels(device: torch.device) -> bool:
    """Whether implementation="auto" is the kernels there: they are for GPUs, and the interpreter is for tests."""
    return device.type == "cuda"


def _why_not_compiled(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why what compiles the kernels makes none that are right, or None: its assembler, or an untested Triton.

    torch.compile calls it while it traces, and has what it says for a constant.
    """
    unsound = trust.why_unsound() if on_hopper(device) else None
    return unsound or trust.why_distrusted(op, device, dtype)


# The same as torch.compiler.assume_constant_result, whose import takes seconds.
_why_not_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def block_dim(head_dim: int) -> int:
    """The power of two, at least 16, that a head dimension is padded to inside a kernel."""
    return max(16, 1 << (head_dim - 1).bit_length())


def unspecialised(numbers: Numbers) -> Numbers:
    """The numbers of a named tuple as kernels take them, which shift them back by four bits.

    Triton compiles a kernel anew for integers that are 1 or multiples of 16, which sizes of videos are now and then. No
    number of this form is, so that one compiled kernel serves all sizes.
    """
    return type(numbers)(*(16 * number + 8 for number in numbers))  # type: ignore[arg-type]


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of products: exact for float32, of no effect for 16-bit inputs."""
    return "ieee" if dtype == torch.float32 else "tf32"


def hopper_fits(op: str, *tensors: torch.Tensor) -> bool:
    """Whether an op's kernels for Hopper take these tensors: 16 bit, one head dimension up to 128, aligned rows."""
    first = tensors[0]
    return (
        hopper_enabled(op, first.device, first.dtype)
        and first.shape[-1] <= HOPPER_HEAD_DIM
        and all(tensor.shape[-1] == first.shape[-1] for tensor in tensors)
        and tma_fits(*tensors)
    )


def tma_fits(*tensors: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can address the tensors: every row starts at a multiple of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * tensor.itemsize % 16 == 0
            for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False)
            if size > 1
        )
        for tensor in tensors
    )


def tma_strides(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Strides of a descriptor: those of memory that `tma_fits`, but a dimension of one element may have any there."""
    return [*(stride if size > 1 else 16 for stride, size in zip(strides[:-1], shape, strict=False)), 1]


def hopper_enabled(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an op's kernels for Hopper, of 16 bit, are used; the override {"hopper": {"enabled": 0}} says no."""
    wanted = (_overrides.get() or {}).get("hopper", {"enabled": 1})["enabled"] == 1
    return dtype in HOPPER_DTYPES and on_hopper(device) and wanted and trust.hopper_is_trusted(op, device, dtype)


@functools.cache
def on_hopper(device: torch.device) -> bool:
    """Whether the kernels for Hopper can run there."""
    return device.type == "cuda" and not interpreted() and torch.cuda.get_device_capability(device) == (9, 0)


@contextmanager
def launch_overrides(options: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    """Use these launch options, by kernel name, in place of the tables': for tuning and for tests.

    They are not checked; the sweeps of `vmonarch tune` have values that kernels support.
    """
    token = _overrides.set(options)
    try:
        yield
    finally:
        _overrides.reset(token)


def has_overrides() -> bool:
    """Whether `launch_overrides` are in place."""
    return _overrides.get() is not None


def launch_options(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """BLOCK sizes, num_warps and num_stages of a kernel on a chip, from the tables in `kernels/common/tables`.

    An unknown chip gets the options of `default.json`.
    """
    chip = "interpreter" if device.type == "cpu" else _chip_name(device.index or 0)
    options = _tabled_options(kernel, chip, dtype.itemsize, block_dim(head_dim))
    return {**options, **(_overrides.get() or {}).get(kernel, {})}


@functools.cache
def _chip_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _tables() -> dict[str, Any]:
    folder = resources.files(__package__) / "tables"
    tables = (json.loads(file.read_text()) for file in folder.iterdir() if file.name.endswith(".json"))
    return {table["chip"]: table["entries"] for table in tables}


@functools.cache
def _tabled_options(kernel: str, chip: str, itemsize: int, dim: int) -> dict[str, int]:
    """The entry of the chip, else of the default, for this kernel and item size with the nearest head dimension."""
    for name in (chip, "default"):
        entries = [
            entry
            for entry in _tables().get(name, [])
            if entry["kernel"] == kernel and entry["itemsize"] in (itemsize, None)
        ]
        if entries:
            # A wider head needs smaller blocks: between two entries the wider one is the one that fits.
            fitting = [entry for entry in entries if entry["head_dim"] >= dim]
            entry = min(fitting, key=lambda e: e["head_dim"]) if fitting else max(entries, key=lambda e: e["head_dim"])
            return dict(entry["options"])
    raise KeyError(f"no launch options for kernel {kernel!r}")
