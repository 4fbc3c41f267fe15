"""Training checkpoints that are complete or not there.

A checkpoint is a folder `step-00000100` with tensors, of which each process has written its part, and `run.json`: what
is run. It is filled under a hidden name, forced to disk and renamed; only then is the oldest removed. Reading one never
runs code that it brings: all of it is safetensors and JSON.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from vmonarch import files
from vmonarch.configs import InputError

FORMAT = 6
RUN = "run.json"
# Prefixes of the names of trained weights and of their average.
WEIGHTS, AVERAGE = "weights.", "average."
# Tensors of a file: a process holds those of one in memory while it writes them.
_IN_A_FILE = 64


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved or loaded; the message says which file and why."""


def path_of(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint, existing or not."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,})", name)))


def save(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], run: Mapping[str, Any], *, keep: int) -> Path:
    """Save a checkpoint, in all processes together; its path.

    Args:
        folder: of the checkpoints; on a file system that all processes share.
        step: of training; the same in all processes.
        tensors: as in `write_tensors`.
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
            # Dead runs left these.
            for leftover in folder.glob(".step-*"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        state.wait_for_everyone()
        write_tensors(partial, tensors)
        state.wait_for_everyone()
        # Also for files of other processes: each machine forces its own to disk.
        files.flush_all(partial)
        state.wait_for_everyone()
        if state.is_main_process:
            body = {"format": FORMAT, "step": step, "world_size": state.num_processes, **run}
            (partial / RUN).write_bytes(json.dumps(body, indent=1).encode())
            files.flush_all(partial)
            partial.rename(target)
            files.flush(folder)
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
    """The newest checkpoint; None if there are none."""
    steps = steps_in(folder)
    return path_of(folder, steps[-1]) if steps else None


def read(folder: Path) -> dict[str, Any]:
    """The contents of a checkpoint's `run.json`.

    Raises:
        CheckpointError: there is none that this version can read.
    """
    path = folder / RUN
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if run["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {run['format']}; this version reads {FORMAT}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is no record of a run: {error!r}") from error
    return run


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a folder, in all processes together.

    Args:
        tensors: by the same names in all of them: parts of one that is spread over them, or the same.

    Raises:
        CheckpointError: they could not be written.
    """
    file_of = {name: number // _IN_A_FILE + 1 for number, name in enumerate(tensors)}
    writer = dcp.HuggingFaceStorageWriter(str(folder), file_of, save_distributed=True)
    _together(f"{folder} could not be saved", dcp.save, tensors, storage_writer=writer)


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors with those that a folder has under their names, however they were spread when they were written.

    Raises:
        CheckpointError: a file cannot be read, or one is missing or of another shape.
    """
    problem = f"{folder} cannot be loaded; without it, the one before serves"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            # torch does not say which file is damaged.
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{problem}: {file.name}: {error}") from error
    _together(problem, dcp.load, tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def _together(problem: str, call: Callable[..., object], tensors: Mapping[str, torch.Tensor], **how: Any) -> None:
    """Save or load in all processes; an error of one is the error of all."""
    try:
        # It warns of being the only process.
        with warnings.catch_warnings(action="ignore"):
            call(dict(tensors), **how)
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            # Ctrl-C is none.
            if not isinstance(cause, Exception):
                raise cause from error
        raise CheckpointError(f"{problem}: {'; '.join(dict.fromkeys(map(str, causes)))}") from error


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
