"""Checkpoints: what is saved is complete or not there, whatever ends the process or the disk."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import PartialState

from vmonarch import files
from vmonarch.finetune import checkpoints
from vmonarch.finetune.checkpoints import CheckpointError, newest, read, read_tensors, steps_in


def save(folder, step, keep=2):
    """Tensors whose every number tells the step, in two files."""
    tensors = {f"tensor-{n}": torch.full((9,), float(step)) for n in range(70)}
    return checkpoints.save(folder, step, tensors, {"config": step}, keep=keep)


def assert_sound(folder, step):
    path = newest(folder)
    assert path == folder / f"step-{step:08d}" and read(path)["config"] == step
    found = {f"tensor-{n}": torch.zeros(9) for n in range(70)}
    read_tensors(path, found)
    assert all((tensor == step).all() for tensor in found.values())


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_the_oldest_are_removed_and_the_new_one_never(tmp_path):
    folder = tmp_path / "deep" / "new"
    assert newest(folder) is None and steps_in(folder) == []
    for step, left in ((10, [10]), (20, [10, 20]), (30, [20, 30]), (5, [5, 30]), (40, [30, 40])):
        save(folder, step)
        assert steps_in(folder) == left and hidden(folder) == []
    assert_sound(folder, 40)
    with pytest.raises(CheckpointError, match="step-00000040 exists and is not overwritten"):
        save(folder, 40)
    assert_sound(folder, 40)
    save(folder, 50, keep=1)
    assert steps_in(folder) == [50]


def test_a_record_that_this_version_cannot_read_is_named(tmp_path):
    record = save(tmp_path, 1) / "run.json"
    for damage, message in ((('"format": 6', '"format": 7'), "has format 7; this"), (('"', "'"), "no record of a run")):
        record.write_text(record.read_text().replace(*damage))
        with pytest.raises(CheckpointError, match=f"step-00000001/run.json .*{message}"):
            read(record.parent)


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.dcp.HuggingFaceStorageWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert not list(tmp_path.iterdir())


# Failing disks


@pytest.fixture
def disk(monkeypatch):
    """Logs every step by which a save changes the disk for good and each wait for other processes; one may fail."""

    class Disk:
        log, failing = [], None

    def watch(owner, name):
        operation = getattr(owner, name)

        def wrapped(path, *arguments):
            Disk.log.append((name, str(path)))
            if len(Disk.log) - 1 == Disk.failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return operation(path, *arguments)

        monkeypatch.setattr(owner, name, wrapped)

    PartialState()
    for owner, name in ((files, "flush"), (Path, "rename"), (Path, "write_bytes"), (checkpoints, "write_tensors")):
        watch(owner, name)
    monkeypatch.setattr(PartialState, "wait_for_everyone", lambda state: Disk.log.append(("wait", "")))
    return Disk


def test_a_full_disk_at_any_moment_leaves_the_old_checkpoints(tmp_path, disk):
    before = tmp_path / "before"
    save(before, 1), save(before, 2)
    (before / ".step-00000003.partial").mkdir()
    disk.log.clear()
    save(shutil.copytree(before, tmp_path / "counted"), 3)
    operations = list(disk.log)
    named = next(n for n, entry in enumerate(operations) if entry[0] == "rename" and entry[1].endswith("3.partial"))
    assert len(operations) > 10
    for n in (n for n, (name, _) in enumerate(operations) if name != "wait"):
        folder = shutil.copytree(before, tmp_path / f"fails-at-{n}")
        disk.log.clear()
        disk.failing = n
        with pytest.raises(CheckpointError, match="step-00000003 could not be saved: .*No space left on device"):
            save(folder, 3)
        disk.failing = None
        assert_sound(folder, 3 if n > named else 2)
        save(folder, 4)
        assert_sound(folder, 4)
        assert hidden(folder) == []


def test_all_is_on_disk_before_the_name_and_the_name_before_the_oldest_goes(tmp_path, disk):
    save(tmp_path, 1)
    disk.log.clear()
    path = save(tmp_path, 2, keep=1)
    partial = tmp_path / ".step-00000002.partial"
    last = lambda name, path: max(n for n, entry in enumerate(disk.log) if entry == (name, str(path)))
    named = last("rename", partial)
    files = [file.relative_to(path) for file in (path, *path.rglob("*"))]
    assert len(files) == 4 and all(last("flush", partial / file) < named for file in files)
    assert named < last("flush", tmp_path) < last("rename", tmp_path / "step-00000001")
    # All processes wait for the folder, for its files, for these to be on disk, and for its name.
    waits = [n for n, (name, _) in enumerate(disk.log) if name == "wait"]
    written = [n for n, (name, _) in enumerate(disk.log) if name == "write_tensors"]
    first = min(n for n, (name, _) in enumerate(disk.log) if name == "flush")
    assert waits[0] < written[0] and written[-1] < waits[1] < first < waits[2] < named < waits[3] == len(disk.log) - 1
