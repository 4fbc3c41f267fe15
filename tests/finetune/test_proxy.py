"""How a proxy of the embedded model is trained, and on what clips."""

import hashlib
import json
import random

import diffusers
import pytest
import torch

from vmonarch.finetune import proxy as command
from vmonarch.finetune import scenes
from vmonarch.pipelines.config import recommended_settings
from vmonarch.pipelines.model_folder import find_model, folder_bytes

SMALL = {"num_attention_heads": 1, "ffn_dim": 64, "num_layers": 1}
QUICK = {"CLIPS": 2, "STEPS": 2, "BATCH": 2, "SCALE": 1, "TRANSFORMER": SMALL}


def test_the_command_writes_a_stock_pipeline_and_how_it_was_made(tmp_path, monkeypatch):
    for name, value in QUICK.items():
        monkeypatch.setattr(command, name, value)
    folder = tmp_path / "model"
    assert command.main(["--output", str(folder)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    pipe = diffusers.WanPipeline.from_pretrained(folder)
    assert type(pipe) is diffusers.WanPipeline and pipe.scheduler.config.flow_shift == 5.0
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.float32}
    size = sum(p.numel() for m in (pipe.vae, pipe.text_encoder, pipe.transformer) for p in m.parameters())
    assert 2 * size < folder_bytes(folder) < 2 * size + 200_000
    record = json.loads((folder / "proxy.json").read_text())
    assert "vmonarch.finetune.proxy --output" in record["command"] and record["log"][-1]["step"] == 2
    assert record["training"]["learning_rate"] == 1e-3
    assert record["parameters"] == sum(parameter.numel() for parameter in pipe.transformer.parameters())
    recommended = recommended_settings(find_model(str(folder)))
    assert recommended["flow_shift"] == 5.0 and (recommended["height"], recommended["width"]) == (96, 160)


# The procedural clips


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_what_a_seed_gives_is_pinned():
    """All shapes, colours, directions, patterns and pans are in it."""
    drawn = [scenes.sample_scene(seed) for seed in range(96)]
    shown = [scene.shown for scene in drawn]
    for name in ("shape", "colour", "direction", "size", "speed"):
        table = getattr(scenes, f"{name.upper()}S")
        assert {getattr(item, name) for scene in shown for item in scene.objects} == set(table)
    assert {scene.pattern for scene in shown} == set(scenes.PATTERNS)
    assert {scene.pan for scene in shown} == set(scenes.PANS)
    assert digest(repr(shown)) == "2ed860b36d5c27ef"
    # Processors round the last bit of pixels differently.
    means = [float((127.5 + 127.5 * scenes.render(scene, frames=[0, 30, 60])).mean()) for scene in drawn[:6]]
    assert means == pytest.approx([104.377, 179.783, 35.085, 40.598, 129.902, 49.052], abs=0.01)
    rng = random.Random(4)
    assert digest("\n".join(scenes.caption(scene, rng) for scene in shown for _ in range(8))) == "7f0a8109e5f5f11d"
    prompts = scenes.held_out_prompts()
    assert len(prompts) == 64 and sum(len(scene.objects) == 2 for scene in prompts.values()) == 12
    assert digest("\n".join(prompts)) == "2c27cc060215c15e"
