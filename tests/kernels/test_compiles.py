"""Every kernel compiles for the GPUs that matter, on a machine without one: Triton brings its own assembler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")
# Bytes of a thread's registers in local memory: a few cost nothing, kilobytes do.
MAX_SPILLED = 512
# Shared memory that a program may use, in bytes: on the big chips of Hopper and Blackwell, which the tuned tables may
# count on, and on the smallest of all others (Ada, the small Ampere and Blackwell), which the default options fit.
BIG_SHARED_MEMORY = 227 * 1024
SMALLEST_SHARED_MEMORY = 99 * 1024
FIRST_FRAME = {"rows": [0], "aware": False}
CASES = {
    "paper": dict(grid=[16, 28, 52], dim=128, dtype="bfloat16", exact=FIRST_FRAME),
    "paper-64": dict(grid=[43, 28, 52], dim=64, dtype="float16", exact=FIRST_FRAME),
    "many-frames": dict(grid=[150, 9, 16], dim=128, dtype="bfloat16", exact={"rows": [0], "columns": [0]}),
    "tiles": dict(grid=[16, 45, 80], dim=128, dtype="bfloat16", tiles=[2, 2], coarse=2, exact={"band": 1}),
    "entropy-gradient": dict(
        grid=[5, 7, 9], dim=80, dtype="bfloat16", coarse=2, num_iterations=3, entropy_grad=True, exact={"band": 0}
    ),
    "wide-head": dict(grid=[16, 28, 52], dim=256, dtype="bfloat16", exact=FIRST_FRAME),
    "float32": dict(grid=[16, 28, 52], dim=128, dtype="float32", exact={"band": 0}),
}


def compile_kernels(architecture, case, folder):
    result = subprocess.run(
        [sys.executable, SCRIPT, str(architecture), json.dumps(case)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "architecture,name",
    [
        (80, "paper"),
        (89, "paper-64"),
        (90, "tiles"),
        (100, "paper"),
        (120, "paper"),
        *((90, name) for name in CASES if name != "tiles"),
    ],
    ids=lambda value: str(value),
)
def test_kernels_compile(architecture, name, tmp_path):
    kernels = compile_kernels(architecture, CASES[name], tmp_path)
    names = {kernel["kernel"] for kernel in kernels}
    assert len(names) >= 10 and {"_r_step_kernel", "_l_centroids_kernel", "_r_backward_keys_kernel"} <= names
    limit = BIG_SHARED_MEMORY if architecture == 100 else SMALLEST_SHARED_MEMORY
    assert not [kernel for kernel in kernels if kernel["shared"] > limit]
    if CASES[name]["dtype"] != "float32" and CASES[name]["dim"] <= 128:
        assert not [kernel for kernel in kernels if kernel["spilled"] > MAX_SPILLED]


@pytest.mark.parametrize("block", [64, 128])
def test_warp_specialised_kernels_compile(block, tmp_path):
    options = {"TMA": 1, "WARP_SPECIALIZE": 1, "BLOCK_M": 128, "BLOCK_N": block, "num_warps": 4, "num_stages": 2}
    flash = {name: value for name, value in options.items() if name != "TMA"}
    case = {**CASES["paper"], "overrides": {"r_step": options, "r_step_last": options, "flash_forward": flash}}
    specialised = [kernel for kernel in compile_kernels(90, case, tmp_path) if kernel["warp_specialized"]]
    assert [kernel["kernel"] for kernel in specialised] == ["_forward_kernel", "_r_step_kernel", "_r_step_kernel"]
    for kernel in specialised:
        assert kernel["spilled"] <= MAX_SPILLED and kernel["shared"] <= BIG_SHARED_MEMORY


@pytest.mark.parametrize("dim", [64, 128])
def test_backward_kernels_for_hopper_compile(dim, tmp_path):
    case = {**CASES["paper"], "dim": dim, "hopper": True}
    kernels = [kernel for kernel in compile_kernels(90, case, tmp_path) if "_hopper_" in kernel["kernel"]]
    # Two iterations and the exact part, each with one that owns keys and one that owns rows.
    assert sorted(kernel["kernel"] for kernel in kernels) == ["_hopper_keys_kernel"] * 3 + ["_hopper_rows_kernel"] * 3
    for kernel in kernels:
        assert kernel["spilled"] <= MAX_SPILLED and kernel["shared"] <= BIG_SHARED_MEMORY


def test_one_compiled_kernel_serves_all_sizes(tmp_path):
    """Sizes that are 1, odd or multiples of 16 would be compiled apart if Triton looked at them."""
    compiled = [
        {kernel["hash"] for kernel in compile_kernels(90, {**CASES["paper"], "grid": grid}, tmp_path)}
        for grid in ([16, 28, 52], [11, 12, 9])
    ]
    assert compiled[0] == compiled[1] and len(compiled[0]) >= 10
