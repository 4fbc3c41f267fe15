"""`vmonarch bench` and `vmonarch tune`: bad arguments have exit code 2, are named, and leave nothing behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from vmonarch.cli import main

BENCH = ["bench", "kernels", "--device", "cpu"]
TUNE = ["tune", "--device", "cpu", "--dtype", "float32", "--output", "table.json"]

# Command line, and what its message must hold.
USAGE = {
    "unknown shape": ([*BENCH, "--shapes", "43x28"], ["--shapes", "43x28x52", "'43x28'"]),
    "shape of nothing": ([*BENCH, "--shapes", "0x28x52"], ["--shapes", "frames x height x width"]),
    "shape twice": ([*BENCH, "--shapes", "2x4x4", "2x4x4:12"], ["--shapes", "different"]),
    "no shape": ([*BENCH, "--shapes", ","], ["--shapes"]),
    "unknown method": ([*BENCH, "--methods", "vmonarch,fa3"], ["--methods", "fa2", "'fa3'"]),
    "method close to a known one": ([*BENCH, "--methods", "vmonach"], ["--methods", "did you mean vmonarch?"]),
    "method twice": ([*BENCH, "--methods", "fa2", "fa2"], ["--methods", "differ"]),
    "method measured nowhere": (
        [*BENCH, "--methods", "vmonarch-torch", "--shapes", "2x4x4"],
        ["--methods", "32x32x64"],
    ),
    "unknown pass": ([*BENCH, "--passes", "sideways"], ["--passes", "forward, backward"]),
    "head dimension too large": ([*BENCH, "--head-dims", "512"], ["--head-dims", "1 to 256", "512"]),
    "head dimension a word": ([*BENCH, "--head-dims", "wide"], ["--head-dims", "1 to 256"]),
    "no rounds": ([*BENCH, "--rounds", "0"], ["--rounds", "above 0"]),
    "rounds a word": ([*BENCH, "--rounds", "many"], ["--rounds", "int"]),
    "no budget": ([*BENCH, "--budget", "0"], ["--budget", "above 0"]),
    "budget not a number": ([*BENCH, "--budget", "nan"], ["--budget", "above 0"]),
    "output is a folder": ([*BENCH, "--output", "."], ["--output", "folder"]),
    "output under a file": ([*BENCH, "--output", "FILE/x.json"], ["--output", "cannot be written"]),
    "unwritable output": ([*BENCH, "--output", "/proc/x/y.json"], ["--output", "cannot be written"]),
    "unknown device": (["bench", "kernels", "--device", "tpu9"], ["--device", "cuda:N", "tpu9"]),
    "another kind of device": (["bench", "kernels", "--device", "meta"], ["--device", "cuda:N", "meta"]),
    "nothing to bench": (["bench"], ["kernels"]),
    "something else to bench": (["bench", "everything"], ["kernels", "everything"]),
    "unknown kernel": ([*TUNE, "--kernels", "r_stop"], ["--kernels", "r_step_last", "'r_stop'"]),
    "unknown dtype": ([*TUNE, "--dtype", "int8"], ["--dtype", "bfloat16, float16, float32"]),
    "dtype of the interpreter": ([*TUNE, "--dtype", "bfloat16"], ["--dtype", "interpreter", "float32"]),
    "interpreter without output": (["tune", "--device", "cpu", "--dtype", "float32"], ["--output"]),
    "tune: head dimension": ([*TUNE, "--head-dims", "0"], ["--head-dims", "1 to 256"]),
    "tune: shape": ([*TUNE, "--shapes", "small"], ["--shapes", "frames x height x width"]),
    "tune: budget": ([*TUNE, "--budget", "-1"], ["--budget", "above 0"]),
    "tune: output is a folder": ([*TUNE, "--output", "."], ["--output", "folder"]),
}


@pytest.mark.parametrize(("words", "fragments"), USAGE.values(), ids=USAGE)
def test_usage_errors(
    words: list[str],
    fragments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "FILE").write_text("no folder")
    assert main(words) == 2
    captured = capsys.readouterr()
    message = captured.err.strip().splitlines()[-1]
    assert captured.out == "" and re.match(rf"vmonarch {words[0]}( kernels)?: error: ", message)
    for fragment in fragments:
        assert fragment in message, message
    assert os.listdir(tmp_path) in (["FILE"], ["FILE", "outputs"], ["outputs", "FILE"])
    assert not [path for path in tmp_path.rglob("*.json")]


@pytest.mark.parametrize("command", [["bench", "kernels"], ["tune"]], ids=lambda words: words[0])
def test_without_a_gpu_there_is_nothing_to_measure(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(command) == 2
    assert "--device 'cuda' cannot be used: there is no CUDA device" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert (
        main([*command, "--device", "cpu", "--output", "x.json", *(["--dtype", "float32"] * (command == ["tune"]))])
        == 2
    )
    assert "--device cpu needs TRITON_INTERPRET=1" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_gpu_is_not_measured_through_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert main(["bench", "kernels"]) == 2
    assert "TRITON_INTERPRET=1: unset it" in capsys.readouterr().err
    assert main(["bench", "kernels", "--device", "cuda:1"]) == 2
    assert "--device must be up to cuda:0" in capsys.readouterr().err
