"""diffusers' context parallelism: two gloo ranks with our processors compute what one process computes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import context_parallel_worker as worker
import pytest
import torch

from vmonarch.attend import Share
from vmonarch.base import Layer
from vmonarch.call import Call
from vmonarch.context_parallel import Part, TokenSplit, balanced_heads, places_of, split_evenly
from vmonarch.grid import LatentGrid
from vmonarch.plan import AttentionPlan, method_flops
from vmonarch.processors import VMonarchProcessor

ALONE = worker.Alone()
PLAN = Path(__file__).parents[2] / "docs" / "benchmarks" / "plan-1.3b.json"


@pytest.fixture(scope="module")
def results(request, made_once, forks):
    """What every rank found, by the name of the case: of those that are to be tested."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in tests if "name" in item.callspec.params]

    def launch(folder):
        code, output = forks(folder, worker.__file__, folder, *names, processes=worker.RANKS)
        assert code == 0, output[-3000:]

    folder = made_once("context-parallel", launch)
    return [torch.load(folder / f"{rank}.pt") for rank in range(worker.RANKS)]


@pytest.mark.parametrize("name", worker.SAME)
def test_ranks_compute_what_one_process_computes(tiny, results, name):
    expected = worker.SAME[name](tiny, ALONE)
    # Where a number of a residual lies between two integers, rounding decides.
    tolerance = 1e-4 if "refresh" in name else 1e-5
    for found in (rank[name] for rank in results):
        assert not isinstance(found, str), found
        assert found.keys() == expected.keys()
        for key, wanted in expected.items():
            size = wanted.abs().max()
            assert 0 < size < torch.inf, key
            assert (found[key] - wanted).abs().max() <= tolerance * size, key


@pytest.mark.parametrize("name", worker.REFUSED)
def test_what_is_not_supported_is_refused_on_every_rank(results, name):
    for rank in results:
        assert worker.REFUSED[name][1] in rank[name]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_err_no_more_than_one_in_the_same_precision(child_environment, tmp_path):
    """By NCCL and with the kernels."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker.__file__]
    options = {"env": child_environment | {"DEVICE": "cuda"}, "capture_output": True, "text": True, "check": False}
    ended = subprocess.run([*command, str(tmp_path), "errors"], timeout=400, **options)
    assert ended.returncode == 0, ended.stderr[-4000:]
    for rank in range(worker.RANKS):
        report = torch.load(tmp_path / f"{rank}.pt")["errors"]
        assert not isinstance(report, str), report
        for model in ("wan", "hunyuan"):
            for name, error in report[model, 2].items():
                assert error <= 2 * report[model, 1][name] + 1e-3, (model, name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_every_head_is_computed_once(ranks):
    x = torch.arange(5)
    sizes = split_evenly(5, ranks)
    assert torch.equal(torch.cat([Part(places_of(sizes, rank), 5).of(x, 0) for rank in range(ranks)]), x)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0


@pytest.mark.parametrize(("ranks", "most", "bound"), [(2, 12, 1.03), (4, 12, 1.05), (4, 3, 1.13)])
def test_heads_of_a_plan_are_placed_by_their_cost(ranks, most, bound):
    """The work of the rank with the most of it over the mean, in all layers; by the numbers of the heads it is 1.74."""
    plan, grid = AttentionPlan.parse(PLAN), LatentGrid(16, 28, 52)
    slowest = total = 0.0
    for names in plan.layers["transformer"]:
        costs = [method_flops(plan.methods[name], grid, 128) for name in names]
        heads = balanced_heads(costs, ranks, most)
        assert sorted(itertools.chain(*heads)) == list(range(12)) and 0 < min(map(len, heads))
        assert max(map(len, heads)) <= most
        slowest += max(sum(costs[head] for head in own) for own in heads)
        total += sum(costs)
    assert slowest <= bound * total / ranks


def test_attention_places_the_heads_of_a_plan_by_their_cost():
    plan = AttentionPlan.parse({"format": "vmonarch-plan-1", "methods": {"t1": {"num_iterations": 1}, "full": None},
                                "layers": {"transformer": [["full", "full", "t1", "t1"]]}})  # fmt: skip
    attend = VMonarchProcessor(plan=plan).attention(Layer(SimpleNamespace(heads=4), 0, 0, 1))
    assert Share(attend)._heads_of_ranks(Call(LatentGrid(4, 4, 4)), 2, 4, 16) == ((0, 2), (1, 3))


def test_heads_that_diffusers_attention_cannot_share_are_named_before_it_runs():
    config = SimpleNamespace(ring_degree=1, ulysses_degree=8, ulysses_anything=True)
    VMonarchProcessor(dense_steps=1).check_context_parallel(config, 30)
    with pytest.raises(ValueError, match="its 12 do not divide by ulysses_degree=8; use dense_steps=0"):
        VMonarchProcessor(dense_steps=1).check_context_parallel(config, 12)


def test_ranks_with_parts_of_a_whole_sequence_take_no_mask():
    with pytest.raises(NotImplementedError, match="a mask of keys is not supported under context parallelism"):
        TokenSplit(None, 0, (3, 3)).whole_mask(torch.ones(1, 3, dtype=torch.bool))
