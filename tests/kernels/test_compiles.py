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
    "coarse": dict(grid=[16, 45, 80], dim=128, dtype="bfloat16", coarse=2, exact={"band": 1}),
    "three-iterations": dict(grid=[5, 7, 9], dim=80, dtype="bfloat16", coarse=2, num_iterations=3, exact={"band": 0}),
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
    ("3.9.0", 89, "_l_backward_rows_kernel"): 1268,
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
        return [{**kernel, "allowed": KNOWN_SPILLS.get((TRITON, kernel["kernel"]), 0)} for kernel in kernels]

    return compiled


def spilling(kernels: list[dict], architecture: int) -> dict[str, int]:
    """Bytes that portable kernels spill at most, of those that spill more than they may."""
    allowed = lambda kernel: KNOWN_PORTABLE_SPILLS.get((TRITON, architecture, kernel["kernel"]), MAX_SPILLED)
    beyond = [kernel for kernel in kernels if kernel["spilled"] > allowed(kernel)]
    return {kernel["kernel"]: kernel["spilled"] for kernel in sorted(beyond, key=lambda kernel: kernel["spilled"])}


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
    "float32": dict(tokens=4096, dim=16, width=64, dtype="float32", causal=True),
}
WINDOW_CASES = {
    "sequence": dict(tokens=4096, window=127, dim=64, dtype="bfloat16"),
    "video": dict(grid=[16, 28, 52], window=[3, 9, 9], dim=128, dtype="float16"),
    "wide": dict(grid=[16, 28, 52], window=[3, 9, 9], dim=256, dtype="bfloat16"),
    "float32": dict(grid=[16, 28, 52], window=[3, 9, 9], dim=128, dtype="float32"),
}
TWO_RESOLUTION_CASES = {
    "full": dict(grid=[16, 28, 52], tile=[4, 4, 4], dim=128, dtype="bfloat16"),
    "ragged": dict(grid=[43, 45, 52], tile=[4, 4, 4], dim=128, dtype="float16", masked=True),
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
INT8_CASES = {
    f"{dim}-{dtype}": dict(tokens=4096, dim=dim, dtype=dtype, eight=True, masked=masked)
    for dim, dtype, masked in ((128, "bfloat16", False), (64, "float16", True), (256, "bfloat16", False))
}
# op -> (its cases, those of other architectures than Hopper, those of Hopper, kernels in the order of launches, of
# which several of one name may follow each other; VMonarch has too many to name)
OPS = {
    "vmonarch": (
        CASES, {89: "coarse", 100: "narrow-values"},
        ["many-frames", "three-iterations", "wide-head", "float32"], None),
    "norm": (
        NORM_CASES, {80: "1536-bfloat16"}, NORM_CASES,
        "norm_rotary norm_rotary_backward"),
    "bias": (
        BIAS_CASES, {89: "narrow-causal", 120: "rank-64"}, BIAS_CASES,
        "forward delta backward_q backward_kv"),
    "linear": (
        LINEAR_CASES, {80: "taylor-causal"}, LINEAR_CASES,
        "state read delta state gradient read"),
    "window": (
        WINDOW_CASES, {100: "video"}, WINDOW_CASES,
        "window window_rows window_keys"),
    "two resolutions": (
        TWO_RESOLUTION_CASES, {89: "ragged"}, TWO_RESOLUTION_CASES,
        "means best lists two_resolution means lists two_resolution_rows two_resolution_means lists"
        " two_resolution_keys"),
    "residual": (
        RESIDUAL_CASES, {80: "64-float16-bfloat16", 120: "128-bfloat16-bfloat16"},
        ["128-bfloat16-int8", "256-float32-bfloat16"],
        "attention_residual add_residual"),
    "int8": (
        INT8_CASES, {80: "128-bfloat16", 120: "64-float16"}, ["256-bfloat16"],
        "statistics finish quantise forward"),
    "merge": (
        MERGE_CASES, {80: "80-float16"}, ["256-float32"],
        "merge merge_backward"),
}  # fmt: skip
OF_OPS = [
    *((*case, op) for op, (_, others, _, _) in OPS.items() for case in others.items()),
    *((90, next(iter(hopper)), op) for op, (_, _, hopper, _) in OPS.items()),
    *(deep(90, name, op) for op, (_, _, hopper, _) in OPS.items() for name in list(hopper)[1:]),
    # Made like those of another architecture, or of another op for the same one.
    *(deep(*case) for case in (
        (80, "paper", "vmonarch"), (100, "paper", "vmonarch"), (120, "narrow-values", "vmonarch"),
        (100, "5120-bfloat16", "norm"), (100, "rank-16", "bias"),
        (120, "taylor-wide", "linear"), (120, "taylor", "linear"), (89, "sequence", "window"),
        (80, "full", "two resolutions"), (100, "full", "two resolutions"), (89, "80-float16-int8", "residual"),
        (86, "64-float16", "int8"), (89, "128-bfloat16", "int8"), (100, "128-bfloat16", "int8"),
        (100, "128-bfloat16", "merge"))),
]  # fmt: skip


def hashes_of(tokens, case, compile_kernels):
    """Of the kernels that a call with so many tokens takes."""
    return [kernel["hash"] for kernel in compile_kernels(80, {**case, "compile": False, "tokens": tokens})]


@pytest.mark.parametrize("architecture,name,op", OF_OPS)
def test_portable_kernels_of_an_op_compile(architecture, name, op, compile_kernels):
    cases, _, _, launches = OPS[op]
    case = cases[name]
    hopper = op in ("vmonarch", "bias", "int8", "linear", "two resolutions")
    overrides = {"overrides": {"hopper": {"enabled": 0}}} if hopper else {}
    kernels = compile_kernels(architecture, {**case, **overrides})
    names = [kernel["kernel"].strip("_").removesuffix("_kernel") for kernel in kernels]
    if launches is None:
        assert len(set(names)) >= 10 and {"r_step", "l_centroids", "r_backward_keys"} <= set(names)
    else:
        assert [name for name, _ in itertools.groupby(names)] == launches.split()
    assert not [kernel for kernel in kernels if kernel["warp_specialized"]]
    on_big = architecture == 100 and op in ("vmonarch", "bias", "two resolutions")
    limit = BIG_SHARED_MEMORY if on_big else SMALLEST_SHARED_MEMORY
    assert not [kernel for kernel in kernels if kernel["shared"] > limit]
    # The most channels of a norm do not fit the registers of a program: slower, not wrong.
    by_row = op in ("residual", "merge") or op == "norm" and case["channels"] <= 5120
    if by_row:
        assert not [kernel for kernel in kernels if kernel["spilled"] > 0]
    elif op == "norm" or case["dtype"] != "float32" and case["dim"] <= 128:
        assert not spilling(kernels, architecture)
    if op in ("norm", "residual", "merge") and architecture == 80:
        assert hashes_of(4096, case, compile_kernels) == hashes_of(999, case, compile_kernels)


ALL_OF_BIAS, ALL_OF_TILES = "flash rows keys", "two_resolution two_resolution_queries two_resolution_keys"
ALL_OF_TAYLOR = "state read state state gradient gradient read"
RANK_64, TAYLOR, TILES = BIAS_CASES["rank-64"], LINEAR_CASES["taylor"], TWO_RESOLUTION_CASES["full"]


@pytest.mark.parametrize(
    "case,launches",
    [
        (BIAS_CASES["rank-16"], ALL_OF_BIAS),
        deep(RANK_64, ALL_OF_BIAS),
        deep({**RANK_64, "dim": 64, "scale": 0.125}, ALL_OF_BIAS),
        deep(BIAS_CASES["narrow-causal"], "flash"),
        (INT8_CASES["128-bfloat16"], "int8"),
        deep(INT8_CASES["64-float16"], "int8"),
        ({**TAYLOR, "dtype": "float16"}, ALL_OF_TAYLOR),
        deep({**TAYLOR, "width": 128}, ALL_OF_TAYLOR),
        # Backward they take tiles of 64 keys and one mean.
        (TILES, ALL_OF_TILES),
        deep({**TILES, "grid": [4, 28, 52], "parts": 2}, ALL_OF_TILES),
        deep({**TILES, "tile": [1, 4, 4], "dim": 64}, "two_resolution"),
        deep({**TILES, "grid": [43, 45, 52], "rest": False, "dtype": "float16"}, ALL_OF_TILES),
    ],
)
def test_hopper_kernels_of_an_op_compile(case, launches, compile_kernels):
    """Without spills inside the loops, and with products that run while the same warps do other things."""
    kernels = compile_kernels(90, {**case, "only": "_hopper_"})
    assert [kernel["kernel"] for kernel in kernels] == [f"_hopper_{name}_kernel" for name in launches.split()]
    for kernel in kernels:
        spilled = kernel["allowed"]
        if kernel["kernel"] in ("_hopper_keys_kernel", "_hopper_int8_kernel"):
            # What it needs before and after its loop; and in eight bits a few numbers of the loop itself.
            spilled = MAX_SPILLED
        elif "tile" in case:
            # The producer has few registers.
            spilled = 192
            in_parts = "parts" in case and "_keys" not in kernel["kernel"]
            assert kernel["warp_specialized"] and (kernel["options"].get("PARTS", 1) > 1) is in_parts, kernel
        elif "width" in case and case["dtype"] == "float16":
            # Its units take some registers.
            spilled = max(64, spilled)
        assert not kernel["serialized"] and kernel["spilled"] <= spilled, kernel
        # Two programs of linear attention run on a processor.
        assert kernel["shared"] <= BIG_SHARED_MEMORY // (2 if "width" in case else 1), kernel


@pytest.mark.parametrize("name", ["paper", "coarse", "values-alone", deep("paper-64"), deep("three-iterations")])
def test_hopper_kernels_compile(name, compile_kernels):
    """Without spills, and with products that run while the same warps do other things."""
    kernels = compile_kernels(90, {**CASES[name], "only": "_hopper_"})
    assert all(kernel["warp_specialized"] for kernel in kernels)
    backward = [kernel for kernel in kernels if kernel["kernel"] in ("_hopper_keys_kernel", "_hopper_rows_kernel")]
    assert {"_hopper_flash_kernel", "_hopper_r_step_kernel"} <= {kernel["kernel"] for kernel in kernels}
    steps = [kernel["options"] for kernel in kernels if kernel["kernel"] == "_hopper_r_step_kernel"]
    assert [step["LAST"] for step in steps] == [False] * (CASES[name].get("num_iterations", 2) - 1) + [True]
    assert steps[0]["KEYS_ARE_BLOCKS"] == ("coarse" in CASES[name])
    for kernel in kernels:
        # Two sums, scores and their gradient leave no registers in the kernel that owns keys.
        spilled = MAX_SPILLED if kernel in backward else kernel["allowed"]
        assert not kernel["serialized"] and kernel["spilled"] <= spilled, kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY, kernel
    if name == "values-alone":
        assert [step["SUM_K"] for step in steps] == [True, False]
        # Backward in blocks, by a kernel that owns keys and one that owns rows.
        own = [kernel for kernel in backward if not kernel["options"].get("FLASH", True)]
        assert [(kernel["kernel"], kernel["options"]["SUM_K"]) for kernel in own] == [
            (f"_hopper_{owner}_kernel", of_keys) for of_keys in (False, True) for owner in ("keys", "rows")
        ]
    # Plain R-steps and, where frames begin at multiples of 16 bytes, the exact part: one that owns keys, one for rows.
    plain = 1 if "coarse" in CASES[name] else 2
    exact = math.prod(CASES[name]["grid"][1:]) % 4 == 0
    assert len(backward) == 2 * (plain + exact)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("options", [{}, {"coarse": 2}, {"tile": [4, 4, 4]}], ids=["plain", "coarse", "tiles"])
def test_rows_that_are_no_multiple_of_16_bytes_are_launched(wide, options, compile_kernels):
    """Those of the inputs may be, 32 numbers apart where 20 count; those between the stages never are."""
    if "tile" in options:
        # The means of all tiles have rows without gaps.
        case = {**TWO_RESOLUTION_CASES["full"], "dim": 32 if wide else 20, "row": 32}
    else:
        case = {**CASES["paper"], "dim": 20, "row": 32 if wide else 20, "num_iterations": 3, "grid": [24, 7, 9]}
    kernels = [kernel["kernel"] for kernel in compile_kernels(90, {**case, **options, "compile": False})]
    assert kernels.count("_r_step_kernel") == case.get("num_iterations", 0)
    assert (f"_hopper_{'two_resolution' if 'tile' in options else 'flash'}_kernel" in kernels) is wide


def test_blocks_of_one_number_are_launched(compile_kernels):
    """Descriptors of blocks want strides that are multiples of 16 bytes, of dimensions of one element too."""
    overrides = dict.fromkeys(["l_centroids", "l_backward_rows"], {"TMA": 1})
    case = {**CASES["paper"], "grid": [1, 1, 1], "dim": 1, "overrides": overrides, "compile": False}
    assert "_l_backward_rows_kernel" in {kernel["kernel"] for kernel in compile_kernels(90, case)}


def test_one_compiled_kernel_serves_all_sizes(compile_kernels):
    """Sizes that are 1, odd or multiples of 16 would be compiled apart if Triton looked at them.

    Only for Hopper it matters how many keys of a block are left after the last whole tile: none to 64, or more.
    """
    compiled = [
        {kernel["hash"] for kernel in compile_kernels(90, {**CASES["paper"], "grid": grid, "compile": False})}
        for grid in ([24, 28, 52], [19, 12, 15])
    ]
    assert compiled[0] == compiled[1] and len(compiled[0]) >= 10
