"""dense_steps and dense_layers: which forward calls and which blocks stay exact, shown by bit-identical outputs."""

from __future__ import annotations

import diffusers
import pytest
import tiny_wan
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.modular_pipelines import WanBlocks

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.validation import check_dense, is_dense


@pytest.mark.parametrize(
    "dense, total, expected",
    [
        (0, 4, []),
        (2, 4, [0, 1]),
        (0.26, 4, [0, 1]),
        (0.07, 100, [0, 1, 2, 3, 4, 5, 6]),
        (1.0, 3, [0, 1, 2]),
        ([3, 1], 4, [1, 3]),
        (range(1, 3), 4, [1, 2]),
    ],
    ids=str,
)
def test_what_a_dense_option_means(dense, total, expected):
    chosen = check_dense("dense_steps", dense)
    assert [index for index in range(total) if is_dense("dense_steps", chosen, index, total)] == expected
    assert bool(chosen) == bool(expected)


def by_hand(tiny, pipe, dense, **options):
    """Generate, with apply and restore called by hand between the steps: the oracle for dense_steps."""
    transformers = tiny.transformers_of(pipe)

    def choose(step):
        for model in transformers:
            applied = hasattr(model, "_vmonarch_record")
            if step in dense and applied:
                vmonarch.restore(model)
            elif step not in dense and not applied:
                vmonarch.apply(model, VMonarchProcessor())

    choose(0)
    output = tiny.generate(pipe, callback_on_step_end=lambda _, step, *others: choose(step + 1) or {}, **options)
    for model in transformers:
        if hasattr(model, "_vmonarch_record"):
            vmonarch.restore(model)
    return output


@pytest.mark.parametrize(
    "kind, dense_steps, dense",
    [("t2v", 1, {0}), ("t2v-2.2", 0.5, {0, 1}), ("i2v-5b", [1, 3], {1, 3}), ("vace", 1, {0})],
    ids=str,
)
def test_dense_steps_follow_the_pipeline(tiny, kind, dense_steps, dense):
    pipe = tiny.pipeline(kind)
    expected = by_hand(tiny, pipe, dense, steps=4)
    nothing_dense = by_hand(tiny, pipe, set(), steps=4)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=dense_steps))
    for _ in range(2):
        assert torch.equal(tiny.generate(pipe, steps=4), expected)
    assert not torch.equal(nothing_dense, expected)


@pytest.mark.parametrize("strength, run", [(1.0, 5), (0.6, 3), (0.2, 1)])
def test_dense_steps_of_video_to_video_count_the_steps_that_run(tiny, strength, run):
    pipe = tiny.pipeline("v2v")
    options = {"steps": 5, "strength": strength}
    expected = by_hand(tiny, pipe, {0}, **options)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    assert torch.equal(tiny.generate(pipe, **options), expected)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[run]))
    with pytest.raises(ValueError, match=f"dense_steps names index {run}, but there are only {run} steps"):
        tiny.generate(pipe, **options)


@pytest.mark.parametrize("option", [{"dense_steps": [1, 2]}, {"refresh": [0, 2]}], ids=str)
def test_a_modular_pipeline_tells_the_step(tiny, option):
    pipe = tiny.pipeline("t2v")
    twin = WanBlocks().init_pipeline()
    names = ("text_encoder", "tokenizer", "transformer", "vae", "scheduler")
    twin.update_components(**{name: getattr(pipe, name) for name in names})
    call = {"prompt": tiny.PROMPT, "negative_prompt": tiny.NEGATIVE, "num_inference_steps": 4, "output": "latents"}
    call |= {"height": tiny.HEIGHT, "width": tiny.WIDTH, "num_frames": tiny.FRAMES}
    vmonarch.apply(twin, VMonarchProcessor(**option))
    found = twin(**call, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, tiny.generate(pipe, steps=4))
    vmonarch.restore(twin)
    assert not torch.equal(found, tiny.generate(pipe, steps=4))


@pytest.mark.parametrize("option", [{"dense_steps": [1, 2]}, {"refresh": [0, 2]}], ids=["dense_steps", "refresh"])
def test_a_scheduler_may_be_swapped_between_calls(tiny, option):
    pipe, twin = tiny.applied("t2v", **option), tiny.pipeline("t2v")
    tiny.quickly(pipe, 4)
    pipe.scheduler, twin.scheduler = (FlowMatchEulerDiscreteScheduler(shift=3.0) for _ in range(2))
    vmonarch.apply(twin, VMonarchProcessor(**option))
    assert torch.equal(tiny.quickly(pipe, 4), tiny.quickly(twin, 4))


class Refining(WanPipeline):
    """Its call begins with a call of another pipeline that has its transformer."""

    def __call__(self, *inputs, **options):
        self.first = tiny_wan.quickly(self.other, 5)
        return super().__call__(*inputs, **options)


@pytest.mark.parametrize("option", [{"dense_steps": [1, 2]}, {"refresh": [0, 2]}], ids=["dense_steps", "refresh"])
def test_a_pipeline_may_call_another_inside_its_call(tiny, option):
    pipe = tiny.applied("t2v", **option)
    expected, other = tiny.quickly(pipe, 4), tiny.another(pipe, own_scheduler=True)
    alone, refining = tiny.quickly(other, 5), Refining(**pipe.components)
    # Its scheduler is in use as before.
    refining.other = other
    assert torch.equal(tiny.quickly(refining, 4), expected) and torch.equal(refining.first, alone)


def test_a_schedule_that_another_pipeline_has_replaced_is_refused(tiny):
    pipe = tiny.pipeline("t2v")
    other = tiny.another(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    with pytest.raises(RuntimeError, match="dense_steps.*WanPipeline.*scheduler of its own.*deepcopy"):
        tiny.quickly(pipe, 5, callback_on_step_end=lambda *_: tiny.quickly(other, 5) is None or {})


def test_a_schedule_that_begins_anew_in_mid_run_is_refused(tiny):
    pipe = tiny.applied("t2v", refresh=1)
    with pytest.raises(RuntimeError, match="refresh needs the denoising step, but UniPC.*does not tell it"):
        tiny.quickly(pipe, 4, callback_on_step_end=lambda pipe, *_: pipe.scheduler.set_timesteps(4) or {})


@pytest.mark.parametrize("option, off", [("dense_steps", "dense_steps=0"), ("refresh", "refresh=None")])
def test_a_transformer_called_without_a_pipeline_has_no_step(tiny, option, off):
    pipe = tiny.applied("t2v", **{option: 1})
    message = f"{option} needs the denoising step, but no pipeline calls this transformer.*{off}"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            tiny.run(pipe.transformer)
        tiny.quickly(pipe, 1)


@pytest.mark.parametrize("option", ["dense_steps", "refresh"])
def test_diffusion_forcing_has_no_common_step(tiny, option):
    class SkyReelsV2DiffusionForcingPipeline(diffusers.WanPipeline):
        pass

    pipe = SkyReelsV2DiffusionForcingPipeline(**tiny.pipeline("t2v").components)
    instead = f"use {option}=(0|None, or the preset)"
    with pytest.raises(ValueError, match=f"{option} is not supported with SkyReelsV2Diffusion.*; {instead}"):
        vmonarch.apply(pipe, VMonarchProcessor(**{option: 1}))
    vmonarch.apply(pipe, VMonarchProcessor())
