"""Tensors that are made once and kept for later calls, such as the tables that kernels read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Constant = TypeVar("Constant")


def outside_of_graphs(make: Callable[Arguments, Constant]) -> Callable[Arguments, Constant]:
    """Let a function whose result is kept make its tensors outside of any CUDA graph and of inference mode.

    What a thread allocates while torch.compile warms up or records a CUDA graph belongs to that graph's memory, where
    nothing but outputs may stay. On a GPU the function is therefore called in a thread of its own, whose work there is
    done when it returns. What is made in inference mode, autograd refuses in training later. To be used below
    `functools.lru_cache`, by every function that keeps tensors.

    Args:
        make: one of its arguments is the `torch.device`; without one, its tensors are on the CPU.
    """

    @functools.wraps(make)
    def apart(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Constant:
        if torch.compiler.is_compiling():
            # Nothing is kept: torch.compile looks through `functools.lru_cache`.
            return make(*args, **kwargs)
        devices = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.device))
        device = next(devices, torch.device("cpu"))
        if device.type != "cuda":
            with torch.inference_mode(False):
                return make(*args, **kwargs)
        index = torch.cuda.current_device() if device.index is None else device.index

        # A new thread is not in inference mode.
        def work() -> Constant:
            with torch.cuda.device(index):
                made = make(*args, **kwargs)
                torch.cuda.current_stream().synchronize()
                return made

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()

    return apart
