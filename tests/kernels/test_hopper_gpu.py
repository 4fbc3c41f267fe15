"""The warp-specialised kernels on a Hopper GPU. Each runs in a process of its own: one that waits forever is killed."""

import json
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import json, sys, torch
from vmonarch import ExactBlocks, vmonarch_attention
from vmonarch.kernels.common.launch import launch_overrides

case = json.loads(sys.argv[1])
torch.manual_seed(0)
T, H, W = case["grid"]
query, key, value = (torch.randn(2, T * H * W, 3, case["dim"], device="cuda").to(torch.bfloat16) for _ in range(3))
attend = lambda how: vmonarch_attention(
    query, key, value, grid=(T, H, W), coarse=case["coarse"], return_lse=True, implementation=how
)
expected, expected_lse = attend("torch")
plain, plain_lse = attend("triton")
r_step = {"TMA": 1, "num_stages": 2, **case["options"]}
flash = {name: value for name, value in r_step.items() if name != "TMA"}
with launch_overrides({"r_step": r_step, "r_step_last": r_step, "flash_forward": flash}):
    hopper, hopper_lse = attend("triton")
    again, _ = attend("triton")
torch.cuda.synchronize()
error = lambda x: ((x.float() - expected.float()).norm() / expected.float().norm()).item()
print(json.dumps({"plain": error(plain), "hopper": error(hopper), "repeats": torch.equal(hopper, again),
                  "lse": (hopper_lse - expected_lse).abs().max().item()}))
"""
OPTIONS = {
    "tma": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8},
    "specialised-64": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "WARP_SPECIALIZE": 1},
    "specialised-128": {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "WARP_SPECIALIZE": 1},
    "specialised-8-warps": {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "WARP_SPECIALIZE": 1},
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("coarse", [1, 2], ids=["fine", "coarse"])
@pytest.mark.parametrize("dim", [64, 128])
def test_warp_specialised_kernels_agree(options, coarse, dim):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = {"grid": [4, 28, 52], "dim": dim, "coarse": coarse, "options": options}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(case)], capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["hopper"] <= 1.1 * found["plain"] + 1e-4 and found["lse"] < 0.05 and found["repeats"], found
