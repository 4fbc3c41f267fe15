"""Batches of clips for training, in an order that a run which was stopped takes up exactly.

Batches are numbered from 0, over all epochs. The order of an epoch follows from seed, epoch and the number of rows
alone. Its slot p is row `order[p mod rows]`, and the slots of a batch, over all ranks, are the next
`batch_size * world_size`. The last batch repeats the first rows, so every rank has the same number of batches. What a
slot holds depends on nothing else: not on threads, or any global random state. A row that cannot be used ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count, islice
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from vmonarch.finetune.data.parquet import EMPTY_CAPTION, TEXT_LENGTH, DataError, ParquetFolder, Sample
from vmonarch.finetune.objective import generator_for

# That read and decode rows.
THREADS = 2
Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(make: Callable[[Item], Made], items: Iterable[Item], threads: int) -> Iterator[tuple[Item, Future[Made]]]:
    """Map `make` over the items, in order, ahead of the consumer and in several threads."""
    left, waiting = iter(items), deque[tuple[Item, Future[Made]]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="clips") as pool:
        while True:
            waiting.extend((item, pool.submit(make, item)) for item in islice(left, 1 + threads - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft()


class Batch(NamedTuple):
    """Clips of one step on one rank.

    Args:
        latents: [B, C, T, H, W] float32, normalised by the VAE's statistics.
        text: [B, TEXT_LENGTH, text_dim] float32; rows after a caption are zero.
        ids: B ids.
        extras: [B, ...] float32 by the names of `parquet.EXTRA_TENSORS`.
    """

    latents: torch.Tensor
    text: torch.Tensor
    ids: tuple[str, ...]
    extras: dict[str, torch.Tensor]


@dataclass(eq=False)
class LatentLoader:
    """Batches of one rank, endless over epochs.

    Args:
        folder: the rows.
        batch_size: clips of a batch on one rank, which must have one shape.
        seed: of the order and of dropped captions.
        rank, world_size: this process and how many there are.
        mean, std: [C], the VAE's; latents become (raw - mean) / std.
        text_dim: of the text encoder.
        caption_dropout: share of slots whose caption is dropped; their text is the folder's encoding of "", or zeros.

    Raises:
        DataError: the folder's empty caption has another dimension than `text_dim`; (from `batch`) a row cannot be
            decoded, is of another VAE or text encoder, or has another shape than others of its batch.

    Attributes:
        batches_per_epoch: the same on all ranks.
    """

    folder: ParquetFolder
    _: KW_ONLY
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    mean: torch.Tensor
    std: torch.Tensor
    text_dim: int
    caption_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.folder.empty_caption is not None:
            self._check_text(self.folder.empty_caption, f"{self.folder.path / EMPTY_CAPTION}")
        self._unit = self.batch_size * self.world_size
        self.batches_per_epoch = -(-len(self.folder) // self._unit)

    def _check_text(self, text: torch.Tensor, place: str) -> None:
        if text.shape[1] != self.text_dim:
            problem = f"{place} has text of {text.shape[1]}: another text encoder made it"
            raise DataError(f"text_dim is {self.text_dim}, but {problem}")

    def batches(self, first: int = 0) -> Generator[Batch]:
        """All batches from the number `first` on."""
        for _, future in ahead(self.batch, self._rows(first), THREADS):
            yield future.result()

    def _rows(self, first: int) -> Iterator[list[tuple[int, bool]]]:
        """The rows of each batch, each with whether its caption is dropped."""
        rows, slots = len(self.folder), self.batches_per_epoch * self._unit
        began, place = divmod(first, self.batches_per_epoch)
        random = lambda what, epoch, size: torch.rand(
            size, generator=generator_for(self.seed, what, epoch), dtype=torch.float64
        )
        for epoch in count(began):
            # Sorted random numbers, not a shuffle, which another version of torch may compute differently.
            order = random("order", epoch, rows).argsort().tolist()
            dropped = (random("captions", epoch, slots) < self.caption_dropout).tolist()
            for start in range(place * self._unit + self.rank * self.batch_size, slots, self._unit):
                yield [(order[slot % rows], dropped[slot]) for slot in range(start, start + self.batch_size)]
            place = 0

    def batch(self, rows: Sequence[tuple[int, bool]]) -> Batch:
        """The clips of some rows, each with its number and whether it goes without its caption."""
        samples = [self._sample(index, dropped) for index, dropped in rows]
        named = [{"vae_latent": sample.latents, **sample.extras} for sample in samples]
        shapes = [", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items()) for tensors in named]
        if len(set(shapes)) > 1:
            clips = "; ".join(f"{sample.id}: {shape}" for sample, shape in zip(samples, shapes, strict=True))
            raise DataError(f"the clips of a micro-batch must have tensors of one shape, got {clips}")
        return Batch(
            latents=torch.stack([sample.latents for sample in samples]),
            text=torch.stack([F.pad(s.text, (0, 0, 0, TEXT_LENGTH - len(s.text))) for s in samples]),
            ids=tuple(sample.id for sample in samples),
            extras={name: torch.stack([s.extras[name] for s in samples]) for name in samples[0].extras},
        )

    def _sample(self, index: int, dropped: bool) -> Sample:
        """The clip of a row, with its caption or without: latents normalised, text cut and not padded."""
        sample, place = self.folder.read(index), self.folder.place(index)
        if len(sample.latents) != len(self.mean):
            problem = f"{place} has latents of {list(sample.latents.shape)}: another VAE made them"
            raise DataError(f"the model's latents have {len(self.mean)} channels, but {problem}")
        if len(sample.text):
            self._check_text(sample.text, place)
        text, empty = sample.text, self.folder.empty_caption
        if dropped:
            text = text[:0] if empty is None else empty
        # Extra tensors are stored as the transformer gets them.
        mean, std = (x.view(-1, 1, 1, 1) for x in (self.mean, self.std))
        latents, text = (sample.latents - mean) / std, text[:TEXT_LENGTH].view(-1, self.text_dim)
        return replace(sample, latents=latents, text=text)
