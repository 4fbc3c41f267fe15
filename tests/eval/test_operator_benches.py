"""The benchmark of attention: every way computes what it says, and a wrong one is noticed.

Kernels run through Triton's interpreter, at tiny sizes; times tell nothing of speed there.
"""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vmonarch.eval.bench import attention, kernels
from vmonarch.eval.bench.attention import sdpa
from vmonarch.eval.bench.machine import Clock
from vmonarch.eval.bench.runner import compare
from vmonarch.flops import vmonarch_work
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import interpreted

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SLOW = ("vmonarch-t3", "vmonarch-coarse2", "vmonarch-coarse2-rows", "vmonarch-torch")


@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
def test_every_way_passes_the_gate_and_spoilt_results_do_not(training, monkeypatch):
    # Without a GPU torch has neither cuDNN nor flash attention of these shapes.
    monkeypatch.setattr(kernels, "sdpa", lambda _, *qkv: sdpa("sdpa", *qkv))
    made = kernels.ways(kernels.shape_case("2x3x3:2", 16, training), CPU, torch.float32)
    assert len(made) >= 2
    for method in made.keys() - {*SLOW, "int8"}:
        way = made[method]()
        results = way.run()
        found, expected = way.found(results), way.expected()
        errors, problem = compare(found, expected, torch.float32, way.bounds)
        assert not problem and max(error["relative"] for error in errors.values()) < 1e-5, method
        assert len(found) >= 3 or not training
        way.more(Clock(CPU), row := {})
        assert 0 < row["host_ms"] < 1e5
        for part in found:
            spoilt = {key: x * 1.01 if key == part else x for key, x in found.items()}
            assert f"{part} is off by" in compare(spoilt, expected, torch.float32, way.bounds)[1]


def products(grid, d, *, num_iterations=2, coarse=1):
    """Multiply-adds × 2 of the forward pass, and of its scores alone, by counting."""
    frames, height, width = grid
    places = list(itertools.product(range(height), range(width)))
    scores = 2 * d * len(places) ** 2 * frames
    flops = 2 * scores
    for i in range(num_iterations):
        last = i == num_iterations - 1
        keys = len({(r, c) if last else (r // coarse, c // coarse) for r, c in places})
        scores += frames * 2 * d * len(places) * (keys + frames)
        flops += frames * 2 * d * len(places) * (keys * (3 if last else 2) + 2 * frames)
    return flops, scores


OPTIONS = {"plain": {}, "three iterations": {"num_iterations": 3}, "coarse": {"coarse": 2}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("grid", [(2, 4, 4), (3, 5, 3)], ids=["even", "ragged"])
def test_the_flops_are_those_that_one_counts_and_those_of_plain_torch(grid, options):
    work = vmonarch_work(LatentGrid(*grid), 8, training=True, **options)
    forward, backward = (3 * sum(n for name, n in work.items() if ("backward" in name) == b) for b in (False, True))
    flops, scores = products(grid, 8, **options)
    # Every product has two in its backward pass, which computes the scores once more.
    assert (forward, backward) == (3 * flops, 3 * (2 * flops + scores))
    if LatentGrid(*grid).tokens == 32:
        tensors = attention.randn(0, CPU, torch.float32, *[(1, 32, 3, 8)] * 3)
        with FlopCounterMode(display=False) as counter:
            kernels.vmonarch_attention(*tensors, grid=grid, implementation="torch", **options)
        assert counter.get_total_flops() == forward
