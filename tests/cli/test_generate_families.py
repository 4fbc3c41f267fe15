"""Pipelines of every family in the commands that sample: frames, grids and settings are those of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_folders
import torch

from vmonarch import LatentGrid, VMonarchProcessor, apply, report
from vmonarch.pipelines import loading, sampling
from vmonarch.pipelines.config import GenerateConfig, complete
from vmonarch.pipelines.model_folder import find_model

PROMPT = "a red circle moving right"
# Settings that are not the defaults, and what the pipeline itself calls them.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "t2v": (
        {"guidance": 4.0, "negative_prompt": "blue", "max_sequence_length": 8},
        {"guidance_scale": 4.0, "negative_prompt": ["blue"], "max_sequence_length": 8},
    ),
    "hunyuan": (
        {"guidance": 4.0, "true_guidance": 2.0, "negative_prompt": "blue", "max_sequence_length": 24},
        {"guidance_scale": 4.0, "true_cfg_scale": 2.0, "negative_prompt": ["blue"], "max_sequence_length": 24},
    ),
    "hunyuan15": ({"negative_prompt": "blue"}, {"negative_prompt": ["blue"]}),
    "ltx": (
        {"guidance": 4.0, "negative_prompt": "blue", "fps": 12.0, "max_sequence_length": 16},
        {"guidance_scale": 4.0, "negative_prompt": ["blue"], "frame_rate": 12.0, "max_sequence_length": 16},
    ),
    "cogvideox": (
        {"guidance": 4.0, "negative_prompt": "blue"},
        {"guidance_scale": 4.0, "negative_prompt": ["blue"]},
    ),
    "cogvideox15": ({"guidance": 1.0}, {"guidance_scale": 1.0}),
}
FAMILIES = ("hunyuan", "hunyuan15", "ltx", "cogvideox")
Folders = Callable[[str], Path]


def config(folder: Path, name: str, **values: Any) -> GenerateConfig:
    given = {"prompts": (PROMPT,), "model": str(folder), "steps": 2, "device": "cpu", **tiny_folders.size(name)}
    return GenerateConfig(**given | values)


def line(folder: Path, name: str, *words: object) -> list[object]:
    size = [word for key, value in tiny_folders.size(name).items() for word in (f"--{key.replace('_', '-')}", value)]
    return [PROMPT, "--model", folder, "--steps", 2, "--device", "cpu", *size, *words]


@pytest.mark.parametrize("name", tiny_folders.FOLDERS)
def test_full_attention_is_the_stock_pipeline(folders: Folders, name: str) -> None:
    folder, (ours, theirs) = find_model(str(folders(name))), SETTINGS[name]
    settings = complete(config(folder.path, name, attention="full", **ours), folder)
    model = loading.load_model(settings, folder)
    settings.attention.install(model.pipe)
    found = sampling.sample(model, settings, [PROMPT], [7])
    stock = tiny_folders.stock(folder.path)
    call = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(7), "output_type": "pt"}
    expected = stock(prompt=[PROMPT], **tiny_folders.size(name), **call, **theirs).frames
    assert torch.equal(found.frames, expected)
    # What any of the settings changes shows: they have reached the pipeline.
    plain = complete(config(folder.path, name, attention="full"), folder)
    assert not torch.equal(found.frames, sampling.sample(model, plain, [PROMPT], [7]).frames)
    # The grid is that of the call.
    apply(model.pipe, VMonarchProcessor())
    sampling.sample(model, settings, [PROMPT], [0], steps=1, decode=False)
    expected_grid = LatentGrid(*tiny_folders.FOLDERS[name][2])
    assert folder.grid(**tiny_folders.size(name)) == expected_grid == report(model.pipe).grid
    modules = len([module for module in model.pipe.transformer.modules() if hasattr(module, "to_q")])
    assert 2 <= folder.layers <= modules


@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_repeats_every_bit(cli, folders: Folders, name: str) -> None:
    words = ["--attention", "near-lossless", "--steps", 3, "--guidance", 1, "--seed", 0, 1]
    cli.done("generate", *line(folders(name), name, *words), tiny=False)
    record, other = cli.records()
    path = cli.folder / "outputs/generate" / other["video"].replace(".mp4", ".json")
    cli.done("generate", "--from-json", path, "--quiet", tiny=False)
    again = cli.records()[2]
    assert again["config"] == other["config"] and again["frames_sha256"] == other["frames_sha256"]
    assert again["frames_sha256"] != record["frames_sha256"]
    assert record["model"]["vae_dtype"] == "float32" and record["frames_shape"][0] == record["config"]["num_frames"]


LONG = "red " * 300
# Of each pipeline: words after a prompt, and what the message must hold.
BAD_INPUT = {
    "image for text to video": ("hunyuan", ["--image", "first.png"], ["--image", "text-to-video model"]),
    "frames of LTX": ("ltx", ["--num-frames", "13"], ["--num-frames", "8·k + 1 for this model", "9 or 17"]),
    "beyond the rotary tables": ("cogvideox15", ["--height", "80"], ["--height", "at most 64 for this model"]),
    "true guidance": ("ltx", ["--true-guidance", "3"], ["--true-guidance", "LTXPipeline", "HunyuanVideoPipeline"]),
    "negative prompt of no use": (
        "hunyuan",
        ["--negative-prompt", "x"],
        ["--negative-prompt", "true_guidance above"],
    ),
    "long prompt of HunyuanVideo": ("hunyuan", [LONG], ["prompt", "at most 256 tokens", "has 3"]),
    "learnt attention": ("hunyuan", ["--attention", "based"], ["--attention", "'based'", "Wan family"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(cli, folders: Folders, case: str) -> None:
    name, words, parts = BAD_INPUT[case]
    code, out, err = cli("generate", *line(folders(name), name, *words), tiny=False)
    assert code == 2 and out == "" and err.count("\n") == 1, err
    assert all(part in err for part in parts), err
    assert not cli.outputs()
