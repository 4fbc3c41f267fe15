"""The backward kernels for Hopper, on one. Each case runs in a process of its own: one that waits forever is killed."""

import json
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import json, sys, torch
from vmonarch import (
    ExactBlocks, flash_bias_attention, flash_entropy_attention, monarch_attention, vmonarch_attention
)
from vmonarch.kernels.flash_bias import backward as bias
from vmonarch.kernels.flash_entropy import backward as flash
from vmonarch.kernels.hopper import backward as hopper_backward
from vmonarch.kernels.hopper.backward import r_step as hopper_r_step
from vmonarch.kernels.monarch import r_step

case = json.loads(sys.argv[1])
torch.manual_seed(0)
B, S, H, D = case["shape"]
shapes = [(B, S, H, D)] * 3 + [(b, S, h, case["rank"]) for b, h in case.get("factors", [])]
tensors = [torch.randn(shape, device="cuda").to(getattr(torch, case["dtype"])) for shape in shapes]
grad_out = torch.randn(B, S, H, D, device="cuda")
grad_rows = torch.randn(B, H, S, device="cuda")

def attend(how, query, key, value, *factors):
    options = dict(case["options"], implementation=how)
    if factors:
        return flash_bias_attention(query, key, value, *factors, return_lse=True, **options)
    if case["op"] == "flash":
        return flash_entropy_attention(query, key, value, **options)
    if case["op"] == "sequence":
        return monarch_attention(query, key, value, return_lse=True, **options)
    if "exact" in options:
        options["exact"] = ExactBlocks(**options["exact"])
    return vmonarch_attention(query, key, value, return_lse=True, **options)

def gradients(how, dtype=None):
    inputs = [x.to(dtype or x.dtype).requires_grad_() for x in tensors]
    out, *rows = attend(how, *inputs)
    loss = (out.float() * grad_out).sum() + sum((x * grad_rows).sum() for x in rows)
    return torch.autograd.grad(loss, inputs)

calls = []
launch = hopper_backward.launch_keys
def watched(*arguments, **options):
    calls.append(1)
    launch(*arguments, **options)
hopper_backward.launch_keys = hopper_r_step.launch_keys = watched
expected = gradients("torch", torch.float32)
hopper, again = gradients("triton"), gradients("triton")
launched = len(calls)
# Overrides are of this thread, and the backward pass runs in another.
bias.hopper_fits = flash.hopper_fits = r_step.hopper_fits = lambda *tensors: False
portable = gradients("triton")
torch.cuda.synchronize()
error = lambda found: [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected)]
print(json.dumps({"portable": error(portable), "hopper": error(hopper), "launched": launched,
                  "left": len(calls) - launched, "repeats": all(torch.equal(a, b) for a, b in zip(hopper, again))}))
"""
CASES = {
    "first-frame": dict(op="video", shape=[1, 4 * 28 * 52, 2], options=dict(grid=[4, 28, 52])),
    "small-batch": dict(op="video", shape=[2, 3 * 77, 3], options=dict(grid=[3, 7, 11], num_iterations=3)),
    "odd-frames": dict(op="video", shape=[2, 3 * 153, 2], options=dict(grid=[3, 9, 17])),
    "band": dict(op="video", shape=[1, 4 * 200, 2], options=dict(grid=[4, 10, 20], exact={"band": 0})),
    "coarse": dict(op="video", shape=[1, 4 * 28 * 52, 2], options=dict(grid=[4, 28, 52], coarse=2)),
    "coarse-3": dict(op="video", shape=[2, 3 * 180, 2], options=dict(grid=[3, 12, 15], coarse=3, num_iterations=3)),
    "odd-band": dict(op="video", shape=[1, 9 * 15, 2], options=dict(grid=[9, 3, 5], exact={"band": 1})),
    "sequence-post": dict(op="sequence", shape=[1, 1000, 2], options=dict(block_size=192)),
    "sequence-pre": dict(op="sequence", shape=[2, 1000, 2], options=dict(block_size=192, padding="pre")),
    "flash": dict(op="flash", shape=[2, 777, 3], options={}),
    "flash-entropy": dict(op="flash", shape=[1, 1999, 2], options=dict(entropy_grad=True)),
    "bias": dict(op="bias", shape=[2, 777, 3], options={}, rank=9, factors=[[1, 3], [2, 1]]),
    "bias-exact-scale": dict(op="bias", shape=[1, 1999, 2], options=dict(scale=0.125), rank=64, factors=[[1, 2]] * 2),
    "bias-one-tile": dict(op="bias", shape=[3, 33, 2], options={}, rank=24, factors=[[3, 2], [1, 1]]),
}
# Of the kernel that owns keys, in one backward pass: one for every iteration and one for the exact part, where frames
# begin at multiples of 16 bytes.
LAUNCHES = {"small-batch": 4, "coarse-3": 4}
LAUNCHES |= dict.fromkeys(("odd-band", "sequence-post", "sequence-pre"), 2)
LAUNCHES |= dict.fromkeys(("flash", "flash-entropy", "bias", "bias-exact-scale", "bias-one-tile"), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dim,dtype", [(64, "bfloat16"), (80, "bfloat16"), (128, "bfloat16"), (128, "float16")])
def test_gradients_agree(name, dim, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = {**CASES[name], "dtype": dtype}
    case["shape"] = [*case["shape"], dim]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(case)], capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["launched"] == 2 * LAUNCHES.get(name, 3) and found["left"] == 0 and found["repeats"], found
    for hopper, portable in zip(found["hopper"], found["portable"], strict=True):
        assert hopper <= 1.1 * portable + 1e-4, found
