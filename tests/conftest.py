"""Fixtures of all tests."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from filelock import FileLock

SUPPORT = Path(__file__).with_name("support")

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether it runs on the CPU through the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Builders of tiny Wan models and pipelines; imported late, as most tests need no diffusers."""
    return importlib.import_module("tiny_wan")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """made_once(name, make): a folder that `make(folder)` has filled, once for all processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        path = root / name
        done = root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                make(path)
                done.touch()
        return path

    return folder


@pytest.fixture(scope="session", autouse=True)
def language_is_patched_once_for_a_kernel() -> Iterator[None]:
    """Triton's interpreter patches its language again for every call of a helper: a quarter of all its time."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", run_kernel_anew)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_helper)
        yield


@pytest.fixture(scope="session", autouse=True)
def interpreter_knows_types_it_has_seen() -> Iterator[None]:
    """Triton's interpreter makes types and shapes anew for every number: half of its time. It computes the same."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    import numpy as np
    from triton.language import core, semantic
    from triton.runtime import interpreter

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

    operators = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        # As theirs, in one operation in place of eight.
        type = lhs.type.scalar
        if type.int_bitwidth < 64:
            exact = operators[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            assert type.get_int_min_value() <= exact.min() and exact.max() <= type.get_int_max_value(), "overflow"

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = ([*x.type.shape] if x.type.is_block() else None for x in (lhs, rhs))
        return (lhs, rhs) if one == other else broadcast(self, lhs, rhs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast_unless_alike)
        patch.setattr(core.block_type, "__init__", new_block)
        patch.setattr(core.tensor, "__init__", new_tensor)
        patch.setattr(interpreter, "_get_np_dtype", known_numpy_type)
        patch.setattr(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", check_overflow)
        yield


@pytest.fixture(scope="session", autouse=True)
def conditions_of_scalars_are_conditions() -> Iterator[None]:
    """Triton's interpreter takes one that masks a vector for a number, which Triton 3.9 refuses as a mask."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.language import int1
    from triton.runtime import interpreter

    splat = interpreter.InterpreterBuilder.create_splat

    def splat_condition(self: Any, shape: Any, scalar: Any) -> Any:
        is_condition = scalar.data.dtype == bool
        return splat(self, shape, interpreter.TensorHandle(scalar.data, int1) if is_condition else scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_splat", splat_condition)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    # Tiny tensors: more threads only wait for each other, and sums in another order would not be bit-identical.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def default_attention_backend() -> Iterator[None]:
    """What a test gives a model by `set_attention_backend` is the default of all others from then on: not here."""
    yield
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


@pytest.fixture(autouse=True)
def skip_without_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


class Forks:
    """A process that has imported some modules; it runs programs in forks of itself, see `support/run_in_forks.py`."""

    def __init__(self, modules: tuple[str, ...], environment: dict[str, str]) -> None:
        command = [sys.executable, "-P", str(SUPPORT / "run_in_forks.py"), *modules]
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, folder: Path, *words: object, processes: int = 1, **environment: str) -> tuple[int, str]:
        """(exit code, what it wrote) of the module or script words[0] with the arguments after it, in `folder`."""
        self.start(folder, *words, processes=processes, **environment)
        return self.wait()

    def start(self, folder: Path, *words: object, processes: int = 1, **environment: str) -> list[int]:
        """The ids of the processes; `wait` must follow."""
        assert self.process.stdin is not None
        self.output = folder / "output.txt"
        request = [str(folder), str(self.output), [str(word) for word in words], processes, environment]
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return [int(child) for child in self._line().split()]

    def wait(self) -> tuple[int, str]:
        code, text = int(self._line()), self.output.read_text()
        self.output.unlink()
        return code, text

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that forks has ended"
        return line


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """Environment of processes that tests start: they find this package and all that this process finds."""
    import vmonarch

    path = os.pathsep.join([str(Path(vmonarch.__file__).parents[1]), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def start_forks() -> Iterator[Callable[..., Forks]]:
    """start_forks(*modules, **environment) -> Forks."""
    with ExitStack() as stack:

        def start(*modules: str, **environment: str) -> Forks:
            forks = Forks(modules, environment)
            stack.enter_context(forks.process)
            return forks

        yield start


@pytest.fixture(scope="session")
def forks(child_environment: dict[str, str]) -> Iterator[Forks]:
    """Runs programs in processes that have imported all that takes long, though nothing of ours."""
    modules = ("torch._dynamo", "accelerate", "peft", "omegaconf", "pyarrow.parquet", "torch.utils.tensorboard")
    forks = Forks((*modules, "diffusers.pipelines.wan.pipeline_wan"), child_environment)
    with forks.process:
        yield forks


@pytest.fixture
def dynamo():
    """torch.compile from a clean start; its counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()
