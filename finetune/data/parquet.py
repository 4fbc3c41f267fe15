"""Clips as rows of FastVideo's parquet: written at once or not at all, and read by row group.

A tensor is three columns: `NAME_bytes`, `NAME_shape`, `NAME_dtype`. Latents are the VAE's means as they are,
[C, T, H, W]; training normalises them with the VAE's statistics. (`first_frame_latent` is stored normalised.) Text is
[L, D] without padding. Read are the columns that training needs: those of TENSORS, and where they are, EXTRA_TENSORS.

A row group is the least that can be read, so each row that is written here has its own. Files are opened for each read
and closed again.

Source: https://github.com/hao-ai-lab/FastVideo (`pyarrow_schema_t2v`, `pyarrow_schema_i2v`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vmonarch.files import AtomicFiles

# Dimensions of the tensors that every row has, and of those of image-to-video.
TENSORS = {"vae_latent": 4, "text_embedding": 2}
EXTRA_TENSORS = {"clip_feature": 2, "first_frame_latent": 4}
PARTS = {"bytes": pa.binary(), "shape": pa.list_(pa.int64()), "dtype": pa.string()}
# The other columns.
PLAIN = {
    **dict.fromkeys(("id", "file_name", "caption", "media_type"), pa.string()),
    **dict.fromkeys(("width", "height", "num_frames"), pa.int64()),
    **dict.fromkeys(("duration_sec", "fps"), pa.float64()),
}
# Tokens of text that a transformer is trained with: shorter text is padded with zeros.
TEXT_LENGTH = 512
# Beside the shards: what the text encoder makes of "", for captions that are dropped.
EMPTY_CAPTION = "empty-caption.safetensors"
# Arrow's errors on damaged files: its own, OSError without a number, and ValueError for names that are no text.
_UNREADABLE = (pa.ArrowException, OSError, ValueError)


class DataError(ValueError):
    """Training data that cannot be used; the message names the file or folder, and the row if one is to blame."""


@dataclass(frozen=True)
class Sample:
    """A clip. One that is read has nothing in `about`, and its tensors are float32.

    Args:
        id: unique in its data set.
        latents: [C, T, H, W], raw means of the VAE.
        text: [L, D], without padding; L = 0 for no caption.
        extras: by the names in EXTRA_TENSORS.
        about: other columns of PLAIN, such as the caption that `text` encodes; `num_frames` is that of the latents.
    """

    id: str
    latents: torch.Tensor
    text: torch.Tensor
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def _columns(tensors: Iterable[str]) -> list[str]:
    return [f"{name}_{part}" for name in tensors for part in PARTS]


def row_schema(extras: Iterable[str] = ()) -> pa.Schema:
    """Every column and its type; that of `id` is the first."""
    types = {column: PARTS[column.rpartition("_")[2]] for column in _columns((*TENSORS, *extras))}
    return pa.schema({"id": PLAIN["id"], **types, **PLAIN})


def encode_row(sample: Sample) -> dict[str, Any]:
    """The columns of a clip.

    Raises:
        TypeError: a tensor has a dtype that numpy does not know, such as bfloat16.
    """
    row = {"id": sample.id, "media_type": "video", **sample.about}
    row["num_frames"] = sample.latents.shape[1]
    for name, tensor in {"vae_latent": sample.latents, "text_embedding": sample.text, **sample.extras}.items():
        array = tensor.detach().cpu().numpy()
        row |= zip(_columns([name]), (array.tobytes(), list(array.shape), str(array.dtype)), strict=True)
    return row


def decode_row(row: Mapping[str, Any]) -> Sample:
    """The clip in a row.

    Raises:
        DataError: a tensor is missing, of another number of dimensions, or has values that are not finite.
    """
    tensors = {}
    for name, dims in (TENSORS | EXTRA_TENSORS).items():
        parts: list[Any] = [row.get(column) for column in _columns([name])]
        data, shape, dtype = parts
        # FastVideo leaves the columns of a tensor empty that a clip does not have.
        if name in EXTRA_TENSORS and not data:
            continue
        try:
            array = np.frombuffer(data, str(dtype).removeprefix("torch.")).reshape([*shape])
        except (TypeError, ValueError) as error:
            raise DataError(f"{name} is no tensor of dtype {dtype} and shape {shape}: {error}") from error
        tensors[name] = torch.from_numpy(array.astype(np.float32))
        if array.ndim != dims or not tensors[name].isfinite().all():
            raise DataError(f"{name} must have {dims} dimensions and finite values, got the shape {list(shape)}")
    latents, text = tensors.pop("vae_latent"), tensors.pop("text_embedding")
    return Sample(row["id"], latents, text, extras=tensors)


def write_shard(path: Path, samples: Iterable[Sample]) -> None:
    """Write clips as one parquet file, which appears under its name when it is complete and on disk.

    Args:
        path: of the file; its folder is made.
        samples: clips, which all have the extras of the first. None makes a file without rows.

    Raises:
        FileExistsError: there is a file of that name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = list(samples)
    schema = row_schema(samples[0].extras if samples else ())
    # Tensors have no repeated values worth a dictionary, and their least and greatest bytes mean nothing.
    options: dict[str, Any] = dict(
        compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    with AtomicFiles() as files, pq.ParquetWriter(files.stage(path), schema, **options) as writer:
        for sample in samples:
            writer.write_table(pa.Table.from_pylist([encode_row(sample)], schema=schema))


class ParquetFolder:
    """The rows of all parquet files of a folder, numbered from 0 in the order of the files' relative paths.

    Args:
        path: searched for `*.parquet` in its folders too (hidden files are those of a writer that was killed; links to
            folders are not followed).

    Raises:
        DataError: no parquet file or no row at `path`; a file that cannot be read or has lost its end;
            missing columns; an EMPTY_CAPTION that is damaged.

    Attributes:
        empty_caption: [L, D] float32, the encoding of ""; None where the folder has none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        found = self.path.rglob("*.parquet")
        self.files = sorted(f.relative_to(self.path).as_posix() for f in found if f.is_file() and f.name[0] != ".")
        if not self.files:
            raise DataError(f"no *.parquet file in {self.path}")
        self._sizes = [(self.path / name).stat().st_size for name in self.files]
        # For each row: its file, its row group there and its number in that.
        self._places: list[tuple[str, int, int]] = []
        # A footer grows with its file's rows, until it takes longer to read than a row: those of a few files are kept.
        self._footer = functools.lru_cache(16)(lambda name: pq.read_metadata(self.path / name))
        for name in self.files:
            file = self.path / name
            try:
                footer = self._footer(name)
                columns = footer.schema.to_arrow_schema().names
            except _UNREADABLE as error:
                raise DataError(f"{file} is not a parquet file, or its end is missing: {error}") from error
            if missing := [column for column in ("id", *_columns(TENSORS)) if column not in columns]:
                raise DataError(f"{file} lacks the column(s) {', '.join(missing)}")
            sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
            self._places += [(name, group, row) for group, rows in enumerate(sizes) for row in range(rows)]
        if not len(self):
            raise DataError(f"no rows in {self.path}: {len(self.files)} parquet file(s) are all empty")
        self.empty_caption: torch.Tensor | None = None
        if (empty := self.path / EMPTY_CAPTION).exists():
            try:
                self.empty_caption = load_file(empty)["text_embedding"].float()
            except (SafetensorError, KeyError) as error:
                raise DataError(f"{empty} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._places)

    def fingerprint(self) -> str:
        """SHA-256 of the files' relative names and sizes, the number of rows, and the empty caption."""
        digest = hashlib.sha256(json.dumps([self.files, self._sizes, len(self)]).encode())
        if self.empty_caption is not None:
            digest.update(self.empty_caption.numpy().tobytes())
        return digest.hexdigest()

    def place(self, index: int) -> str:
        """The place of row `index`, in words."""
        file, group, row = self._places[index]
        return f"row {row} of row group {group} of {self.path / file}"

    def read(self, index: int) -> Sample:
        """The clip in row `index`.

        Raises:
            DataError: the row, or the row group that it is in, cannot be decoded.
            OSError: the file is gone or cannot be opened; the message names it.
        """
        name, group, row = self._places[index]
        wanted = ["id", *_columns(TENSORS | EXTRA_TENSORS)]
        try:
            with pq.ParquetFile(self.path / name, metadata=self._footer(name), page_checksum_verification=True) as file:
                table = file.read_row_group(group, columns=wanted)
            return decode_row({name: table[name][row].as_py() for name in table.column_names})
        except _UNREADABLE as error:
            # Arrow's errors have no number. Those of the system name the file.
            if getattr(error, "errno", None) is not None:
                raise
            raise DataError(f"{self.place(index)} cannot be used: {error}") from error
