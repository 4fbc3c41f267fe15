"""The proxy model: its size, its clips, and a run of a few steps that writes a pipeline."""

import json

import pytest
import torch
from safetensors.torch import load_file

from vmonarch.eval import prompt_score
from vmonarch.eval.methods import prompt_scorer
from vmonarch.eval.prompt_score import expected_objects, read_video, score_readings
from vmonarch.eval.studies import proxy
from vmonarch.finetune.embedded.data import render, sample_scenes
from vmonarch.pipelines.config import recommended_settings
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.model_folder import find_model


def test_it_is_as_large_as_it_has_to_be():
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        parameters = sum(p.numel() for p in WanTransformer3DModel(**proxy.PROXY_CONFIG).parameters())
    grid = proxy.proxy_grid(proxy.PROXY_SETTINGS)
    assert parameters >= 30_000_000
    assert tuple(grid) == (16, 12, 20) and grid.tokens_per_frame >= 240
    steps = proxy.expected_steps(420, proxy.ProxyTraining.batch, parameters, grid.tokens, proxy.PROXY_CONFIG)
    assert steps == pytest.approx(1980, abs=10) and "1,980 steps of 24 clips" in proxy.__doc__


def test_the_rate_is_that_of_the_embedded_models_run():
    from vmonarch.finetune.embedded.transformer import TRANSFORMER_CONFIG

    # finetune/embedded/README.md: 10,534 steps of 256 clips of 960 tokens in 762 s.
    rate = 10_534 * 256 / 762 * proxy.clip_flops(5_810_000, 960, TRANSFORMER_CONFIG)
    assert rate == pytest.approx(proxy.RATE, rel=0.02)


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
    with pytest.raises(ValueError, match="scale"):
        render(scenes, scale=0)


def test_attributes_are_read_from_larger_videos_too():
    scenes = sample_scenes(4, 5, two_objects=0.0)
    for index, clip in enumerate(render(scenes, frames=range(0, 61, 6), scale=2)):
        readings = read_video((clip.permute(1, 2, 3, 0) + 1) / 2)
        assert score_readings(readings, expected_objects(scenes.scene(index))).all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("proxy") / "model"
    assert proxy.main(["train", "--output", str(path), "--quick", "--device", "cpu", "--minutes", "5"]) == 0
    return path


def test_a_run_writes_a_pipeline_and_its_record(folder, tmp_path):
    assert find_model(str(folder)).pipeline == "WanPipeline"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    record = json.loads((folder / "proxy.json").read_text())
    assert record["steps"] == 2 and record["grid"] == [16, 6, 10] and record["generation"]["height"] == 96
    assert record["command"].startswith("python -m vmonarch.eval.studies.proxy train --output model --quick")
    assert record["training"]["minutes"] == 5.0 and record["seconds"] < 300
    model = LoadedModel(None, find_model(str(folder)), torch.device("cpu"), torch.float32, 0.0, None)
    assert prompt_scorer(model)(torch.zeros(2, 3, 32, 32), "a red circle moves right") == 0.0
    recommended = recommended_settings(find_model(str(folder)))
    assert recommended["flow_shift"] == 5.0 and (recommended["height"], recommended["width"]) == (96, 160)
    command = ["--model", str(folder), "--output", str(tmp_path / "scores.json"), "--methods", "full", "local"]
    few = [
        "--prompts",
        "1",
        "--steps",
        "1",
        "--reader-clips",
        "0",
        "--device",
        "cpu",
        "--height",
        "64",
        "--width",
        "96",
    ]
    assert prompt_score.main([*command, *few]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["settings"]["height"] == 64 and scores["settings"]["flow_shift"] == 5.0
    assert set(scores["summary"]) == {"full", "local"}


def test_a_run_ends_by_the_clock_and_goes_on_from_its_checkpoint(folder, tmp_path, monkeypatch):
    given = []

    def finished(**options):
        given.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(proxy, "train_transformer", finished)
    state = tmp_path / "a" / "state.pt"
    options = ["train", "--quick", "--device", "cpu", "--minutes", "3", "--checkpoint", str(state), "--from-embedded"]
    with pytest.raises(KeyboardInterrupt):
        proxy.main([*options, "--output", str(tmp_path / "model")])
    assert 0 < given[0]["time_limit"] < 180 - proxy.RESERVED_SECONDS
    assert given[0]["checkpoint"] == state and given[0]["sigma_shift"] == 5.0
    own = load_file(embedded_model_path() / "transformer" / "diffusion_pytorch_model.safetensors")
    learnt = given[0]["transformer"].state_dict()
    assert given[0]["config"] == proxy.TRANSFORMER_CONFIG and learnt.keys() == own.keys()
    assert all(torch.equal(learnt[name], own[name].float()) for name in own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "minutes must be positive"),
        (["--minutes", "0.1", "--quick"], "minutes must be more than 0.1"),
        (["--batch", "-1"], "batch must be positive"),
        (["--seed", "-1"], "seed must be at least 0"),
    ],
)
def test_bad_options_are_named(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        proxy.main(["train", "--output", str(tmp_path / "model"), "--device", "cpu", *words])
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_nothing_is_overwritten(folder, capsys):
    before = (folder / "proxy.json").read_bytes()
    with pytest.raises(SystemExit):
        proxy.main(["train", "--output", str(folder), "--quick", "--device", "cpu"])
    assert "nothing is overwritten" in capsys.readouterr().err and (folder / "proxy.json").read_bytes() == before
