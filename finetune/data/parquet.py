"""Shards of clips: parquet files with the rows of `schema.py`, written at once or not at all and read by row group.

A row group is the least that can be read, so a folder keeps the last ones in memory and the order of training stays
within a few of them at a time (`loader.py`). Files are opened for each read and closed again: nothing that a worker
process could share with its parent stays open.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vmonarch.files import AtomicFiles
from vmonarch.finetune.data.schema import (
    EXTRA_TENSORS,
    PLAIN,
    TENSORS,
    BadRow,
    Sample,
    decode_row,
    encode_row,
    row_schema,
    tensor_columns,
)

# Row groups that a process keeps, in bytes of memory; the last one is kept whatever its size.
CACHE_BYTES = 1 << 30

# Beside the shards: what the text encoder makes of "", for captions that are dropped.
EMPTY_CAPTION = "empty-caption.safetensors"
_EMPTY_TENSOR = "text_embedding"

# What Arrow raises on damaged files: its own errors, OSError without a number, ValueError for names that are no text.
_UNREADABLE = (pa.ArrowException, OSError, ValueError)
_REQUIRED = ("id", "caption", *tensor_columns(TENSORS))


class DataError(ValueError):
    """Training data that cannot be used; the message names the file or folder."""


def write_shard(path: Path, samples: Iterable[Sample], rows_per_group: int = 16) -> int:
    """Write clips as one parquet file, which appears under its name when it is complete and on disk.

    Args:
        path: of the file; its folder is made.
        samples: clips; the extras of the first are those of the file. None makes a file without rows.
        rows_per_group: rows that are read together.

    Returns:
        The number of rows.

    Raises:
        FileExistsError: there is a file of that name.
        ValueError: a clip has other extras than the first, or could not be read back (no id, values that are not
            finite, wrong dimensions, a dtype that no row can hold).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = iter(samples)
    chunk = list(islice(samples, rows_per_group))
    extras = tuple(chunk[0].extras) if chunk else ()
    schema, rows = row_schema(extras), 0
    # Tensors have no repeated values worth a dictionary, and their least and greatest bytes mean nothing.
    options: dict[str, Any] = dict(
        compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    with AtomicFiles() as files, pq.ParquetWriter(files.stage(path), schema, **options) as writer:
        while chunk:
            columns = [_checked_row(sample, extras) for sample in chunk]
            writer.write_table(pa.Table.from_pylist(columns, schema=schema), row_group_size=rows_per_group)
            rows += len(chunk)
            chunk = list(islice(samples, rows_per_group))
    return rows


def _checked_row(sample: Sample, extras: tuple[str, ...]) -> dict[str, Any]:
    if set(sample.extras) != set(extras):
        found, first = sorted(sample.extras), sorted(extras)
        raise ValueError(f"sample {sample.id!r} has the extras {found}, but the first of the shard has {first}")
    row = encode_row(sample)
    try:
        decode_row(row)
    except BadRow as error:
        raise ValueError(f"sample {sample.id!r} cannot be written: {error}") from error
    return row


def write_empty_caption(folder: Path, text: torch.Tensor) -> None:
    """Write the encoding of "", [L, D], beside the shards of a folder, at once or not at all.

    Raises:
        FileExistsError: there is one.
        ValueError: it is no encoding: of other dimensions, or not finite.
    """
    from safetensors.torch import save_file

    if text.dim() != 2 or not text.isfinite().all():
        raise ValueError(f"text must be [L, D] and finite, got {list(text.shape)}")
    with AtomicFiles() as files:
        save_file({_EMPTY_TENSOR: text.contiguous()}, files.stage(Path(folder) / EMPTY_CAPTION))


class ParquetFolder:
    """The rows of all parquet files of a folder, numbered from 0 in the order of the files' relative paths.

    Args:
        path: a folder, searched for `*.parquet` in its folders too (hidden files are those of a writer that was
            killed; links to folders are not followed), or one file.

    Raises:
        DataError: nothing at `path`; no parquet file or no row in it; a file that is not parquet or has lost its end;
            missing columns; files with other extra tensors than the first; an EMPTY_CAPTION that is damaged.

    Attributes:
        group_starts: [G + 1], the first row of each row group. group_bytes: [G], of it, not compressed.
        shapes: by row, the shapes of its tensors other than text, as they are written; rows of one batch share them.
        empty_caption: [L, D] float32, the encoding of ""; None where the folder has none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise DataError(f"there is no {self.path}")
        self.root = self.path.parent if self.path.is_file() else self.path
        found = [self.path] if self.path.is_file() else self.root.rglob("*.parquet")
        self.files = sorted(
            file.relative_to(self.root).as_posix() for file in found if file.is_file() and file.name[0] != "."
        )
        if not self.files:
            raise DataError(f"no *.parquet file in {self.path}")
        self.extras: tuple[str, ...] | None = None
        self.shapes: list[tuple[tuple[int, ...], ...]] = []
        self._sizes = [(self.root / name).stat().st_size for name in self.files]
        # Its file, its number in the file, rows, bytes.
        self._groups = [(name, *group) for name in self.files for group in self._read_footer(name)]
        rows, sizes = ([group[place] for group in self._groups] for place in (2, 3))
        self.group_starts, self.group_bytes = np.cumsum([0, *rows]), np.array(sizes, np.int64)
        if not len(self):
            raise DataError(f"no rows in {self.path}: {len(self.files)} parquet file(s) are all empty")
        self._cache: OrderedDict[int, pa.Table | str] = OrderedDict()
        self.empty_caption = self._read_empty_caption()

    def _read_empty_caption(self) -> torch.Tensor | None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.root / EMPTY_CAPTION
        if not path.exists():
            return None
        try:
            text = load_file(path)[_EMPTY_TENSOR].float()
        except (SafetensorError, KeyError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if text.dim() != 2 or not text.isfinite().all():
            raise DataError(f"{path} must hold a finite [L, D], got {list(text.shape)}")
        return text

    def _read_footer(self, name: str) -> list[tuple[int, int, int]]:
        """Number, rows and bytes of the groups of a file; notes the shapes of its rows."""
        path = self.root / name
        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                columns = file.schema_arrow.names
                extras = tuple(extra for extra in EXTRA_TENSORS if f"{extra}_bytes" in columns)
                wanted = (*_REQUIRED, *tensor_columns(extras))
                if missing := [column for column in wanted if column not in columns]:
                    raise DataError(f"{path} lacks the column(s) {', '.join(missing)}")
                groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
                kept = [f"{tensor}_shape" for tensor in ("vae_latent", *extras)]
                table = file.read(columns=kept, use_threads=False).to_pydict()
                shapes = list(zip(*(table[column] for column in kept), strict=True))
        except DataError:
            raise
        except _UNREADABLE as error:
            if _is_of_system(error):
                raise
            raise DataError(f"{path} is not a parquet file, or its end is missing: {error}") from error
        if len(shapes) != sum(group.num_rows for group in groups):
            raise DataError(f"{path} cannot be used: the numbers of rows in its footer do not agree")
        if shapes and self.extras not in (None, extras):
            others = ", ".join(self.extras or ())
            raise DataError(f"{path} has the extra tensors [{', '.join(extras)}], but files before it have [{others}]")
        self.extras = extras if shapes else self.extras
        self.shapes += [tuple(tuple(shape or ()) for shape in row) for row in shapes]
        return [(number, group.num_rows, group.total_byte_size) for number, group in enumerate(groups)]

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process fills its own.
        return {**self.__dict__, "_cache": OrderedDict()}

    def fingerprint(self) -> str:
        """SHA-256 of the files' relative names and sizes, the rows and bytes of their groups, and the empty caption."""
        digest = hashlib.sha256(json.dumps([self.files, self._sizes, self._groups]).encode())
        if self.empty_caption is not None:
            digest.update(self.empty_caption.numpy().tobytes())
        return digest.hexdigest()

    def _find(self, index: int) -> tuple[int, int]:
        """(number of the row group, row in it)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.path}, which has {len(self)}")
        # Groups without rows start where the next one does; "right" steps over them.
        group = int(np.searchsorted(self.group_starts, index, side="right")) - 1
        return group, int(index - self.group_starts[group])

    def describe(self, index: int) -> dict[str, Any]:
        """Where row `index` is, and its id, None where it cannot be read."""
        group, row = self._find(index)
        file, number, *_ = self._groups[group]
        table = self._cache.get(group)
        try:
            name = table.column("id")[row].as_py() if isinstance(table, pa.Table) else None
        except UnicodeDecodeError:
            name = None
        return {"id": name, "file": file, "row_group": number, "row": row}

    def read(self, index: int) -> Sample:
        """The clip in row `index`.

        Raises:
            BadRow: the row, or the row group that it is in, cannot be decoded.
            DataError, OSError: the file is gone, has changed or cannot be opened; the message names it.
        """
        group, row = self._find(index)
        table = self._group(group)
        if isinstance(table, str):
            raise BadRow(table)
        try:
            columns = {name: table.column(name)[row].as_py() for name in table.column_names}
            for extra in self.extras or ():
                # What FastVideo writes for a tensor that a clip does not have.
                if not any(columns[name] for name in tensor_columns([extra])):
                    columns[f"{extra}_bytes"] = None
            return decode_row(columns)
        except BadRow:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRow(f"a column has a value of the wrong kind: {error}") from error

    def _group(self, group: int) -> pa.Table | str:
        """The rows of a group, or why they cannot be read."""
        if group not in self._cache:
            self._cache[group] = self._read_group(group)
        self._cache.move_to_end(group)
        while len(self._cache) > 1 and sum(getattr(x, "nbytes", 0) for x in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return self._cache[group]

    def _read_group(self, group: int) -> pa.Table | str:
        name, number, rows, _ = self._groups[group]
        path = self.root / name
        if path.stat().st_size != self._sizes[self.files.index(name)]:
            raise DataError(f"{path} has changed since its footer was read")
        try:
            # No threads of Arrow: worker processes are forked.
            with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
                wanted = (*_REQUIRED, *PLAIN, *tensor_columns(self.extras or ()))
                names = [column for column in dict.fromkeys(wanted) if column in file.schema_arrow.names]
                table = file.read_row_group(number, columns=names, use_threads=False)
        except _UNREADABLE as error:
            if _is_of_system(error):
                raise
            return f"the row group cannot be read: {error}"
        return table if len(table) == rows else f"the row group has {len(table)} rows, but its footer says {rows}"


def _is_of_system(error: BaseException) -> bool:
    """Whether the machine failed rather than the data: no such file, no permission, too many open files.

    An unreadable disk block counts as data. Arrow's own OSErrors have no number.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EIO)
