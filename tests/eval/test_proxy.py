"""The proxy model: its size, and a run of a few steps that writes a pipeline."""

import json

import pytest
import torch
from safetensors.torch import load_file

from vmonarch.eval.studies import proxy
from vmonarch.finetune.scenes import render, sample_scenes
from vmonarch.pipelines.config import recommended_settings
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.pipelines.model_folder import find_model


def run(folder, *words):
    return proxy.main(["train", "--output", str(folder), "--quick", "--device", "cpu", *words])


def test_scenes_drawn_larger_are_the_same_scenes():
    scenes = sample_scenes(6, 11)
    small, large = (render(scenes, frames=[0, 60], scale=scale) for scale in (1, 2))
    assert large.shape == (6, 3, 2, 192, 320)
    shrunk = torch.nn.functional.avg_pool3d(large, (1, 2, 2))
    # They differ where an edge crosses a pixel.
    assert (shrunk - small).abs().mean() < 0.01 and (shrunk - small).abs().max() < 0.6
    # Edges are one pixel wide at any scale: the share of pixels between two colours halves.
    edges = [(video.diff(dim=-1).abs() > 0.02).float().mean() for video in (small, large)]
    assert 0.3 < edges[1] / edges[0] < 0.7


def test_a_run_writes_a_pipeline_and_its_record_and_overwrites_nothing(tmp_path, capsys):
    folder = tmp_path / "model"
    assert run(folder, "--minutes", "5") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    record = json.loads((folder / "proxy.json").read_text())
    assert record["steps"] == 2 and record["grid"] == [16, 6, 10] and record["parameters"] < 1e6
    assert record["command"].startswith("python -m vmonarch.eval.studies.proxy train --output model --quick")
    recommended = recommended_settings(find_model(str(folder)))
    assert recommended["flow_shift"] == 5.0 and (recommended["height"], recommended["width"]) == (96, 160)
    with pytest.raises(SystemExit):
        run(folder)
    assert "nothing is overwritten" in capsys.readouterr().err
    assert json.loads((folder / "proxy.json").read_text()) == record


def test_the_clock_ends_a_run_which_may_start_from_the_embedded_model(tmp_path, monkeypatch):
    given = {}

    def interrupted(**options):
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(proxy, "train_transformer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "model", "--minutes", "3", "--from-embedded")
    assert 0 < given["time_limit"] < 180 - proxy.RESERVED and given["sigma_shift"] == 5.0
    own = load_file(embedded_model_path() / "transformer" / "diffusion_pytorch_model.safetensors")
    learnt = given["transformer"].state_dict()
    assert learnt.keys() == own.keys() and all(torch.equal(learnt[name], own[name].float()) for name in own)


@pytest.mark.parametrize("minutes, message", [("0", "must be positive, got 0"), ("0.1", "clips and saving alone")])
def test_too_little_time_is_an_error(minutes, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path / "model", "--minutes", minutes)
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()
