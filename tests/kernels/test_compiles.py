"""Every kernel compiles for the GPUs that matter, on a machine without one: Triton brings its own assembler.

COMPILE_WITH_TRITON=3.8.0 compiles with that version of Triton in place of the environment's own; `make test-deep` does
so with the oldest and the newest of the tested ones, and compiles the cases that are marked deep, too: kernels that
other cases have, with other sizes and types.
"""

import functools
import itertools
import json
import math
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "compile_for_gpu.py"
TRITON = os.environ.get("COMPILE_WITH_TRITON", version("triton"))
deep = functools.partial(pytest.param, marks=pytest.mark.deep)
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
    "values-alone": dict(grid=[43, 28, 52], dim=128, dtype="bfloat16", exact=FIRST_FRAME, last_l_update=False),
    "wide-head": dict(grid=[16, 28, 52], dim=256, dtype="bfloat16", exact=FIRST_FRAME),
    "float32": dict(grid=[16, 28, 52], dim=128, dtype="float32", exact={"band": 0}),
    "narrow-values": dict(grid=[8, 6, 11], dim=64, value_dim=32, dtype="bfloat16", exact=FIRST_FRAME),
}


# What kernels for Hopper spill that are to spill nothing, in bytes, by version of Triton and kernel.
KNOWN_SPILLS = {
    ("3.6.0", "_hopper_state_kernel"): 36,
    # Of float16.
    ("3.7.1", "_hopper_state_kernel"): 88,
    ("3.7.1", "_hopper_rows_kernel"): 12,
    ("3.9.0", "_hopper_rows_kernel"): 12,
    # Where keys stand for unequal numbers of keys (coarse, and cells that are not all full): places of columns.
    ("3.9.0", "_hopper_r_step_kernel"): 256,
}


# What portable kernels spill beyond MAX_SPILLED, in bytes, by version of Triton, architecture and kernel: they are slow
# there, not wrong.
KNOWN_PORTABLE_SPILLS = {
    ("3.7.1", 89, "_l_backward_rows_kernel"): 732,
    ("3.7.1", 120, "_flash_bias_keys_kernel"): 532,
    ("3.9.0", 89, "_l_backward_rows_kernel"): 1268,
    ("3.9.0", 120, "_flash_bias_keys_kernel"): 692,
}


@pytest.fixture(scope="module")
def compiler(start_forks, tmp_path_factory):
    """What runs `compile_for_gpu.py`; what cases share is compiled once, in whichever process of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    paths = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    if version("triton") != TRITON:
        folder = Path(sys.prefix) / f"triton-{TRITON}"
        if not folder.is_dir():
            command = f"pip install --no-deps --target {folder} triton=={TRITON}"
            pytest.fail(f"no Triton {TRITON} to compile with: `make test-deep` installs it, or {command}")
        paths.insert(0, str(folder))
    cache = str(base / "compiled")
    return start_forks(str(SCRIPT), PYTHONPATH=os.pathsep.join(paths), TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache)


@pytest.fixture
def compile_kernels(compiler, tmp_path):
    """compile_kernels(architecture, case): what was compiled, in the order of the launches."""

    def compiled(architecture, case):
        code, output = compiler(tmp_path, SCRIPT, architecture, json.dumps({**case, "triton": TRITON}))
        assert code == 0, output[-3000:]
        kernels = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert not [kernel for kernel in kernels if kernel.get("unwritten")]
        return [{**kernel, "allowed": KNOWN_SPILLS.get((TRITON, kernel["kernel"]), 0)} for kernel in kernels]

    return compiled


def spilling(kernels: list[dict], architecture: int) -> dict[str, int]:
    """Bytes that portable kernels spill at most, of those that spill more than they may."""
    allowed = lambda kernel: KNOWN_PORTABLE_SPILLS.get((TRITON, architecture, kernel["kernel"]), MAX_SPILLED)
    beyond = [kernel for kernel in kernels if kernel["spilled"] > allowed(kernel)]
    return {kernel["kernel"]: kernel["spilled"] for kernel in sorted(beyond, key=lambda kernel: kernel["spilled"])}


@pytest.mark.parametrize(
    "architecture,name",
    [
        *((80, "paper"), (89, "tiles"), (90, "many-frames"), (100, "paper"), (120, "narrow-values")),
        *(deep(90, name) for name in ("entropy-gradient", "wide-head", "float32")),
    ],
)
def test_portable_kernels_compile(architecture, name, compile_kernels):
    kernels = compile_kernels(architecture, {**CASES[name], "overrides": {"hopper": {"enabled": 0}}})
    names = {kernel["kernel"] for kernel in kernels}
    assert len(names) >= 10 and {"_r_step_kernel", "_l_centroids_kernel", "_r_backward_keys_kernel"} <= names
    assert not [kernel for kernel in kernels if kernel["warp_specialized"]]
    limit = BIG_SHARED_MEMORY if architecture == 100 else SMALLEST_SHARED_MEMORY
    assert not [kernel for kernel in kernels if kernel["shared"] > limit]
    if CASES[name]["dtype"] != "float32" and CASES[name]["dim"] <= 128:
        assert not spilling(kernels, architecture)


BIAS_CASES = {
    "rank-16": dict(tokens=4096, rank=16, dim=128, dtype="bfloat16"),
    "rank-64": dict(tokens=4096, rank=64, dim=128, dtype="bfloat16"),
    "narrow-causal": dict(tokens=2048, rank=16, dim=32, dtype="float16", causal=True),
    "masked": dict(tokens=1000, rank=32, dim=64, dtype="bfloat16", masked=True),
    "wide": dict(tokens=1000, rank=256, dim=256, dtype="bfloat16"),
    "float32": dict(tokens=1000, rank=16, dim=128, dtype="float32"),
}
LINEAR_CASES = {
    "taylor": dict(tokens=4096, dim=16, width=64, dtype="bfloat16"),
    "taylor-causal": dict(tokens=4096, dim=16, width=128, dtype="float16", causal=True),
    "taylor-wide": dict(tokens=4096, dim=32, width=64, dtype="bfloat16", causal=True),
    "features": dict(tokens=4096, dim=64, width=64, dtype="bfloat16", causal=True, taylor=False),
    "float32": dict(tokens=4096, dim=16, width=64, dtype="float32", causal=True),
}
WINDOW_CASES = {
    "sequence": dict(grid=[1, 1, 4096], window=[0, 0, 63], dim=64, dtype="bfloat16"),
    "video": dict(grid=[16, 28, 52], window=[1, 4, 4], dim=128, dtype="float16"),
    "wide": dict(grid=[16, 28, 52], window=[1, 4, 4], dim=256, dtype="bfloat16"),
    "float32": dict(grid=[16, 28, 52], window=[1, 4, 4], dim=128, dtype="float32"),
}
TWO_RESOLUTION_CASES = {
    "full": dict(grid=[16, 28, 52], tile=[4, 4, 4], dim=128, dtype="bfloat16"),
    "ragged": dict(grid=[43, 45, 52], tile=[4, 4, 4], cell=[4, 2, 2], dim=128, dtype="float16", masked=True),
    "r-step": dict(grid=[1, 28, 52], tile=[1, 8, 8], cell=[1, 4, 4], dim=128, dtype="bfloat16", r_step=True),
    "wide": dict(grid=[16, 28, 52], tile=[2, 4, 4], dim=256, dtype="bfloat16"),
    "float32": dict(grid=[16, 28, 52], tile=[2, 4, 4], dim=128, dtype="float32"),
}
NORM_CASES = {
    f"{channels}-{dtype}": dict(tokens=4096, channels=channels, dim=128, dtype=dtype)
    for channels, dtype in ((1536, "bfloat16"), (5120, "bfloat16"), (16384, "float32"))
}
RESIDUAL_CASES = {
    f"{dim}-{dtype}-{residual}": dict(tokens=4096, dim=dim, dtype=dtype, residual=residual)
    for dim, dtype, residual in (
        (128, "bfloat16", "int8"), (64, "float16", "bfloat16"), (256, "float32", "bfloat16"),
        (128, "bfloat16", "bfloat16"), (80, "float16", "int8"))
}  # fmt: skip
MERGE_CASES = {
    f"{dim}-{dtype}": dict(tokens=4096, dim=dim, dtype=dtype, merge=True)
    for dim, dtype in ((128, "bfloat16"), (80, "float16"), (256, "float32"))
}
# family -> (its cases, those of other architectures than Hopper, those of Hopper, kernels in the order of launches, of
# which several of one kind may follow each other)
FAMILIES = {
    "norm": (
        NORM_CASES, {80: "1536-bfloat16", 100: "5120-bfloat16"}, NORM_CASES,
        "norm_rotary norm_rotary_backward"),
    "bias": (
        BIAS_CASES, {89: "narrow-causal", 100: "rank-16", 120: "rank-64"}, BIAS_CASES,
        "flash_bias flash_bias_rows flash_bias_keys"),
    "linear": (
        LINEAR_CASES, {80: "taylor-causal", 120: "features"}, LINEAR_CASES,
        "state read prepare state gradient read"),
    "window": (
        WINDOW_CASES, {89: "sequence", 100: "video"}, WINDOW_CASES,
        "window window_rows window_keys"),
    "two resolutions": (
        TWO_RESOLUTION_CASES, {80: "full", 89: "r-step", 100: "full", 120: "ragged"}, TWO_RESOLUTION_CASES,
        "means best lists two_resolution lists two_resolution_rows two_resolution_cells lists two_resolution_keys"),
    "residual": (
        RESIDUAL_CASES, {80: "64-float16-bfloat16", 89: "80-float16-int8", 120: "128-bfloat16-bfloat16"},
        ["128-bfloat16-int8", "256-float32-bfloat16"],
        "attention_residual add_residual"),
    "merge": (
        MERGE_CASES, {80: "80-float16", 100: "128-bfloat16"}, ["256-float32"],
        "merge merge_backward"),
}  # fmt: skip
OF_FAMILIES = [
    *((*case, family) for family, (_, others, _, _) in FAMILIES.items() for case in others.items()),
    *((90, next(iter(hopper)), family) for family, (_, _, hopper, _) in FAMILIES.items()),
    *(deep(90, name, family) for family, (_, _, hopper, _) in FAMILIES.items() for name in list(hopper)[1:]),
]


def hashes_of(tokens, case, compile_kernels):
    """Of the kernels that a call with so many tokens takes."""
    return [kernel["hash"] for kernel in compile_kernels(80, {**case, "compile": False, "tokens": tokens})]


@pytest.mark.parametrize("architecture,name,family", OF_FAMILIES)
def test_portable_kernels_of_a_family_compile(architecture, name, family, compile_kernels):
    cases, _, _, launches = FAMILIES[family]
    case = cases[name]
    hopper = family in ("bias", "linear", "two resolutions")
    overrides = {"overrides": {"hopper": {"enabled": 0}}} if hopper else {}
    kernels = compile_kernels(architecture, {**case, **overrides})
    names = [kernel["kernel"].strip("_").removesuffix("_kernel") for kernel in kernels]
    assert [name for name, _ in itertools.groupby(names)] == launches.split()
    on_big = architecture == 100 and family in ("bias", "two resolutions")
    limit = BIG_SHARED_MEMORY if on_big else SMALLEST_SHARED_MEMORY
    assert not [kernel for kernel in kernels if kernel["shared"] > limit]
    # The most channels of a norm do not fit the registers of a program: slower, not wrong.
    by_row = family in ("residual", "merge") or family == "norm" and case["channels"] <= 5120
    if by_row:
        assert not [kernel for kernel in kernels if kernel["spilled"] > 0]
    elif family == "norm" or case["dtype"] != "float32" and case["dim"] <= 128:
        assert not spilling(kernels, architecture)
    if family in ("norm", "residual", "merge") and architecture == 80:
        assert hashes_of(4096, case, compile_kernels) == hashes_of(999, case, compile_kernels)


@pytest.mark.parametrize(
    "name,options,kernels",
    [
        ("rank-16", {}, ["flash", "rows", "keys"]),
        deep("rank-64", {}, ["flash", "rows", "keys"]),
        deep("rank-64", {"dim": 64, "scale": 0.125}, ["flash", "rows", "keys"]),
        deep("narrow-causal", {}, ["flash"]),
    ],
)
def test_hopper_kernels_with_a_bias_compile(name, options, kernels, compile_kernels):
    """Without spills inside the loops, and with products that run while the same warps do other things."""
    found = compile_kernels(90, {**BIAS_CASES[name], **options, "only": "_hopper_"})
    assert [kernel["kernel"] for kernel in found] == [f"_hopper_{kernel}_kernel" for kernel in kernels]
    for kernel in found:
        assert not kernel["serialized"] and kernel["shared"] <= BIG_SHARED_MEMORY, kernel
        # The kernel that owns keys spills what it needs before and after its loop.
        spilled = MAX_SPILLED if kernel["kernel"] == "_hopper_keys_kernel" else kernel["allowed"]
        assert kernel["spilled"] <= spilled, kernel


@pytest.mark.parametrize(
    "options",
    [
        {},
        deep({"grid": [4, 28, 52], "exact_tiles": 300}),
        deep({"cell": [4, 2, 2], "grid": [43, 45, 52]}),
        deep({"tile": [1, 4, 4], "dim": 64}),
        deep({"grid": [43, 45, 52], "rest": False, "dtype": "float16"}),
        TWO_RESOLUTION_CASES["r-step"],
    ],
    ids=["full", "parts", "cells", "small-tiles", "ragged", "r-step"],
)
def test_hopper_kernels_of_two_resolutions_compile(options, compile_kernels):
    case = {**TWO_RESOLUTION_CASES["full"], **options, "only": "_hopper_"}
    kernels = compile_kernels(90, case)
    # Backward they take tiles of 64 keys and one mean.
    parts = ["", "_queries", "_keys"] if case["tile"] == [4, 4, 4] and "cell" not in case else [""]
    assert [kernel["kernel"] for kernel in kernels] == [f"_hopper_two_resolution{part}_kernel" for part in parts]
    for kernel in kernels:
        assert (kernel["options"].get("PARTS", 1) > 1) is ("exact_tiles" in case and "_keys" not in kernel["kernel"])
        # The producer has few registers.
        assert kernel["warp_specialized"] and not kernel["serialized"] and kernel["spilled"] <= 192, kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY, kernel


@pytest.mark.parametrize("width,dtype", [(64, "float16"), deep(128, "bfloat16")])
def test_hopper_kernels_of_linear_attention_compile(width, dtype, compile_kernels):
    """Without spills, small enough for two programs on a processor, with products that run beside other things."""
    case = {**LINEAR_CASES["taylor"], "width": width, "dtype": dtype, "only": "_hopper_"}
    kernels = compile_kernels(90, case)
    assert [kernel["kernel"] for kernel in kernels] == [
        f"_hopper_{name}_kernel" for name in ("state", "read", "state", "state", "gradient", "gradient", "read")
    ]
    for kernel in kernels:
        # The units of float16 take some registers.
        spilled = max(64, kernel["allowed"]) if dtype == "float16" else kernel["allowed"]
        assert not kernel["serialized"] and kernel["spilled"] <= spilled, kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY // 2, kernel


@pytest.mark.parametrize("name", ["paper", "tiles", deep("paper-64"), deep("entropy-gradient")])
def test_hopper_kernels_compile(name, compile_kernels):
    """Without spills, and with products that run while the same warps do other things."""
    kernels = compile_kernels(90, {**CASES[name], "only": "_hopper_"})
    assert all(kernel["warp_specialized"] for kernel in kernels)
    backward = [kernel for kernel in kernels if kernel["kernel"] in ("_hopper_keys_kernel", "_hopper_rows_kernel")]
    assert {"_hopper_flash_kernel", "_hopper_r_step_kernel"} <= {kernel["kernel"] for kernel in kernels}
    steps = [kernel["options"] for kernel in kernels if kernel["kernel"] == "_hopper_r_step_kernel"]
    assert [step["LAST"] for step in steps] == [False] * (CASES[name].get("num_iterations", 2) - 1) + [True]
    assert steps[0]["KEYS_ARE_BLOCKS"] == ("coarse" in CASES[name] or "tiles" in CASES[name])
    for kernel in kernels:
        # Two sums, scores and their gradient leave no registers in the kernel that owns keys.
        spilled = MAX_SPILLED if kernel in backward else kernel["allowed"]
        assert not kernel["serialized"] and kernel["spilled"] <= spilled, kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY, kernel
    # Plain R-steps and, where frames begin at multiples of 16 bytes, the exact part: one that owns keys, one for rows.
    plain = 0 if "tiles" in CASES[name] else 1 if "coarse" in CASES[name] else 2
    exact = math.prod(CASES[name]["grid"][1:]) % 4 == 0
    assert len(backward) == 2 * (plain + exact)


def test_values_alone_compile_for_hopper(compile_kernels):
    kernels = compile_kernels(90, {**CASES["values-alone"], "only": "_hopper_"})
    steps = [kernel for kernel in kernels if kernel["kernel"] == "_hopper_r_step_kernel"]
    assert [(kernel["options"]["SUM_K"], kernel["options"]["LAST"]) for kernel in steps] == [
        (True, False),
        (False, True),
    ]
    assert not any(kernel["spilled"] for kernel in steps)
    # Backward in blocks, by a kernel that owns keys and one that owns rows.
    own = [kernel for kernel in kernels if not kernel["options"].get("FLASH", True)]
    assert [(kernel["kernel"], kernel["options"]["SUM_K"]) for kernel in own] == [
        (f"_hopper_{owner}_kernel", of_keys) for of_keys in (False, True) for owner in ("keys", "rows")
    ]
    assert all(kernel["spilled"] <= MAX_SPILLED for kernel in own)
    for kernel in (*steps, *own):
        assert kernel["warp_specialized"] and not kernel["serialized"], kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY, kernel


@pytest.mark.parametrize("row", [20, 32])
@pytest.mark.parametrize("tiling", [{}, {"coarse": 2}, {"tiles": [1, 3]}], ids=["plain", "coarse", "tiles"])
def test_rows_that_are_no_multiple_of_16_bytes_are_launched(row, tiling, compile_kernels):
    """Those of the inputs may be, 32 numbers apart where 20 count; those between the stages never are."""
    case = {**CASES["paper"], "dim": 20, "row": row, "num_iterations": 3, "compile": False, **tiling}
    kernels = [kernel["kernel"] for kernel in compile_kernels(90, {**case, "grid": [24, 7, 9]})]
    assert kernels.count("_r_step_kernel") == 3 and "_pack_kernel" not in kernels
    assert ("_hopper_flash_kernel" in kernels) is (row == 32)


@pytest.mark.parametrize("dim", [20, 32])
def test_tiles_of_rows_that_are_no_multiple_of_16_bytes_are_launched(dim, compile_kernels):
    """The means of all cells have rows without gaps."""
    case = {**TWO_RESOLUTION_CASES["full"], "dim": dim, "row": 32, "compile": False}
    kernels = [kernel["kernel"] for kernel in compile_kernels(90, case)]
    assert ("_hopper_two_resolution_kernel" in kernels) is (dim == 32)


def test_blocks_of_one_number_are_launched(compile_kernels):
    """Descriptors of blocks want strides that are multiples of 16 bytes, of dimensions of one element too."""
    overrides = dict.fromkeys(["l_centroids", "l_backward_rows"], {"TMA": 1})
    case = {**CASES["paper"], "grid": [1, 1, 1], "dim": 1, "overrides": overrides, "compile": False}
    assert "_l_backward_rows_kernel" in {kernel["kernel"] for kernel in compile_kernels(90, case)}


@pytest.mark.parametrize("frames,kernels", [(24, ["centroids", "output"]), deep(81, ["output"])])
def test_hopper_l_steps_compile(frames, kernels, compile_kernels):
    """Without spills: two positions to a tile, and half of one."""
    found = compile_kernels(90, {**CASES["paper"], "grid": [frames, 28, 52], "only": "_hopper_l_"})
    assert [kernel["kernel"] for kernel in found] == [f"_hopper_l_{name}_kernel" for name in kernels]
    for kernel in found:
        assert not kernel["serialized"] and kernel["spilled"] == 0 and kernel["shared"] <= BIG_SHARED_MEMORY, kernel


def test_one_compiled_kernel_serves_all_sizes(compile_kernels):
    """Sizes that are 1, odd or multiples of 16 would be compiled apart if Triton looked at them.

    Only for Hopper it matters how many keys of a block are left after the last whole tile: none to 64, or more.
    """
    compiled = [
        {kernel["hash"] for kernel in compile_kernels(90, {**CASES["paper"], "grid": grid, "compile": False})}
        for grid in ([24, 28, 52], [19, 12, 15])
    ]
    assert compiled[0] == compiled[1] and len(compiled[0]) >= 10
