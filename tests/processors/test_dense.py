"""dense_steps and dense_layers: which forward calls and which blocks stay exact, shown by bit-identical outputs."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.dense import DenseSet

SCHEDULERS = {
    "unipc": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "heun": lambda: FlowMatchHeunDiscreteScheduler(shift=3.0),
    "dpm": lambda: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, algorithm_type="dpmsolver++"
    ),
}


@pytest.mark.parametrize(
    "dense, total, expected",
    [
        (0, 4, []),
        (2, 4, [0, 1]),
        (4, 4, [0, 1, 2, 3]),
        (0.0, 4, []),
        (0.5, 4, [0, 1]),
        (0.26, 4, [0, 1]),
        (0.1, 50, [0, 1, 2, 3, 4]),
        (0.07, 100, [0, 1, 2, 3, 4, 5, 6]),
        (1.0, 3, [0, 1, 2]),
        ([], 4, []),
        ([3, 1], 4, [1, 3]),
        ({0, 2}, 4, [0, 2]),
        (range(1, 3), 4, [1, 2]),
    ],
    ids=str,
)
def test_what_a_dense_option_means(dense, total, expected):
    chosen = DenseSet("dense_steps", dense)
    assert [index for index in range(total) if chosen.contains(index, total)] == expected
    assert chosen.some == bool(expected)


@pytest.mark.parametrize("dense", [0, 1, 2, 3, 0.34, 1.0, [1], [0, 2]], ids=str)
def test_dense_layers_keep_their_own_processor(tiny, dense):
    model = tiny.transformer(num_layers=3)
    chosen = DenseSet("dense_layers", dense)
    originals = [block.attn1.processor for block in model.blocks]
    vmonarch.apply(model, VMonarchProcessor())
    sparse = [block.attn1.processor for block in model.blocks]
    vmonarch.restore(model)
    vmonarch.apply(model, VMonarchProcessor(dense_layers=dense))
    actual = tiny.run(model)
    for layer, block in enumerate(model.blocks):
        assert (block.attn1.processor is originals[layer]) == chosen.contains(layer, 3)
    # The same by hand.
    vmonarch.apply(model, VMonarchProcessor())
    for layer, block in enumerate(model.blocks):
        if chosen.contains(layer, 3):
            block.attn1.set_processor(originals[layer])
    assert torch.equal(tiny.run(model), actual)
    assert len(sparse) == 3


def test_dense_layers_of_vace_include_their_control_blocks(tiny):
    model = tiny.vace_transformer()
    vmonarch.apply(model, VMonarchProcessor(dense_layers=[2]))
    kinds = [type(block.attn1.processor).__name__ for block in (*model.blocks, *model.vace_blocks)]
    ours, stock = "VMonarchProcessor", "WanAttnProcessor"
    assert kinds == [ours, ours, stock, ours, stock]


def by_hand(tiny, pipe, dense, order=1, steps=3, **options):
    """Generate, with apply and restore called by hand between the steps: the oracle for dense_steps."""
    transformers = [m for m in (pipe.transformer, getattr(pipe, "transformer_2", None)) if m is not None]

    def choose(step):
        for model in transformers:
            applied = hasattr(model, "_vmonarch_record")
            if step in dense and applied:
                vmonarch.restore(model)
            elif step not in dense and not applied:
                vmonarch.apply(model, VMonarchProcessor())

    def next_step(pipe, evaluation, timestep, tensors):
        # Wan-Animate starts over with each segment.
        choose((evaluation + 1) // order % steps)
        return {}

    choose(0)
    output = tiny.generate(pipe, steps=steps, callback_on_step_end=next_step, **options)
    for model in transformers:
        if hasattr(model, "_vmonarch_record"):
            vmonarch.restore(model)
    return output


@pytest.mark.parametrize("kind", ["t2v", "t2v-2.2", "t2v-5b", "i2v-2.1", "i2v-2.2", "i2v-5b", "vace", "v2v"])
@pytest.mark.parametrize(
    "dense_steps, dense", [(1, {0}), (0.5, {0, 1}), ([1, 3], {1, 3})], ids=["count", "fraction", "collection"]
)
def test_dense_steps_follow_the_pipeline(tiny, kind, dense_steps, dense):
    pipe = tiny.pipeline(kind)
    options = {"steps": 4, "strength": 1.0} if kind == "v2v" else {"steps": 4}
    expected = by_hand(tiny, pipe, dense, **options)
    nothing_dense = by_hand(tiny, pipe, set(), **options)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=dense_steps))
    for _ in range(2):
        assert torch.equal(tiny.generate(pipe, **options), expected)
    assert not torch.equal(nothing_dense, expected)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("kind", ["t2v", "i2v-2.2", "v2v"])
def test_dense_steps_follow_a_scheduler_swapped_after_apply(tiny, scheduler, kind):
    pipe = tiny.pipeline(kind)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[1]))
    tiny.generate(pipe, steps=4)
    pipe.scheduler = SCHEDULERS[scheduler]()
    actual = tiny.generate(pipe, steps=4)
    vmonarch.restore(pipe)
    expected = by_hand(tiny, pipe, {1}, pipe.scheduler.order, steps=4)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, by_hand(tiny, pipe, {0}, pipe.scheduler.order, steps=4))


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


def test_dense_steps_start_over_with_each_segment_of_animate(tiny):
    pipe = tiny.pipeline("animate")
    options = {"steps": 3, "segment_frame_length": 5}
    expected = by_hand(tiny, pipe, {0}, **options)
    steps_run = []
    tiny.generate(pipe, callback_on_step_end=lambda *step: steps_run.append(step[1]) or {}, **options)
    assert steps_run == [0, 1, 2] * 2, "two segments"
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    assert torch.equal(tiny.generate(pipe, **options), expected)


@pytest.mark.parametrize("kind", ["t2v", "i2v-2.1"])
def test_all_steps_dense_is_bit_identical_to_stock(tiny, kind):
    pipe = tiny.pipeline(kind)
    expected = tiny.generate(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1.0))
    assert torch.equal(tiny.generate(pipe), expected)


def test_dense_steps_and_dense_layers_combine(tiny):
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1, dense_layers=1))
    both = tiny.generate(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    assert not torch.equal(tiny.generate(pipe), both)
    vmonarch.apply(pipe, VMonarchProcessor(dense_layers=1))
    assert not torch.equal(tiny.generate(pipe), both)


def test_more_dense_steps_than_steps_are_refused(tiny):
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=4))
    with pytest.raises(ValueError, match="dense_steps=4, but there are only 3 steps"):
        tiny.generate(pipe, steps=3)


def test_dense_steps_of_another_pipelines_run_are_refused(tiny):
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    tiny.generate(pipe)
    other = diffusers.WanPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    with pytest.raises(RuntimeError, match="dense_steps.*not.running.*vmonarch.apply"):
        tiny.generate(other)
    with pytest.raises(RuntimeError, match="dense_steps.*vmonarch.apply"):
        tiny.run(pipe.transformer)
    vmonarch.apply(other, VMonarchProcessor(dense_steps=1))
    tiny.generate(other)


def test_dense_steps_of_a_transformer_copied_out_of_its_pipeline_are_refused(tiny):
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    twin = copy.deepcopy(pipe.transformer)
    with pytest.raises(RuntimeError, match="dense_steps.*pipeline is gone"):
        tiny.run(twin)


def test_schedulers_that_do_not_tell_their_step_are_refused(tiny):
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))

    class Silent:
        timesteps = torch.arange(3)

    pipe.scheduler, pipe._current_timestep, pipe._num_timesteps = Silent(), 1, 3
    with pytest.raises(RuntimeError, match="dense_steps needs a scheduler with a step_index.*Silent"):
        tiny.run(pipe.transformer)


def test_dense_steps_need_a_pipeline(tiny):
    with pytest.raises(ValueError, match="dense_steps needs a pipeline"):
        vmonarch.apply(tiny.transformer(), VMonarchProcessor(dense_steps=1))


@pytest.mark.parametrize("option", [{"dense_steps": 1}, {"dense_layers": 1}, {"dense_layers": [0]}], ids=str)
def test_direct_use_knows_neither_step_nor_layer(tiny, option):
    model = tiny.transformer()
    model.set_attn_processor(VMonarchProcessor(**option))
    with pytest.raises(RuntimeError, match=f"{next(iter(option))} needs vmonarch.apply"):
        tiny.run(model)


def test_diffusion_forcing_has_no_common_step(tiny):
    class SkyReelsV2DiffusionForcingPipeline(diffusers.WanPipeline):
        pass

    parts = tiny.pipeline("t2v").components
    pipe = SkyReelsV2DiffusionForcingPipeline(**parts)
    with pytest.raises(ValueError, match="dense_steps is not supported"):
        vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    vmonarch.apply(pipe, VMonarchProcessor())
