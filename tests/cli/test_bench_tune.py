"""`vmonarch bench` and `vmonarch tune`: bad arguments have exit code 2, are named, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vmonarch.cli import main


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
