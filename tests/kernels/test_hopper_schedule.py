"""Schedules on Hopper: every query meets each of its keys once, and items are spread evenly."""

import pytest
import torch

from vmonarch.kernels.flash_entropy.segments import Segment, simplified
from vmonarch.kernels.hopper.schedule import HALF_TILE_COST, TILE_COST, even_order, schedule

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
