"""`torchrun … -m vmonarch generate`: processes make every video together, and one of them writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vmonarch.cli import main
from vmonarch.pipelines.config import GenerateConfig
from vmonarch.pipelines.generation import generate
from vmonarch.pipelines.processes import Shard, check_sharing, leaving_group
from vmonarch.pipelines.video_io import read_video

SCRIPT = Path(__file__).parents[1] / "support" / "shared_generate.py"
# 9 tokens a frame, 27 in all, which two processes cannot divide evenly; two steps, the first with full attention.
SETTINGS = ["--height", "48", "--width", "48", "--num-frames", "9", "--steps", "2", "--seed", "0", "1"]
METHOD = ["--attention", "vmonarch:dense_steps=1"]


def command(model: Path, folder: Path) -> list[str]:
    words = ["generate", "a red circle", "--model", str(model), "--output-dir", str(folder), "--no-contact-sheet"]
    return [*words, *SETTINGS, *METHOD]


@pytest.mark.deep
def test_two_processes_make_the_videos_of_one(forks, tiny_two_stage_model, tmp_path, capsys):
    code, output = forks(tmp_path, SCRIPT, *command(tiny_two_stage_model, tmp_path / "two"), processes=2)
    assert code == 0, output[:3000]
    assert all(f"tokens of a block: [{tokens}]" in output for tokens in (13, 14))
    assert main(command(tiny_two_stage_model, tmp_path / "one")) == 0
    one, two = (sorted((tmp_path / name).glob("*.mp4")) for name in ("one", "two"))
    assert [path.name for path in one] == [path.name for path in two] and len(one) == 2
    assert not list((tmp_path / "two").glob(".*")) and output.count(".mp4") == 2
    for ours, shared in zip(one, two, strict=True):
        alone, together = (json.loads(path.with_suffix(".json").read_text()) for path in (ours, shared))
        assert (alone["environment"]["processes"], together["environment"]["processes"]) == (1, 2)
        assert alone["config"] | {"output_dir": ""} == together["config"] | {"output_dir": ""}
        frames = [read_video(path)[0].astype(np.int16) for path in (ours, shared)]
        # Sums in another order, then eight bits and an encoder.
        assert frames[0].std() > 10 and np.abs(frames[0] - frames[1]).max() <= 8
    assert alone["seed"] == 1 and np.abs(read_video(one[0])[0].astype(int) - read_video(one[1])[0]).mean() > 5


@pytest.mark.parametrize(("backend", "left"), [("gloo", 1), ("nccl", 0)])
def test_a_process_that_fails_does_not_wait_for_the_others(monkeypatch, backend, left):
    ended = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ended.append(backend))
    with pytest.raises(KeyboardInterrupt), leaving_group():
        raise KeyboardInterrupt
    assert len(ended) == left
    with leaving_group():
        pass
    assert len(ended) == left + 1


def test_what_processes_cannot_share(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    who = "for 2 processes that share a video"
    for options, message in (
        ({"device": "cpu"}, f"device must be auto {who}, as each has its own, got cpu"),
        ({"offload": "model"}, f"offload must be none {who}, got model"),
        ({"attention": "stack-fast"}, f"cache must be null {who}"),
    ):
        config = GenerateConfig(prompts=("x",), model=str(tiny_model), output_dir=str(tmp_path / "out"), **options)
        with pytest.raises(ValueError, match=message):
            generate(config, shard=Shard(1, 2, 1))
    assert not (tmp_path / "out").exists()
    check_sharing(GenerateConfig(prompts=("x",), attention="stack-near-lossless"), Shard(1, 2, 1))


def test_commands_for_one_process_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("compare", "calibrate"):
        assert main([name, "a red circle", "--output-dir", str(tmp_path / "out")]) == 2
        assert "WORLD_SIZE is 4, but this command is for one process" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_several_processes_need_gpus(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert main(command(tiny_model, tmp_path / "out")) == 2
    assert "--device cannot be the CPU for 2 processes that share a video: each needs a GPU" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "2")
    assert main(command(tiny_model, tmp_path / "out")) == 2
    assert "RANK must be a number below WORLD_SIZE" in capsys.readouterr().err
