"""Batches of clips for training, in an order that a run which was stopped takes up exactly.

A position is a number of batches. The order of an epoch follows from seed, epoch and the rows' layout alone: the
row groups are shuffled and cut into windows of WINDOW_BYTES, and rows are shuffled within a window, so that a process
reads each row group about once (each worker of each rank does). Small data sets are one window.

The clips of a batch have one shape. Rows of one shape are a bucket, which keeps their order; a bucket's slot p is row
`order[p mod rows]`, and the slots of a batch, over all ranks, are the next `batch_size * world_size` of one bucket.
Batches of different buckets follow each other as their first rows do, and the last one of a bucket repeats its first
rows, so every rank has the same number of batches. What a slot holds depends on nothing else: not on workers, or any
global random state. A row that cannot be used is replaced by the next row of its bucket that can.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Generator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from vmonarch.finetune.data.parquet import EMPTY_CAPTION, BadRow, DataError, ParquetFolder, Sample

__all__ = ["Batch", "DataError", "LatentLoader"]

# Half of what a process keeps of row groups (`parquet.CACHE_BYTES`): batches made ahead reach into the next window.
WINDOW_BYTES = 1 << 29
# Rows tried before the share of bad ones is judged, unless an epoch is shorter.
JUDGED_AFTER = 100


@dataclass(frozen=True)
class Batch:
    """Clips of one step on one rank.

    Args:
        latents: [B, C, T, H, W] float32, normalised by the VAE's statistics.
        text: [B, text_length, text_dim] float32; rows after a caption are zero.
        ids: B ids.
        captions: B captions, "" where dropped.
        extras: [B, ...] by the names of `parquet.EXTRA_TENSORS`; float32, but uint8 stays.
    """

    latents: torch.Tensor
    text: torch.Tensor
    ids: tuple[str, ...]
    captions: tuple[str, ...]
    extras: dict[str, torch.Tensor]


@dataclass
class _Made:
    """A batch, or an error that ends the run: raised in a worker, it would be wrapped in that one's traceback.

    Args:
        tried, bad: rows that belong into the batch, and those of them that could not be used.
        failures: these, and those that were tried in their place, with the reasons.
    """

    batch: Batch | Exception = field(default_factory=DataError)
    tried: int = 0
    bad: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """An epoch.

    Args:
        batches: (bucket, first slot over all ranks) of each.
        orders: rows of each bucket.
        dropped: for each bucket and slot, whether its caption is dropped.
    """

    batches: list[tuple[int, int]]
    orders: list[np.ndarray]
    dropped: list[np.ndarray]


@dataclass(eq=False)
class LatentLoader(Dataset[_Made]):
    """Batches of one rank, endless over epochs, from a position that is saved and restored exactly.

    As a data set, whose copies worker processes get, it holds the batches by their number from the run's first.

    Args:
        folder: the rows.
        batch_size: clips of a batch on one rank, all of one shape.
        seed: of the order and of dropped captions.
        rank, world_size: this process and how many there are.
        workers: processes that read and decode; 0 does it in this one. Batches are the same.
        mean, std: [C], the VAE's; latents become (raw - mean) / std.
        text_length: text is padded with zeros to it, and cut where longer (FastVideo pads to 512).
        text_dim: of the text encoder.
        caption_dropout: share of slots whose caption is dropped; their text is the folder's encoding of "", or zeros.
        shuffle: False keeps the folder's order.
        bad_fraction: the largest share of rows that may be unusable. It is judged by each rank on the rows that it has
            tried in an epoch, from JUDGED_AFTER rows or an epoch's on.
        quarantine: JSON lines file that gets every bad row once: `id` (or null), `file`, `row_group`, `row`, `reason`.
            With more than one rank each has its own, `NAME-rank-00001.jsonl`. It is appended to.

    Raises:
        DataError: the folder's empty caption has another dimension than `text_dim`; (from iteration) too many rows are
            bad, a row's text has another dimension than `text_dim`, a file has changed.

    Attributes:
        batches_per_epoch: the same on all ranks.
        quarantine: the file of this rank, or None.
    """

    folder: ParquetFolder
    _: KW_ONLY
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    mean: torch.Tensor
    std: torch.Tensor
    text_length: int = 512
    text_dim: int
    caption_dropout: float = 0.0
    shuffle: bool = True
    bad_fraction: float = 0.05
    quarantine: Path | None = None

    def __post_init__(self) -> None:
        empty = self.folder.empty_caption
        if empty is not None:
            self._check_text(empty, f"{self.folder.root / EMPTY_CAPTION}")
        if self.quarantine is not None and self.world_size > 1:
            self.quarantine = self.quarantine.with_stem(f"{self.quarantine.stem}-rank-{self.rank:05d}")
        numbers = {shape: number for number, shape in enumerate(dict.fromkeys(self.folder.shapes))}
        self._buckets = np.array([numbers[shape] for shape in self.folder.shapes])
        self._unit = self.batch_size * self.world_size
        self.batches_per_epoch = int(sum(-(-count // self._unit) for count in np.bincount(self._buckets)))
        names = ("seed", "batch_size", "world_size", "shuffle")
        # What a saved position means nothing without.
        self._run = {"fingerprint": self.folder.fingerprint(), **{name: getattr(self, name) for name in names}}
        self._next = 0
        self._warned = False
        self._epoch = -1

    def _check_text(self, text: torch.Tensor, place: str) -> None:
        if text.shape[1] != self.text_dim:
            problem = f"{place} has text of {text.shape[1]}: another text encoder made it"
            raise DataError(f"text_dim is {self.text_dim}, but {problem}")

    def plan(self, epoch: int) -> _Plan:
        """The batches of an epoch, on all ranks the same."""
        rows = len(self.folder)
        order = epoch_order(self.folder, self.seed, epoch) if self.shuffle else np.arange(rows)
        place = np.argsort(order)
        orders = [order[self._buckets[order] == number] for number in range(self._buckets.max() + 1)]
        padded = [-(-len(rows) // self._unit) * self._unit for rows in orders]
        # The upper 53 bits are a number of [0, 1) exactly.
        uniform = (_random_bits(sum(padded), self.seed, epoch, 2) >> np.uint64(11)) * 2.0**-53
        dropped = np.split(uniform < self.caption_dropout, np.cumsum(padded)[:-1])
        batches = [(n, first) for n, slots in enumerate(padded) for first in range(0, slots, self._unit)]
        batches.sort(key=lambda batch: place[orders[batch[0]][batch[1]]])
        return _Plan(batches, orders, dropped)

    def __getitem__(self, number: int) -> _Made:
        """Batch `number`, counted from the run's first."""
        epoch, place = divmod(number, self.batches_per_epoch)
        if epoch != self._epoch:
            self._plan, self._epoch = self.plan(epoch), epoch
        made = _Made()
        dead: set[int] = set()
        try:
            # Where no row of a bucket can be used, a batch of another one stands in.
            for bucket, first in self._plan.batches[place:] + self._plan.batches[:place]:
                start = first + self.rank * self.batch_size
                slots = range(start, start + self.batch_size) if bucket not in dead else ()
                found = (self._sample(bucket, slot, made, not dead) for slot in slots)
                samples = [sample for sample in itertools.takewhile(bool, found) if sample]
                if len(samples) == self.batch_size:
                    made.batch = Batch(
                        latents=torch.stack([sample.latents for sample in samples]),
                        text=torch.stack([F.pad(s.text, (0, 0, 0, self.text_length - len(s.text))) for s in samples]),
                        ids=tuple(sample.id for sample in samples),
                        captions=tuple(sample.caption for sample in samples),
                        extras={name: torch.stack([s.extras[name] for s in samples]) for name in samples[0].extras},
                    )
                    return made
                dead.add(bucket)
            raise self._too_bad(len(made.failures), len(made.failures), made.failures)
        except (DataError, OSError) as error:
            return _Made(error, failures=made.failures)

    def _sample(self, bucket: int, slot: int, made: _Made, counts: bool) -> Sample | None:
        """The clip of a slot, or None where no row of the bucket can be used; notes in `made` what was tried."""
        order = self._plan.orders[bucket]
        # The slots after the last row repeat rows that are counted elsewhere.
        counts &= slot < len(order)
        made.tried += counts
        # More in a row than this, and the whole folder has too many.
        limit = max(JUDGED_AFTER, int(self.bad_fraction * len(self.folder)) + 1)
        for step in range(len(order)):
            index = int(order[(slot + step) % len(order)])
            try:
                sample = self._read(index)
            except BadRow as error:
                made.bad += counts and step == 0
                made.failures.append({**self.folder.describe(index), "reason": str(error)})
                if step + 1 >= limit:
                    raise self._too_bad(step + 1, step + 1, made.failures) from error
                continue
            if not self._plan.dropped[bucket][slot]:
                return sample
            empty = self.folder.empty_caption
            text = sample.text[:0] if empty is None else empty[: self.text_length]
            return Sample(sample.id, sample.latents, text, "", extras=sample.extras)
        return None

    def _read(self, index: int) -> Sample:
        """Row `index`: latents [C, T, H, W] normalised, text [L, D] cut, not padded.

        Raises:
            BadRow: it cannot be read, or does not fit the model.
            DataError: its text has another dimension than the model's.
        """
        sample = self.folder.read(index)
        if len(sample.text):
            place = self.folder.describe(index)
            file = self.folder.root / place["file"]
            self._check_text(sample.text, f"row {place['row']} of row group {place['row_group']} of {file}")
        if len(sample.latents) != len(self.mean):
            raise BadRow(f"has latents of {list(sample.latents.shape)}, the model's have {len(self.mean)} channels")
        # Extra tensors are stored as the transformer gets them; FastVideo normalises the first frame's latents too.
        mean, std = (x.view(-1, 1, 1, 1) for x in (self.mean, self.std))
        latents = (_as_float("vae_latent", sample.latents) - mean) / std
        text = _as_float("text_embedding", sample.text[: self.text_length]).view(-1, self.text_dim)
        extras = {name: x if x.dtype == torch.uint8 else _as_float(name, x) for name, x in sample.extras.items()}
        return Sample(sample.id, latents, text, sample.caption, extras=extras)

    def _too_bad(self, bad: int, tried: int, failures: list[dict[str, Any]]) -> DataError:
        reasons = "; ".join(dict.fromkeys(failure["reason"] for failure in failures[:3]))
        return DataError(
            f"{bad} of {tried} rows tried in {self.folder.path} cannot be used ({bad / tried:.1%}, at most"
            f" {self.bad_fraction:.1%} may): {reasons}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The batches handed out so far and what they depend on, as plain values; the same on all ranks."""
        return {"batches": self._next, **self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; an iterator that was made before must not be used any more.

        Raises:
            DataError: the state is of other data, or of a run with another seed, batch size, world size or shuffle; the
                message names what differs.
        """
        differing = [f"{n} is {here!r} but was {state.get(n)!r}" for n, here in self._run.items() if here != state[n]]
        if differing:
            raise DataError(f"cannot resume on {self.folder.path}: {'; '.join(differing)}")
        self._next = int(state["batches"])

    def __iter__(self) -> Generator[Batch]:
        enough = max(1, min(JUDGED_AFTER, len(self.folder) // self.world_size))
        loader: DataLoader[_Made] = DataLoader(
            self,
            batch_size=None,
            sampler=itertools.count(self._next),
            num_workers=self.workers,
            # Its seed for workers, which use none, would be drawn from the global state.
            generator=torch.Generator().manual_seed(0),
        )
        tried = bad = 0
        failures: list[dict[str, Any]] = []
        for made in loader:
            self._record(made.failures)
            if isinstance(made.batch, Exception):
                raise made.batch
            tried, bad, failures = tried + made.tried, bad + made.bad, (failures + made.failures)[:3]
            # Divided, not multiplied: 29 of 100 are a share of 0.29, but 0.29 * 100 is less than 29.
            if tried >= enough and bad / tried > self.bad_fraction:
                raise self._too_bad(bad, tried, failures)
            self._next += 1
            if self._next % self.batches_per_epoch == 0:
                # An epoch's share is that of the data; a sum over epochs would count some rows more often than others.
                tried = bad = 0
            yield made.batch

    def _record(self, failures: list[dict[str, Any]]) -> None:
        """Append bad rows to the quarantine file, each once, those of earlier runs included."""
        path = self.quarantine
        if failures and not self._warned:
            self._warned = True
            where = "" if path is None else f"; {path} lists all"
            warnings.warn(f"rows cannot be used and are replaced, such as {failures[0]}{where}", stacklevel=3)
        if failures and path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                before = file.read().split("\n")
                new = [line for line in dict.fromkeys(map(json.dumps, failures)) if line not in before]
                # A run that was killed may have left half a line.
                file.write("\n" * bool(new and before[-1]) + "".join(f"{line}\n" for line in new))


def _as_float(name: str, tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.float()
    if tensor.dtype == torch.float64 and not result.isfinite().all():
        raise BadRow(f"{name} has values beyond float32")
    return result


def _random_bits(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """[count] uint64. Streams of numpy's bit generators stay as they are from version to version; shuffles may not."""
    return np.random.PCG64(np.random.SeedSequence((seed, epoch, purpose))).random_raw(count)


def epoch_order(folder: ParquetFolder, seed: int, epoch: int) -> np.ndarray:
    """[rows] int64: every row once, row groups shuffled, rows shuffled within windows of WINDOW_BYTES."""
    sizes = np.diff(folder.group_starts)
    groups = np.argsort(_random_bits(len(sizes), seed, epoch, 0), kind="stable")
    windows, window, filled = np.zeros(len(sizes), np.int64), 0, 0
    for place, size in enumerate(folder.group_bytes[groups].tolist()):
        if filled and filled + size > WINDOW_BYTES:
            window, filled = window + 1, 0
        windows[place] = window
        filled += size
    rows = np.concatenate([np.arange(folder.group_starts[group], folder.group_starts[group + 1]) for group in groups])
    return rows[np.lexsort((_random_bits(len(rows), seed, epoch, 1), np.repeat(windows, sizes[groups])))]
