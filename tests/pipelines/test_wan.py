"""Every pipeline of the Wan family: on and off, saved and loaded."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import diffusers
import pytest
import tiny_wan
import torch

import vmonarch
from vmonarch import ExactBlocks, VMonarchProcessor
from vmonarch.pipelines.sampling import _tile


@pytest.mark.parametrize("kind", [*tiny_wan.KINDS, *tiny_wan.RELATIVES])
def test_three_ways_on_bit_identical_off_and_saved_as_stock(tiny, kind, tmp_path):
    pipe = tiny.pipeline(kind)
    expected = tiny.generate(pipe)

    vmonarch.apply(pipe, VMonarchProcessor())
    applied = tiny.generate(pipe)
    assert applied.isfinite().all()
    assert (applied - expected).abs().max() > 1e-3
    # ChronoEdit drops the frames in between after its reasoning steps.
    assert vmonarch.report(pipe).grid == ({"animate": 4, "chronoedit": 2}.get(kind, 3), 2, 3)
    if kind in tiny_wan.RELATIVES:
        vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[1]))
        assert not torch.equal(tiny.generate(pipe), applied)
        vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1.0))
        assert torch.equal(tiny.generate(pipe), expected)
    vmonarch.apply(pipe, VMonarchProcessor(exact=ExactBlocks(band=100)))
    torch.testing.assert_close(tiny.generate(pipe), expected, rtol=1e-3, atol=1e-4)
    vmonarch.restore(pipe)
    assert torch.equal(tiny.generate(pipe), expected)

    parts = tiny_wan.transformers_of(pipe)
    for way in (
        lambda: pipe.set_attn_processor(VMonarchProcessor()),
        lambda: [model.set_attn_processor(VMonarchProcessor()) for model in parts],
    ):
        way()
        assert torch.equal(tiny.generate(pipe), applied)
        pipe.save_pretrained(tmp_path)
        pipe.set_attn_processor(None)
        assert torch.equal(tiny.generate(pipe), expected)

    assert "vmonarch" not in (tmp_path / "model_index.json").read_text()
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(pipe)
    torch.testing.assert_close(tiny.generate(loaded), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", tiny_wan.KINDS)
def test_on_the_gpu(tiny, kind):
    pipe = tiny.applied(kind)
    expected = tiny.generate(pipe)
    pipe.to("cuda")
    torch.testing.assert_close(tiny.generate(pipe).cpu(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("gigabytes", [24, 32])
def test_a_card_too_small_for_whole_frames_decodes_in_tiles(monkeypatch, recwarn, gigabytes):
    model = mock.Mock(device=torch.device("cuda"), **{"folder.traits": SimpleNamespace(wan=True, tiled=False)})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mock.Mock(total_memory=gigabytes * 2**30))
    _tile(model, SimpleNamespace(height=720, width=1280))
    assert model.pipe.vae.mock_calls == [mock.call.enable_tiling() if gigabytes == 24 else mock.call.disable_tiling()]
    assert ["may need 26 GB" in str(warning.message) for warning in recwarn] == [True] * (gigabytes == 24)
