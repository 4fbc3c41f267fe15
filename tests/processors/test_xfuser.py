"""xfuser: two ranks of it with our backend, or our processors, compute what one process of diffusers computes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import xfuser_worker as worker
from op_checks import refuses

from vmonarch import BasedProcessor, LatentGrid, VMonarchProcessor, engines
from vmonarch.xfuser import register

needs_xfuser = pytest.mark.skipif(
    importlib.util.find_spec("xfuser") is None, reason="needs xfuser: pip install 'xfuser>=0.7,<0.8'"
)
two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# Of the largest number, in the norm. On GPUs everything is in bfloat16, and matrix products have other shapes.
TOLERANCE = {"cpu": 1e-5, "cuda": 5e-2}


@pytest.fixture(scope="module")
def results(request, made_once, forks, child_environment):
    """What every rank found on a device, by the name of the case: of those that are to be tested."""

    def run(device):
        own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
        names = [item.callspec.params["name"] for item in own if item.callspec.params.get("device") == device]

        def launch(folder):
            words = [worker.__file__, device, str(folder), *names]
            if device == "cpu":
                code, output = forks(folder, *words, processes=worker.RANKS)
            else:
                options = {"env": child_environment, "capture_output": True, "text": True, "check": False}
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
                ended = subprocess.run([*launch, str(worker.RANKS), *words], timeout=620, **options)
                code, output = ended.returncode, ended.stderr
            assert code == 0, output[-3000:]

        folder = made_once(f"xfuser-{device}", launch)
        return [torch.load(folder / f"{rank}.pt") for rank in range(worker.RANKS)]

    return run


@needs_xfuser
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
@pytest.mark.parametrize("name", worker.SAME)
def test_ranks_compute_what_one_process_computes(tiny, results, device, name):
    expected = worker.SAME[name](tiny, worker.Alone(device))
    size = expected.norm()
    assert 0 < size < torch.inf
    # In bfloat16, products of other shapes round differently; and in int8, numbers between two integers.
    tolerance = max(TOLERANCE[device], 1e-4 if "refresh" in name else 0)
    for rank in results(device):
        assert not isinstance(rank[name], str), rank[name]
        assert rank[name].shape == expected.shape
        assert (rank[name] - expected).norm() <= tolerance * size


@needs_xfuser
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
@pytest.mark.parametrize("name", worker.REFUSED)
def test_what_is_not_supported_is_refused_on_every_rank(results, device, name):
    for rank in results(device):
        assert worker.REFUSED[name][1] in rank[name]


test_what_is_told_neither_layer_nor_step_is_refused = refuses({
    "dense-steps": (
        lambda: register(VMonarchProcessor(dense_steps=2)), ValueError, "dense_steps must be 0 .*hybrid schedule"),
    "plan": (lambda: register(VMonarchProcessor(plan=worker.parts.PLAN)), ValueError, "plan must be None"),
    "based": (lambda: register(BasedProcessor()), TypeError, "processor must be a VMonarchProcessor or FlashBiasPro"),
})  # fmt: skip


def test_why_xfuser_cannot_be_imported():
    with pytest.raises(ImportError, match="xfuser cannot be imported: No module .*; supported is xfuser>=0"):
        engines.import_xfuser("vmonarch.no_such_module")


def test_the_last_ranks_of_a_padded_video_hold_less(monkeypatch):
    grid, groups = LatentGrid(3, 2, 3), SimpleNamespace(get_sp_group=lambda: SimpleNamespace(ulysses_group=None))
    monkeypatch.setattr(engines, "import_xfuser", lambda name: groups)
    for ranks, tokens, held in ((4, 5, (5, 5, 5, 3)), (7, 3, (3, 3, 3, 3, 3, 3, 0)), (2, 9, (9, 9))):
        monkeypatch.setattr(engines, "ulysses_rank", lambda groups, ranks=ranks: (ranks, 1))
        split = engines.split_video(grid, tokens)
        assert split.tokens == held and split.rank == 1
        with pytest.raises(ValueError, match=rf"has 18 tokens, but xfuser's .* given {tokens + 1} on each of {ranks}"):
            engines.split_video(grid, tokens + 1)
