"""What is kept for later calls is made in another thread, where no CUDA graph is recorded (GPU: test_compose.py)."""

import contextlib
import functools
import threading
from types import SimpleNamespace

import pytest
import torch

from vmonarch.kernels.common.constants import outside_of_graphs


@functools.lru_cache
@outside_of_graphs
def made_by(device, problem=None):
    if problem is not None:
        raise problem
    return threading.get_ident()


def test_on_a_gpu_another_thread_makes_it_once_and_has_finished(monkeypatch):
    seen = []
    stream = SimpleNamespace(synchronize=lambda: seen.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "device", lambda index: seen.append(index) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    thread = made_by(torch.device("cuda:1"))
    assert thread != threading.get_ident() and seen == [1, thread]
    assert made_by(torch.device("cuda:1")) == thread and len(seen) == 2
    with pytest.raises(ValueError, match="of its own"):
        made_by(torch.device("cuda:1"), ValueError("of its own"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    made_by(torch.device("cuda"))
    assert seen[3] == 3


def test_on_a_cpu_there_is_nothing_to_stay_out_of():
    assert made_by(torch.device("cpu")) == threading.get_ident()


def test_in_inference_mode_it_makes_tensors_for_training_too():
    kept = functools.lru_cache(outside_of_graphs(lambda device: torch.ones(3, device=device)))
    with torch.inference_mode():
        made = kept(torch.device("cpu"))
        assert torch.is_inference_mode_enabled()
    x = torch.ones(3, requires_grad=True)
    (made * x).sum().backward()
    assert torch.equal(x.grad, made)
