"""Training checkpoints that are complete or not there.

A checkpoint is a folder `step-00000100` with what `accelerator.save_state` writes, and `run.json`: what is run, and the
size and SHA-256 of every file. It is filled under a hidden name, forced to disk and renamed; only then is the oldest
removed. Reading one never runs code that it brings: all of it is safetensors, JSON, or read by
`torch.load` with `weights_only`.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from safetensors.torch import load_file

from vmonarch.configs import InputError, file_sha256
from vmonarch.files import flush

FORMAT = 3
RUN = "run.json"
# By name: the trained weights (of FSDP in a folder of its own), and their average.
WEIGHTS, AVERAGE = "model.safetensors", "ema.safetensors"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved or loaded; the message says which file and why."""


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first; also of damaged ones."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,})", name)))


def save(folder: Path, step: int, write: Callable[[Path], object], run: Mapping[str, Any], *, keep: int) -> Path:
    """Save a checkpoint, in all processes together; its path.

    Args:
        folder: of the checkpoints; on a file system that all processes share.
        step: of training; the same in all processes.
        write: fills the folder that it is given, in each process.
        run: what is run, as JSON has it, for run.json.
        keep: how many stay; older ones are removed once the new one is safe on disk.

    Raises:
        CheckpointError: it could not be saved, or the step has a checkpoint, which is never overwritten. The older
            ones stay.
    """
    state, target = PartialState(), path_of(folder, step)
    partial = folder / f".{target.name}.partial"
    try:
        if state.is_main_process:
            if target.exists():
                raise CheckpointError(f"{target} exists and is not overwritten")
            # What dead runs left.
            for leftover in folder.glob(".step-*"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        state.wait_for_everyone()
        write(partial)
        state.wait_for_everyone()
        # Of files that another process has written, too: each machine forces its own to disk.
        _flush_all(partial)
        state.wait_for_everyone()
        if state.is_main_process:
            entries = {
                path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
                for path in sorted(partial.rglob("*"))
                if path.is_file()
            }
            body = {"format": FORMAT, "step": step, "world_size": state.num_processes, "files": entries, **run}
            (partial / RUN).write_bytes(json.dumps(body, indent=1).encode())
            _flush_all(partial)
            partial.rename(target)
            flush(folder)
            for other in [path_of(folder, other) for other in steps_in(folder) if other != step][: 1 - keep or None]:
                # Hidden first: half a checkpoint must not look like a whole one.
                shutil.rmtree(other.rename(folder / f".{other.name}.removed"))
        state.wait_for_everyone()
    except OSError as error:
        raise CheckpointError(f"{target} could not be saved: {error}") from error
    finally:
        if state.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def newest(folder: Path) -> Path | None:
    """The newest checkpoint all of whose files are what was saved; None if there are none.

    A newer one that is damaged is passed over with a warning.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    problem = None
    for path in (path_of(folder, step) for step in reversed(steps_in(folder))):
        try:
            check(path)
        except CheckpointError as error:
            problem = error
            warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
        else:
            return path
    if problem:
        raise CheckpointError(f"{problem}; there is no other checkpoint") from problem
    return None


def resume_from(folder: Path) -> Path | None:
    """`newest` for all processes; damaged newer ones are moved aside, for their steps come again.

    Raises:
        CheckpointError: as `newest`.
    """
    found: list[Path | None] = [None]
    if PartialState().is_main_process:
        found[0] = newest(folder)
        for damaged in reversed([path_of(folder, step) for step in steps_in(folder)]):
            if found[0] in (None, damaged):
                break
            damaged.rename(folder / f"{damaged.name}.damaged-{time.time_ns()}")
    return broadcast_object_list(found)[0]


def read(folder: Path) -> dict[str, Any]:
    """What `run.json` of a checkpoint says."""
    run: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
    return run


def check(folder: Path) -> dict[str, Any]:
    """`read` of a checkpoint whose every file has the SHA-256 that it had when it was saved.

    Raises:
        CheckpointError: it is not complete, or a file is damaged; the message names it.
    """
    path = folder / RUN
    try:
        run = read(folder)
        if run["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {run['format']}; this version reads {FORMAT}")
        if folder.name != path_of(folder, run["step"]).name:
            raise CheckpointError(f"{path} is of step {run['step']}, not of {folder.name}")
        for name, entry in run["files"].items():
            if (found := file_sha256(folder / name)) != entry["sha256"]:
                raise CheckpointError(f"{folder / name} is damaged: its SHA-256 is {found}, not {entry['sha256']}")
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no record of a run: {error!r}") from error
    return run


def load_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors with those that a file has under their names.

    Raises:
        CheckpointError: the file lacks one, or has others.
    """
    found = load_file(path)
    if different := sorted(weights.keys() ^ found.keys()):
        raise CheckpointError(f"{path} does not fit: missing or unexpected are {', '.join(different[:3])}, …")
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(found[name])


def hold(folder: Path, argument: str) -> AbstractContextManager[object]:
    """Hold an output folder against other processes until what is returned is left, or the process ends.

    Args:
        argument: that names the folder.

    Raises:
        InputError: another process holds it.
    """
    try:
        return FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout as error:
        problem = f"{str(folder)!r} is in use by another run; wait for its end or give another"
        raise InputError(argument, problem) from error


def _flush_all(folder: Path) -> None:
    """Force a folder and all in it to disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)
