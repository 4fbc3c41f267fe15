"""Switching on, by a name too, switching off, and what becomes of both when pipelines are copied, shared or rebuilt."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import vmonarch
from vmonarch import Refresh, VMonarchProcessor
from vmonarch.configs.methods import resolve_method
from vmonarch.own import Bound

NEAR_LOSSLESS = VMonarchProcessor(num_iterations=1, exact=None, refresh=Refresh(tolerance=0.07, cache=0.1))
FAST = VMonarchProcessor(num_iterations=1, exact=None, refresh=Refresh(tolerance=0.13, cache=0.1, precision="int8"))


def snapshot(model):
    """Everything about a module tree that apply could leave behind."""
    return {
        name: (
            sorted(vars(module)),
            dict(module._forward_pre_hooks),
            dict(module._forward_pre_hooks_with_kwargs),
            dict(module._forward_hooks),
            getattr(module, "processor", None),
        )
        for name, module in model.named_modules()
    }


def is_ours(processor):
    return isinstance(processor, Bound)


@pytest.mark.parametrize(
    "build",
    ["transformer", "vace_transformer", "chronoedit_transformer", "skyreels_transformer", "animate_transformer"],
)
def test_restore_leaves_nothing_behind_and_cross_attention_is_never_touched(tiny, build):
    model = getattr(tiny, build)()
    before, names = snapshot(model), list(model.state_dict())
    cross = {name: p for name, p in model.attn_processors.items() if "attn2" in name or "face_adapter" in name}
    vmonarch.apply(model, VMonarchProcessor())
    applied = model.attn_processors
    assert list(model.state_dict()) == names and list(snapshot(model)) == list(before)
    assert {name for name in applied if not is_ours(applied[name])} == set(cross)
    assert all(applied[name] is processor for name, processor in cross.items())
    vmonarch.restore(model)
    assert snapshot(model) == before


def test_processors_that_others_have_set_since_stay(tiny):
    model, own = tiny.transformer(), WanAttnProcessor()
    before = snapshot(model)
    stock = model.blocks[0].attn2.processor
    vmonarch.apply(model, VMonarchProcessor())
    expected = tiny.run(model)
    model.blocks[0].attn2.set_processor(own)
    model.blocks[1].attn1.set_processor(own)
    # A dictionary may have ours where they are already.
    model.set_attn_processor(dict(model.attn_processors))
    vmonarch.apply(model, VMonarchProcessor())
    assert model.blocks[0].attn2.processor is own and is_ours(model.blocks[1].attn1.processor)
    assert torch.equal(tiny.run(model), expected)
    vmonarch.restore(model)
    assert model.blocks[0].attn2.processor is own and model.blocks[1].attn1.processor is own
    model.blocks[0].attn2.set_processor(stock)
    model.blocks[1].attn1.set_processor(before["blocks.1.attn1"][-1])
    assert snapshot(model) == before


def test_nothing_changes_when_apply_fails(tiny):
    pipe = tiny.pipeline("t2v-2.2")
    pipe.transformer_2 = tiny.transformer(num_layers=1)
    before = snapshot(pipe.transformer), snapshot(pipe.transformer_2)
    with pytest.raises(ValueError, match="dense_layers"):
        vmonarch.apply(pipe, VMonarchProcessor(dense_layers=[1]))
    assert (snapshot(pipe.transformer), snapshot(pipe.transformer_2)) == before


def test_two_threads_share_a_transformer(tiny):
    model = tiny.applied_transformer()
    grids = [(3, 2, 4), (4, 2, 3)]
    expected = [tiny.run(model, grid) for grid in grids]
    # Both threads are inside forward before either reaches its blocks.
    barrier = threading.Barrier(2, timeout=20)
    model.condition_embedder.register_forward_hook(lambda *_: barrier.wait() < 0 or None)
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(lambda grid: [tiny.run(model, grid) for _ in range(3)], grids))
    for found, wanted in zip(outputs, expected, strict=True):
        assert all(torch.equal(output, wanted) for output in found)


def test_apply_is_near_lossless_and_takes_names(tiny):
    pipe = tiny.pipeline("t2v")
    assert vmonarch.apply(pipe).processor.config == NEAR_LOSSLESS.config
    assert next(iter(vmonarch.presets())) == "near-lossless"
    for name, line in vmonarch.presets().items():
        found = vmonarch.apply(pipe, name).processor
        assert "\n" not in line and found.config == resolve_method(name).processor().config
    assert vmonarch.apply(pipe, "fast").processor.config == FAST.config
    vmonarch.apply(pipe, "fast:refresh=3")
    by_name = tiny.quickly(pipe, 4)
    vmonarch.apply(pipe, VMonarchProcessor(num_iterations=1, exact=None, refresh=3))
    assert torch.equal(tiny.quickly(pipe, 4), by_name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("near-lossles", "processor must be one of .*near-lossless.*got 'near-lossles' .did you mean near-lossless"),
        ("fast:refesh=3", "processor.refesh is no known key .did you mean refresh"),
        ("full", "processor cannot be 'full', the model's own attention: vmonarch.restore puts it back"),
        ("based", "processor cannot be made with 'embedded': vmonarch.load_adapter applies adapters"),
        ("stack-fast", "processor must be one of based.* got 'stack-fast'"),
    ],
)
def test_a_name_that_is_no_preset_is_explained(name, problem, tiny):
    transformer = tiny.transformer()
    with pytest.raises(ValueError, match=problem):
        vmonarch.apply(transformer, name)
    vmonarch.restore(transformer)


@pytest.mark.parametrize("grid", [(3, 3, 3), (3, 3, 2)], ids=["of-another-size", "of-equal-size"])
def test_a_grid_that_the_transformer_is_not_given_is_refused(tiny, grid):
    model = tiny.applied_transformer(grid=grid)
    with pytest.raises(ValueError, match=re.escape(f"grid={grid}, but the transformer was given the grid (3, 2, 3)")):
        tiny.run(model)
