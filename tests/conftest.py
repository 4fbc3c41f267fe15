"""Fixtures of all tests.

The folders are those of the package: `processors/` and `vmonarch/` test what lies beside its packages, `cli/` the
commands from their words to their files. `support/` has tiny models (`tiny_wan.py`, `tiny_families.py`), checks that
all ops share (`op_checks.py`), and scripts that tests run in processes of their own; tests import these by name.
Nothing imports tests. Begin with `processors/test_processor.py` and `kernels/test_monarch.py`.

Tests marked `deep` take long or need other engines, those marked `gpu` a GPU. The bugs of `planted_bugs.toml`, planted
in a copy, must be found (`test_planted_bugs.py`).
"""

from __future__ import annotations

import gc
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
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock

SUPPORT = Path(__file__).with_name("support")
QUICK = Path(__file__).with_name("quick.txt")
pytest.register_assert_rewrite("op_checks")
SLOW_IMPORTS = ("torch._dynamo", "accelerate", "peft", "pyarrow.parquet", "torch.utils.tensorboard",
                "diffusers.pipelines.wan.pipeline_wan")  # fmt: skip

# Looking for garbage among all that torch and diffusers keep takes a twentieth of the time.
gc.set_threshold(50_000)

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether it runs on the CPU through the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that `quick.txt` names, the cases listed there are part of `make test`; its other cases are deep."""
    quick = {line for line in QUICK.read_text().splitlines() if not line.startswith("#")}
    named = {line.partition("[")[0] for line in quick}
    for item in items:
        if item.nodeid.partition("[")[0] in named and item.nodeid not in quick:
            item.add_marker(pytest.mark.deep)
    if any("::" in argument for argument in config.args):
        return
    found = {item.nodeid for item in items}
    files = {nodeid.partition("::")[0] for nodeid in found}
    missing = sorted(line for line in quick - found if line.partition("::")[0] in files)
    if missing:
        raise pytest.UsageError(f"{QUICK.name} names tests that there are not: {', '.join(missing)}")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Builders of tiny Wan models and pipelines; imported late, as most tests need no diffusers."""
    return importlib.import_module("tiny_wan")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """made_once(name, make): a folder that `make(folder)` has filled, once for all processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

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
def interpreter_for_tests() -> Iterator[None]:
    """Triton's interpreter in less than half its time; see `support/interpreter.py`."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from interpreter import faster

    with faster():
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


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(queries, keys, scale, causal) of the calls of a stand-in for FlashAttention-3, on the CPU."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    from vmonarch import engines

    calls: list[tuple[Any, ...]] = []

    def attend(q: Any, k: Any, v: Any, softmax_scale: Any, causal: bool, return_attn_probs: bool) -> Any:
        calls.append((q.shape[1], k.shape[1], softmax_scale, causal))
        scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) * q.shape[-1] ** -0.5
        out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.double())
        return out.to(q.dtype), scores.logsumexp(-1).float()

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(__spec__=True, flash_attn_func=attend))
    monkeypatch.setattr(engines, "on_hopper", lambda device: True)
    # diffusers forgets it afterwards.
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    return calls


@pytest.fixture(autouse=True)
def skip_without_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


class Forks:
    """A process that has imported some modules; it runs programs in forks of itself, see `support/run_in_forks.py`."""

    def __init__(self, modules: tuple[str, ...], environment: dict[str, str]) -> None:
        command = [sys.executable, "-P", str(SUPPORT / "run_in_forks.py"), *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)

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
    forks = Forks(SLOW_IMPORTS, child_environment)
    with forks.process:
        yield forks


@pytest.fixture
def dynamo():
    """torch.compile from a clean start; its counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()
