"""Batches of clips for training, in an order that a run which was stopped takes up exactly.

A position is an epoch and a number of batches. The order of an epoch follows from the seed, the epoch and the rows'
layout alone: the row groups are shuffled and cut into windows of WINDOW_BYTES, and rows are shuffled within a window,
so that a process reads each row group about once (each worker of each rank does). Small data sets are one window.

Slot p of an epoch is row `order[p mod rows]`. Batch k of rank r is the slots from `(k * world_size + r) * batch_size`
on, so every rank has the same number of batches; the last slots repeat the first rows. What a slot holds depends on
nothing else: not on ranks, workers, or any global random state. A row that cannot be used is replaced by the next row
of the order that can.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from vmonarch.finetune.data.parquet import EMPTY_CAPTION, DataError, ParquetFolder
from vmonarch.finetune.data.schema import BadRow

__all__ = ["Batch", "DataError", "LatentLoader"]

# Half of what a process keeps of row groups (`parquet.CACHE_BYTES`): batches made ahead reach into the next window.
WINDOW_BYTES = 1 << 29
# Rows tried before the share of bad ones is judged, unless an epoch is shorter.
JUDGED_AFTER = 100
_REASONS_KEPT = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Clips of one step on one rank.

    Args:
        latents: [B, C, T, H, W] float32, normalised by the VAE's statistics.
        text: [B, text_length, text_dim] float32; rows after a caption are zero.
        ids: B ids.
        captions: B captions, "" where dropped.
        extras: [B, ...] by the names of `schema.EXTRA_TENSORS`; float32, but uint8 stays.
        epoch, number: from 0; `number` counts the batches of the epoch.
    """

    latents: torch.Tensor
    text: torch.Tensor
    ids: tuple[str, ...]
    captions: tuple[str, ...]
    extras: dict[str, torch.Tensor]
    epoch: int
    number: int


@dataclass(frozen=True)
class _Position:
    """Where a loader is.

    Args:
        epoch, batch: of the next batch.
        tried, bad: rows of this epoch that this rank has tried, and those of them that could not be used.
        reasons: the first reasons.
    """

    epoch: int = 0
    batch: int = 0
    tried: int = 0
    bad: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Clip:
    """A row ready for a batch: latents [C, T, H, W] normalised, text [L, D] cut, not padded."""

    id: str
    latents: torch.Tensor
    text: torch.Tensor
    caption: str
    extras: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Slot:
    """A slot's clip, or None where `len(failures)` rows of the order have been tried in vain so far."""

    position: int
    clip: _Clip | None
    failures: tuple[dict[str, Any], ...]


@dataclass(eq=False)
class _Rows(Dataset[_Slot]):
    """Slots by (epoch, position); what worker processes get a copy of."""

    folder: ParquetFolder
    seed: int
    shuffle: bool
    mean: torch.Tensor
    std: torch.Tensor
    text_length: int
    text_dim: int
    caption_dropout: float
    slots: int
    # [C, T, H, W], and shape and dtype of every extra tensor, once the first clip has decided them.
    shape: tuple[int, ...] | None = None
    extras: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    _epoch: int = -1
    _order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    _dropped: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))

    def __getitem__(self, key: tuple[int, int]) -> _Slot:
        return self.fill(*key, tried=0)

    def fill(self, epoch: int, position: int, tried: int) -> _Slot:
        """The slot's clip, from `tried` rows after its own on; gives up for now after JUDGED_AFTER bad ones."""
        self._prepare(epoch)
        failures: list[dict[str, Any]] = []
        rows = len(self.folder)
        for step in range(tried, min(tried + JUDGED_AFTER, rows)):
            index = int(self._order[(position + step) % rows])
            try:
                clip = self.clip(index)
            except BadRow as error:
                failures.append(self.failure(index, error))
                continue
            if self._dropped[position]:
                empty = self.folder.empty_caption
                text = clip.text[:0] if empty is None else empty[: self.text_length]
                clip = replace(clip, text=text, caption="")
            return _Slot(position, clip, tuple(failures))
        return _Slot(position, None, tuple(failures))

    def _prepare(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._order = epoch_order(self.folder, self.seed, epoch) if self.shuffle else np.arange(len(self.folder))
        # The upper 53 bits are a number of [0, 1) exactly.
        uniform = (_random_bits(self.slots, self.seed, epoch, 2) >> np.uint64(11)) * 2.0**-53
        self._dropped = uniform < self.caption_dropout
        self._epoch = epoch

    def failure(self, index: int, error: BadRow) -> dict[str, Any]:
        place = self.folder.place(index)
        return {
            "id": self.folder.read_id(index),
            "file": self.folder.files[place.file],
            "row_group": place.group,
            "row": place.row,
            "reason": str(error),
        }

    def clip(self, index: int) -> _Clip:
        """Row `index`, ready for a batch.

        Raises:
            BadRow: it cannot be read, or does not fit the run's shapes.
            DataError: its text has another dimension than the run's.
        """
        sample = self.folder.read(index)
        length, dim = sample.text.shape
        if length and dim != self.text_dim:
            place = self.folder.place(index)
            raise DataError(
                f"text_dim is {self.text_dim}, but row {place.row} of row group {place.group} of "
                f"{self.folder.root / self.folder.files[place.file]} has text of {dim}: another text encoder made it"
            )
        shape = tuple(sample.latents.shape)
        channels = len(self.mean)
        wanted = (channels, *shape[1:]) if self.shape is None else self.shape
        if shape != wanted:
            raise BadRow(f"has latents of {list(shape)}, this run trains on {list(wanted)}")
        # Extra tensors are stored as the transformer gets them; FastVideo normalises the first frame's latents too.
        mean, std = (x.view(-1, 1, 1, 1) for x in (self.mean, self.std))
        latents = (_as_float("vae_latent", sample.latents) - mean) / std
        text = _as_float("text_embedding", sample.text[: self.text_length])
        extras = {name: _as_float(name, tensor, keep=torch.uint8) for name, tensor in sample.extras.items()}
        kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in extras.items()}
        if self.shape is not None and kinds != self.extras:
            raise BadRow(f"has extra tensors {_kinds_text(kinds)}, this run trains on {_kinds_text(self.extras)}")
        return _Clip(sample.id, latents, text, sample.caption, extras)


def _as_float(name: str, tensor: torch.Tensor, keep: torch.dtype | None = None) -> torch.Tensor:
    if tensor.dtype == keep:
        return tensor
    result = tensor.float()
    if tensor.dtype == torch.float64 and not result.isfinite().all():
        raise BadRow(f"{name} has values beyond float32")
    return result


def _kinds_text(kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    parts = (f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in kinds.items())
    return "; ".join(parts) or "none"


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


def _after(epoch: int, batch: int, batches_per_epoch: int) -> tuple[int, int]:
    return (epoch, batch + 1) if batch + 1 < batches_per_epoch else (epoch + 1, 0)


@dataclass(eq=False)
class _Slots(Sampler[list[tuple[int, int]]]):
    """Slots of one rank's batches as (epoch, position), endless from `start` on: (epoch, batch)."""

    batch_size: int
    rank: int
    world_size: int
    batches_per_epoch: int
    start: tuple[int, int] = (0, 0)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, batch = self.start
        while True:
            first = (batch * self.world_size + self.rank) * self.batch_size
            yield [(epoch, position) for position in range(first, first + self.batch_size)]
            epoch, batch = _after(epoch, batch, self.batches_per_epoch)


class LatentLoader:
    """Batches of one rank, endless over epochs, from a position that is saved and restored exactly.

    Args:
        folder: the rows.
        batch_size: clips of a batch on one rank.
        seed: of the order and of dropped captions.
        rank, world_size: this process and how many there are.
        workers: processes that read and decode; 0 does it in this one. Batches are the same.
        mean, std: [C] (or any shape of C elements), the VAE's; latents become (raw - mean) / std, and so does
            `first_frame_latent`.
        text_length: text is padded with zeros to it, and cut where longer (FastVideo pads to 512).
        text_dim: of the text encoder.
        caption_dropout: share of slots whose caption is dropped; their text is the folder's encoding of "", or zeros.
        shuffle: False keeps the folder's order.
        bad_fraction: the largest share of rows that may be unusable. It is judged by each rank on the rows that it has
            tried in an epoch, from JUDGED_AFTER rows or the epoch's end on; with more ranks or a share near the limit,
            chance alone takes some rank over it, so leave room.
        quarantine: JSON lines file that gets every bad row once: `id` (or null), `file`, `row_group`, `row`, `reason`.
            With more than one rank each has its own, `NAME-rank-00001.jsonl`. It is appended to.

    The first readable row of the folder decides which extra tensors there are, their shapes and that of the latents.

    Raises:
        ValueError: an argument is out of range; the message names it.
        DataError: the folder's empty caption has another dimension than `text_dim`; (from iteration) too many rows are
            bad, a row's text has another dimension than `text_dim`, a file has changed. A rank that raises leaves the
            others waiting in their next collective operation.

    Attributes:
        batches_per_epoch: the same on all ranks.
        quarantine: the file of this rank, or None.
    """

    def __init__(
        self,
        folder: ParquetFolder,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        mean: torch.Tensor,
        std: torch.Tensor,
        text_length: int = 512,
        text_dim: int,
        caption_dropout: float = 0.0,
        shuffle: bool = True,
        bad_fraction: float = 0.05,
        quarantine: Path | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "world_size": world_size, "text_length": text_length, "text_dim": text_dim}
        for name, value in {**sizes, "seed": seed, "workers": workers}.items():
            if value < (smallest := int(name in sizes)):
                raise ValueError(f"{name} must be at least {smallest}, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be of 0 to {world_size - 1} (world_size is {world_size}), got {rank}")
        for name, share in {"caption_dropout": caption_dropout, "bad_fraction": bad_fraction}.items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be of 0 to 1, got {share}")
        mean, std = (tensor.detach().cpu().float().flatten() for tensor in (mean, std))
        if mean.shape != std.shape or not mean.isfinite().all() or not (std.isfinite() & (std > 0)).all():
            raise ValueError(
                f"mean and std must have one finite number per channel, those of std above 0; got {mean} and {std}"
            )
        if folder.empty_caption is not None and folder.empty_caption.shape[1] != text_dim:
            raise DataError(
                f"text_dim is {text_dim}, but {folder.root / EMPTY_CAPTION} has text of"
                f" {folder.empty_caption.shape[1]}: another text encoder made it"
            )
        self.folder, self.rank, self.bad_fraction = folder, rank, bad_fraction
        self.batches_per_epoch = math.ceil(len(folder) / (batch_size * world_size))
        if quarantine is not None and world_size > 1:
            quarantine = Path(quarantine)
            quarantine = quarantine.with_name(f"{quarantine.stem}-rank-{rank:05d}{quarantine.suffix}")
        self.quarantine = None if quarantine is None else Path(quarantine)
        # What a saved position means nothing without.
        self._run = {"fingerprint": folder.fingerprint(), "seed": seed, "batch_size": batch_size,
                     "world_size": world_size, "shuffle": shuffle}  # fmt: skip
        self._state = _Position()
        self._rows = _Rows(
            folder, seed, shuffle, mean, std, text_length, text_dim, caption_dropout,
            slots=self.batches_per_epoch * batch_size * world_size,
        )  # fmt: skip
        self._slots = _Slots(batch_size, rank, world_size, self.batches_per_epoch)
        self._batches: DataLoader[_Slot] = DataLoader(
            self._rows,
            batch_sampler=self._slots,
            num_workers=workers,
            collate_fn=list,
            persistent_workers=workers > 0,
            # Its seed for workers, which use none, would be drawn from the global state.
            generator=torch.Generator().manual_seed(seed),
        )
        self._iteration = 0
        self._recorded: set[str] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far, and what it depends on, as plain values.

        It is the same on all ranks but for the counts of bad rows, so save each rank's own.
        """
        return {**asdict(self._state), "reasons": list(self._state.reasons), **self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Iterators made before end with an error.

        Raises:
            DataError: the state is of other data, or of a run with another seed, batch size, world size or shuffle; the
                message names what differs.
            ValueError: the state is not whole.
        """
        # Older checkpoints have a grid, which was null in every run.
        found = {name: value for name, value in state.items() if name != "grid"}
        known = self.state_dict().keys()
        if found.keys() != known:
            missing, unknown = sorted(known - found.keys()), sorted(found.keys() - known)
            raise ValueError(f"a loader's state lacks {missing} and has the unknown {unknown}")
        pairs = [(name, here, found.pop(name)) for name, here in self._run.items()]
        differing = [f"{name} is {here!r} but was {there!r}" for name, here, there in pairs if here != there]
        if differing:
            raise DataError(f"cannot resume on {self.folder.path}: {'; '.join(differing)}")
        position = _Position(**{**found, "reasons": tuple(found["reasons"])})
        if position.epoch < 0 or not 0 <= position.batch < self.batches_per_epoch:
            raise ValueError(f"a loader's state has no batch {position.batch} of epoch {position.epoch}")
        self._iteration += 1
        self._state = position

    def __iter__(self) -> Generator[Batch, None, None]:
        self._iteration += 1
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Generator[Batch, None, None]:
        batches: Iterator[list[_Slot]] | None = None
        while True:
            # Workers are shared, and a position is one.
            if iteration != self._iteration:
                raise RuntimeError("the loader was iterated or its state loaded again: this iterator is over")
            if batches is None:
                self._decide_shapes()
                self._slots.start = (self._state.epoch, self._state.batch)
                batches = iter(self._batches)
            try:
                slots = next(batches)
            except Exception as error:
                if not self._batches.num_workers:
                    raise
                # A worker's traceback is in the message. torch's frames refer to the exception, and workers that die
                # with such a cycle are waited for in vain for seconds.
                raise error.with_traceback(None) from None
            yield self._hand_out(slots)

    def _decide_shapes(self) -> None:
        """Shapes of the run, by the first readable row in the folder's order."""
        rows = self._rows
        if rows.shape is not None:
            return
        # More in a row than this, and the whole folder has too many.
        limit = min(len(self.folder), max(JUDGED_AFTER, int(self.bad_fraction * len(self.folder)) + 1))
        failures = []
        for index in range(limit):
            try:
                clip = rows.clip(index)
            except BadRow as error:
                failures.append(rows.failure(index, error))
                continue
            rows.extras = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in clip.extras.items()}
            rows.shape = tuple(clip.latents.shape)
            return
        self._record(failures)
        raise self._too_bad(limit, limit, [failure["reason"] for failure in failures])

    def _hand_out(self, slots: list[_Slot]) -> Batch:
        state = self._state
        tried, bad, reasons = state.tried, state.bad, state.reasons
        clips: list[_Clip] = []
        for slot in slots:
            self._record(slot.failures)
            # The slots after the last row repeat rows that were counted before.
            if slot.position < len(self.folder):
                tried += 1
                if slot.failures:
                    bad += 1
                    reasons = (*reasons, slot.failures[0]["reason"])[:_REASONS_KEPT]
            clips.append(self._replacement(slot, tried, bad, reasons) if slot.clip is None else slot.clip)
        epoch, number = _after(state.epoch, state.batch, self.batches_per_epoch)
        if tried >= JUDGED_AFTER or epoch > state.epoch:
            self._judge(tried, bad, reasons)
        if epoch > state.epoch:
            # An epoch's share is that of the data; a sum over epochs would count some rows more often than others.
            tried, bad = 0, 0
        self._state = replace(state, epoch=epoch, batch=number, tried=tried, bad=bad, reasons=reasons)
        text = torch.zeros(len(clips), self._rows.text_length, self._rows.text_dim)
        for row, clip in zip(text, clips, strict=True):
            if len(clip.text):
                row[: len(clip.text)] = clip.text
        return Batch(
            latents=torch.stack([clip.latents for clip in clips]),
            text=text,
            ids=tuple(clip.id for clip in clips),
            captions=tuple(clip.caption for clip in clips),
            extras={name: torch.stack([clip.extras[name] for clip in clips]) for name in self._rows.extras},
            epoch=state.epoch,
            number=state.batch,
        )

    def _replacement(self, slot: _Slot, tried: int, bad: int, reasons: tuple[str, ...]) -> _Clip:
        """Search on where a worker gave up, as long as the share of bad rows allows it."""
        in_vain = len(slot.failures)
        while slot.clip is None:
            reasons = (*reasons, *(failure["reason"] for failure in slot.failures))[:_REASONS_KEPT]
            # The slot's own row is among both counts already, unless it repeats one.
            more = in_vain - (slot.position < len(self.folder))
            all_tried, all_bad = tried + more, bad + more
            if in_vain >= len(self.folder):
                raise self._too_bad(all_tried, all_bad, reasons)
            self._judge(all_tried, all_bad, reasons)
            slot = self._rows.fill(self._state.epoch, slot.position, in_vain)
            self._record(slot.failures)
            in_vain += len(slot.failures)
        return slot.clip

    def _judge(self, tried: int, bad: int, reasons: tuple[str, ...]) -> None:
        # Divided, not multiplied: 29 of 100 are a share of 0.29, but 0.29 * 100 is less than 29.
        if tried and bad / tried > self.bad_fraction:
            raise self._too_bad(tried, bad, reasons)

    def _too_bad(self, tried: int, bad: int, reasons: tuple[str, ...] | list[str]) -> DataError:
        where = f"they are listed in {self.quarantine}" if self.quarantine else "give quarantine= to list them"
        return DataError(
            f"{bad} of {tried} rows tried in {self.folder.path} cannot be used ({bad / tried:.1%}, at most "
            f"{self.bad_fraction:.1%} may): {'; '.join(dict.fromkeys(reasons[:_REASONS_KEPT]))}; {where}"
        )

    def _record(self, failures: tuple[dict[str, Any], ...] | list[dict[str, Any]]) -> None:
        """Append bad rows to the quarantine file, each once, those of earlier runs included."""
        if not failures:
            return
        first = self._recorded is None
        if self._recorded is None:
            old = self.quarantine.read_text(errors="replace") if self.quarantine and self.quarantine.exists() else ""
            self._recorded = set(old.splitlines())
        lines = dict.fromkeys(json.dumps(failure) for failure in failures)
        new = [line for line in lines if line not in self._recorded]
        self._recorded.update(new)
        if new and first:
            _log.warning("a row of %s cannot be used and is replaced: %s (further ones are not shown)",
                         self.folder.path, new[0])  # fmt: skip
        if new and self.quarantine:
            self.quarantine.parent.mkdir(parents=True, exist_ok=True)
            with self.quarantine.open("a+b") as file:
                # A run that was killed may have left half a line.
                if file.tell() and not _ends_with_newline(file):
                    new.insert(0, "")
                file.write("".join(f"{line}\n" for line in new).encode())


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"
