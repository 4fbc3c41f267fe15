"""Context parallelism on two GPUs, by NCCL and with the kernels: errors are those of one GPU in the same precision."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """By rank, by model, by the number of ranks, by tensor."""
    folder = tmp_path_factory.mktemp("gpus")
    script = str(Path(__file__).parents[1] / "support" / "context_parallel_gpus.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launcher, script, str(folder), "cuda"], capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("model", ["wan", "hunyuan"])
def test_two_gpus_err_no_more_than_one(errors, model):
    for report in errors:
        for name, error in report[model]["2"].items():
            assert error <= 2 * report[model]["1"][name] + 1e-3, name
