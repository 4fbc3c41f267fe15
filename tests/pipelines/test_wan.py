"""vmonarch.pipelines: on and off in every pipeline of the Wan family, saved and loaded, with and without vmonarch."""

from __future__ import annotations

import itertools
import json

import diffusers
import numpy as np
import pytest
import tiny_wan
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import vmonarch
from vmonarch import ExactBlocks, VMonarchProcessor, pipelines
from vmonarch.video_processor import VideoAttentionProcessor


@pytest.mark.parametrize("kind", [*tiny_wan.KINDS, *tiny_wan.RELATIVES])
def test_three_ways_on_and_bit_identical_off(tiny, kind):
    stock = tiny.pipeline(kind)
    expected = tiny.generate(stock)

    installation = vmonarch.apply(stock, VMonarchProcessor())
    applied = tiny.generate(stock)
    assert applied.isfinite().all()
    assert (applied - expected).abs().max() > 1e-3
    # ChronoEdit drops the frames in between after its reasoning steps.
    assert installation.grid == ({"animate": 4, "chronoedit": 2}.get(kind, 3), 2, 3)
    if kind in tiny_wan.RELATIVES:
        vmonarch.apply(stock, VMonarchProcessor(dense_steps=[1]))
        assert not torch.equal(tiny.generate(stock), applied)
        vmonarch.apply(stock, VMonarchProcessor(dense_steps=1.0))
        assert torch.equal(tiny.generate(stock), expected)
    vmonarch.restore(stock)
    assert torch.equal(tiny.generate(stock), expected)

    for model in tiny_wan.transformers_of(stock):
        model.set_attn_processor(VMonarchProcessor())
    assert torch.equal(tiny.generate(stock), applied)
    vmonarch.restore(stock)
    assert torch.equal(tiny.generate(stock), expected)

    if kind in tiny_wan.KINDS:
        ours = tiny.pipeline(kind, pipelines)
        assert torch.equal(tiny.generate(ours), expected)
        ours.set_attn_processor(VMonarchProcessor())
        assert torch.equal(tiny.generate(ours), applied)
        ours.set_attn_processor(None)
        assert torch.equal(tiny.generate(ours), expected)


@pytest.mark.parametrize("kind", tiny_wan.KINDS)
def test_all_blocks_exact_equals_full_attention(tiny, kind):
    pipe = tiny.pipeline(kind)
    expected = tiny.generate(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(exact=ExactBlocks(band=100)))
    torch.testing.assert_close(tiny.generate(pipe), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["t2v", "i2v-2.1"])
def test_batches_and_guidance(tiny, kind):
    pipe = tiny.applied(kind, dense_steps=1)
    with_guidance = tiny.generate(pipe, guidance=5.0)
    without = tiny.generate(pipe, guidance=1.0)
    assert not torch.equal(with_guidance, without)
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    prompts = {"prompt": [tiny.PROMPT] * 2, "negative_prompt": [tiny.NEGATIVE] * 2}
    two = tiny.generate(pipe, generator=generators, **prompts)
    assert two.shape[0] == 2
    torch.testing.assert_close(two[:1], with_guidance, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(two[1:], tiny.generate(pipe, seed=1), rtol=1e-4, atol=1e-4)


def test_frames_of_pixels(tiny):
    pipe = tiny.pipeline("t2v", pipelines)
    pipe.set_attn_processor(VMonarchProcessor())
    frames = tiny.generate(pipe, output_type="np")
    assert frames.shape == (1, tiny.FRAMES, tiny.HEIGHT, tiny.WIDTH, 3)
    assert np.isfinite(frames).all() and frames.std() > 0


def test_sizes_may_change_from_call_to_call(tiny):
    pipe = tiny.pipeline("t2v", pipelines)
    pipe.set_attn_processor(VMonarchProcessor())
    sizes = [
        {"height": 32, "width": 64},
        {"height": 64, "width": 32},
        {"num_frames": 1},
        {"num_frames": 17, "height": 16, "width": 48},
    ]
    first = [tiny.generate(pipe, steps=1, **size) for size in sizes]
    for size, output in zip(sizes, first, strict=True):
        assert torch.equal(tiny.generate(pipe, steps=1, **size), output)


@pytest.mark.parametrize("kind", tiny_wan.KINDS)
def test_what_is_saved_names_the_stock_class_and_loads_either_way(tiny, kind, tmp_path):
    ours = tiny.pipeline(kind, pipelines)
    expected = tiny.generate(ours)
    ours.set_attn_processor(VMonarchProcessor())
    applied = tiny.generate(ours)
    ours.save_pretrained(tmp_path)
    stock_name = type(tiny.pipeline(kind)).__name__
    saved = (tmp_path / "model_index.json").read_text()
    assert json.loads(saved)["_class_name"] == stock_name
    assert "vmonarch" not in saved

    stock = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    stock.set_progress_bar_config(disable=True)
    assert type(stock) is getattr(diffusers, stock_name)
    torch.testing.assert_close(tiny.generate(stock), expected, rtol=1e-4, atol=1e-4)

    loaded = type(ours).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(ours)
    loaded.set_attn_processor(VMonarchProcessor())
    torch.testing.assert_close(tiny.generate(loaded), applied, rtol=1e-4, atol=1e-4)


def test_what_is_saved_loads_where_vmonarch_is_not_installed(tiny, forks, tmp_path):
    ours = tiny.pipeline("t2v-2.2", pipelines)
    ours.set_attn_processor(VMonarchProcessor())
    ours.save_pretrained(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.modules["vmonarch"] = None
import diffusers
pipe = diffusers.DiffusionPipeline.from_pretrained({str(tmp_path)!r})
assert type(pipe) is diffusers.WanPipeline
names = {{type(p).__name__ for p in pipe.transformer_2.attn_processors.values()}}
print(names)
try:
    import vmonarch
except ImportError:
    print("blocked")
""")
    code, output = forks(tmp_path, program)
    assert code == 0, output
    assert output.split("\n")[-3:-1] == ["{'WanAttnProcessor'}", "blocked"]


@pytest.mark.parametrize("dense_steps", [0, [1]], ids=["sparse", "dense-steps"])
def test_from_pipe(tiny, dense_steps):
    stock = tiny.pipeline("t2v")
    expected = tiny.generate(stock)
    ours = pipelines.WanPipeline.from_pipe(stock)
    ours.set_progress_bar_config(disable=True)
    assert type(ours) is pipelines.WanPipeline
    ours.set_attn_processor(VMonarchProcessor(dense_steps=dense_steps))
    applied = tiny.generate(ours)
    assert not torch.equal(applied, expected)
    editing = pipelines.WanVideoToVideoPipeline.from_pipe(ours)
    editing.set_progress_bar_config(disable=True)
    editing.set_attn_processor(VMonarchProcessor(dense_steps=dense_steps))
    tiny.generate(editing, steps=4)
    editing.set_attn_processor(None)
    assert torch.equal(tiny.generate(stock), expected)


@pytest.mark.parametrize("off", [None, WanAttnProcessor()], ids=["None", "stock-processor"])
def test_switching_off_is_idempotent(tiny, off):
    ours = tiny.pipeline("t2v-2.2", pipelines)
    expected = tiny.generate(ours)
    ours.set_attn_processor(off)
    ours.set_attn_processor(VMonarchProcessor())
    for _ in range(2):
        ours.set_attn_processor(off)
        assert torch.equal(tiny.generate(ours), expected)


def test_attn_processors_name_every_module(tiny):
    ours = tiny.pipeline("t2v-2.2", pipelines)
    places = itertools.product(("transformer", "transformer_2"), (0, 1), ("attn1", "attn2"))
    assert list(ours.attn_processors) == [f"{t}.blocks.{i}.{a}.processor" for t, i, a in places]
    ours.set_attn_processor(VMonarchProcessor(dense_layers=[1]))
    changed = {name for name, p in ours.attn_processors.items() if isinstance(p, VideoAttentionProcessor)}
    assert changed == {"transformer.blocks.0.attn1.processor", "transformer_2.blocks.0.attn1.processor"}


@pytest.mark.parametrize("processor", ["vmonarch", VMonarchProcessor, {}, 0], ids=["text", "class", "dict", "number"])
def test_other_processors_are_refused(tiny, processor):
    ours = tiny.pipeline("t2v", pipelines)
    with pytest.raises(TypeError, match="processor must be a VMonarchProcessor"):
        ours.set_attn_processor(processor)


@pytest.mark.parametrize("name", pipelines.__all__)
def test_names_and_signatures_are_those_of_diffusers(name):
    ours, stock = getattr(pipelines, name), getattr(diffusers, name)
    assert issubclass(ours, stock) and ours.__name__ == stock.__name__ == name
    assert ours._get_signature_keys(ours) == stock._get_signature_keys(stock)
    assert ours.model_cpu_offload_seq == stock.model_cpu_offload_seq


def test_bfloat16(tiny):
    pipe = tiny.pipeline("t2v-5b", pipelines).to(torch.bfloat16)
    expected = tiny.generate(pipe)
    pipe.set_attn_processor(VMonarchProcessor())
    applied = tiny.generate(pipe)
    pipe.set_attn_processor(None)
    assert torch.equal(tiny.generate(pipe), expected)
    for model in tiny_wan.transformers_of(pipe):
        model.set_attn_processor(VMonarchProcessor())
    assert torch.equal(tiny.generate(pipe), applied)
    assert applied.isfinite().all() and not torch.equal(applied, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", tiny_wan.KINDS)
def test_on_the_gpu(tiny, kind):
    pipe = tiny.applied(kind)
    expected = tiny.generate(pipe)
    pipe.to("cuda")
    torch.testing.assert_close(tiny.generate(pipe).cpu(), expected, rtol=1e-2, atol=1e-2)
