"""Calls that are recorded once and replayed: what an op allocates and launches follows from sizes and options alone.

The first call with a key runs its Python while a recorder notes, in order, what is allocated, operators of torch, and
launches. Later calls with the key repeat these steps with their own tensors, without the Python in between: checks,
options, descriptors, Triton's search for the compiled kernel. A record knows places in memory, never addresses: every
call allocates its own buffers, and gives each back after its last use.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vmonarch.kernels.common.launch import has_overrides
from vmonarch.kernels.common.trust import is_checking, triton_is_tested

# By number: the tensors of a call, then its buffers, None before and after their use.
Memory = list[Any]
# Of one function.
MAX_RECORDS = 128
_ALLOCATIONS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("empty", "memory_format"), ("empty_like", "default"), ("empty_strided", "default"), ("new_empty", "default"),
        ("new_empty_strided", "default"),
    )
}  # fmt: skip
_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)
_lock = threading.Lock()


class _Place(NamedTuple):
    """A tensor `offset` numbers after the first of a buffer; `size` and `stride` are None where it is the buffer."""

    buffer: int
    offset: int
    itemsize: int
    size: torch.Size | None
    stride: tuple[int, ...] | None

    def found(self, memory: Memory) -> torch.Tensor:
        buffer = memory[self.buffer]
        if self.size is None:
            return buffer
        return buffer.as_strided(self.size, self.stride, buffer.storage_offset() + self.offset)


class _Descriptor(NamedTuple):
    """A tensor descriptor of Triton's with its base at a place."""

    descriptor: Any
    base: _Place

    def found(self, memory: Memory) -> Any:
        return replace(self.descriptor, base=self.base.found(memory))


class _Address(int):
    """The base of a descriptor, as far as a launch asks."""

    def data_ptr(self) -> int:
        return self


def _filled(given: Any, memory: Memory) -> Any:
    """Arguments with what is at their places."""
    if isinstance(given, (_Place, _Descriptor)):
        return given.found(memory)
    return [_filled(x, memory) for x in given] if type(given) is list else given


@dataclass(frozen=True)
class _Allocate:
    buffer: int
    like: dict[str, Any]

    def __call__(self, memory: Memory) -> None:
        memory[self.buffer] = torch.empty_strided(**self.like)


@dataclass(frozen=True)
class _Run:
    """An operator of torch, or a launch; `made` are the buffers that its results are, None for old ones."""

    function: Callable[..., Any]
    args: list[Any]
    options: dict[str, Any]
    made: tuple[int | None, ...] = ()

    def __call__(self, memory: Memory) -> None:
        results = self.function(*_filled(self.args, memory), **self.options)
        for i, buffer in enumerate(self.made):
            if buffer is not None:
                memory[buffer] = results[i] if isinstance(results, (tuple, list)) else results


@dataclass(frozen=True)
class _Start:
    """The launch of a compiled kernel, which takes addresses for tensors and asks for the device and the stream."""

    start: Callable[..., Any]
    args: list[Any]
    # Argument, buffer, bytes from its start, and the descriptor if it is one.
    places: list[tuple[int, int, int, Any]]

    def __call__(self, memory: Memory) -> None:
        args = self.args.copy()
        for i, buffer, offset, descriptor in self.places:
            args[i] = memory[buffer].data_ptr() + offset
            if descriptor is not None:
                # Not by its class, which checks again what has not changed.
                twin = object.__new__(type(descriptor))
                vars(twin).update(vars(descriptor), base=_Address(args[i]))
                args[i] = twin
        self.start(*args)


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, whose launch is noted where a call is recorded. No tensors are inside of its tuples."""
    recorder = _recorder.get()
    return kernel[grid] if recorder is None else functools.partial(recorder.launch, kernel, grid)


def _starts(compiled: Any) -> bool:
    """Whether what a launch returns starts the kernel again, in the way of the tested versions of Triton."""
    from triton.compiler import CompiledKernel

    return isinstance(compiled, CompiledKernel) and triton_is_tested() and torch.version.hip is None


class _Recorder(TorchDispatchMode):
    """Notes the steps of a call of these tensors.

    Attributes:
        why_not: what was not understood, so that there is no record; None if all was.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[Callable[[Memory], None]] = []
        self.why_not: str | None = None
        self._tensors = len(tensors)
        # (first number, dtype, size, stride) of every buffer; tensors themselves would stay in memory.
        self._buffers: list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = []
        # Numbers of buffers by their storage, whose address is no other's while there is a weak reference.
        self._numbers: dict[int, int] = {}
        self._storages: list[StorageWeakRef] = []
        # The step of the last use.
        self._last: dict[int, int] = {}
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

    def _placed(self, given: Any) -> Any:
        """An argument of the next step with places for tensors, but for constants, which stay."""
        if isinstance(given, torch.Tensor):
            number = self._numbers.get(given.untyped_storage()._cdata)
            if number is None:
                return given
            self._last[number] = len(self.steps)
            first, dtype, size, stride = self._buffers[number]
            if given.dtype != dtype:
                self.why_not = f"memory of {dtype} is read as {given.dtype}"
            offset = int(given.storage_offset()) - first
            whole = offset == 0 and given.shape == size and given.stride() == stride
            return _Place(number, offset, given.itemsize, *((None, None) if whole else (given.shape, given.stride())))
        if hasattr(given, "block_shape"):
            base = self._placed(given.base)
            return _Descriptor(given, base) if isinstance(base, _Place) else given
        if type(given) in (list, tuple):
            placed = [self._placed(x) for x in given]
            return placed if any(x is not y for x, y in zip(placed, given, strict=True)) else given
        return given

    def launch(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        """Launch, and note it."""
        self._in_launch = True
        compiled = kernel[grid](*args, **options)
        self._in_launch = False
        placed = [self._placed(x) for x in args]
        if not _starts(compiled):
            self.steps.append(_Run(kernel[grid], placed, options))
            return
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(*placed, **{name: x for name, x in options.items() if name in signature.parameters})
        bound.apply_defaults()
        placed, places = list(bound.arguments.values()), []
        for i, x in enumerate(placed):
            if isinstance(x, (_Place, _Descriptor)):
                place, descriptor = (x, None) if isinstance(x, _Place) else (x.base, x.descriptor)
                places.append((i, place.buffer, place.offset * place.itemsize, descriptor))
        self.steps.append(_Start(compiled[(*grid, 1, 1)[:3]], placed, places))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._in_launch:
            self._note(func, args, kwargs or {}, list(found) if isinstance(found, (tuple, list)) else [found])
        return found

    def _note(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any], results: list[Any]) -> None:
        tensors = all(isinstance(x, torch.Tensor) for x in results)
        if not tensors or not _DEPENDS_ON_DATA.isdisjoint(operator.tags):
            self.why_not = f"{operator} may depend on what is in memory"
            return
        if operator in _ALLOCATIONS:
            x = results[0]
            like = dict(size=x.shape, stride=x.stride(), dtype=x.dtype, device=x.device)
            self.steps.append(_Allocate(self._add(x), like))
            return
        given = [x for x in torch.utils._pytree.tree_leaves((args, options)) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        constants = known - set(self._numbers)
        new = [x.untyped_storage()._cdata not in known for x in results]
        if not any(new) and not operator._schema.is_mutable:
            # A view.
            return
        if operator._schema.is_mutable and constants:
            self.why_not = f"{operator} may write to a constant"
        step = len(self.steps)
        placed, placed_options = self._placed(list(args)), {name: self._placed(x) for name, x in options.items()}
        if any(x is not placed_options[name] for name, x in options.items()):
            self.why_not = f"{operator} has a tensor by name"
        made = tuple(self._add(x) if is_new else None for x, is_new in zip(results, new, strict=True))
        self._last |= {buffer: step for buffer in made if buffer is not None}
        self.steps.append(_Run(operator, placed, options, made))

    def record(self, results: tuple[Any, ...]) -> _Record | str:
        """The record of a call that gave these results, or why there is none."""
        placed = [self._placed(x) for x in results]
        if not all(x is None or isinstance(x, _Place) for x in placed):
            return self.why_not or "a result is a constant"
        if self.why_not is not None:
            return self.why_not
        freed = defaultdict(list)
        for buffer, step in self._last.items():
            if buffer >= self._tensors:
                freed[step].append(buffer)
        used = [
            step for step in enumerate(self.steps) if not isinstance(step[1], _Allocate) or step[1].buffer in self._last
        ]
        steps = [(step, tuple(freed[number])) for number, step in used]
        return _Record(steps, len(self._buffers) - self._tensors, placed)


class _Record(NamedTuple):
    """Steps, each with the buffers that are free after it; how many buffers there are; and where the results are."""

    steps: list[tuple[Callable[[Memory], None], tuple[int, ...]]]
    buffers: int
    results: list[Any]

    def replay(self, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        memory: Memory = [*tensors, *[None] * self.buffers]
        for step, freed in self.steps:
            step(memory)
            for buffer in freed:
                memory[buffer] = None
        return tuple(_filled(self.results, memory))


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
            found.append(x)
    return tuple(found)


def replayed(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Record the calls of a function, and replay those that are like one before. It runs on its tensors' device.

    What the function does must follow from its arguments: sizes, strides, dtypes, the device and the alignment of
    tensors, of which the first argument is one, and hashable values. Calls with `launch_overrides` are not recorded,
    nor those whose operators give other than tensors, or tensors of sizes that depend on data.

    Args:
        function: takes positional arguments alone, and returns a tuple of tensors and None. All its launches are by
            `launch`; tensors that it neither takes nor allocates are made once (`constants.kept`).
    """
    records: dict[tuple[Any, ...], _Record | str] = {}

    @functools.wraps(function)
    def call(*args: Any) -> tuple[Any, ...]:
        with torch.cuda.device_of(args[0]):
            if _recorder.get() is not None or has_overrides() or is_checking():
                return function(*args)
            key = _key(args)
            record = records.get(key)
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if isinstance(record, _Record):
                return record.replay(tensors)
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
