"""Triton's interpreter as the tests need it: it computes the same in less than half the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
from triton import knobs
from triton.language import core, int1, semantic
from triton.runtime import interpreter


@contextmanager
def faster() -> Iterator[None]:
    """The interpreter of this process, until the end; where kernels are compiled, as on a GPU, nothing changes."""
    if not knobs.runtime.interpret:
        yield
        return
    with ExitStack() as stack:
        for change in (patch_language_once, know_types, check_overflow_at_once, take_conditions_for_masks):
            for owner, name, function in change():
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


def patch_language_once() -> list[tuple[Any, str, Any]]:
    """It patches its language again for every call of a helper; here, once for a kernel."""
    patched: set[str] = set()
    run_kernel = interpreter.GridExecutor.__call__

    def run_kernel_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        run_kernel(self, *args, **kwargs)

    def call_helper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    return [
        (interpreter.GridExecutor, "__call__", run_kernel_anew),
        (interpreter.InterpretedFunction, "__call__", call_helper),
    ]


def know_types() -> list[tuple[Any, str, Any]]:
    """It makes types and shapes anew for every number; here, those of a name once."""
    make_block, make_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def new_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle)

    def known_numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    return [
        (core.block_type, "__init__", new_block),
        (core.tensor, "__init__", new_tensor),
        (interpreter, "_get_np_dtype", known_numpy_type),
    ]


def check_overflow_at_once() -> list[tuple[Any, str, Any]]:
    """It looks for overflow of integers by eight operations and says nothing; here, by numpy, and it is an error."""
    operators = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        type = lhs.type.scalar
        if type.int_bitwidth < 64:
            exact = operators[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            inside = type.get_int_min_value() <= exact.min() and exact.max() <= type.get_int_max_value()
            assert inside, f"int{type.int_bitwidth} overflow detected for operation {binary_op.__name__}"

    return [(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", check)]


def take_conditions_for_masks() -> list[tuple[Any, str, Any]]:
    """It takes the condition of a scalar that masks a vector for a number, which Triton 3.9 refuses as a mask."""
    splat = interpreter.InterpreterBuilder.create_splat

    def splat_condition(self: Any, shape: Any, scalar: Any) -> Any:
        is_condition = scalar.data.dtype == bool
        return splat(self, shape, interpreter.TensorHandle(scalar.data, int1) if is_condition else scalar)

    return [(interpreter.InterpreterBuilder, "create_splat", splat_condition)]
