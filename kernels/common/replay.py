"""Calls that are recorded once and replayed: what an op allocates and launches follows from sizes and options alone.

The first call with a key runs its Python while a recorder notes, in order, what is allocated, operators of torch, and
launches, as lines of a function that does nothing else. Later calls with the key run that function on their own
tensors: no checks, options, views, descriptors, nor Triton's search for the compiled kernel. It knows places in memory,
never addresses: every call allocates its own buffers. Those that only kernels use lie in one, the workspace, where a
place is another's after the last use.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.compiler import CompiledKernel

from vmonarch.kernels.common.launch import has_overrides
from vmonarch.kernels.common.trust import is_checking, triton_is_tested

# Per function.
MAX_RECORDS = 128
_ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Bytes between places in the workspace, as torch's allocator has them.
_ALIGNMENT = 512
_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)
_lock = threading.Lock()


class _Descriptor(int):
    """The address of a tensor descriptor, as the launch of a compiled kernel takes it; its class has the rest."""

    base = property(lambda self: self)

    def data_ptr(self) -> int:
        return self


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, whose launch is noted where a call is recorded."""
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


class _Buffer(NamedTuple):
    """A tensor of the call, or what a step makes: without the tensor, which would stay in memory."""

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    bytes: int
    # The address of a storage is no other's while there is a weak reference.
    storage: StorageWeakRef


class _Recorder(TorchDispatchMode):
    """Notes what a call of these tensors does, as lines of Python.

    In these, `b0`, `b1`, … are the tensors of the call and then its buffers, `a0`, … their addresses, and `c0`, …
    constants.

    Attributes:
        why_not: what was not understood, so that there is no record; None if all was.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or torch would import all of torch.compile in the first call, for seconds."""
        return False

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.why_not: str | None = None
        self._names: dict[str, Any] = {"empty": torch.empty_strided}
        self._given = len(tensors)
        self._buffers: list[_Buffer] = []
        self._numbers: dict[int, int] = {}
        # (line, buffers that it makes, whether it does nothing else)
        self._steps: list[tuple[str, list[int], bool]] = []
        # The step of the last use of a buffer, and the buffers that are used as tensors, not by addresses alone.
        self._last: dict[int, int] = {}
        self._tensors: set[int] = set()
        # The interpreter asks torch for much that is not the call's.
        self._in_launch = False
        for tensor in tensors:
            self._add(tensor)

    def _add(self, x: torch.Tensor) -> int:
        """The number of a new buffer."""
        storage, number = x.untyped_storage(), len(self._buffers)
        about = int(x.storage_offset()), x.dtype, x.shape, x.stride(), storage.nbytes()
        self._buffers.append(_Buffer(*about, StorageWeakRef(storage)))
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
        """An argument of the next step; for a tensor what it is a part of, or its address."""
        number = self._numbers.get(x.untyped_storage()._cdata) if isinstance(x, torch.Tensor) else None
        if number is not None:
            buffer, self._last[number] = self._buffers[number], len(self._steps)
            offset = int(x.storage_offset()) - buffer.offset
            if x.dtype != buffer.dtype:
                self.why_not = f"memory of {buffer.dtype} is read as {x.dtype}"
            if address:
                return f"a{number} + {offset * x.itemsize}" if offset else f"a{number}"
            self._tensors.add(number)
            if offset == 0 and x.shape == buffer.size and x.stride() == buffer.stride:
                return f"b{number}"
            size, stride = self._constant(x.shape), self._constant(x.stride())
            return f"b{number}.as_strided({size}, {stride}, b{number}.storage_offset() + {offset})"
        if hasattr(x, "block_shape"):
            # Without its tensor, which would stay in memory.
            rest = {name: value for name, value in vars(x).items() if name != "base"}
            made: Any = type("Descriptor", (_Descriptor,), rest) if address else functools.partial(x.__class__, **rest)
            return f"{self._constant(made)}({'' if address else 'base='}{self._written(x.base, address)})"
        if isinstance(x, (list, tuple)) and any(isinstance(y, torch.Tensor) for y in x):
            written = ", ".join(self._written(y, address) for y in x)
            if isinstance(x, list):
                return f"[{written}]"
            # A compiled kernel finds the parts of a named tuple by their places, another by their names.
            return f"({written},)" if address else f"{self._constant(getattr(x, '_make', tuple))}([{written}])"
        return self._constant(x)

    def launch(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        """Launch, and note it."""
        self._in_launch = True
        compiled = kernel[grid](*args, **options)
        self._in_launch = False
        if _is_known(compiled):
            # All parameters, constants too. The kernel is named because it takes its function along when it goes.
            args = (*args, *(options.get(x.name, x.default) for x in kernel.params[len(args) :]))
            names = map(self._constant, (compiled.run, compiled.function, compiled.packed_metadata, compiled))
            run, function, metadata, _ = names
            sizes = ", ".join(map(str, (*grid, 1, 1)[:3]))
            written = [self._written(x, address=True) for x in args]
            line = f"{run}({sizes}, stream, {function}, {metadata}, None, None, None, {', '.join(written)})"
        else:
            written = [*map(self._written, args), f"**{self._constant(options)}"]
            line = f"{self._constant(kernel[grid])}({', '.join(written)})"
        self._steps.append((line, [], False))

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
        if operator.name().partition(".")[0] in _ALLOCATIONS:
            (x,) = results
            number = self._add(x)
            size, stride, dtype, device = map(self._constant, (x.shape, x.stride(), x.dtype, x.device))
            line = f"b{number} = empty({size}, {stride}, dtype={dtype}, device={device})"
            self._steps.append((line, [number], True))
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
        names = [f"b{self._add(x)}" if is_new else "_" for x, is_new in zip(results, new, strict=True)]
        made = list(range(len(self._buffers) - sum(new), len(self._buffers)))
        self._last |= dict.fromkeys(made, len(self._steps))
        self._steps.append((f"{', '.join(names)} = {self._constant(operator)}({', '.join(written)})", made, False))

    def record(self, results: Any) -> Callable[..., Any] | str:
        """record(stream, *tensors), which does the same as the call that gave these results, or why there is none."""
        written = [self._written(x) for x in (results if isinstance(results, tuple) else [results])]
        if self.why_not is not None or any(name.startswith("c") for name in written):
            return self.why_not or "a result is a constant"
        spans = {
            made[0]: (self._buffers[made[0]].bytes, step, self._last[made[0]])
            for step, (_, made, allocates) in enumerate(self._steps)
            if allocates and made[0] in self._last and made[0] not in self._tensors
        }
        offsets, size = _packed(spans)
        given = range(self._given)
        lines = [f"def record({', '.join(['stream', *(f'b{number}' for number in given)])}):"]
        lines += [f"a{number} = b{number}.data_ptr()" for number in given]
        if offsets:
            self._names["bytes"] = torch.uint8
            lines.append(f"workspace = empty(({size},), (1,), dtype=bytes, device=b0.device)")
            lines.append("start = workspace.data_ptr()")
            lines += [f"a{number} = start + {offset}" for number, offset in offsets.items()]
        for step, (line, made, allocates) in enumerate(self._steps):
            if not allocates or made[0] in self._tensors:
                lines += [line, *(f"a{number} = b{number}.data_ptr()" for number in made)]
            freed = [number for number, last in self._last.items() if last == step and number not in (*given, *offsets)]
            lines += [f"del b{number}" for number in freed]
        lines.append(f"return {', '.join(written)}{',' if isinstance(results, tuple) else ''}")
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


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Record the calls of a function, and replay those that are like one before. It runs on its tensors' device.

    What the function does must follow from its arguments: sizes, strides, dtypes, the device and the alignment of
    tensors, of which the first argument is one, numbers, lists of these, and what is hashable. Calls with
    `launch_overrides` are not recorded, nor those whose operators give other than tensors or sizes that data decide.

    Args:
        function: takes positional arguments alone, and returns a tensor or a tuple of such and None. All its launches
            are by `launcher`; tensors that it neither takes nor allocates are made once (`constants.kept`).
    """
    records: dict[tuple[Any, ...], Callable[..., Any] | str] = {}

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        device = args[0].device
        with torch.cuda.device_of(args[0]):
            if _recorder.get() is not None or has_overrides() or is_checking() or _is_watched():
                return function(*args)
            key = _key(args)
            record = records.get(key)
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if callable(record):
                stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None
                return record(stream, *tensors)
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
