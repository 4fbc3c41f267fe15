"""What is made once for later calls: where, for how long, and what CUDA graphs and streams may rely on."""

import contextlib
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from vmonarch import ExactBlocks, vmonarch_attention
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.constants import kept
from vmonarch.kernels.two_resolution.tiling import tile_layout, tiling_of
from vmonarch.options import TwoResolutionOptions

CPU = torch.device("cpu")
BAND = ExactBlocks(band=1)


@kept
def made_by(device, problem=None):
    if problem is not None:
        raise problem
    return threading.get_ident()


@pytest.fixture
def gpu(monkeypatch):
    """As if there was a GPU: the devices that work was done on, and the threads that waited for it."""
    seen = []
    stream = SimpleNamespace(synchronize=lambda: seen.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "device", lambda index: seen.append(index) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    yield seen
    made_by.cache_clear()


def test_on_a_gpu_another_thread_makes_it_once_and_has_finished(gpu):
    thread = made_by(torch.device("cuda:1"))
    assert thread != threading.get_ident() and gpu == [1, thread]
    assert made_by(torch.device("cuda:1")) == thread and len(gpu) == 2
    with pytest.raises(ValueError, match="of its own"):
        made_by(torch.device("cuda:1"), ValueError("of its own"))
    made_by(torch.device("cuda"))
    assert gpu[3] == 3


def test_a_capture_finds_what_is_there_and_is_told_to_warm_up_for_the_rest(gpu, monkeypatch):
    thread = made_by(torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert made_by(torch.device("cuda:1")) == thread
    with pytest.raises(RuntimeError, match="made_by: the first call .* make one such call before the capture"):
        made_by(torch.device("cuda:0"))
    assert len(gpu) == 2
    # Nothing of the failure is kept.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert made_by(torch.device("cuda:0")) != threading.get_ident()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_inference_mode_it_makes_tensors_for_training_too(device):
    made_for_all = kept(lambda device: torch.ones(3, device=device))
    with torch.inference_mode():
        made = made_for_all(torch.device(device))
        assert torch.is_inference_mode_enabled()
    x = torch.ones(3, device=device, requires_grad=True)
    (made * x).sum().backward()
    assert torch.equal(x.grad, made)


def test_what_grows_with_the_tokens_is_not_kept():
    layout = tile_layout(tiling_of(LatentGrid(1, 3, 4), TwoResolutionOptions()), CPU)
    kept_by_others = weakref.ref(layout.index)
    del layout
    assert kept_by_others() is None


# --- On a GPU. ---


def attend(grid, tensors, exact=BAND):
    with torch.no_grad():
        return vmonarch_attention(*tensors, grid=grid, exact=exact, implementation="triton", return_lse=True)


def qkv(grid, dim=64):
    tokens = grid[0] * grid[1] * grid[2]
    return torch.randn(3, 1, tokens, 2, dim, device="cuda", dtype=torch.bfloat16).unbind(0)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", ["first_frame", BAND], ids=["first-frame", "band"])
def test_a_graph_is_replayed_after_200_other_shapes(exact):
    grid = (5, 9, 17)
    tensors = qkv(grid)
    attend(grid, tensors, exact)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(grid, tensors, exact)
    for n in range(200):
        other = (3 + n % 4, 2 + n // 4, 3)
        attend(other, qkv(other), exact)
        # Whatever was freed is somebody else's now.
        torch.full((1 << 14,), -1, dtype=torch.int32, device="cuda")
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for result, expected in zip(results, attend(grid, tensors, exact), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.gpu
def test_a_table_made_on_one_stream_is_ready_on_others():
    grid = (5, 11, 13)
    tensors = qkv(grid)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # The default stream is busy while the side stream makes the tables, and the other way round.
    torch.cuda._sleep(1 << 28)
    with torch.cuda.stream(side):
        first = attend(grid, tensors)
        torch.cuda._sleep(1 << 28)
        again = attend(grid, tensors)
    default = attend(grid, tensors)
    torch.cuda.synchronize()
    for a, b, c in zip(first, again, default, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
