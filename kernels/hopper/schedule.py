"""Which program of a persistent kernel attends from which queries to which keys, so that all end at the same time."""

from __future__ import annotations

import heapq

import torch
import triton

from vmonarch.kernels.common.constants import kept
from vmonarch.kernels.flash_entropy.segments import (
    MAX_SPLITS,
    Range,
    Segment,
    Work,
    device_table,
    parts_of,
    simplified,
    tiles_of,
)

# What one more item costs, and what writing and reading its result in parts costs, in tiles of keys.
ITEM_COST, PART_COST = 1, 2
# What a tile of rows costs, and one that has rows for one of the two warpgroups only.
TILE_COST, HALF_TILE_COST = 10, 7


def _assigned(costs: list[int], processors: int) -> tuple[int, list[list[int]]]:
    """Longest time, and the items of every processor: each in turn goes to the one that is free first."""
    free = [(0, p) for p in range(processors)]
    lists: list[list[int]] = [[] for _ in range(processors)]
    for i, cost in enumerate(costs):
        time, p = heapq.heappop(free)
        lists[p].append(i)
        heapq.heappush(free, (time + cost, p))
    return max(time for time, _ in free), lists


@kept
def schedule(
    segments: tuple[Segment, ...],
    block_rows: int,
    block_columns: int,
    heads: int,
    processors: int,
    device: torch.device,
) -> Work:
    """Whole row blocks for as long as every processor gets one, then the rest with their keys in parts.

    Row blocks of one head and part of the keys follow each other, so that programs at work at the same time read the
    same keys. Long segments come first.

    Args:
        heads: batch × heads. processors: programs that run at a time.

    Returns:
        the tables, whose items are [I, 8] = (batch·H + head, row start, row stop, slot of the partial result or -1,
        first range, last range + 1, start and stop of the first range); those of one program are consecutive.
    """

    def cost_of(ranges: tuple[Range, ...]) -> int:
        return len(tiles_of(ranges, block_columns))

    segments = tuple(sorted(simplified(segments), key=lambda s: -cost_of(s.key_ranges)))
    segments = tuple(s for s in segments if s.key_ranges)
    blocks = [
        (segment, bh, *rows)
        for segment in segments
        for bh in range(heads)
        for rows in tiles_of([(segment.query_start, segment.query_stop)], block_rows)
    ]
    whole = len(blocks) // processors * processors

    def items_of(parts: int) -> tuple[list[tuple[int, int, int, tuple[Range, ...]]], list[int]]:
        """(block, part, parts, keys) of every item, and the costs."""
        items = [(i, 0, 1, block[0].key_ranges) for i, block in enumerate(blocks[:whole])]
        first = whole
        while first < len(blocks):
            # Blocks of one segment and head share their keys.
            last = first
            while last < len(blocks) and blocks[last][:2] == blocks[first][:2]:
                last += 1
            tiles = tiles_of(blocks[first][0].key_ranges, block_columns)
            cut = parts_of(tiles, min(parts, len(tiles)))
            items += [(i, part, len(cut), keys) for part, keys in enumerate(cut) for i in range(first, last)]
            first = last
        costs = [cost_of(keys) + ITEM_COST + PART_COST * (n > 1) for _, _, n, keys in items]
        return items, costs

    parts = min(range(1, MAX_SPLITS + 1), key=lambda n: _assigned(items_of(n)[1], processors)[0])
    items, costs = items_of(parts)
    lists = _assigned(costs, processors)[1]

    range_rows: list[Range] = []
    range_places: dict[tuple[Range, ...], tuple[int, int]] = {}
    for _, _, _, keys in items:
        if keys not in range_places:
            range_places[keys] = (len(range_rows), len(range_rows) + len(keys))
            range_rows += keys
    first_slots: dict[int, int] = {}
    merges: list[tuple[int, int, int, int, int]] = []
    slots = 0
    for i, part, n, _ in items:
        if n > 1 and part == 0:
            first_slots[i] = slots
            _, bh, start, stop = blocks[i]
            merges.append((start, stop, slots, n, bh))
            slots += n
    rows: list[tuple[int, ...]] = []
    firsts = [0]
    for own in lists:
        for item in own:
            i, part, n, keys = items[item]
            _, bh, start, stop = blocks[i]
            slot = first_slots[i] + part if n > 1 else -1
            rows.append((bh, start, stop, slot, *range_places[keys], *keys[0]))
        firsts.append(len(rows))

    covered = sum(segment.query_stop - segment.query_start for segment in segments)
    return Work(
        device_table(rows, 8, device),
        device_table(range_rows, 2, device),
        device_table(merges, 5, device) if merges else None,
        slots,
        covered,
        device_table([(first,) for first in firsts], 1, device),
    )


@kept
def even_order(tiles: int, groups: int, half_tiles: bool, processors: int, device: torch.device) -> torch.Tensor:
    """Which of the tiles·groups items, group·tiles + tile, each program takes, so that all end at the same time.

    Without it every program would get the same kind of tile, where `tiles` divides the number of programs.

    Args:
        half_tiles: whether the last tile of every group has rows for one warpgroup only.
        processors: programs that run at a time.

    Returns:
        int32 on the device: the place of the first item of every program and of the end, the items, one place more.
    """
    items = range(tiles * groups)

    def cost(item: int) -> int:
        return HALF_TILE_COST if half_tiles and item % tiles == tiles - 1 else TILE_COST

    # Neighbours share keys. Only at the end do short items come last, where they even out what is left.
    end = min(groups, triton.cdiv(2 * processors, tiles)) * tiles
    in_order = [*items[: len(items) - end], *sorted(items[len(items) - end :], key=cost, reverse=True)]
    lists = _assigned([cost(item) for item in in_order], min(processors, len(items)))[1]
    firsts = [len(lists) + 1]
    for own in lists:
        firsts.append(firsts[-1] + len(own))
    order = [in_order[place] for own in lists for place in own]
    return torch.tensor([*firsts, *order, 0], dtype=torch.int32, device=device)
