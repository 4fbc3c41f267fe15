"""Fixtures of all tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether it runs on the CPU through the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Builders of tiny Wan models and pipelines; see `tests/processors/tiny_wan.py`."""
    spec = importlib.util.spec_from_file_location("tiny_wan", Path(__file__).with_name("processors") / "tiny_wan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    # Tiny tensors: more threads only wait for each other, and sums in another order would not be bit-identical.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def skip_without_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
