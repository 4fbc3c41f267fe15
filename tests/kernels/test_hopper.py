"""The kernels for Hopper against the portable ones and float32, at sizes around the edges of their tiles.

Each case of a backward pass runs in a process of its own: one that waits forever is killed. Schedules are tested
everywhere: every query meets each of its keys once, and items are spread evenly.
"""

import json
import math
import subprocess
import sys
from itertools import product

import pytest
import torch
from op_checks import in_turns

from vmonarch import ExactBlocks, vmonarch_attention
from vmonarch.kernels.common.launch import hopper_fits, launch_overrides
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.flash_entropy.segments import Segment, simplified
from vmonarch.kernels.hopper.schedule import HALF_TILE_COST, TILE_COST, even_order, schedule

PORTABLE = {"hopper": {"enabled": 0}}
# Positions per frame: fewer than a warpgroup's rows, whole tiles, one more and one less, odd ones, those of videos.
FRAMES = [(1, 1), (3, 5), (7, 9), (8, 8), (5, 13), (1, 127), (8, 16), (3, 43), (11, 17), (1, 193), (16, 16), (28, 52)]


@pytest.fixture(autouse=True)
def hopper(request, skip_without_gpu):
    if request.node.get_closest_marker("gpu") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)


def relative_error(x, expected):
    """Relative to the expected values, but to no less than 1e-3 each: an entropy may be 0 everywhere."""
    return ((x.float() - expected.float()).norm() / (expected.float().norm() + 1e-3 * expected.numel() ** 0.5)).item()


def check(attend, query, key, value):
    """`attend(q, k, v)` with the kernels for Hopper must be as near to float32 as with the portable ones."""
    assert hopper_fits("monarch", query, key, value)
    expected = attend(query.float(), key.float(), value.float(), implementation="torch")
    with launch_overrides(PORTABLE):
        assert not hopper_fits("monarch", query, key, value)
        portable = attend(query, key, value, implementation="triton")
    found = attend(query, key, value, implementation="triton")
    again = attend(query, key, value, implementation="triton")
    for a, b, c, d in zip(found, again, portable, expected, strict=True):
        assert torch.equal(a, b)
        assert relative_error(a, d) <= 1.1 * relative_error(c, d) + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries,keys", [(1, 1), (63, 64), (64, 129), (65, 200), (130, 31), (200, 4000), (1500, 5000)])
def test_flash_entropy_of_any_length(queries, keys, dim):
    query = torch.randn(2, queries, 3, dim, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, keys, 2, 3, dim, device="cuda", dtype=torch.bfloat16).unbind(2)
    check(lambda q, k, v, **how: flash_entropy_attention(q, k, v, **how), query, key, value)


WHOLE_ROWS = [None, ExactBlocks(rows=(0,)), ExactBlocks(rows=(0,), aware=False), ExactBlocks(rows=(0, 7, 16))]
HALF = {"dtype": torch.float16}
EXACT = [ExactBlocks(band=1, rows=(0,)), ExactBlocks(columns=(0, 3), aware=False)]
OPTIONS = [dict(coarse=2), dict(coarse=3, num_iterations=3), dict(num_iterations=1)]
OPTIONS += [dict(exact=exact) for exact in EXACT]
VIDEOS = [
    *(((5, *frame), dict(dim=dim)) for frame, dim in in_turns(FRAMES, (8, 64, 72, 96, 128), 2)),
    *(((5, *frame), HALF | options) for frame in ((4, 6), (15, 17), (16, 24), (28, 52)) for options in OPTIONS),
    # Thousands of small blocks: every program goes round its buffers many times.
    ((40, 7, 10), dict(B=4, H=40, dim=64)),
    # Two positions to a tile, one, or half of one; an odd number of positions.
    *(((frames, 5, 7), dict(dim=dim, exact=exact) | (HALF if frames % 2 else {}))
      for (frames, exact), dim in in_turns(product((17, 32, 33, 43, 64, 65, 128), WHOLE_ROWS), (64, 80, 128), 1)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("grid", "options"), VIDEOS, ids=str)
def test_videos_of_every_size(grid, options):
    sizes = {"B": 2, "H": 3, "dim": 128, "dtype": torch.bfloat16} | options
    B, H, dim, dtype = (sizes.pop(name) for name in ("B", "H", "dim", "dtype"))
    inputs = torch.randn(B, math.prod(grid), 3, H, dim, device="cuda", dtype=dtype).unbind(2)
    check(lambda q, k, v, **how: vmonarch_attention(q, k, v, grid=grid, return_lse=True, **sizes, **how), *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", WHOLE_ROWS, ids=str)
@pytest.mark.parametrize("frames", [17, 43, 81])
def test_gradients_with_many_frames(frames, exact):
    """They need what the L-steps save: cR and log-partitions."""
    query, key, value, grad = torch.randn(4, 2, frames * 35, 3, 128, device="cuda", dtype=torch.bfloat16)

    def gradients(*tensors, **how):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = vmonarch_attention(*tensors, grid=(frames, 5, 7), exact=exact, num_iterations=3, **how)
        return torch.autograd.grad(out, tensors, grad.to(out.dtype))

    check(gradients, query, key, value)


# --- Backward. ---

SCRIPT = """
import json, sys, torch
from vmonarch import (
    ExactBlocks, flash_bias_attention, flash_entropy_attention, monarch_attention, vmonarch_attention
)
from vmonarch.kernels.common import replay
from vmonarch.kernels.flash_bias import op as bias
from vmonarch.kernels.flash_entropy import backward as flash
from vmonarch.kernels.hopper import backward as hopper_backward
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
hopper_backward.launch_keys = watched
expected = gradients("torch", torch.float32)
hopper = gradients("triton")
launched = len(calls)
# Replayed, but for a bias, which is not recorded.
again = gradients("triton")
calls.clear()
# Overrides are of this thread, and the backward pass runs in another.
bias.hopper_fits = flash.hopper_fits = r_step.hopper_fits = lambda *tensors: False
replay.has_overrides = lambda: True
portable = gradients("triton")
torch.cuda.synchronize()
error = lambda found: [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected)]
print(json.dumps({"portable": error(portable), "hopper": error(hopper), "launched": launched,
                  "left": len(calls), "repeats": all(torch.equal(a, b) for a, b in zip(hopper, again))}))
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
SIZES = ((64, "bfloat16"), (128, "bfloat16"), (80, "bfloat16"), (128, "float16"))
# Of the kernel that owns keys, in one backward pass: one for every iteration and one for the exact part, where frames
# begin at multiples of 16 bytes.
LAUNCHES = {"small-batch": 4, "coarse-3": 4}
LAUNCHES |= dict.fromkeys(("odd-band", "sequence-post", "sequence-pre"), 2)
LAUNCHES |= dict.fromkeys(("flash", "bias", "bias-exact-scale", "bias-one-tile"), 1)
# A gradient through the entropy has portable kernels alone.
LAUNCHES["flash-entropy"] = 0


@pytest.mark.gpu
@pytest.mark.parametrize("name,sizes", in_turns(CASES, SIZES, 2), ids=str)
def test_gradients_agree(name, sizes):
    dim, dtype = sizes
    case = {**CASES[name], "dtype": dtype}
    case["shape"] = [*case["shape"], dim]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(case)], capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["launched"] == LAUNCHES.get(name, 3) and found["left"] == 0 and found["repeats"], found
    for hopper, portable in zip(found["hopper"], found["portable"], strict=True):
        assert hopper <= 1.1 * portable + 1e-4, found


# --- Schedules. ---

CPU = torch.device("cpu")
BLOCK_M, BLOCK_N = 128, 128
PATTERNS = {
    "first frame": ((9, 200, 2), (Segment(0, 200, ((0, 9 * 200),)),)),
    "short": ((1, 70, 2), (Segment(0, 70, ((0, 70),)),)),
    "band": (
        (9, 200, 3),
        tuple(
            Segment(l * 200, (l + 1) * 200, ((0, 200), (max(0, l - 1) * 200, min(9, l + 2) * 200))) for l in range(9)
        ),
    ),
    "some rows": ((4, 300, 2), (Segment(300, 600, ((0, 300), (900, 1200))), Segment(900, 1000, ((5, 17),)))),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_query_meets_each_of_its_keys_once(name):
    (frames, positions, heads), segments = PATTERNS[name]
    work = schedule(segments, BLOCK_M, BLOCK_N, heads, 132, CPU)
    met = torch.zeros(heads, frames * positions, frames * positions, dtype=torch.int8)
    slots = {}
    ranges = work.ranges.tolist()
    for bh, row, row_stop, slot, first, last, start, stop in work.items.tolist():
        assert 0 < row_stop - row <= BLOCK_M and [start, stop] == ranges[first]
        for key, key_stop in ranges[first:last]:
            met[bh, row:row_stop, key:key_stop] += 1
        if slot >= 0:
            assert slot not in slots
            slots[slot] = (bh, row, row_stop)
    expected = simplified(segments)
    for s in expected:
        for start, stop in s.key_ranges:
            met[:, s.query_start : s.query_stop, start:stop] -= 1
    assert not met.any()
    merges = [] if work.merges is None else work.merges.tolist()
    assert merges or name == "short"
    assert sorted(slots) == list(range(work.slots)) == [n for m in merges for n in range(m[2], m[2] + m[3])]
    for row, row_stop, first, count, bh in merges:
        assert {slots[n] for n in range(first, first + count)} == {(bh, row, row_stop)}
    assert work.covered == sum(s.query_stop - s.query_start for s in expected)


@pytest.mark.parametrize(
    ("tiles", "groups", "half_tiles"),
    [(12, 192, True), (12, 516, True), (29, 192, True), (28, 960, False), (1, 7, True), (3, 44, False), (12, 1, True)],
)
def test_items_are_spread_evenly(tiles, groups, half_tiles):
    programs = min(132, tiles * groups)
    order = even_order(tiles, groups, half_tiles, 132, CPU).tolist()
    lists = [order[order[p] : order[p + 1]] for p in range(programs)]
    assert sorted(item for own in lists for item in own) == list(range(tiles * groups))
    assert all(lists)
    costs = [
        sum(HALF_TILE_COST if half_tiles and item % tiles == tiles - 1 else TILE_COST for item in own) for own in lists
    ]
    assert max(costs) - sum(costs) / programs <= TILE_COST * 0.75
