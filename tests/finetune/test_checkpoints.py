"""Checkpoints: what is saved comes back bit by bit, and no kill, full disk or failing rank leaves half of one."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vmonarch.finetune import checkpoints as layer
from vmonarch.finetune.checkpoints import (
    CheckpointError,
    Checkpoints,
    pack,
    random_state,
    set_random_state,
    unpack,
)

MEMORY = Path("/dev/shm")
PARTS = ("model", "optimizer", "config", "random", "loader")


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is such a folder: the tests wait for a thousand fsyncs, and none cuts the power."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="vmonarch-", dir=MEMORY) as folder:
        yield Path(folder)


def same(a, b):
    """Equal in type and in every bit, but for a NaN's payload in plain floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(layer._view(a)) == bytes(layer._view(b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return repr(a) == repr(b)


def state(step):
    """Shared and own parts whose every value tells the step."""
    shared = {
        "model": {"layer.weight": torch.full((40, 30), float(step)), "layer.bias": torch.full((7,), step).half()},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((40, 30), 2.0 * step)}}},
        "config": {"lr": 1e-4, "name": "run", "betas": (0.9, 0.999)},
    }
    return shared, {"random": {"torch": torch.full((50,), step % 256, dtype=torch.uint8)}, "loader": {"position": step}}


def save(checkpoints, step):
    return checkpoints.save(step, *state(step))


def assert_loads(checkpoints, step):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = checkpoints.latest()
    assert path == checkpoints.folder / f"step-{step:08d}"
    shared, own = state(step)
    assert same(checkpoints.load(path, wanted=PARTS), {name: {**shared, **own}[name] for name in PARTS})


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


# Packing

DTYPES = [torch.bool, torch.int8, torch.int64, torch.uint16, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64, torch.float8_e4m3fn]  # fmt: skip
VALUES = {
    "int-keys": {0: "a", "0": "b", -1: [], 2**80: {}},
    "order": {"b": 1, "a": 2},
    "tags-as-keys": {"$tensor": "x", "$dict": {"$": 1}},
    "numbers": [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1 / 3, 2**80, True, 1, 1.0],
    "strings": ["", "é漢𝄞", "\ud800", "\x00\n"],
    "nested": ([(), [()], {"x": ({},)}], None),
    "numpy": [np.arange(6, dtype=">u2").reshape(2, 3), np.zeros((0, 2)), np.array(3), np.asfortranarray(np.eye(3))],
    "same-places": {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, "__metadata__": torch.ones(3), "": torch.ones(4)},
    "int-and-str": {1: torch.ones(1), "1": torch.zeros(2)},
    "odd-names": {"\ud800": torch.ones(1), "\x00": torch.ones(2), "漢": torch.ones(3)},
    "numpy-generator": np.random.default_rng(1).bit_generator.state,
}  # fmt: skip


def through_disk(value, folder):
    checkpoints = Checkpoints(folder)
    step = max(checkpoints.steps(), default=0) + 1
    return checkpoints.load(checkpoints.save(step, {"part": value}, {}), wanted=["part"])["part"]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(name, tmp_path):
    assert same(unpack(*pack(VALUES[name])), VALUES[name])
    assert same(through_disk(VALUES[name], tmp_path), VALUES[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_keeps_dtype_shape_and_bits(dtype, tmp_path):
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (3 * 5 * 16,), dtype=torch.uint8).view(dtype)
    given = [data, data.reshape(5, -1).T, data[:0].reshape(0, 3), data[1], data[1:3]]
    assert same(through_disk(given, tmp_path), given)


def test_views_conjugates_and_parameters_are_saved_as_what_they_show(tmp_path):
    base = torch.randn(4, 6)
    z = torch.randn(3, dtype=torch.complex64)
    given = [base[:, ::2], base.T, base, base, z.conj(), z.conj().imag, base[0].expand(3, 6)]
    found = through_disk([*given, torch.nn.Parameter(base)], tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, [*given, base], strict=True))
    assert type(found[-1]) is torch.Tensor and not found[-1].requires_grad
    assert found[2].data_ptr() != found[3].data_ptr()


def test_mappings_and_strings_come_back_plain():
    given = torch.nn.Linear(2, 2).state_dict()
    found = unpack(*pack({"model": given, "torch": torch.__version__}))
    assert type(found["model"]) is dict and list(found["model"]) == list(given) and type(found["torch"]) is str


keys = st.one_of(st.text(max_size=3), st.integers())
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(),
    st.builds(lambda n, dtype: torch.arange(n).to(dtype), st.integers(0, 5), st.sampled_from(DTYPES[1:8])),
    st.builds(lambda n, dtype: np.arange(n).astype(dtype), st.integers(0, 5), st.sampled_from(["<u4", ">f8", "?"])),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_value_comes_back(value):
    packed, tensors = pack(value)
    header, *chunks = layer._tensor_file(tensors)
    read = safetensors.torch.load(header + b"".join(bytes(layer._view(chunk)) for chunk in chunks))
    assert same(unpack(json.loads(json.dumps(packed, allow_nan=False)), read), value)


UNSUPPORTED = {
    "object": ({"a": [object()]}, "a/0 is of type object"),
    "set": ({"a": {1}}, "type set"),
    "object-array": ({"a": np.array([None])}, "an array of object"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, "a must be a plain dense tensor"),
    "meta": ({"a": torch.empty(2, device="meta")}, "on meta"),
    "subclass": ({"a": torch.ones(1).as_subclass(type("Odd", (torch.Tensor,), {}))}, "got Odd"),
    "bytes": ({"a": b"x"}, "a is of type bytes"),
    "numpy-number": ({"a": np.float64(1)}, "a is of type float64"),
    "key": ({"a": {1.5: 1}}, "a has the key 1.5"),
    "dtype": ({"a": torch.zeros(1).to(torch.complex128)}, "complex128 on cpu"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_saved_is_named_before_anything_is_written(name, tmp_path):
    value, message = UNSUPPORTED[name]
    with pytest.raises(TypeError, match=message):
        pack(value)
    checkpoints = Checkpoints(tmp_path / "new")
    with pytest.raises(CheckpointError, match=f"part model: .*{message}"):
        checkpoints.save(1, {"model": value}, {})
    assert not checkpoints.folder.exists()


@pytest.mark.parametrize("packed", [{"$pickle": 1}, {"$tensor": "gone"}], ids=str)
def test_what_pack_never_writes_is_an_error(packed):
    with pytest.raises(CheckpointError):
        unpack(packed, {})


def test_other_tools_read_the_tensors(tmp_path):
    given = {"b": torch.ones(3, dtype=torch.bool), "w": torch.randn(2, 3), "h": torch.ones(5).bfloat16()}
    path = Checkpoints(tmp_path).save(1, {"model": given}, {})
    found = safetensors.torch.load_file(path / "model.safetensors")
    assert found.keys() == given.keys() and all(same(found[name], given[name]) for name in given)
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    starts = {name: 8 + length + header[name]["data_offsets"][0] for name in given}
    assert all(starts[name] % given[name].itemsize == 0 for name in given), starts


# Resuming


def test_random_numbers_go_on_and_tensors_outlive_their_files(tmp_path):
    cpu, tensor = torch.device("cpu"), torch.randn(5)
    draw = lambda: (torch.randn(4).tolist(), random.random(), np.random.randn(3).tolist())
    np.random.randn()  # leaves a second normal number in numpy's state
    path = Checkpoints(tmp_path).save(5, {"model": tensor}, {"random": random_state(cpu)})
    wanted = draw()
    found = Checkpoints(tmp_path).load(path, wanted=["model", "random"])
    # A mapped file would keep its room on the disk after its removal.
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(path) not in maps.read_text()
    shutil.rmtree(path)
    set_random_state(found["random"], cpu)
    assert draw() == wanted and torch.equal(found["model"], tensor)


def test_a_random_state_without_a_generator_is_an_error_and_sets_nothing():
    given = random_state(torch.device("cpu"))
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="lacks the generator of cuda"):
        set_random_state({**given, "torch": torch.zeros_like(before)}, torch.device("cuda"))
    with pytest.raises(CheckpointError, match="lacks the generator of numpy"):
        set_random_state({name: given[name] for name in ("python", "torch")}, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="goes on without one"):
        set_random_state({**given, "cuda": before}, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_the_cuda_generator_goes_on(tmp_path):
    device = torch.device("cuda")
    tensor = torch.randn(5, 3, device=device).T
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, {"model": [tensor]}, {"random": random_state(device)})
    wanted = torch.rand(8, device=device)
    found = checkpoints.load(path, wanted=["model", "random"])
    assert found["model"][0].device.type == "cpu" and torch.equal(found["model"][0], tensor.cpu())
    set_random_state(found["random"], device)
    assert torch.equal(torch.rand(8, device=device), wanted)


# What is chosen and what is refused


def test_the_oldest_are_removed_and_the_new_one_never(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None and checkpoints.steps() == []
    for step, left in ((10, [10]), (20, [10, 20]), (30, [20, 30]), (5, [5, 30]), (40, [30, 40])):
        save(checkpoints, step)
        assert checkpoints.steps() == left and hidden(tmp_path) == []
    Checkpoints(tmp_path, keep=1).save(50, *state(50))
    assert_loads(checkpoints, 50)
    assert checkpoints.steps() == [50]


def test_a_step_is_not_overwritten(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    with pytest.raises(CheckpointError, match="step-00000003 exists and is not overwritten"):
        checkpoints.save(3, {"model": 1}, {})
    assert_loads(checkpoints, 3)
    assert hidden(tmp_path) == []


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "cut-tensors": lambda folder: cut(folder / "model.safetensors"),
    "cut-json": lambda folder: cut(folder / "config.json"),
    "file-gone": lambda folder: (folder / "loader.rank-00000.json").unlink(),
    "manifest-gone": lambda folder: (folder / "manifest.json").unlink(),
    "manifest-empty": lambda folder: (folder / "manifest.json").write_text(""),
    "manifest-a-list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "manifest-cut": lambda folder: cut(folder / "manifest.json"),
    "manifest-of-another": lambda folder: shutil.copy(folder.with_name("step-00000001") / "manifest.json", folder),
    "manifest-edited": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"world_size": 1', '"world_size": 2')
    ),
    "format-of-the-future": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"format": 1', '"format": 2')
    ),
    "emptied": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_moved_aside_when_its_step_comes_again(name, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1), save(checkpoints, 2)
    path = tmp_path / "step-00000002"
    DAMAGES[name](path)
    with pytest.warns(UserWarning, match="step 2 passed over"):
        assert checkpoints.latest() == tmp_path / "step-00000001"
    assert checkpoints.steps() == [1]
    with pytest.raises(CheckpointError, match="step-00000002"):
        checkpoints.load(path, wanted=[])
    with pytest.warns(UserWarning, match="moved to .*damaged"):
        save(checkpoints, 2)
    assert_loads(checkpoints, 2)
    assert checkpoints.steps() == [1, 2] and (tmp_path / "step-00000002.damaged").is_dir()


def test_a_flipped_byte_in_any_file_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = save(checkpoints, 1)
    files = sorted(path.iterdir())
    assert len(files) == 9
    for file in files:
        good = file.read_bytes()
        for place in {0, 7, len(good) // 2, len(good) - 1} & set(range(len(good))):
            bad = bytearray(good)
            bad[place] ^= 4
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match="step-00000001"):
                checkpoints.load(path, wanted=PARTS)
        file.write_bytes(good)
    assert_loads(checkpoints, 1)


def test_missing_parts_are_named_unless_waived(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = save(checkpoints, 1)
    with pytest.raises(CheckpointError, match="lacks ema, scheduler;"):
        checkpoints.load(path, wanted=["model", "ema", "scheduler"])
    with pytest.raises(CheckpointError, match="lacks scheduler;"):
        checkpoints.load(path, wanted=["model", "ema", "scheduler"], waive=["ema"])
    found = checkpoints.load(path, wanted=["config", "ema"], waive=["ema", "config"])
    assert found == {"config": state(1)[0]["config"]}


BAD_SAVES = {
    "upper-case": (1, {"Model": 1}, {}, "part's name"),
    "a-path": (1, {"../model": 1}, {}, "part's name"),
    "empty-name": (1, {"": 1}, {}, "part's name"),
    "manifest": (1, {"manifest": 1}, {}, "part's name"),
    "twice": (1, {"model": 1}, {"model": 1}, "both shared and"),
    "negative-step": (-1, {}, {}, "step must be"),
    "step-of-another-type": (1.0, {}, {}, "step must be"),
}


@pytest.mark.parametrize("name", BAD_SAVES)
def test_bad_arguments_are_named(name, tmp_path):
    *arguments, message = BAD_SAVES[name]
    with pytest.raises(ValueError if "step" in message else CheckpointError, match=message):
        Checkpoints(tmp_path).save(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"rank": 1}, {"rank": -1}])
def test_bad_settings_are_named(wrong, tmp_path):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Checkpoints(tmp_path, **wrong)


# Failing disks


class Disk:
    """Logs every change of the disk and makes some fail."""

    OPERATIONS = ("_mkdir", "_create", "_write", "_sync", "_rename", "_remove")

    def __init__(self, monkeypatch):
        self.log = []
        self.failing = range(0)
        self.number = errno.EIO
        for name in self.OPERATIONS:
            monkeypatch.setattr(layer, name, self.wrap(name, getattr(layer, name)))

    def wrap(self, name, operation):
        def wrapped(subject, *arguments):
            self.log.append((name, os.fspath(getattr(subject, "name", subject) if name == "_write" else subject)))
            if len(self.log) - 1 in self.failing:
                if name == "_write":
                    operation(subject, arguments[0][: len(arguments[0]) // 2])
                raise OSError(self.number, os.strerror(self.number))
            return operation(subject, *arguments)

        return wrapped


@pytest.fixture
def before(tmp_path):
    """A folder with steps 1 and 2 of which the next save removes one, and with leftovers of dead runs."""
    folder = tmp_path / "before"
    checkpoints = Checkpoints(folder, keep=2)
    save(checkpoints, 1), save(checkpoints, 2)
    shutil.copytree(folder / "step-00000001", folder / ".step-00000003.partial")
    shutil.copytree(folder / "step-00000001", folder / ".step-00000000.removed")
    (folder / ".step-00000007.failed-rank-00001").touch()
    return folder


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk-full", "io-error"])
def test_a_failure_at_any_change_of_the_disk_leaves_the_old_checkpoints(number, lasting, before, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    disk.number = number
    folder = shutil.copytree(before, tmp_path / "counted")
    save(Checkpoints(folder, keep=2), 3)
    operations = list(disk.log)
    assert {name for name, _ in operations} == set(Disk.OPERATIONS) and hidden(folder) == []
    published = max(n for n, (name, path) in enumerate(operations) if path.endswith("3.partial") and name == "_rename")
    for n, (name, path) in enumerate(operations):
        folder = shutil.copytree(before, tmp_path / f"fails-at-{n}")
        checkpoints = Checkpoints(folder, keep=2)
        disk.log.clear()
        disk.failing = range(n, 10**6 if lasting else n + 1)
        with pytest.raises(CheckpointError) as caught:
            save(checkpoints, 3)
        disk.failing = range(0)
        message = str(caught.value)
        assert path.replace("counted", folder.name) in message and os.strerror(number) in message
        assert ("is complete" in message) == (n > published)
        assert ("bytes" in message) == (number == errno.ENOSPC)
        assert_loads(checkpoints, 3 if n > published else 2)
        assert visible(folder) == [f"step-{step:08d}" for step in checkpoints.steps()]
        if not lasting and name != "_remove":
            assert not (folder / ".step-00000003.partial").exists()
        save(checkpoints, 4)
        assert_loads(checkpoints, 4)
        assert checkpoints.steps()[0] >= 2 and hidden(folder) == []
        shutil.rmtree(folder)


def test_a_file_that_really_cannot_grow(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        with pytest.raises(CheckpointError, match="model.safetensors: File too large"):
            checkpoints.save(2, {"model": torch.zeros(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert_loads(checkpoints, 1)
    assert hidden(tmp_path) == []


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def interrupt(path, descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(layer, "_sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2)
    assert_loads(checkpoints, 1)
    assert hidden(tmp_path) == []


def test_a_short_write_goes_on(tmp_path, monkeypatch):
    class Slow:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[: max(1, len(data) // 2)])

    write = layer._write
    monkeypatch.setattr(layer, "_write", lambda file, data: write(Slow(file), data))
    monkeypatch.setattr(layer, "_PIECE", 100)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    assert_loads(checkpoints, 1)


def test_all_is_on_disk_before_the_name_and_the_name_before_the_oldest_goes(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "new"
    checkpoints = Checkpoints(folder, keep=1)
    disk = Disk(monkeypatch)
    save(checkpoints, 1)
    made = [path for name, path in disk.log if name == "_mkdir"][:2]
    assert made == [str(folder.parent), str(folder)]
    assert {("_sync", str(tmp_path)), ("_sync", str(folder.parent))} <= set(disk.log)
    disk.log.clear()
    path = save(checkpoints, 2)
    log = disk.log
    hidden_folder = folder / ".step-00000002.partial"

    def last(name, path):
        return max(n for n, entry in enumerate(log) if entry == (name, str(path)))

    named = last("_rename", hidden_folder)
    for file in path.iterdir():
        assert last("_write", hidden_folder / file.name) < last("_sync", hidden_folder / file.name) < named
        assert last("_create", hidden_folder / file.name) < last("_sync", hidden_folder) < named
    old = folder / "step-00000001"
    syncs = [n for n, entry in enumerate(log) if entry == ("_sync", str(folder))]
    hiding, removing = last("_rename", old), last("_remove", folder / ".step-00000001.removed")
    assert [n > named for n in syncs[-2:]] == [True, True]
    assert named < syncs[-2] < hiding < syncs[-1] < removing


# Kills

KILLS = """
    import json, os, random, select, signal, sys, time, warnings
    from pathlib import Path
    import torch
    from vmonarch.finetune.checkpoints import Checkpoints

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    checkpoints = Checkpoints(folder, keep=2)

    def state(step):
        return {"model": {f"layer.{i}": torch.full((20_000,), float(step + i)) for i in range(4)},
                "optimizer": {i: torch.full((300,), step) for i in range(4)}}

    def newest():
        path = checkpoints.latest()
        if path is None:
            return 0
        step = int(path.name.removeprefix("step-"))
        found = checkpoints.load(path, wanted=["model", "optimizer", "loader"])
        assert found["loader"] == {"step": step}
        for name, part in state(step).items():
            assert all(torch.equal(found[name][key], value) for key, value in part.items()), name
        return step

    def save_for_ever(pipe):
        step = newest()
        while True:
            step += 1
            start = time.perf_counter()
            checkpoints.save(step, state(step), {"loader": {"step": step}})
            os.write(pipe, b"%d %f\\n" % (step, time.perf_counter() - start))

    rng = random.Random(0)
    committed = partial = fresh = 0
    duration = 0.01
    for kill in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(writing)
            finally:
                os._exit(1)
        os.close(writing)
        # At any moment of the first saves, or of those after one that was announced, however slow the disk is.
        if rng.random() < 0.7:
            assert select.select([reading], [], [], 60)[0], "the child saves nothing"
        time.sleep(rng.uniform(0, 3 * duration))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child failed by itself"
        with os.fdopen(reading) as pipe:
            lines = [line.split() for line in pipe.read().split("\\n")[:-1]]
        said = [int(step) for step, _ in lines]
        duration = float(lines[-1][1]) if lines else duration
        fresh += bool(said)
        committed = max([committed, *said])
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        partial += any(name.endswith(".partial") for name in names)
        seen = [name for name in names if not name.startswith(".")]
        assert sorted(seen) == [f"step-{step:08d}" for step in checkpoints.steps()], names
        assert newest() >= committed, (newest(), committed)
    print(json.dumps({"committed": committed, "partial": partial, "fresh": fresh}))
"""


def run_script(script, *arguments):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_a_hundred_kills_lose_nothing_that_was_committed(tmp_path):
    report = run_script(KILLS, tmp_path / "run", 100)
    # Kills that hit nothing would prove nothing.
    assert report["partial"] >= 25 and report["fresh"] >= 25 and report["committed"] >= 50, report


# Several ranks


def together(*calls):
    """Results or errors of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.exception() or future.result() for future in [pool.submit(call) for call in calls]]


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


def save_both(ranks, step, *, own=({"loader": 0}, {"loader": 1})):
    return together(*(partial(c.save, step, {"model": step}, part) for c, part in zip(ranks, own, strict=True)))


def test_ranks_save_and_load_their_own_parts(tmp_path):
    ranks = two_ranks(tmp_path, keep=2)
    for step in (1, 2, 3):
        path = tmp_path / f"step-{step:08d}"
        assert save_both(ranks, step) == [path, path]
    for rank, checkpoints in enumerate(ranks):
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.load(path, wanted=["model", "loader"]) == {"model": 3, "loader": rank}
    assert visible(path) == ["loader.rank-00000.json", "loader.rank-00001.json", "manifest.json", "model.json"]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_own_parts_of_another_number_of_ranks_count_as_missing(world_size, tmp_path):
    save_both(two_ranks(tmp_path), 1)
    checkpoints = Checkpoints(tmp_path, world_size=world_size)
    with pytest.raises(CheckpointError, match=rf"lacks loader \(saved by 2 ranks, there are {world_size}\)"):
        checkpoints.load(checkpoints.latest(), wanted=["model", "loader"])
    assert checkpoints.load(checkpoints.latest(), wanted=["model", "loader"], waive=["loader"]) == {"model": 1}


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_one_rank_finds_damaged_is_passed_over_by_all(culprit, tmp_path):
    ranks = two_ranks(tmp_path, keep=4)
    for step in (1, 2, 3, 4):
        save_both(ranks, step)
    # A byte of one rank's own part, and of one that all read.
    for step, name in ((4, f"loader.rank-0000{culprit}.json"), (3, "model.json")):
        (tmp_path / f"step-{step:08d}" / name).write_text("9")
    with pytest.warns(UserWarning, match="step 4 passed over: .*is damaged"):
        found = together(*(partial(c.load_latest, wanted=["model", "loader"]) for c in ranks))
    wanted = [(tmp_path / "step-00000002", {"model": 2, "loader": rank}) for rank in (0, 1)]
    assert found == wanted and all(checkpoints.steps() == [1, 2] for checkpoints in ranks)
    (tmp_path / "step-00000004.damaged").mkdir()
    save_both(ranks, 4)
    assert ranks[0].steps() == [1, 2, 4] and (tmp_path / "step-00000004.damaged-2").is_dir()


def test_if_all_are_damaged_the_error_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load_latest(wanted=["model"]) is None
    (save(checkpoints, 1) / "model.json").write_text("9" * (tmp_path / "step-00000001" / "model.json").stat().st_size)
    with (
        pytest.raises(CheckpointError, match="is damaged: .*; there is no other checkpoint"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        checkpoints.load_latest(wanted=["model"])
    # What is missing is no damage, which an older checkpoint would mend.
    save(checkpoints, 2), save(checkpoints, 3)
    with pytest.raises(CheckpointError, match="step-00000003 lacks ema"):
        checkpoints.load_latest(wanted=["ema"])


def assert_both_fail(ranks, found, culprit, message):
    assert all(isinstance(error, CheckpointError) for error in found), found
    assert message in str(found[culprit])
    path = ranks[0].folder
    assert ranks[0].steps() == [1] and ranks[0].latest() == path / "step-00000001"
    assert hidden(path) == []
    assert save_both(ranks, 3) == [path / "step-00000003"] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_fails_makes_the_other_fail(culprit, tmp_path):
    ranks = two_ranks(tmp_path)
    save_both(ranks, 1)
    own = [{"loader": 0}, {"loader": 1}]
    own[culprit] = {"loader": object()}
    found = save_both(ranks, 2, own=own)
    assert f"rank {culprit}: step 2 was not saved: part loader" in str(found[1 - culprit])
    assert_both_fail(ranks, found, culprit, "type object")


STAGES = {
    "open": (0, "_mkdir", ".step-00000002.partial"),
    "write-0": (0, "_create", "model.json"),
    "write-1": (1, "_create", "loader.rank-00001.json"),
    "manifest": (0, "_create", "manifest.json"),
    "rename": (0, "_rename", ".step-00000002.partial"),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_disk_that_fails_on_one_rank_makes_both_fail(name, tmp_path, monkeypatch):
    culprit, operation, file = STAGES[name]
    ranks = two_ranks(tmp_path)
    save_both(ranks, 1)
    original = getattr(layer, operation)

    def fail(path, *arguments):
        if path.name == file:
            raise OSError(errno.EIO, "Input/output error")
        return original(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(layer, operation, fail)
        found = save_both(ranks, 2)
    assert f"rank {culprit}: step 2 was not saved: " in str(found[1 - culprit])
    assert_both_fail(ranks, found, culprit, "Input/output error")


def test_a_failure_after_the_commit_is_told_to_all(tmp_path, monkeypatch):
    ranks = two_ranks(tmp_path, keep=1)
    save_both(ranks, 1)

    remove = layer._remove

    def fail(path):
        if path.name.endswith(".removed"):
            raise OSError(errno.EIO, "Input/output error")
        remove(path)

    monkeypatch.setattr(layer, "_remove", fail)
    found = save_both(ranks, 2)
    assert all("step 2 is complete, but" in str(error) for error in found)
    assert ranks[0].steps() == [2]


def test_leftovers_of_a_dead_run_are_cleared_away(tmp_path):
    (tmp_path / ".step-00000009.failed-rank-00001").touch()
    (tmp_path / ".step-00000001.partial").mkdir()
    (tmp_path / ".step-00000001.partial" / "loader.rank-00001.json").write_text("{}")
    assert save_both(two_ranks(tmp_path), 1) == [tmp_path / "step-00000001"] * 2
    assert hidden(tmp_path) == []


def test_a_step_is_not_overwritten_by_any_rank(tmp_path):
    ranks = two_ranks(tmp_path)
    save_both(ranks, 1)
    (tmp_path / ".step-00000001.partial").mkdir()
    found = save_both(ranks, 1)
    assert all("exists and is not overwritten" in str(error) for error in found)


def test_ranks_at_different_steps_are_an_error(tmp_path):
    ranks = two_ranks(tmp_path)
    found = together(lambda: ranks[0].save(1, {}, {"loader": 0}), lambda: ranks[1].save(2, {}, {"loader": 1}))
    assert all(isinstance(error, CheckpointError) for error in found)
    assert ranks[0].steps() == []


def test_a_rank_that_died_ends_the_save(tmp_path):
    def exchange(value):
        raise RuntimeError("timed out")

    checkpoints = Checkpoints(tmp_path, world_size=2, exchange=exchange)
    with pytest.raises(CheckpointError, match="waiting for the other ranks failed: timed out"):
        save(checkpoints, 1)
    with pytest.raises(CheckpointError, match="part loader.*type object.*timed out"):
        checkpoints.save(1, {}, {"loader": object()})
    assert list(tmp_path.iterdir()) == []


# Pickle

AUDIT = """
    import json, pickle, sys
    from pathlib import Path
    import numpy, torch
    from vmonarch.finetune.checkpoints import Checkpoints, random_state, set_random_state

    found = []
    sys.addaudithook(lambda event, arguments: found.append(event) if event == "pickle.find_class" else None)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(Path(sys.argv[1]))
    path = checkpoints.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                            {"random": random_state(torch.device("cpu")), "loader": numpy.arange(3)})
    loaded = checkpoints.load(checkpoints.latest(), wanted=["model", "optimizer", "random", "loader"])
    optimizer.load_state_dict(loaded["optimizer"])
    set_random_state(loaded["random"], torch.device("cpu"))
    ours = len(found)
    pickle.loads(pickle.dumps(numpy.arange(3)))
    heads = [file.read_bytes()[:1].hex() for file in path.iterdir()]
    print(json.dumps({"ours": ours, "planted": len(found) - ours, "names": sorted({f.suffix for f in path.iterdir()})}))
"""


def test_nothing_is_unpickled(tmp_path):
    report = run_script(AUDIT, tmp_path)
    assert report["ours"] == 0 and report["planted"] > 0
    assert report["names"] == [".json", ".safetensors"]
