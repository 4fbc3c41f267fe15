"""`AtomicFiles`: files appear complete, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def test_a_rename_that_fails_loses_no_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    (tmp_path / "b.json").mkdir()
    with pytest.raises(IsADirectoryError), AtomicFiles(overwrite=True) as files:
        for name in ("a.json", "c.json", "b.json"):
            files.stage(tmp_path / name).write_text("new")
    # The last of them is not there, which tells that they are not all there.
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json", "c.json"]
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
