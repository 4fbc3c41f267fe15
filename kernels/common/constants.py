"""Tensors that are made once and kept for all later calls, such as the tables that kernels read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Constant = TypeVar("Constant")


def kept(make: Callable[Arguments, Constant]) -> Callable[Arguments, Constant]:
    """Let a function make its tensors once for the same arguments, outside of any CUDA graph and of inference mode.

    They are kept until the process ends: recorded graphs and kernels on other streams go on reading what nobody else
    refers to. So they must be small, at most a megabyte; a video shape has some of them.

    What a thread allocates while torch.compile warms up or records a CUDA graph belongs to that graph's memory, where
    nothing but outputs may stay. The function is therefore called in a thread of its own, whose work on a GPU is done
    when it returns, so that every stream may read it. What is made in inference mode, autograd refuses in training
    later.

    Args:
        make: one of its arguments is the `torch.device`; without one, its tensors are on the CPU.

    Raises:
        RuntimeError: the tensors are not there yet and a CUDA graph is being captured.
    """

    @functools.wraps(make)
    def apart(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Constant:
        if torch.compiler.is_compiling():
            # Nothing is kept: torch.compile looks through `functools.cache`.
            return make(*args, **kwargs)
        devices = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.device))
        device = next(devices, torch.device("cpu"))
        on_gpu = device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{make.__module__}.{make.__name__}: the first call of its sizes and options makes tables on the GPU,"
                " which cannot be done while a CUDA graph is captured; make one such call before the capture"
            )
        index = torch.cuda.current_device() if on_gpu and device.index is None else device.index

        # A new thread is not in inference mode, and `replay` does not see what it does.
        def work() -> Constant:
            with torch.cuda.device(index) if on_gpu else nullcontext():
                made = make(*args, **kwargs)
                if on_gpu:
                    torch.cuda.current_stream().synchronize()
                return made

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()

    return functools.cache(apart)  # type: ignore[return-value]
