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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
_OPTIONAL = tuple(name for name in PLAIN if name not in _REQUIRED)


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
    path = Path(path)
    if rows_per_group < 1:
        raise ValueError(f"rows_per_group must be at least 1, got {rows_per_group}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFiles() as files:
        return _write(files.stage(path), iter(samples), rows_per_group)


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


def _write(path: Path, samples: Iterator[Sample], rows_per_group: int) -> int:
    chunk = list(islice(samples, rows_per_group))
    extras = tuple(chunk[0].extras) if chunk else ()
    if unknown := [name for name in extras if name not in EXTRA_TENSORS]:
        raise ValueError(f"extras must be of {', '.join(EXTRA_TENSORS)}, got {', '.join(unknown)}")
    schema = row_schema(extras)
    rows = 0
    # Tensors have no repeated values worth a dictionary, and their least and greatest bytes mean nothing.
    options: dict[str, Any] = dict(
        compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    with pq.ParquetWriter(path, schema, **options) as writer:
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


@dataclass(frozen=True)
class RowPlace:
    """Where a row is: file by its number in the folder, row group in the file, row in the group; all from 0."""

    file: int
    group: int
    row: int


class ParquetFolder:
    """The rows of all parquet files of a folder, numbered from 0 in the order of the files' relative paths.

    Args:
        path: a folder, searched for `*.parquet` in its folders too (hidden files are those of a writer that was
            killed; links to folders are not followed), or one file.

    Raises:
        DataError: nothing at `path`; no parquet file or no row in it; a file that is not parquet or has lost its end;
            missing columns; files with other extra tensors than the first; an EMPTY_CAPTION that is damaged.

    Attributes:
        empty_caption: [L, D] float32, the encoding of ""; None where the folder has none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise DataError(f"there is no {self.path}")
        if self.path.is_file():
            self.root, names = self.path.parent, [self.path.name]
        else:
            self.root = self.path
            files = (file for file in self.root.rglob("*.parquet") if file.is_file() and file.name[0] != ".")
            names = sorted(file.relative_to(self.root).as_posix() for file in files)
        if not names:
            raise DataError(f"no *.parquet file in {self.path}")
        self.files = tuple(names)
        self._sizes: list[int] = []
        self.extras: tuple[str, ...] = ()
        groups: list[tuple[int, int, int, int]] = []
        first: str | None = None
        for number, name in enumerate(names):
            extras, file_groups = self._read_footer(name)
            groups += [(number, group, rows, size) for group, (rows, size) in enumerate(file_groups)]
            if not sum(rows for rows, _ in file_groups):
                continue
            if first is None:
                first, self.extras = name, extras
            elif extras != self.extras:
                raise DataError(
                    f"{self.root / name} has the extra tensors [{', '.join(extras)}], "
                    f"but {self.root / first} has [{', '.join(self.extras)}]"
                )
        table = np.array(groups, dtype=np.int64).reshape(-1, 4)
        self._group_file, self._group_in_file = table[:, 0], table[:, 1]
        # Row `group_starts[g]` is the first of row group g; one more entry than groups.
        self.group_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(table[:, 2])])
        # Bytes of a row group, not compressed.
        self.group_bytes = table[:, 3]
        if not len(self):
            raise DataError(f"no rows in {self.path}: {len(names)} parquet file(s) are all empty")
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

    def _read_footer(self, name: str) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
        """Extra tensors of a file; rows and bytes of its groups."""
        path = self.root / name
        try:
            self._sizes.append(path.stat().st_size)
            with pq.ParquetFile(path, pre_buffer=False) as file:
                columns, metadata = file.schema_arrow.names, file.metadata
                groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
                sizes = [(group.num_rows, group.total_byte_size) for group in groups]
            if min((min(size) for size in sizes), default=0) < 0 or sum(rows for rows, _ in sizes) != metadata.num_rows:
                raise ValueError("the numbers of rows in its footer do not agree")
        except _UNREADABLE as error:
            if _is_of_system(error):
                raise
            raise DataError(f"{path} is not a parquet file, or its end is missing: {error}") from error
        extras = tuple(extra for extra in EXTRA_TENSORS if f"{extra}_bytes" in columns)
        wanted = (*_REQUIRED, *tensor_columns(extras))
        if missing := [column for column in wanted if column not in columns]:
            raise DataError(f"{path} lacks the column(s) {', '.join(missing)}")
        if twice := [column for column in (*wanted, *_OPTIONAL) if columns.count(column) > 1]:
            raise DataError(f"{path} has the column(s) {', '.join(twice)} more than once")
        return extras, sizes

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A worker process fills its own.
        return {**self.__dict__, "_cache": OrderedDict()}

    def place(self, index: int) -> RowPlace:
        """Where row `index` is.

        Raises:
            IndexError: there is no such row.
        """
        group, row = self._find(index)
        return RowPlace(int(self._group_file[group]), int(self._group_in_file[group]), row)

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.path}, which has {len(self)}")
        # Groups without rows start where the next one does; "right" steps over them.
        group = int(np.searchsorted(self.group_starts, index, side="right")) - 1
        return group, int(index - self.group_starts[group])

    def fingerprint(self) -> str:
        """SHA-256 of the files' relative names and sizes, the rows and bytes of their groups, and the empty caption."""
        groups = [self._group_file.tolist(), np.diff(self.group_starts).tolist(), self.group_bytes.tolist()]
        digest = hashlib.sha256(json.dumps([self.files, self._sizes, groups]).encode())
        if self.empty_caption is not None:
            digest.update(self.empty_caption.numpy().tobytes())
        return digest.hexdigest()

    def read(self, index: int) -> Sample:
        """The clip in row `index`.

        Raises:
            BadRow: the row, or the row group that it is in, cannot be decoded; a note of the error says where it is.
            DataError, OSError: the file is gone, has changed or cannot be opened; the message names it.
        """
        group, row = self._find(index)
        try:
            return self._decode(group, row)
        except BadRow as error:
            place = self.place(index)
            error.add_note(f"in {self.root / self.files[place.file]}, row group {place.group}, row {place.row}")
            raise

    def read_id(self, index: int) -> str | None:
        """The id of the clip in row `index`, None where it cannot be read; the errors of `read` but BadRow."""
        group, row = self._find(index)
        table = self._group(group)
        try:
            value = None if isinstance(table, str) else table.column("id")[row].as_py()
        except UnicodeDecodeError:
            return None
        return value if isinstance(value, str) else None

    def _decode(self, group: int, row: int) -> Sample:
        table = self._group(group)
        if isinstance(table, str):
            raise BadRow(table)
        try:
            columns = {name: table.column(name)[row].as_py() for name in table.column_names}
            for extra in self.extras:
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
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        table = self._read_group(group)
        self._cache[group] = table
        kept = sum(entry.nbytes for entry in self._cache.values() if not isinstance(entry, str))
        while kept > CACHE_BYTES and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            kept -= 0 if isinstance(oldest, str) else oldest.nbytes
        return table

    def _read_group(self, group: int) -> pa.Table | str:
        path = self.root / self.files[self._group_file[group]]
        number, rows = int(self._group_in_file[group]), int(np.diff(self.group_starts)[group])
        if path.stat().st_size != self._sizes[self._group_file[group]]:
            raise DataError(f"{path} has changed since its footer was read")
        try:
            # No threads of Arrow: worker processes are forked.
            with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
                names = file.schema_arrow.names
                wanted = (*_REQUIRED, *_OPTIONAL, *tensor_columns(self.extras))
                table = file.read_row_group(number, columns=[n for n in wanted if n in names], use_threads=False)
        except _UNREADABLE as error:
            if _is_of_system(error):
                raise
            return f"the row group cannot be read: {error}"
        if len(table) != rows:
            return f"the row group has {len(table)} rows, but its footer says {rows}"
        return table


def _is_of_system(error: BaseException) -> bool:
    """Whether the machine failed rather than the data: no such file, no permission, too many open files.

    An unreadable disk block counts as data. Arrow's own OSErrors have no number.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EIO)
