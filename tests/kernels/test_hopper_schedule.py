"""Schedules on Hopper: every query meets each of its keys once, and no program waits for long."""

import pytest
import torch

from vmonarch.kernels.flash_entropy.segments import Segment, simplified
from vmonarch.kernels.hopper.schedule import HALF_TILE_COST, ITEM_COST, PART_COST, TILE_COST, even_order, schedule

CPU = torch.device("cpu")
BLOCK_M, BLOCK_N = 128, 128
PATTERNS = {
    "first frame": ((16, 1456, 12), (Segment(0, 1456, ((0, 16 * 1456),)),)),
    "few heads": ((16, 1456, 1), (Segment(0, 1456, ((0, 16 * 1456),)),)),
    "large frames": ((16, 3600, 12), (Segment(0, 3600, ((0, 16 * 3600),)),)),
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
    met = torch.zeros(heads, frames * positions, frames * positions, dtype=torch.int8) if frames < 10 else None
    pairs, slots = 0, {}
    ranges = work.ranges.tolist()
    for bh, row, row_stop, slot, first, last, start, stop in work.items.tolist():
        assert 0 < row_stop - row <= BLOCK_M and [start, stop] == ranges[first]
        for key, key_stop in ranges[first:last]:
            pairs += (row_stop - row) * (key_stop - key)
            if met is not None:
                met[bh, row:row_stop, key:key_stop] += 1
        if slot >= 0:
            assert slot not in slots
            slots[slot] = (bh, row, row_stop)
    expected = simplified(segments)
    in_all = sum((s.query_stop - s.query_start) * (stop - start) for s in expected for start, stop in s.key_ranges)
    assert pairs == in_all * heads
    if met is not None:
        for s in expected:
            for start, stop in s.key_ranges:
                met[:, s.query_start : s.query_stop, start:stop] -= 1
        assert not met.any()
    merges = [] if work.merges is None else work.merges.tolist()
    assert sorted(slots) == list(range(work.slots)) == [n for m in merges for n in range(m[2], m[2] + m[3])]
    for row, row_stop, first, count, bh in merges:
        assert {slots[n] for n in range(first, first + count)} == {(bh, row, row_stop)}
    assert work.covered == sum(s.query_stop - s.query_start for s in expected)


@pytest.mark.parametrize("name", ["first frame", "few heads", "large frames"])
def test_programs_end_at_about_the_same_time(name):
    (_, _, heads), segments = PATTERNS[name]
    work = schedule(segments, BLOCK_M, BLOCK_N, heads, 132, CPU)
    tiles = [-(-(stop - start) // BLOCK_N) for start, stop in work.ranges.tolist()]
    costs = [
        sum(tiles[first:last]) + ITEM_COST + PART_COST * (slot >= 0)
        for _, _, _, slot, first, last, _, _ in work.items.tolist()
    ]
    firsts = work.firsts.flatten().tolist()
    times = [sum(costs[start:stop]) for start, stop in zip(firsts, firsts[1:], strict=False)]
    assert len(times) == 132 and max(times) <= 1.12 * sum(times) / 132


def own_items(order, programs):
    order = order.tolist()
    return [order[order[p] : order[p + 1]] for p in range(programs)]


@pytest.mark.parametrize(
    ("tiles", "groups", "half_tiles"),
    [(12, 192, True), (12, 516, True), (29, 192, True), (28, 960, False), (1, 7, True), (3, 44, False), (12, 1, True)],
)
def test_items_are_spread_evenly(tiles, groups, half_tiles):
    programs = min(132, tiles * groups)
    lists = own_items(even_order(tiles, groups, half_tiles, 132, CPU), programs)
    assert sorted(item for own in lists for item in own) == list(range(tiles * groups))
    assert all(lists)
    costs = [
        sum(HALF_TILE_COST if half_tiles and item % tiles == tiles - 1 else TILE_COST for item in own) for own in lists
    ]
    assert max(costs) - sum(costs) / programs <= TILE_COST * 0.75
    # Items at work at the same time are of neighbouring groups, and share their keys in the cache.
    turns = max(len(own) for own in lists)
    for turn in range(turns - 3):
        groups_at_work = [own[turn] // tiles for own in lists if turn < len(own)]
        assert max(groups_at_work) - min(groups_at_work) <= 3 * programs / tiles + 1
