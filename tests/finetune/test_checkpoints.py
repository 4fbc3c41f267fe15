"""Checkpoints: what is saved is complete or not there, whatever ends the process, the disk or another rank."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from vmonarch.finetune import checkpoints as layer
from vmonarch.finetune.checkpoints import CheckpointError, Checkpoints, check, read_run

SUPPORT = Path(__file__).parents[1] / "support"


def write(step, folder):
    """Files whose every byte tells the step."""
    (folder / "weights").mkdir(exist_ok=True)
    (folder / "weights" / "part.bin").write_bytes(bytes([step % 256]) * 1000)
    (folder / "optimizer.bin").write_bytes(bytes([step % 256]) * 500)


def save(checkpoints, step):
    return checkpoints.save(step, partial(write, step), {"step": step})


def assert_sound(checkpoints, step):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = checkpoints.latest_sound()
    assert path == checkpoints.path(step) and read_run(path) == {"step": step}
    assert (path / "weights" / "part.bin").read_bytes() == bytes([step % 256]) * 1000


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_the_oldest_are_removed_and_the_new_one_never(tmp_path):
    checkpoints = Checkpoints(tmp_path / "deep" / "new", keep=2)
    assert checkpoints.latest_sound() is None and checkpoints.steps() == []
    for step, left in ((10, [10]), (20, [10, 20]), (30, [20, 30]), (5, [5, 30]), (40, [30, 40])):
        save(checkpoints, step)
        assert checkpoints.steps() == left and hidden(checkpoints.folder) == []
    assert_sound(checkpoints, 40)
    with pytest.raises(CheckpointError, match="step-00000040 exists and is not overwritten"):
        save(checkpoints, 40)
    assert_sound(checkpoints, 40)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "cut": lambda folder: cut(folder / "weights" / "part.bin"),
    "gone": lambda folder: (folder / "optimizer.bin").unlink(),
    "no-manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest-a-list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "manifest-of-another": lambda folder: shutil.copy(folder.with_name("step-00000001") / "manifest.json", folder),
    "manifest-edited": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"world_size": 1', '"world_size": 2')
    ),
    "flipped": lambda folder: (folder / "optimizer.bin").write_bytes(b"\2" * 499 + b"\3"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_moved_aside_when_its_step_comes_again(name, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1), save(checkpoints, 2)
    (tmp_path / "step-00000002.damaged").mkdir()
    DAMAGES[name](tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match="step 2 passed over"):
        assert checkpoints.latest_sound() == tmp_path / "step-00000001"
    assert checkpoints.steps() == [1]
    with pytest.raises(CheckpointError, match="step-00000002"):
        check(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match="moved to .*damaged-2"):
        save(checkpoints, 2)
    assert_sound(checkpoints, 2)
    assert checkpoints.steps() == [1, 2] and (tmp_path / "step-00000002.damaged-2").is_dir()


def test_if_all_are_damaged_the_error_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    DAMAGES["flipped"](save(checkpoints, 1))
    with (
        pytest.warns(UserWarning),
        pytest.raises(CheckpointError, match="is damaged: .*; there is no other"),
    ):
        checkpoints.latest_sound()


def test_a_format_of_the_future_is_named(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 3}))
    with pytest.raises(CheckpointError, match="has format 3; this version reads"):
        check(path)


# Failing disks


class Disk:
    """Logs every step by which a save changes the disk for good, and makes one of them fail."""

    def __init__(self, monkeypatch):
        self.log, self.failing = [], None
        monkeypatch.setattr(layer, "flush", self.wrap("flush", layer.flush))
        monkeypatch.setattr(Path, "rename", self.wrap("rename", Path.rename))
        monkeypatch.setattr(Path, "write_bytes", self.wrap("write", Path.write_bytes))

    def wrap(self, name, operation):
        def wrapped(path, *arguments):
            self.log.append((name, str(path)))
            if len(self.log) - 1 == self.failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return operation(path, *arguments)

        return wrapped


def test_a_full_disk_at_any_moment_leaves_the_old_checkpoints(tmp_path, monkeypatch):
    before = tmp_path / "before"
    save(Checkpoints(before, keep=2), 1), save(Checkpoints(before, keep=2), 2)
    (before / ".step-00000003.partial").mkdir()
    disk = Disk(monkeypatch)
    save(Checkpoints(shutil.copytree(before, tmp_path / "counted"), keep=2), 3)
    operations = list(disk.log)
    named = next(n for n, entry in enumerate(operations) if entry[0] == "rename" and entry[1].endswith("3.partial"))
    assert len(operations) > 10
    for n in range(len(operations)):
        checkpoints = Checkpoints(shutil.copytree(before, tmp_path / f"fails-at-{n}"), keep=2)
        disk.log.clear()
        disk.failing = n
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save(checkpoints, 3)
        disk.failing = None
        assert ("is complete" in str(caught.value)) == (n > named)
        assert_sound(checkpoints, 3 if n > named else 2)
        save(checkpoints, 4)
        assert_sound(checkpoints, 4)
        assert hidden(checkpoints.folder) == []


def test_all_is_on_disk_before_the_name_and_the_name_before_the_oldest_goes(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    disk = Disk(monkeypatch)
    path = save(checkpoints, 2)
    partial_folder = tmp_path / ".step-00000002.partial"
    place = lambda name, path: max(n for n, entry in enumerate(disk.log) if entry == (name, str(path)))
    named = place("rename", partial_folder)
    files = [file.relative_to(path) for file in (path, *path.rglob("*"))]
    assert len(files) == 6 and all(place("flush", partial_folder / file) < named for file in files)
    assert named < place("flush", tmp_path) < place("rename", tmp_path / "step-00000001")


def test_an_interrupted_save_leaves_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def interrupted(folder):
        write(2, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, interrupted, {})
    assert_sound(checkpoints, 1)
    assert hidden(tmp_path) == []


# Several ranks


def two_ranks(folder, **settings):
    barrier, said = threading.Barrier(2, timeout=20), [None, None]

    def exchange(rank, value):
        said[rank] = value
        barrier.wait()
        found = list(said)
        # Nobody says more before both have heard this.
        barrier.wait()
        return found

    return [
        Checkpoints(folder, rank=rank, world_size=2, exchange=partial(exchange, rank), **settings) for rank in (0, 1)
    ]


def together(*calls):
    """Results or errors of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.exception() or future.result() for future in [pool.submit(call) for call in calls]]


def save_both(ranks, step, broken=None):
    def write_own(rank, folder):
        if rank == broken:
            raise RuntimeError("the card fell off")
        (folder / f"random-{rank}").write_text(str(step))

    return together(*(partial(c.save, step, partial(write_own, c.rank), {"step": step}) for c in ranks))


@pytest.mark.parametrize("broken", [0, 1])
def test_ranks_save_together_or_not_at_all(broken, tmp_path):
    ranks = two_ranks(tmp_path, keep=2)
    assert save_both(ranks, 1) == [tmp_path / "step-00000001"] * 2
    assert {path.name for path in ranks[0].path(1).iterdir()} == {"random-0", "random-1", "run.json", "manifest.json"}
    found = save_both(ranks, 2, broken)
    assert all(isinstance(error, CheckpointError) for error in found)
    assert all(str(error) == f"step 2 was not saved: rank {broken}: the card fell off" for error in found)
    assert ranks[0].steps() == [1] and hidden(tmp_path) == []
    save_both(ranks, 3)
    DAMAGES["no-manifest"](ranks[0].path(3))
    with pytest.warns(UserWarning, match="step 3 passed over"):
        assert together(*(c.latest_sound for c in ranks)) == [tmp_path / "step-00000001"] * 2


# Kills

KILLED = SUPPORT / "killed_training.py"


def run_killed(tmp_path, kills):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, KILLED, str(tmp_path), str(kills)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.deep, pytest.mark.slow])])
def test_a_run_that_is_killed_at_any_moment_ends_as_one_that_was_not(tmp_path, kills):
    report = run_killed(tmp_path, kills)
    # Kills that hit nothing would prove nothing.
    assert report["killed"] == kills and report["resumed"] >= kills // 4 and report["same"], report


# Code


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("file", ["optimizer.bin", "random_states_0.pkl"])
def test_a_checkpoint_from_elsewhere_runs_no_code(file, tmp_path):
    model = torch.nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    path = Checkpoints(tmp_path / "run").save(1, lambda folder: accelerator.save_state(str(folder)), {})
    torch.save({"state": Evil(tmp_path / "evil")}, path / file)
    with suppress(pickle.UnpicklingError):
        accelerator.load_state(str(path))
    accelerator.free_memory()
    assert not (tmp_path / "evil").exists()
    torch.load(path / file, weights_only=False)
    assert (tmp_path / "evil").exists()
