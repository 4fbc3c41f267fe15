"""`AtomicFiles`: all appear complete, or none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import pytest

import vmonarch.files
from vmonarch.files import AtomicFiles, write_json


def test_existing_files_stay(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(FileExistsError), AtomicFiles() as files:
        files.stage(tmp_path / "a.json")
    # One that appears meanwhile stays too, and takes the others of its group along.
    with pytest.raises(FileExistsError), AtomicFiles() as files:
        files.stage(tmp_path / "c.json").write_text("new")
        files.stage(tmp_path / "b.json").write_text("new")
        (tmp_path / "b.json").write_text("old")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text() == "old"


def test_an_interrupt_at_any_line_leaves_the_old_files_or_the_new_ones(tmp_path: Path) -> None:
    """The last line is behind all of them: it is not interrupted."""
    names, lines, found = ("old-1.json", "old-2.json", "not-there.json"), 0, set()
    while True:
        lines, folder = lines + 1, tmp_path / str(lines)
        folder.mkdir()
        for name in names[:2]:
            (folder / name).write_text("old")
        left = lines

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal left
            if frame.f_code.co_filename != vmonarch.files.__file__:
                return None
            left -= event == "line"
            if left == 0 and event == "line":
                raise KeyboardInterrupt
            return trace

        files = AtomicFiles(overwrite=True)
        for name in names:
            files.stage(folder / name).write_text("new")
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            files.__exit__(None, None, None)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        found.add(tuple((folder / name).read_text() if (folder / name).exists() else None for name in names))
        assert found <= {("old", "old", None), ("new", "new", "new")}, (lines, found)
        if left > 0:
            break
    assert len(found) == 2 and lines > 20


def test_a_rename_that_fails_loses_no_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    (tmp_path / "b.json").mkdir()
    with pytest.raises(IsADirectoryError), AtomicFiles(overwrite=True) as files:
        for name in ("a.json", "c.json", "b.json"):
            files.stage(tmp_path / name).write_text("new")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]
    assert (tmp_path / "a.json").read_text() == "new"


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(UnicodeEncodeError):
        write_json(tmp_path / "a.json", {"a": "\ud800"})
    assert os.listdir(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_text() == '{\n "a": 1\n}\n'


def test_what_is_written_is_flushed_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("flush"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("name"), replace(a, b))[1])
    with AtomicFiles() as files:
        files.stage(tmp_path / "a.json").write_text("a")
    assert events == ["flush", "name", "flush"]
