"""The keys that queries attend to, and the tables of work items that the kernels read.

Everything here runs on the host and is cached with its device tables, so that a repeated call copies nothing to the
device (a CUDA graph can capture it).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from vmonarch.kernels.common.constants import kept

Range = tuple[int, int]

# Bound of the partial results of a row, and with it of their memory.
MAX_SPLITS = 16
# Cost of one more work item (its partial result is written and read again), in tiles of keys.
SPLIT_COST = 8


@dataclass(frozen=True)
class Segment:
    """The queries [query_start, query_stop) attend to the keys of all `key_ranges`.

    The query ranges of the segments of one call never overlap. Key ranges are [start, stop); their union counts.
    """

    query_start: int
    query_stop: int
    key_ranges: tuple[Range, ...]


def all_pairs(queries: int, keys: int) -> tuple[Segment, ...]:
    """Every query attends to every key."""
    return (Segment(0, queries, ((0, keys),)),)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, disjoint, non-adjacent ranges that cover the same numbers."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


@functools.lru_cache(maxsize=128)
def simplified(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The same pattern with as few segments as possible: sorted, neighbours with the same keys joined."""
    joined: list[Segment] = []
    for segment in sorted(segments, key=lambda s: s.query_start):
        if segment.query_start >= segment.query_stop:
            continue
        key_ranges = union(segment.key_ranges)
        last = joined[-1] if joined else None
        if last and last.query_stop == segment.query_start and last.key_ranges == key_ranges:
            joined[-1] = Segment(last.query_start, segment.query_stop, key_ranges)
        else:
            joined.append(Segment(segment.query_start, segment.query_stop, key_ranges))
    return tuple(joined)


@functools.lru_cache(maxsize=128)
def transposed(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The pattern seen from the keys: which ranges of queries attend to every range of keys.

    Returns:
        segments whose "queries" are keys and whose "keys" are queries; keys that nobody attends to are left out.
    """
    segments = simplified(segments)
    edges = sorted({edge for segment in segments for key_range in segment.key_ranges for edge in key_range})
    columns = []
    for start, stop in pairwise(edges):
        queries = union(
            (segment.query_start, segment.query_stop)
            for segment in segments
            if any(first <= start and stop <= last for first, last in segment.key_ranges)
        )
        if queries:
            columns.append(Segment(start, stop, queries))
    return simplified(tuple(columns))


@functools.lru_cache(maxsize=128)
def one_range(segments: tuple[Segment, ...], multiple: int) -> bool:
    """Whether every query attends to consecutive keys, and every key is attended to by consecutive queries.

    These queries must start at multiples of `multiple`.
    """
    columns = transposed(segments)
    return all(len(segment.key_ranges) <= 1 for segment in (*simplified(segments), *columns)) and all(
        start % multiple == 0 for segment in columns for start, _ in segment.key_ranges
    )


@dataclass(frozen=True)
class Work:
    """Tables that the programs of one kernel read, int32 on the device.

    Args:
        items: [I, 5] = (row start, row stop, first range, last range + 1, slot of the partial result or -1); of
            persistent programs as `hopper.schedule.schedule` has them.
        ranges: [R, 2] = (start, stop) of the columns.
        merges: [J, 5] = (row start, row stop, first slot of all, slots, head) of the rows whose columns are split, for
            every head; None without.
        slots: the number of partial results of one head; with `firsts`, of all heads.
        covered: the number of rows of one head that are in any segment.
        firsts: [P + 1], the first item of every persistent program; None without.
        one_range: whether every item has exactly one range, so that kernels need no loop over them.
    """

    items: torch.Tensor
    ranges: torch.Tensor
    merges: torch.Tensor | None
    slots: int
    covered: int
    firsts: torch.Tensor | None = None
    one_range: bool = False


def tiles_of(ranges: Iterable[Range], block: int) -> list[Range]:
    """The ranges in tiles of `block`, the last of each range as long as what is left."""
    return [(n, min(n + block, stop)) for start, stop in ranges for n in range(start, stop, block)]


def parts_of(tiles: Sequence[Range], parts: int) -> list[tuple[Range, ...]]:
    """The tiles in `parts` parts of nearly equal numbers of tiles, each as few ranges as possible."""
    return [union(tiles[len(tiles) * i // parts : len(tiles) * (i + 1) // parts]) for i in range(parts)]


def device_table(entries: Sequence[tuple[int, ...]], width: int, device: torch.device) -> torch.Tensor:
    """[entries, width], int32."""
    return torch.tensor(entries, dtype=torch.int32, device=device).reshape(-1, width)


def split_counts(row_blocks: Sequence[int], tiles: Sequence[int], heads: int, processors: int) -> list[int]:
    """Into how many parts the keys of every segment are cut, so that all processors have work until the end.

    Args:
        row_blocks, tiles: per segment.
        heads: batch × heads.
        processors: programs that run at a time.

    The cut minimises a bound on the time of any greedy schedule: work / processors + the longest item, plus what
    splitting costs. Time is counted in tiles.
    """
    work = sum(rows * n for rows, n in zip(row_blocks, tiles, strict=True)) * heads

    def counts(longest: int) -> list[int]:
        return [max(1, -(-n // longest)) for n in tiles]

    def time(longest: int) -> float:
        parts = counts(longest)
        split_items = sum(rows * n for rows, n in zip(row_blocks, parts, strict=True) if n > 1) * heads
        return (work + SPLIT_COST * split_items) / processors + longest

    most = max(tiles, default=1)
    candidates = {max(1, -(-most // splits)) for splits in range(1, MAX_SPLITS + 1)}
    return counts(min(candidates, key=lambda longest: (time(longest), -longest)))


@kept
def row_work(
    segments: tuple[Segment, ...],
    block_rows: int,
    block_columns: int,
    heads: int,
    processors: int,
    splits: int | None,
    device: torch.device,
) -> Work:
    """One item per block of query rows and part of its keys; rows are the fastest index, so neighbours share keys.

    Args:
        splits: parts to cut the keys of every segment into (fewer if it has fewer tiles); None to choose.
    """
    segments = simplified(segments)
    rows = [tiles_of([(segment.query_start, segment.query_stop)], block_rows) for segment in segments]
    tiles = [tiles_of(segment.key_ranges, block_columns) for segment in segments]
    if splits is None:
        parts = split_counts([len(r) for r in rows], [len(t) for t in tiles], heads, processors)
    else:
        parts = [max(1, min(splits, len(t))) for t in tiles]

    items: list[tuple[int, int, int, int, int]] = []
    ranges: list[Range] = []
    merges: list[tuple[int, int, int, int]] = []
    slots = 0
    for row_blocks, segment_tiles, n in zip(rows, tiles, parts, strict=True):
        for part, keys in enumerate(parts_of(segment_tiles, n)):
            first_range = len(ranges)
            ranges += keys
            for i, (start, stop) in enumerate(row_blocks):
                items.append((start, stop, first_range, len(ranges), slots + i * n + part if n > 1 else -1))
        if n > 1:
            merges += [(start, stop, slots + i * n, n) for i, (start, stop) in enumerate(row_blocks)]
            slots += n * len(row_blocks)

    covered = sum(segment.query_stop - segment.query_start for segment in segments)
    of_heads = [(start, stop, head * slots + slot, n, head) for head in range(heads) for start, stop, slot, n in merges]
    return Work(
        device_table(items, 5, device),
        device_table(ranges, 2, device),
        device_table(of_heads, 5, device) if merges else None,
        slots,
        covered,
        one_range=all(item[3] - item[2] == 1 for item in items),
    )


@functools.cache
def processors(device: torch.device) -> int:
    """Programs that run at a time: the streaming multiprocessors; one in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
