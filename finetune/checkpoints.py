"""Training checkpoints that are complete or not there.

A checkpoint is a folder `step-00000100` with what `accelerator.save_state` writes, `run.json` (what is run) and
`manifest.json` (size and SHA-256 of every file). It is filled under a hidden name, forced to disk and renamed;
only then is the oldest removed. Reading one never runs code that it brings: all of it is safetensors, JSON, or read by
`torch.load` with `weights_only`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vmonarch.configs import file_sha256
from vmonarch.files import flush

# 1 was written until 2026-11-28; its weights can be exported.
FORMAT, FORMATS = 2, (1, 2)
MANIFEST = "manifest.json"
RUN = "run.json"
# By name: the trained weights (of FSDP in a folder of its own), and their average.
WEIGHTS, AVERAGE = "model.safetensors", "ema.safetensors"
_STEP = re.compile(r"step-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved or loaded; the message says which file and why."""


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: made at the first save; on a file system that all ranks share.
        keep: how many complete ones stay; older ones are removed once a newer one is safe on disk.
        rank, world_size: of this process.
        exchange: takes a value of each rank and returns those of all, in the order of the ranks.
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
        self.folder, self.keep, self.rank, self.world_size = Path(folder), keep, rank, world_size
        self._exchange = exchange
        # Why checkpoints that look complete cannot be loaded, by step.
        self._damages: dict[int, str] = {}

    def save(self, step: int, write: Callable[[Path], None], run: Mapping[str, Any]) -> Path:
        """Save a checkpoint, on all ranks together; its folder.

        Args:
            step: of training; the same on all ranks.
            write: fills the folder that it is given, on each rank.
            run: what `read_run` gives, as JSON has it.

        Raises:
            CheckpointError: on every rank when one of them fails. The older checkpoints stay. Also when the step has a
                complete checkpoint, which is never overwritten.
        """
        partial = self.folder / f".{_name(step)}.partial"
        try:
            self._together(step, lambda: self._open(step, partial))
            self._together(step, lambda: write(partial))
            # Of files that another rank has written, too: each machine forces its own to disk.
            self._together(step, lambda: _flush_all(partial))
            self._together(step, lambda: self._commit(step, partial, run))
        finally:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        return self.path(step)

    def _together(self, step: int, stage: Callable[[], None]) -> None:
        """Run a stage; if it fails on one rank, raise on all."""
        failure, cause = None, None
        try:
            stage()
        except Exception as error:
            failure, cause = str(error) or repr(error), error
        for rank, theirs in enumerate(self._exchange(failure)):
            if theirs is not None:
                done = "is complete, but" if (self.path(step) / MANIFEST).exists() else "was not saved:"
                raise CheckpointError(f"step {step} {done} rank {rank}: {theirs}") from cause

    def _open(self, step: int, partial: Path) -> None:
        """Make the hidden folder, after what dead runs left has gone."""
        if self.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.path(step)
        if target.exists():
            damage = self._why_not(step)
            if damage is None:
                raise CheckpointError(f"{target} exists and is not overwritten")
            names = (f"{target.name}.damaged{end}" for end in ("", *(f"-{number}" for number in range(2, 1000))))
            aside = next(path for path in map(self.folder.joinpath, names) if not path.exists())
            warnings.warn(f"a damaged checkpoint is moved to {aside}: {damage}", stacklevel=5)
            target.rename(aside)
            self._damages.pop(step, None)
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover)
        partial.mkdir()

    def _commit(self, step: int, partial: Path, run: Mapping[str, Any]) -> None:
        """Describe all files, give the folder its name, remove the oldest checkpoints."""
        if self.rank:
            return
        (partial / RUN).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        entries = {
            path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in files
        }
        body = {"format": FORMAT, "step": step, "world_size": self.world_size, "files": entries}
        (partial / MANIFEST).write_bytes(_manifest_text(body))
        _flush_all(partial)
        partial.rename(self.path(step))
        flush(self.folder)
        others = [other for other in self.steps() if other != step]
        for other in others[: max(0, len(others) - self.keep + 1)]:
            # Hidden first: half a checkpoint must not look like a whole one.
            hidden = self.folder / f".{_name(other)}.removed"
            self.path(other).rename(hidden)
            shutil.rmtree(hidden)

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

    def latest_sound(self) -> Path | None:
        """The newest checkpoint all of whose files are what was saved, the same on all ranks; None if there is none.

        Raises:
            CheckpointError: there are some, and all are damaged.
        """
        found: tuple[str | None, str | None] = (None, None)
        while self.rank == 0 and (path := self.latest()) is not None:
            step = int(path.name.removeprefix("step-"))
            try:
                check(path)
            except CheckpointError as error:
                self._damages[step] = str(error)
                found = None, str(error)
                continue
            found = str(path), None
            break
        chosen, damage = self._exchange(found)[0]
        if damage is not None:
            raise CheckpointError(f"{damage}; there is no other checkpoint")
        return None if chosen is None else Path(chosen)

    def _found(self) -> list[int]:
        """Steps of all visible folders, also of damaged ones."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def _why_not(self, step: int) -> str | None:
        """Why the checkpoint of a step is not complete; None if it is."""
        try:
            read_manifest(self.path(step))
        except CheckpointError as error:
            return str(error)
        return self._damages.get(step)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint, all whose files are there with their sizes.

    Raises:
        CheckpointError: it is not complete; the message says why.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] not in FORMATS:
            raise CheckpointError(f"{path} has format {manifest['format']}; this version reads {FORMATS}")
        if _manifest_text({key: item for key, item in manifest.items() if key != "sha256"}) != text:
            raise CheckpointError(f"{path} does not fit its own SHA-256")
        if folder.name != _name(manifest["step"]):
            raise CheckpointError(f"{path} is of step {manifest['step']}, not of {folder.name}")
        for name, entry in manifest["files"].items():
            if (found := (folder / name).stat().st_size) != entry["bytes"]:
                raise CheckpointError(f"{folder / name} has {found} bytes, its manifest says {entry['bytes']}")
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no manifest: {error!r}") from error
    return manifest


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file has the SHA-256 that it had when it was saved.

    Raises:
        CheckpointError: a file is damaged or missing; the message names it.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        try:
            found = file_sha256(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror or error}") from error
        if found != entry["sha256"]:
            raise CheckpointError(f"{folder / name} is damaged: its SHA-256 is {found}, not {entry['sha256']}")
    return manifest


def read_run(folder: Path) -> dict[str, Any]:
    """What was run: `step`, `config`, `model`, and of a checkpoint that can be resumed `loader`."""
    run: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
    return run


def load_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors with those that a file has under their names.

    Raises:
        CheckpointError: the file lacks one, or has others.
    """
    found = load_file(path)
    missing, unexpected = weights.keys() - found.keys(), found.keys() - weights.keys()
    if missing or unexpected:
        raise CheckpointError(
            f"{path} does not fit: missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(found[name])


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _flush_all(folder: Path) -> None:
    """Force a folder and all in it to disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def _manifest_text(body: Mapping[str, Any]) -> bytes:
    """With a hash of itself: a wrong step or world size is otherwise believed."""
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": sha256}, indent=2) + "\n").encode()
