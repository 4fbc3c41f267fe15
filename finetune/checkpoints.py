"""Training checkpoints that are complete or not there.

A checkpoint is a folder `step-00000100`: a JSON file for each part of the state, a safetensors file beside it if the
part has tensors, and `manifest.json` with the size and SHA-256 of all. It is written under a hidden name, forced to
disk and renamed; only then is the oldest removed. Nothing is pickled: a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import re
import shutil
import struct
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

FORMAT = 1
MANIFEST = "manifest.json"
# Bytes hashed and written at a time.
_PIECE = 16 << 20
_STEP = re.compile(r"step-(\d{8,})")
_PART = re.compile(r"[a-z0-9_-]+")
# Names of dtypes in safetensors.
_SAFETENSORS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
# Kinds of numpy dtypes whose values are their bytes: no objects, no records.
_ARRAYS = "?biufc"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved or loaded; the message says which file and why."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is not what was saved."""


def pack(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A JSON value and the tensors it refers to, from nested dicts, lists, tuples, numbers, strings, None, tensors and
    numpy arrays.

    The tensors are those of `value`, not copies, on their own devices. Mappings of every kind come back as dicts,
    subclasses of str as str, parameters as plain tensors, tensors that share memory as separate ones.

    Raises:
        TypeError: a value of another type, a key that is neither string nor integer, a tensor that is not plain
            (sparse, quantised, meta, distributed), an array that is not of numbers. The message says where.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(value, "", tensors), tensors


def _pack(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    named = place or "the value"
    inside = lambda item, key: _pack(item, f"{place}/{key}" if place else str(key), tensors)
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not plain or value.is_meta or value.dtype not in _SAFETENSORS:
            kind = f"{type(value).__name__}, {value.layout}, {value.dtype} on {value.device}"
            raise TypeError(f"{named} must be a plain dense tensor of a dtype of safetensors, got {kind}")
        return {"$tensor": _add(tensors, place, value.detach().resolve_conj().resolve_neg())}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _ARRAYS:
            raise TypeError(f"{named} is an array of {value.dtype}, which no checkpoint can hold")
        data = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
        return {"$array": _add(tensors, place, data), "dtype": value.dtype.str, "shape": list(value.shape)}
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if type(value) in (list, tuple):
        items = [inside(item, index) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, Mapping):
        if bad := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"{named} has the key {bad[0]!r}, which is neither string nor integer")
        packed = {key: inside(item, key) for key, item in value.items()}
        plain = all(type(key) is str and not key.startswith("$") for key in packed)
        return packed if plain else {"$dict": [list(pair) for pair in packed.items()]}
    raise TypeError(f"{named} is of type {type(value).__name__}, which no checkpoint can hold")


def _add(tensors: dict[str, torch.Tensor], place: str, tensor: torch.Tensor) -> str:
    """Store under a name that is new and that safetensors takes: UTF-8, not its own `__metadata__`."""
    name = place.encode("utf-8", "replace").decode() or "value"
    while name in tensors or name == "__metadata__":
        name += "'"
    tensors[name] = tensor
    return name


def unpack(packed: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `pack` was given.

    Raises:
        CheckpointError: `packed` is not of `pack`, or a tensor is missing.
    """
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    tag = next((key for key in packed if key.startswith("$")), None)
    if tag is None:
        return {key: unpack(item, tensors) for key, item in packed.items()}
    content = packed[tag]
    if tag == "$float":
        return float(content)
    if tag == "$tuple":
        return tuple(unpack(item, tensors) for item in content)
    if tag == "$dict":
        return {key: unpack(item, tensors) for key, item in content}
    if tag not in ("$tensor", "$array"):
        raise CheckpointError(f"{tag} is no kind of value that this version knows")
    if content not in tensors:
        raise CheckpointError(f"tensor {content} is missing")
    if tag == "$tensor":
        return tensors[content]
    return tensors[content].numpy().view(packed["dtype"]).reshape(packed["shape"]).copy()


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the global generators of python, numpy and torch, and of the CUDA device's if `device` is one."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Continue on `device` from what `random_state` gave.

    Raises:
        CheckpointError: a generator's state is missing, or `state` has one of CUDA and training goes on without CUDA.
            Nothing is set then.
    """
    names = ["python", "numpy", "torch"] + ["cuda"] * (device.type == "cuda")
    missing = [name for name in names if name not in state]
    if missing:
        raise CheckpointError(f"the random state lacks the generator of {', '.join(missing)}")
    if "cuda" in state and (device.type != "cuda" or not torch.cuda.is_available()):
        raise CheckpointError("the random state is of a CUDA device, and training goes on without one")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


# All that changes the disk goes through these, so that tests can make each call fail.


def _mkdir(path: Path) -> None:
    os.mkdir(path)


def _create(path: Path) -> FileIO:
    return open(path, "xb", buffering=0)


def _write(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _sync(path: Path, descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The file in the message: errors of write and fsync do not know it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _sync_folder(path: Path) -> None:
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _sync(path, descriptor)
        finally:
            os.close(descriptor)


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    _make_folder(path.parent)
    with _naming(path):
        # Another rank may be first.
        with suppress(FileExistsError):
            _mkdir(path)
        _sync_folder(path.parent)


def _move(source: Path, target: Path) -> None:
    with _naming(source):
        _rename(source, target)


# The content of a file in order; tensors are fetched from their device one at a time.
_Chunks = list[bytes | torch.Tensor]


def _part_files(stem: str, value: Any) -> dict[str, _Chunks]:
    """The JSON file and the safetensors file of a part, by their names."""
    packed, tensors = pack(value)
    files: dict[str, _Chunks] = {f"{stem}.json": [json.dumps(packed, allow_nan=False).encode()]}
    return files | ({f"{stem}.safetensors": _tensor_file(tensors)} if tensors else {})


def _tensor_file(tensors: Mapping[str, torch.Tensor]) -> _Chunks:
    """In the format of safetensors, whose own writer wants all tensors on the CPU at once and hashes nothing.

    Source: https://github.com/huggingface/safetensors (README, Format).
    """
    # Large items first, so that each tensor lies at a multiple of its item's size.
    order = sorted(tensors, key=lambda key: -tensors[key].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        tensor = tensors[key]
        start, end = end, end + tensor.nbytes
        kind = _SAFETENSORS[tensor.dtype]
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *(tensors[key] for key in order)]


def _view(chunk: bytes | torch.Tensor) -> memoryview:
    if isinstance(chunk, bytes):
        return memoryview(chunk)
    if not chunk.numel():
        return memoryview(b"")
    return chunk.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _write_file(path: Path, chunks: _Chunks) -> dict[str, Any]:
    """Write and force to disk; size and SHA-256 of what was meant, whatever the disk made of it."""
    digest, size = hashlib.sha256(), 0
    with _naming(path), _create(path) as out:
        for chunk in chunks:
            data = _view(chunk)
            size += len(data)
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                digest.update(piece)
                _write(out, piece)
        _sync(path, out.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _manifest_text(body: Mapping[str, Any]) -> bytes:
    """With a hash of itself: a wrong step or world size is otherwise believed."""
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": sha256}, indent=2) + "\n").encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint, all whose files are there with their sizes.

    Raises:
        CheckpointError: it is not complete; the message says why.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}; this version reads {FORMAT}")
        body = {key: item for key, item in manifest.items() if key != "sha256"}
        if _manifest_text(body) != text:
            raise CheckpointError(f"{path} does not fit its own SHA-256")
        if folder.name != _name(manifest["step"]):
            raise CheckpointError(f"{path} is of step {manifest['step']}, not of {folder.name}")
        for name, entry in manifest["files"].items():
            _check_size(folder / name, entry)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no manifest: {error!r}") from error
    return manifest


def _check_size(path: Path, entry: Mapping[str, Any]) -> None:
    found = path.stat().st_size
    if found != entry["bytes"]:
        raise CheckpointError(f"{path} has {found} bytes, its manifest says {entry['bytes']}")


def _check_hash(path: Path, entry: Mapping[str, Any]) -> None:
    with _naming(path), open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry["sha256"]:
        raise DamagedError(f"{path} is damaged: its SHA-256 is {found}, its manifest says {entry['sha256']}")


def _read_part(folder: Path, stem: str, files: Mapping[str, Mapping[str, Any]]) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    path = folder / f"{stem}.safetensors"
    if path.name in files:
        _check_hash(path, files[path.name])
        try:
            with safe_open(path, framework="pt") as file:
                # Copies: the tensors must not hang on the mapped file, which may be removed while training goes on.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from error
    path = folder / f"{stem}.json"
    _check_hash(path, files[path.name])
    with _naming(path):
        text = path.read_bytes()
    try:
        return unpack(json.loads(text), tensors)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _name(step: int) -> str:
    return f"step-{step:08d}"


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: made at the first save; on a file system that all ranks share.
        keep: how many complete ones stay; older ones are removed once a newer one is safe on disk.
        rank, world_size: of this process.
        exchange: takes a value of each rank and returns those of all, in the order of the ranks. It is called equally
            often on each rank, also when the save fails. It may raise, for instance after a time-out because a rank
            died; the save is an error then.

    Raises:
        ValueError: keep is below 1, or there is no such rank.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        rank: int = 0,
        world_size: int = 1,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        self.folder = Path(folder)
        self.keep = keep
        self.rank = rank
        self.world_size = world_size
        self._exchange = exchange
        # Why checkpoints that look complete cannot be loaded, by step.
        self._damages: dict[int, str] = {}

    def save(self, step: int, shared: Mapping[str, Any], own: Mapping[str, Any]) -> Path:
        """Save a checkpoint, on all ranks together; its folder.

        Args:
            step: of training; the same on all ranks.
            shared: parts that all ranks have alike, written by rank 0 only ("model", "optimizer", "config", ...).
            own: parts of this rank ("random", "loader").

        Every part is a value that `pack` takes; its name has small letters, digits, `_` and `-`.

        Raises:
            ValueError: step is no integer of at least 0.
            CheckpointError: on every rank when one of them fails. The older checkpoints stay, and of this one nothing
                but hidden leftovers, which the next save removes; unless the message says that it is complete. Also
                when the step has a complete checkpoint, which is never overwritten.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be an integer of at least 0, got {step!r}")
        attempt = _Attempt(self, step, shared, own)
        try:
            attempt.together(attempt.open)
            attempt.entries = {
                name: entry for entries in attempt.together(attempt.write) for name, entry in entries.items()
            }
            attempt.together(attempt.commit)
        finally:
            attempt.clean()
        return self.path(step)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint, be it there or not."""
        return self.folder / _name(step)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [step for step in self._found() if self._why_not(step) is None]

    def latest(self) -> Path | None:
        """The newest complete checkpoint; None if there is none. A newer one that is damaged gives a warning."""
        for step in reversed(self._found()):
            reason = self._why_not(step)
            if reason is None:
                return self.path(step)
            warnings.warn(f"checkpoint of step {step} passed over: {reason}", stacklevel=2)
        return None

    def _found(self) -> list[int]:
        """Steps of all visible folders, also of damaged ones."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def _why_not(self, step: int) -> str | None:
        """Why the checkpoint of a step is not complete; None if it is."""
        try:
            _read_manifest(self.folder / _name(step))
        except CheckpointError as error:
            return str(error)
        return self._damages.get(step)

    def load_latest(
        self, *, waive: Collection[str] = (), wanted: Collection[str]
    ) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that no rank finds damaged, and `load` of it; on all ranks together. None for none.

        A newer one that is damaged gives a warning, and counts as not complete from then on.

        Raises:
            CheckpointError: as `load`; or all are damaged.
        """
        damage: str | None = None
        while (path := self.latest()) is not None:
            parts, own = {}, None
            try:
                parts = self.load(path, waive=waive, wanted=wanted)
            except DamagedError as error:
                own = str(error)
            damage = next((of_rank for of_rank in self._exchange(own) if of_rank is not None), None)
            if damage is None:
                return path, parts
            self._damages[int(path.name.removeprefix("step-"))] = damage
        if damage is not None:
            raise DamagedError(f"{damage}; there is no other checkpoint")
        return None

    def load(self, path: Path, *, waive: Collection[str] = (), wanted: Collection[str]) -> dict[str, Any]:
        """The wanted parts, checked against their SHA-256; tensors on the CPU.

        Args:
            path: of `save` or `latest`.
            waive: parts that may be missing; they are absent in the result then.
            wanted: names of parts. Of a rank's own parts those of this rank; they count as missing when the number of
                ranks has changed.

        Raises:
            CheckpointError: the checkpoint is not complete, a file is damaged, or a part is missing and not waived.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        files = manifest["files"]
        stems: dict[str, str] = {}
        missing: list[str] = []
        for name in wanted:
            own = f"{name}.rank-{self.rank:05d}"
            if f"{name}.json" in files:
                stems[name] = name
            elif f"{own}.json" in files and manifest["world_size"] == self.world_size:
                stems[name] = own
            elif name not in waive:
                of_ranks = f"{name}.rank-00000.json" in files
                missing.append(
                    f"{name} (saved by {manifest['world_size']} ranks, there are {self.world_size})"
                    if of_ranks and manifest["world_size"] != self.world_size
                    else name
                )
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}; waive what may be missing")
        return {name: _read_part(path, stem, files) for name, stem in stems.items()}


@dataclass
class _Attempt:
    """One save on one rank, in stages after each of which the ranks tell each other how it went."""

    owner: Checkpoints
    step: int
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    files: dict[str, _Chunks] = field(default_factory=dict)
    # Sizes and hashes of the files of all ranks.
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    published: bool = False

    @property
    def target(self) -> Path:
        return self.owner.path(self.step)

    @property
    def partial(self) -> Path:
        return self._hidden(self.step, "partial")

    def _hidden(self, step: int, kind: str) -> Path:
        return self.owner.folder / f".{_name(step)}.{kind}"

    def together(self, stage: Callable[[], Any]) -> list[Any]:
        """What a stage returns on each rank.

        Raises:
            CheckpointError: it failed on one of them, or a rank no longer answers.
        """
        result, failure, cause = None, None, None
        try:
            result = stage()
        except Exception as error:
            known = isinstance(error, CheckpointError | OSError)
            reason = f"{error if known else repr(error)}{self._shortage(error)}"
            failure = f"step {self.step} {'is complete, but' if self.published else 'was not saved'}: {reason}"
            cause = error
        try:
            answers = self.owner._exchange((failure, result))
        except Exception as error:
            raise CheckpointError(
                f"{failure or f'step {self.step}'}; waiting for the other ranks failed: {error}"
            ) from error
        if failure is not None:
            raise CheckpointError(failure) from cause
        for rank, (theirs, _) in enumerate(answers):
            if theirs is not None:
                raise CheckpointError(f"rank {rank}: {theirs}")
        return [result for _, result in answers]

    def _shortage(self, error: Exception) -> str:
        """What a full disk would have to hold."""
        cause = error.__cause__ if isinstance(error, CheckpointError) else error
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            return ""
        chunks = [chunk for file in self.files.values() for chunk in file]
        size = sum(len(chunk) if isinstance(chunk, bytes) else chunk.nbytes for chunk in chunks)
        return f" (the files of this rank take {size} bytes)"

    def open(self) -> None:
        """Make the hidden folder, after what dead runs left has gone."""
        self._gather()
        if self.owner.rank:
            return
        folder = self.owner.folder
        _make_folder(folder)
        if self.target.exists():
            damage = self.owner._why_not(self.step)
            if damage is None:
                raise CheckpointError(f"{self.target} exists and is not overwritten")
            aside = self._free_name(f"{self.target.name}.damaged")
            warnings.warn(f"a damaged checkpoint is moved to {aside}: {damage}", stacklevel=4)
            _move(self.target, aside)
            self.owner._damages.pop(self.step, None)
        with _naming(folder):
            leftovers = [path for path in folder.iterdir() if path.name.startswith(".step-")]
        for path in leftovers:
            self._discard(path)
        with _naming(self.partial):
            _mkdir(self.partial)

    def _free_name(self, name: str) -> Path:
        """Where nothing is yet: the name, or that with a number."""
        names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
        return next(path for path in map(self.owner.folder.joinpath, names) if not path.exists())

    def _discard(self, path: Path) -> None:
        if path.exists():
            with _naming(path):
                _remove(path)

    def _gather(self) -> None:
        """Pack everything first: what cannot be saved is found before anything is written."""
        for name in (*self.shared, *self.own):
            if not isinstance(name, str) or not _PART.fullmatch(name) or f"{name}.json" == MANIFEST:
                raise CheckpointError(f"a part's name has small letters, digits, _ and - and is not manifest: {name!r}")
            if name in self.shared and name in self.own:
                raise CheckpointError(f"part {name} is both shared and a rank's own")
        parts = {f"{name}.rank-{self.owner.rank:05d}": value for name, value in self.own.items()}
        if self.owner.rank == 0:
            parts |= self.shared
        for stem, value in parts.items():
            try:
                self.files |= _part_files(stem, value)
            except (TypeError, ValueError, RecursionError) as error:
                raise CheckpointError(f"part {stem}: {error}") from error

    def write(self) -> dict[str, dict[str, Any]]:
        """Sizes and hashes of this rank's files."""
        return {name: _write_file(self.partial / name, chunks) for name, chunks in self.files.items()}

    def commit(self) -> None:
        """Rank 0: describe all files, force the folder to disk, give it its name, remove the oldest checkpoints."""
        if self.owner.rank:
            return
        for name, entry in self.entries.items():
            with _naming(self.partial / name):
                _check_size(self.partial / name, entry)
        body = {
            "format": FORMAT,
            "step": self.step,
            "world_size": self.owner.world_size,
            "files": dict(sorted(self.entries.items())),
        }
        _write_file(self.partial / MANIFEST, [_manifest_text(body)])
        _sync_folder(self.partial)
        _move(self.partial, self.target)
        self.published = True
        _sync_folder(self.owner.folder)
        self._prune()

    def _prune(self) -> None:
        """Hidden first, then removed: half a checkpoint must not look like a whole one, even after a power cut."""
        others = [step for step in self.owner.steps() if step != self.step]
        surplus = others[: max(0, len(others) - self.owner.keep + 1)]
        if not surplus:
            return
        for step in surplus:
            _move(self.owner.path(step), self._hidden(step, "removed"))
        _sync_folder(self.owner.folder)
        for step in surplus:
            self._discard(self._hidden(step, "removed"))

    def clean(self) -> None:
        """Remove what a failed save leaves, as far as the disk lets us."""
        if self.owner.rank == 0:
            with suppress(CheckpointError, OSError):
                self._discard(self.partial)
