"""Calls that are recorded once and replayed: what an op allocates and launches follows from sizes and options alone.

The first call with a key runs its Python while a recorder notes, in order, what is allocated, operators of torch, and
launches, as lines of a function that does nothing else. Later calls with the key run that function on their own
tensors: no checks, options, views, descriptors, nor Triton's search for the compiled kernel. It knows places in memory,
never addresses: every call allocates its own buffers. Those that only kernels use lie in one, the workspace, where a
place is another's after the last use.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.compiler import CompiledKernel

from vmonarch.kernels.common.launch import has_overrides
from vmonarch.kernels.common.trust import is_checking, triton_is_tested

# Of one function.
MAX_RECORDS = 128
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Bytes between places in the workspace, as torch's allocator has them.
_ALIGNMENT = 512
_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)
_lock = threading.Lock()


class _Address(int):
    """The base of a tensor descriptor, as far as the launch of a compiled kernel asks."""

    def data_ptr(self) -> int:
        return self


def _moved(descriptor: Any, address: int) -> Any:
    """The descriptor of the same tile elsewhere; not by its class, which checks again what has not changed."""
    twin = object.__new__(type(descriptor))
    vars(twin).update(vars(descriptor), base=_Address(address))
    return twin


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, whose launch is noted where a call is recorded. No tensors are inside of its tuples."""
    recorder = _recorder.get()
    return kernel[grid] if recorder is None else functools.partial(recorder.launch, kernel, grid)


def _is_known(compiled: Any) -> bool:
    """Whether what a launch returns can be launched again in the way of the tested versions of Triton."""
    return isinstance(compiled, CompiledKernel) and triton_is_tested() and torch.version.hip is None


def _is_watched() -> bool:
    """Whether somebody, say a profiler, wants to know of launches."""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _packed(buffers: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Offsets of buffers (bytes, first and last step) in one, and the bytes of that: none is two at the same time."""
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int, int]] = []
    for number, (size, first, last) in sorted(buffers.items(), key=lambda item: -item[1][0]):
        offset, size = 0, -(-size // _ALIGNMENT) * _ALIGNMENT
        for start, stop, since, until in sorted(taken):
            if first <= until and since <= last and start < offset + size and offset < stop:
                offset = stop
        taken.append((offset, offset + size, first, last))
        offsets[number] = offset
    return offsets, max((stop for _, stop, _, _ in taken), default=0)


class _Recorder(TorchDispatchMode):
    """Notes what a call of these tensors does, as lines of Python.

    In these, `b0`, `b1`, … are the tensors of the call and then its buffers, `a0`, … their addresses, `c0`, …
    constants, and `w` is the workspace.

    Attributes:
        why_not: what was not understood, so that there is no record; None if all was.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.why_not: str | None = None
        self._names: dict[str, Any] = {"moved": _moved, "replace": replace, "empty": torch.empty_strided}
        self._names["bytes"] = torch.uint8
        self._tensors = len(tensors)
        # (line, buffers that it makes)
        self._steps: list[tuple[str, list[int]]] = []
        # (first number, dtype, size, stride) of every buffer; tensors themselves would stay in memory.
        self._buffers: list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = []
        # Numbers of buffers by their storage, whose address is no other's while there is a weak reference.
        self._numbers: dict[int, int] = {}
        self._storages: list[StorageWeakRef] = []
        # Of buffers that are not results of operators, their bytes and the step that allocates them.
        self._allocated: dict[int, tuple[int, int]] = {}
        # The step of the last use of a buffer, and those that are used by operators, or as tensors at all.
        self._last: dict[int, int] = {}
        self._operands: set[int] = set()
        self._seen: set[int] = set()
        # The interpreter asks torch for much that is not the call's.
        self._in_launch = False
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> int:
        storage, number = tensor.untyped_storage(), len(self._buffers)
        self._storages.append(StorageWeakRef(storage))
        self._buffers.append((int(tensor.storage_offset()), tensor.dtype, tensor.shape, tensor.stride()))
        # Tensors of a call may share memory.
        self._numbers.setdefault(storage._cdata, number)
        return number

    def _constant(self, x: Any) -> str:
        if type(x) in (int, bool, type(None)):
            return repr(x)
        name = f"c{len(self._names)}"
        self._names[name] = x
        return name

    def _written(self, x: Any, address: bool = False) -> str:
        """An argument of the next step: of a tensor what it is a part of, or its address."""
        number = self._numbers.get(x.untyped_storage()._cdata) if isinstance(x, torch.Tensor) else None
        if number is not None:
            self._last[number] = len(self._steps)
            first, dtype, size, stride = self._buffers[number]
            if x.dtype != dtype:
                self.why_not = f"memory of {dtype} is read as {x.dtype}"
            offset = int(x.storage_offset()) - first
            if address:
                return f"a{number} + {offset * x.itemsize}"
            self._seen.add(number)
            if offset == 0 and x.shape == size and x.stride() == stride:
                return f"b{number}"
            start = f"b{number}.storage_offset() + {offset}"
            return f"b{number}.as_strided({self._constant(x.shape)}, {self._constant(x.stride())}, {start})"
        if hasattr(x, "block_shape"):
            base = self._written(x.base, address)
            return f"moved({self._constant(x)}, {base})" if address else f"replace({self._constant(x)}, base={base})"
        if type(x) in (list, tuple) and any(isinstance(y, torch.Tensor) for y in x):
            return f"[{', '.join(self._written(y) for y in x)}]"
        return self._constant(x)

    def launch(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        """Launch, and note it."""
        self._in_launch = True
        compiled = kernel[grid](*args, **options)
        self._in_launch = False
        if not _is_known(compiled):
            written = [*map(self._written, args), f"**{self._constant(options)}"]
            self._steps.append((f"{self._constant(kernel[grid])}({', '.join(written)})", []))
            return
        # In the order of the parameters; what is a constant to the kernel, too.
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(*args, **{name: x for name, x in options.items() if name in signature.parameters})
        bound.apply_defaults()
        sizes = ", ".join(map(str, (*grid, 1, 1)[:3]))
        # Named as well, because it would take its function along if it was collected.
        function, metadata, run, _ = map(
            self._constant, (compiled.function, compiled.packed_metadata, compiled.run, compiled)
        )
        written = [self._written(x, address=True) for x in bound.arguments.values()]
        line = f"{run}({sizes}, stream, {function}, {metadata}, None, None, None, {', '.join(written)})"
        self._steps.append((line, []))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._in_launch:
            self._note(func, args, kwargs or {}, list(found) if isinstance(found, (tuple, list)) else [found])
        return found

    def _note(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any], results: list[Any]) -> None:
        """Note an operator of torch that was called."""
        tensors = all(isinstance(x, torch.Tensor) for x in results)
        if not tensors or not _DEPENDS_ON_DATA.isdisjoint(operator.tags):
            self.why_not = f"{operator} may depend on what is in memory"
            return
        if operator.namespace == "aten" and operator._opname in _ALLOCATIONS:
            x = results[0]
            number = self._add(x)
            self._allocated[number] = x.untyped_storage().nbytes(), len(self._steps)
            size, stride, dtype, device = map(self._constant, (x.shape, x.stride(), x.dtype, x.device))
            line = f"b{number} = empty({size}, {stride}, dtype={dtype}, device={device})"
            self._steps.append((line, [number]))
            return
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, options)) if isinstance(x, torch.Tensor)}
        new = [x.untyped_storage()._cdata not in known for x in results]
        writes = operator._schema.is_mutable
        if not any(new) and not writes:
            # A view.
            return
        if writes and not known <= set(self._numbers) or any(isinstance(x, torch.Tensor) for x in options.values()):
            self.why_not = f"{operator} may write to a constant"
        written = [*map(self._written, args), f"**{self._constant(options)}"]
        self._operands |= {self._numbers[storage] for storage in known if storage in self._numbers}
        made = [self._add(x) if is_new else None for x, is_new in zip(results, new, strict=True)]
        buffers = [number for number in made if number is not None]
        self._last |= dict.fromkeys(buffers, len(self._steps))
        names = ", ".join("_" if number is None else f"b{number}" for number in made)
        line = f"{names} = {self._constant(operator)}({', '.join(written)})"
        self._steps.append((line, buffers))

    def record(self, results: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]] | str:
        """record(stream, *tensors), which does the same as the call that gave these results, or why there is none."""
        written = [self._written(x) for x in results]
        if self.why_not is not None:
            return self.why_not
        if any(name.startswith("c") for name in written):
            return "a result is a constant"
        own = self._operands | {self._numbers[x.untyped_storage()._cdata] for x in results if x is not None}
        used = {number: (*x, self._last[number]) for number, x in self._allocated.items() if number in self._last}
        offsets, size = _packed({number: x for number, x in used.items() if number not in own})
        tensors = [f"b{number}" for number in range(self._tensors)]
        lines = [f"def record({', '.join(['stream', *tensors])}):"]
        lines += [f"a{number} = b{number}.data_ptr()" for number in range(self._tensors)]
        lines += [f"w = empty(({size},), (1,), dtype=bytes, device=b0.device)", "start = w.data_ptr()"]
        for number, offset in offsets.items():
            lines.append(f"a{number} = start + {offset}")
            if number in self._seen:
                _, dtype, shape, stride = map(self._constant, self._buffers[number])
                place = f"w[{offset}:{offset + used[number][0]}].view({dtype})"
                lines.append(f"b{number} = {place}.as_strided({shape}, {stride})")
        freed = defaultdict(list)
        for number, step in self._last.items():
            if number >= self._tensors and number not in offsets:
                freed[step].append(f"b{number}")
        for i, (line, made) in enumerate(self._steps):
            if not made or made[0] not in self._allocated or (made[0] in used and made[0] not in offsets):
                lines += [line, *(f"a{number} = b{number}.data_ptr()" for number in made)]
            if i in freed:
                lines.append(f"del {', '.join(freed[i])}")
        lines.append(f"return ({', '.join(written)},)")
        exec("\n    ".join(lines), self._names)
        return self._names["record"]


def _key(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that the Python of a call asks of its arguments: of tensors all but addresses and what is in them."""
    found: list[Any] = []
    shared: dict[int, tuple[int, int]] = {}
    for x in args:
        if isinstance(x, torch.Tensor):
            offset = int(x.storage_offset())
            first, of_first = shared.setdefault(x.untyped_storage()._cdata, (len(found), offset))
            found += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16, first, offset - of_first)
        else:
            found.append(tuple(x) if type(x) is list else x)
    return tuple(found)


def _stream(device: torch.device) -> int:
    """Of the GPU that is current; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def replayed(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Record the calls of a function, and replay those that are like one before. It runs on its tensors' device.

    What the function does must follow from its arguments: sizes, strides, dtypes, the device and the alignment of
    tensors, of which the first argument is one, numbers, lists of these, and what is hashable. Calls with
    `launch_overrides` are not recorded, nor those whose operators give other than tensors or sizes that data decide.

    Args:
        function: takes positional arguments alone, and returns a tuple of tensors and None. All its launches are by
            `launcher`; tensors that it neither takes nor allocates are made once (`constants.kept`).
    """
    records: dict[tuple[Any, ...], Callable[..., tuple[Any, ...]] | str] = {}

    @functools.wraps(function)
    def call(*args: Any) -> tuple[Any, ...]:
        with torch.cuda.device_of(args[0]):
            if _recorder.get() is not None or has_overrides() or is_checking() or _is_watched():
                return function(*args)
            key = _key(args)
            record = records.get(key)
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if callable(record):
                return record(_stream(args[0].device), *tensors)
            if record is not None:
                return function(*args)
            recorder = _Recorder(tensors)
            token = _recorder.set(recorder)
            try:
                with recorder:
                    results = function(*args)
            finally:
                _recorder.reset(token)
            with _lock:
                while len(records) >= MAX_RECORDS:
                    del records[next(iter(records))]
                records[key] = recorder.record(results)
            return results

    call.records = records  # type: ignore[attr-defined]
    return call
