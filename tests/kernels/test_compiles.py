"""Every kernel compiles for the GPUs that matter, on a machine without one: Triton brings its own assembler.

COMPILE_WITH_TRITON=3.8.0 compiles with that version of Triton in place of the environment's own; `make test-deep` does
so with the oldest and the newest of the tested ones, and compiles the cases that are marked deep, too: kernels that
other cases have, with other sizes and types.
"""

import functools
import json
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
# Sizes and options, the architectures for which `make compiles` compiles the portable kernels, and those of
# `make test-deep` besides.
CASES = {
    "paper": (dict(grid=[16, 28, 52], dim=128, dtype="bfloat16", exact=FIRST_FRAME), [], [80, 86, 100]),
    "many-frames": (
        dict(grid=[150, 9, 16], dim=128, dtype="bfloat16", exact={"rows": [0], "columns": [0]}), [90], []),
    "coarse": (dict(grid=[16, 45, 80], dim=128, dtype="bfloat16", coarse=2, exact={"band": 1}), [89], []),
    "three-iterations": (
        dict(grid=[5, 7, 9], dim=80, dtype="bfloat16", coarse=2, num_iterations=3, exact={"band": 0}), [], [90]),
    "wide-head": (dict(grid=[16, 28, 52], dim=256, dtype="bfloat16", exact=FIRST_FRAME), [], [90]),
    "float32": (dict(grid=[16, 28, 52], dim=128, dtype="float32", exact={"band": 0}), [], [90]),
    "narrow-values": (
        dict(grid=[8, 6, 11], dim=64, value_dim=32, dtype="bfloat16", exact=FIRST_FRAME), [100], [120]),
    "bias-16": (dict(tokens=4096, rank=16, dim=128, dtype="bfloat16"), [90], [80, 86, 100]),
    "bias-64": (dict(tokens=4096, rank=64, dim=128, dtype="bfloat16"), [120], [90]),
    "bias-causal": (dict(tokens=2048, rank=16, dim=32, dtype="float16", causal=True), [89], [90]),
    "bias-masked": (dict(tokens=1000, rank=32, dim=64, dtype="bfloat16", masked=True), [], [90]),
    "bias-wide": (dict(tokens=1000, rank=256, dim=256, dtype="bfloat16"), [], [90]),
    "bias-float32": (dict(tokens=1000, rank=16, dim=128, dtype="float32"), [], [90]),
    "taylor": (dict(tokens=4096, dim=16, width=64, dtype="bfloat16"), [90], [86, 89, 100, 120]),
    "taylor-causal": (dict(tokens=4096, dim=16, width=128, dtype="float16", causal=True), [80], [90]),
    "taylor-wide": (dict(tokens=4096, dim=32, width=64, dtype="bfloat16", causal=True), [], [90, 120]),
    "taylor-float32": (dict(tokens=4096, dim=16, width=64, dtype="float32", causal=True), [], [90]),
    "window": (dict(tokens=4096, window=127, dim=64, dtype="bfloat16"), [90], [80, 86, 89, 120]),
    "window-video": (dict(grid=[16, 28, 52], window=[3, 9, 9], dim=128, dtype="float16"), [100], [90]),
    "window-wide": (dict(grid=[16, 28, 52], window=[3, 9, 9], dim=256, dtype="bfloat16"), [], [90]),
    "window-float32": (dict(grid=[16, 28, 52], window=[3, 9, 9], dim=128, dtype="float32"), [], [90]),
    "tiles": (dict(grid=[16, 28, 52], tile=[4, 4, 4], dim=128, dtype="bfloat16"), [90], [80, 86, 100, 120]),
    "tiles-ragged": (dict(grid=[43, 45, 52], tile=[4, 4, 4], dim=128, dtype="float16", masked=True), [89], [90]),
    "tiles-wide": (dict(grid=[16, 28, 52], tile=[2, 4, 4], dim=256, dtype="bfloat16"), [], [90]),
    "tiles-float32": (dict(grid=[16, 28, 52], tile=[2, 4, 4], dim=128, dtype="float32"), [], [90]),
    "norm": (dict(tokens=4096, channels=1536, dim=128, dtype="bfloat16"), [80, 90], []),
    "norm-14b": (dict(tokens=4096, channels=5120, dim=128, dtype="bfloat16"), [], [86, 89, 90, 100, 120]),
    "norm-most": (dict(tokens=4096, channels=16384, dim=128, dtype="float32"), [], [90]),
    "residual": (dict(tokens=4096, dim=128, dtype="bfloat16", residual=True), [90], []),
    "residual-80": (dict(tokens=4096, dim=80, dtype="float16", residual=True), [], [86, 89, 100, 120]),
    "residual-wide": (dict(tokens=4096, dim=256, dtype="float32", residual=True), [80], [90]),
    "merge": (dict(tokens=4096, dim=128, dtype="bfloat16", merge=True), [], [86, 89, 100, 120]),
    "merge-80": (dict(tokens=4096, dim=80, dtype="float16", merge=True), [80], []),
    "merge-wide": (dict(tokens=4096, dim=256, dtype="float32", merge=True), [90], []),
    "int8": (dict(tokens=4096, dim=128, dtype="bfloat16", eight=True), [80], [86, 89, 90, 100, 120]),
    "int8-64": (dict(tokens=4096, dim=64, dtype="float16", eight=True, masked=True), [120], [86]),
    "int8-wide": (dict(tokens=4096, dim=256, dtype="bfloat16", eight=True), [90], []),
}  # fmt: skip
PAPER, COARSE, TILES = (CASES[name][0] for name in ("paper", "coarse", "tiles"))
BIAS_16, BIAS_64 = CASES["bias-16"][0], CASES["bias-64"][0]
ALL_OF_PAPER, ALL_OF_BIAS = "flash r_step r_step keys rows keys rows rows keys", "flash rows keys"
ALL_OF_TILES = "two_resolution two_resolution_queries two_resolution_keys"
# Sizes and options, and the kernels for Hopper that are launched.
HOPPER_CASES = [
    (PAPER, ALL_OF_PAPER),
    (COARSE, "flash r_step r_step keys rows rows keys"),
    ({**PAPER, "last_l_update": False}, ALL_OF_PAPER),
    deep({**PAPER, "dim": 64, "dtype": "float16"}, ALL_OF_PAPER),
    deep(CASES["three-iterations"][0], "flash r_step r_step r_step keys rows"),
    (BIAS_16, ALL_OF_BIAS),
    deep(BIAS_64, ALL_OF_BIAS),
    deep({**BIAS_64, "dim": 64, "scale": 0.125}, ALL_OF_BIAS),
    deep(CASES["bias-causal"][0], "flash"),
    (CASES["int8"][0], "int8"),
    deep({**CASES["int8"][0], "dim": 64, "dtype": "float16", "masked": True}, "int8"),
    (TILES, ALL_OF_TILES),
    deep({**TILES, "grid": [4, 28, 52], "parts": 2}, ALL_OF_TILES),
    deep({**TILES, "tile": [1, 4, 4], "dim": 64}, "two_resolution"),
    deep({**TILES, "grid": [43, 45, 52], "rest": False, "dtype": "float16"}, ALL_OF_TILES),
]


# What kernels for Hopper spill that are to spill nothing, in bytes, by version of Triton and kernel.
KNOWN_SPILLS = {
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


def hashes_of(tokens, case, compile_kernels):
    """Of the kernels that a call with so many tokens takes."""
    return [kernel["hash"] for kernel in compile_kernels(80, {**case, "compile": False, "tokens": tokens})]


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *((architecture, name) for name, (_, quick, _) in CASES.items() for architecture in quick),
        *(deep(architecture, name) for name, (_, _, others) in CASES.items() for architecture in others),
    ],
)
def test_portable_kernels_compile(architecture, name, compile_kernels):
    case, _, _ = CASES[name]
    # The others have no form for Hopper, which overrides would be compiled apart for.
    by_row = bool({"channels", "residual", "merge"} & case.keys())
    overrides = {} if by_row or "window" in case else {"overrides": {"hopper": {"enabled": 0}}}
    kernels = compile_kernels(architecture, {**case, **overrides})
    assert len({kernel["kernel"] for kernel in kernels}) >= 2
    assert not [kernel for kernel in kernels if kernel["warp_specialized"]]
    on_big = architecture == 100 and bool({"exact", "rank", "tile"} & case.keys())
    limit = BIG_SHARED_MEMORY if on_big else SMALLEST_SHARED_MEMORY
    assert not [kernel for kernel in kernels if kernel["shared"] > limit]
    # The most channels of a norm do not fit the registers of a program: slower, not wrong.
    if by_row and case.get("channels", 0) <= 5120:
        assert not [kernel for kernel in kernels if kernel["spilled"] > 0]
    elif by_row or case["dtype"] != "float32" and case["dim"] <= 128:
        assert not spilling(kernels, architecture)
    if by_row and architecture == 80:
        assert hashes_of(4096, case, compile_kernels) == hashes_of(999, case, compile_kernels)


def test_kernels_of_every_op_have_cases_for_every_architecture():
    found = {}
    for name, (case, quick, others) in CASES.items():
        op = "monarch" if "exact" in case else name.partition("-")[0]
        found.setdefault(op, set()).update(quick, others)
    assert len(found) == 9 and set(map(frozenset, found.values())) == {frozenset({80, 86, 89, 90, 100, 120})}


@pytest.mark.parametrize(("case", "launches"), HOPPER_CASES)
def test_hopper_kernels_compile(case, launches, compile_kernels):
    """Without spills inside the loops, and with products that run while the same warps do other things."""
    kernels = compile_kernels(90, {**case, "only": "_hopper_"})
    assert [kernel["kernel"] for kernel in kernels] == [f"_hopper_{name}_kernel" for name in launches.split()]
    for kernel in kernels:
        name, spilled = kernel["kernel"], kernel["allowed"]
        if name in ("_hopper_keys_kernel", "_hopper_int8_kernel") or name == "_hopper_rows_kernel" and "exact" in case:
            # What it needs before and after its loop; and in eight bits a few numbers of the loop itself.
            spilled = MAX_SPILLED
        elif "tile" in case:
            # The producer has few registers.
            spilled = 192
            in_parts = "parts" in case and "_keys" not in name
            assert (kernel["options"].get("PARTS", 1) > 1) is in_parts, kernel
        assert kernel["warp_specialized"] or "exact" not in case and "tile" not in case, kernel
        assert not kernel["serialized"] and not kernel["idle_barriers"] and kernel["spilled"] <= spilled, kernel
        assert kernel["shared"] <= BIG_SHARED_MEMORY, kernel


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("options", [{}, {"coarse": 2}, {"tile": [4, 4, 4]}], ids=["plain", "coarse", "tiles"])
def test_rows_that_are_no_multiple_of_16_bytes_are_launched(wide, options, compile_kernels):
    """Those of the inputs may be, 32 numbers apart where 20 count; those between the stages never are."""
    if "tile" in options:
        # The means of all tiles have rows without gaps.
        case = {**TILES, "dim": 32 if wide else 20, "row": 32}
    else:
        case = {**PAPER, "dim": 20, "row": 32 if wide else 20, "num_iterations": 3, "grid": [24, 7, 9]}
    kernels = [kernel["kernel"] for kernel in compile_kernels(90, {**case, **options, "compile": False})]
    portable_flash = "exact" in case and not wide
    assert kernels.count("_forward_kernel") == case.get("num_iterations", 0) + portable_flash
    assert (f"_hopper_{'two_resolution' if 'tile' in options else 'flash'}_kernel" in kernels) is wide


def test_blocks_of_one_number_are_launched(compile_kernels):
    """Descriptors of blocks want strides that are multiples of 16 bytes, of dimensions of one element too."""
    overrides = dict.fromkeys(["l_centroids", "l_backward_rows"], {"TMA": 1})
    case = {**PAPER, "grid": [1, 1, 1], "dim": 1, "overrides": overrides, "compile": False}
    assert "_l_backward_rows_kernel" in {kernel["kernel"] for kernel in compile_kernels(90, case)}


def test_one_compiled_kernel_serves_all_sizes(compile_kernels):
    """Sizes that are 1, odd or multiples of 16 would be compiled apart if Triton looked at them.

    Only for Hopper it matters how many keys of a block are left after the last whole tile: none to 64, or more.
    """
    compiled = [
        {kernel["hash"] for kernel in compile_kernels(90, {**PAPER, "grid": grid, "compile": False})}
        for grid in ([24, 28, 52], [19, 12, 15])
    ]
    assert compiled[0] == compiled[1] and len(compiled[0]) >= 10
