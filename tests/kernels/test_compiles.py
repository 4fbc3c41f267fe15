"""Every kernel compiles for the GPUs that matter, on a machine without one: Triton brings its own assembler."""

import json
import math
import os
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


@pytest.fixture(scope="module", autouse=True)
def compiler(start_forks, tmp_path_factory):
    """Runs `compile_for_gpu.py`; what several cases share is compiled once, in whichever process of pytest-xdist."""
    global run_compiler
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    run_compiler = start_forks(str(SCRIPT), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder / "compiled"))


def compile_kernels(architecture, case, folder):
    code, output = run_compiler(folder, SCRIPT, architecture, json.dumps(case))
    assert code == 0, output[-3000:]
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


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
def test_portable_kernels_compile(architecture, name, tmp_path):
    kernels = compile_kernels(architecture, {**CASES[name], "overrides": {"hopper": {"enabled": 0}}}, tmp_path)
    names = {kernel["kernel"] for kernel in kernels}
    assert len(names) >= 10 and {"_r_step_kernel", "_l_centroids_kernel", "_r_backward_keys_kernel"} <= names
    assert not [kernel for kernel in kernels if kernel["warp_specialized"]]
    limit = BIG_SHARED_MEMORY if architecture == 100 else SMALLEST_SHARED_MEMORY
    assert not [kernel for kernel in kernels if kernel["shared"] > limit]
    if CASES[name]["dtype"] != "float32" and CASES[name]["dim"] <= 128:
        assert not [kernel for kernel in kernels if kernel["spilled"] > MAX_SPILLED]


BIAS_CASES = {
    "rank-16": dict(tokens=4096, rank=16, dim=128, dtype="bfloat16"),
    "rank-64": dict(tokens=4096, rank=64, dim=128, dtype="bfloat16"),
    "narrow-causal": dict(tokens=2048, rank=16, dim=32, dtype="float16", causal=True),
    "masked": dict(tokens=1000, rank=32, dim=64, dtype="bfloat16", masked=True),
    "wide": dict(tokens=1000, rank=256, dim=256, dtype="bfloat16"),
    "float32": dict(tokens=1000, rank=16, dim=128, dtype="float32"),
}


@pytest.mark.parametrize(
    "architecture,name",
    [(80, "rank-16"), (89, "narrow-causal"), (100, "rank-16"), (120, "rank-64"), *((90, name) for name in BIAS_CASES)],
    ids=lambda value: str(value),
)
def test_kernels_with_a_bias_compile(architecture, name, tmp_path):
    kernels = compile_kernels(architecture, {**BIAS_CASES[name], "overrides": {"hopper": {"enabled": 0}}}, tmp_path)
    assert {kernel["kernel"] for kernel in kernels} == {
        "_flash_bias_kernel", "_flash_bias_rows_kernel", "_flash_bias_keys_kernel"
    }  # fmt: skip
    limit = BIG_SHARED_MEMORY if architecture == 100 else SMALLEST_SHARED_MEMORY
    assert not [kernel for kernel in kernels if kernel["shared"] > limit]
    if BIAS_CASES[name]["dtype"] != "float32" and BIAS_CASES[name]["dim"] <= 128:
        assert not [kernel for kernel in kernels if kernel["spilled"] > MAX_SPILLED]


@pytest.mark.parametrize(
    "name,options,kernels",
    [
        ("rank-16", {}, ["flash", "rows", "keys"]),
        ("rank-64", {}, ["flash", "rows", "keys"]),
        ("rank-64", {"dim": 64, "scale": 0.125}, ["flash", "rows", "keys"]),
        ("narrow-causal", {}, ["flash"]),
    ],
)
def test_hopper_kernels_with_a_bias_compile(name, options, kernels, tmp_path):
    """Without spills inside the loops, and with products that run while the same warps do other things."""
    found = [k for k in compile_kernels(90, {**BIAS_CASES[name], **options}, tmp_path) if k["warp_specialized"]]
    assert [kernel["kernel"] for kernel in found] == [f"_hopper_{kernel}_kernel" for kernel in kernels]
    for kernel in found:
        assert not kernel["serialized"] and kernel["shared"] <= BIG_SHARED_MEMORY, kernel
        # The kernel that owns keys spills what it needs before and after its loop.
        assert kernel["spilled"] <= (MAX_SPILLED if kernel["kernel"] == "_hopper_keys_kernel" else 0), kernel


LINEAR_CASES = {
    "taylor": dict(tokens=4096, dim=16, width=64, dtype="bfloat16"),
    "taylor-causal": dict(tokens=4096, dim=16, width=128, dtype="float16", causal=True),
    "taylor-wide": dict(tokens=4096, dim=32, width=64, dtype="bfloat16", causal=True),
    "features": dict(tokens=4096, dim=64, width=64, dtype="bfloat16", causal=True, taylor=False),
    "float32": dict(tokens=4096, dim=16, width=64, dtype="float32", causal=True),
}


@pytest.mark.parametrize(
    "architecture,name",
    [(80, "taylor-causal"), (89, "taylor"), (100, "taylor"), (120, "features"), *((90, name) for name in LINEAR_CASES)],
    ids=lambda value: str(value),
)
def test_kernels_of_linear_attention_compile(architecture, name, tmp_path):
    kernels = compile_kernels(architecture, {**LINEAR_CASES[name], "overrides": {"hopper": {"enabled": 0}}}, tmp_path)
    forward, backward = ["state", "read"], ["prepare", "state", "state", "gradient", "gradient", "read"]
    assert [kernel["kernel"].removesuffix("_kernel") for kernel in kernels] == forward + backward
    assert not [kernel for kernel in kernels if kernel["shared"] > SMALLEST_SHARED_MEMORY]
    if LINEAR_CASES[name]["dtype"] != "float32":
        assert not [kernel for kernel in kernels if kernel["spilled"] > MAX_SPILLED]


@pytest.mark.parametrize(("width", "dtype"), [(64, "float16"), (128, "bfloat16")])
def test_hopper_kernels_of_linear_attention_compile(width, dtype, tmp_path):
    """Without spills, small enough for two programs on a processor, with products that run beside other things."""
    kernels = compile_kernels(90, {**LINEAR_CASES["taylor"], "width": width, "dtype": dtype}, tmp_path)
    kernels = [kernel for kernel in kernels if kernel["kernel"] != "prepare_kernel"]
    assert [kernel["kernel"] for kernel in kernels] == [
        f"_hopper_{name}_kernel" for name in ("state", "read", "state", "state", "gradient", "gradient", "read")
    ]
    for kernel in kernels:
        # The units of float16 take some registers.
        assert not kernel["serialized"] and kernel["spilled"] <= (64 if dtype == "float16" else 0), kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY // 2, kernel


WINDOW_CASES = {
    "sequence": dict(grid=[1, 1, 4096], window=[0, 0, 63], dim=64, dtype="bfloat16"),
    "video": dict(grid=[16, 28, 52], window=[1, 4, 4], dim=128, dtype="float16"),
    "wide": dict(grid=[16, 28, 52], window=[1, 4, 4], dim=256, dtype="bfloat16"),
    "float32": dict(grid=[16, 28, 52], window=[1, 4, 4], dim=128, dtype="float32"),
}


@pytest.mark.parametrize(
    "architecture,name",
    [(80, "video"), (89, "sequence"), (100, "video"), (120, "sequence"), *((90, name) for name in WINDOW_CASES)],
    ids=lambda value: str(value),
)
def test_kernels_of_window_attention_compile(architecture, name, tmp_path):
    kernels = compile_kernels(architecture, WINDOW_CASES[name], tmp_path)
    assert [kernel["kernel"] for kernel in kernels] == ["window_kernel", "window_rows_kernel", "window_keys_kernel"]
    assert not [kernel for kernel in kernels if kernel["shared"] > SMALLEST_SHARED_MEMORY]
    if WINDOW_CASES[name]["dtype"] != "float32" and WINDOW_CASES[name]["dim"] <= 128:
        assert not [kernel for kernel in kernels if kernel["spilled"] > MAX_SPILLED]


@pytest.mark.parametrize(
    "architecture,channels,dtype",
    [
        (80, 1536, "bfloat16"),
        *((90, channels, "bfloat16") for channels in (1536, 5120)),
        (90, 16384, "float32"),
        (100, 5120, "bfloat16"),
        (120, 1536, "bfloat16"),
    ],
)
def test_norm_and_rotary_embedding_compile(architecture, channels, dtype, tmp_path):
    case = {"tokens": 4096, "channels": channels, "dim": 128, "dtype": dtype}
    kernels = compile_kernels(architecture, case, tmp_path)
    assert [kernel["kernel"] for kernel in kernels] == ["norm_rotary_kernel", "norm_rotary_backward_kernel"]
    assert not [kernel for kernel in kernels if kernel["shared"] > SMALLEST_SHARED_MEMORY]
    # The most channels do not fit the registers of a program: slower, not wrong.
    assert not [kernel for kernel in kernels if kernel["spilled"] > (MAX_SPILLED if channels > 5120 else 0)]
    if architecture == 80:
        other = compile_kernels(architecture, {**case, "tokens": 999}, tmp_path)
        assert [kernel["hash"] for kernel in other] == [kernel["hash"] for kernel in kernels]


@pytest.mark.parametrize("name", ["paper", "paper-64", "tiles", "entropy-gradient"])
def test_hopper_kernels_compile(name, tmp_path):
    """Without spills, and with products that run while the same warps do other things."""
    kernels = [kernel for kernel in compile_kernels(90, CASES[name], tmp_path) if kernel["warp_specialized"]]
    backward = [kernel for kernel in kernels if kernel["kernel"] in ("_hopper_keys_kernel", "_hopper_rows_kernel")]
    assert {"_hopper_flash_kernel", "_hopper_r_step_kernel"} <= {kernel["kernel"] for kernel in kernels}
    steps = [kernel["options"] for kernel in kernels if kernel["kernel"] == "_hopper_r_step_kernel"]
    assert [step["LAST"] for step in steps] == [False] * (CASES[name].get("num_iterations", 2) - 1) + [True]
    assert steps[0]["KEYS_ARE_BLOCKS"] == ("coarse" in CASES[name] or "tiles" in CASES[name])
    for kernel in kernels:
        # Two sums, scores and their gradient leave no registers in the kernel that owns keys.
        spilled = MAX_SPILLED if kernel in backward else 0
        assert not kernel["serialized"] and kernel["spilled"] <= spilled, kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY, kernel
    # Plain R-steps and, where frames begin at multiples of 16 bytes, the exact part: one that owns keys, one for rows.
    plain = 0 if "tiles" in CASES[name] else 1 if "coarse" in CASES[name] else 2
    exact = math.prod(CASES[name]["grid"][1:]) % 4 == 0
    assert len(backward) == 2 * (plain + exact)


@pytest.mark.parametrize("row", [20, 32])
@pytest.mark.parametrize("tiling", [{}, {"coarse": 2}, {"tiles": [1, 3]}], ids=["plain", "coarse", "tiles"])
def test_rows_that_are_no_multiple_of_16_bytes_are_launched(row, tiling, tmp_path):
    """Those of the inputs may be, 32 numbers apart where 20 count; those between the stages never are."""
    case = {**CASES["paper"], "dim": 20, "row": row, "num_iterations": 3, "compile": False, **tiling}
    kernels = [kernel["kernel"] for kernel in compile_kernels(90, {**case, "grid": [24, 7, 9]}, tmp_path)]
    assert kernels.count("_r_step_kernel") == 3 and "_pack_kernel" not in kernels
    assert ("_hopper_flash_kernel" in kernels) is (row == 32)


@pytest.mark.parametrize("frames,kernels", [(24, ["centroids", "output"]), (81, ["output"])])
def test_hopper_l_steps_compile(frames, kernels, tmp_path):
    """Without spills: two positions to a tile, and half of one."""
    case = {**CASES["paper"], "grid": [frames, 28, 52]}
    found = [kernel for kernel in compile_kernels(90, case, tmp_path) if kernel["kernel"].startswith("_hopper_l_")]
    assert [kernel["kernel"] for kernel in found] == [f"_hopper_l_{name}_kernel" for name in kernels]
    for kernel in found:
        assert not kernel["serialized"] and kernel["spilled"] == 0 and kernel["shared"] <= BIG_SHARED_MEMORY, kernel


def test_one_compiled_kernel_serves_all_sizes(tmp_path):
    """Sizes that are 1, odd or multiples of 16 would be compiled apart if Triton looked at them.

    Only for Hopper it matters how many keys of a block are left after the last whole tile: none to 64, or more.
    """
    compiled = [
        {kernel["hash"] for kernel in compile_kernels(90, {**CASES["paper"], "grid": grid}, tmp_path)}
        for grid in ([24, 28, 52], [19, 12, 15])
    ]
    assert compiled[0] == compiled[1] and len(compiled[0]) >= 10
