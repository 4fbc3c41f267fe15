"""Switching on, by a name too, switching off, and what becomes of both when pipelines are copied, shared or rebuilt."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import vmonarch
from vmonarch import LatentGrid, VMonarchProcessor
from vmonarch.call import current_call, running
from vmonarch.configs.methods import resolve_method
from vmonarch.own import Bound

NEAR_LOSSLESS = VMonarchProcessor(num_iterations=1, exact=None, refresh=0.28)
FAST = VMonarchProcessor(num_iterations=1, exact=None, refresh=0.16)


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


class Custom(WanAttnProcessor):
    pass


def is_ours(processor):
    return isinstance(processor, Bound)


@pytest.mark.parametrize(
    "build",
    ["transformer", "vace_transformer", "chronoedit_transformer", "skyreels_transformer", "animate_transformer"],
)
def test_restore_leaves_nothing_behind_and_cross_attention_is_never_touched(tiny, build):
    model = getattr(tiny, build)()
    before = snapshot(model)
    cross = {name: p for name, p in model.attn_processors.items() if "attn2" in name or "face_adapter" in name}
    vmonarch.apply(model, VMonarchProcessor())
    applied = model.attn_processors
    assert {name for name in applied if not is_ours(applied[name])} == set(cross)
    assert all(applied[name] is processor for name, processor in cross.items())
    vmonarch.restore(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", ["t2v", "t2v-2.2", "t2v-2.2-low-noise-only"])
def test_both_transformers_are_changed_and_restored(tiny, kind):
    pipe = tiny.pipeline(kind)
    present = tiny.transformers_of(pipe)
    expected = tiny.generate(pipe)
    outputs = []
    for model in present:
        with vmonarch.apply(model, VMonarchProcessor()):
            outputs.append(tiny.generate(pipe))
    installation = vmonarch.apply(pipe, VMonarchProcessor())
    assert list(installation.transformers.values()) == present
    both = tiny.generate(pipe)
    assert not torch.equal(both, expected)
    if len(present) == 2:
        assert not torch.equal(outputs[0], both) and not torch.equal(outputs[1], both)
    assert torch.equal(tiny.generate(pipe), both)
    vmonarch.restore(pipe)
    assert torch.equal(tiny.generate(pipe), expected)
    assert not any(is_ours(p) for model in present for p in model.attn_processors.values())


def test_applying_again_replaces_and_still_restores_the_original(tiny):
    model = tiny.transformer()
    before, stock = snapshot(model), tiny.run(model)
    vmonarch.apply(model, VMonarchProcessor())
    first = tiny.run(model)
    vmonarch.apply(model, VMonarchProcessor(num_iterations=1, exact=None))
    second = tiny.run(model)
    assert len(model._forward_pre_hooks) == 1
    assert not torch.equal(first, second)
    vmonarch.apply(model, VMonarchProcessor())
    assert torch.equal(tiny.run(model), first)
    vmonarch.restore(model)
    assert torch.equal(tiny.run(model), stock)
    assert snapshot(model) == before


def test_processors_that_were_there_before_come_back(tiny):
    model = tiny.transformer()
    custom = Custom()
    model.set_attn_processor(custom)
    vmonarch.apply(model, VMonarchProcessor())
    vmonarch.restore(model)
    assert all(processor is custom for processor in model.attn_processors.values())


@pytest.mark.parametrize("applied", ["before", "after", "never"])
def test_restore_undoes_ours_that_was_set_on_single_modules(tiny, applied):
    model = tiny.transformer()
    before, stock, expected = snapshot(model), tiny.run(model), tiny.run(tiny.applied_transformer())
    if applied == "before":
        vmonarch.apply(model, VMonarchProcessor())
    for block in model.blocks:
        block.attn1.set_processor(VMonarchProcessor())
    with pytest.raises(RuntimeError, match="vmonarch.apply"):
        tiny.run(model)
    if applied == "after":
        # As the error says.
        vmonarch.apply(model, VMonarchProcessor())
        assert torch.equal(tiny.run(model), expected)
    vmonarch.restore(model)
    assert torch.equal(tiny.run(model), stock)
    assert {type(processor) for processor in model.attn_processors.values()} == {WanAttnProcessor}
    # Where nothing was applied, the model's own are new ones.
    assert applied != "before" or snapshot(model) == before


def test_restoring_what_is_not_applied_does_nothing(tiny):
    model = tiny.transformer()
    before = snapshot(model)
    vmonarch.restore(model)
    installation = vmonarch.apply(model, VMonarchProcessor())
    vmonarch.restore(model)
    vmonarch.restore(model)
    installation.restore()
    assert snapshot(model) == before


def test_processors_that_others_have_set_since_stay(tiny):
    model, own = tiny.transformer(), Custom()
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


def test_what_apply_returns_has_a_short_repr(tiny):
    installation = vmonarch.apply(tiny.pipeline("t2v-2.2"), VMonarchProcessor())
    names = "transformer=WanTransformer3DModel, transformer_2=WanTransformer3DModel"
    assert repr(installation) == f"Installation(VMonarchProcessor, {names})"


def test_nothing_changes_when_apply_fails(tiny):
    pipe = tiny.pipeline("t2v-2.2")
    pipe.transformer_2 = tiny.transformer(num_layers=1)
    before = snapshot(pipe.transformer), snapshot(pipe.transformer_2)
    with pytest.raises(ValueError, match="dense_layers"):
        vmonarch.apply(pipe, VMonarchProcessor(dense_layers=[1]))
    assert (snapshot(pipe.transformer), snapshot(pipe.transformer_2)) == before


def test_the_context_manager_restores_after_an_error(tiny):
    model = tiny.transformer()
    before = snapshot(model)
    with pytest.raises(KeyError), vmonarch.apply(model, VMonarchProcessor()) as installation:
        tiny.run(model)
        assert installation.grid == tiny.GRID
        raise KeyError
    assert snapshot(model) == before


def test_the_users_processor_is_not_changed_and_serves_several_models(tiny):
    processor = VMonarchProcessor()
    state = dict(vars(processor))
    models = [tiny.transformer(), tiny.vace_transformer()]
    for model in models:
        vmonarch.apply(model, processor)
    assert vars(processor) == state
    bound = [p for model in models for p in model.attn_processors.values() if is_ours(p)]
    assert len({id(p) for p in bound}) == len(bound) == 2 + 5


TWINS = pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)


@TWINS
def test_a_copy_of_a_transformer_is_independent(tiny, twin):
    model = tiny.transformer()
    stock = tiny.run(model)
    vmonarch.apply(model, VMonarchProcessor())
    small, large = tiny.run(model, (3, 2, 4)), tiny.run(model, (4, 2, 3))
    twin = twin(model)
    for _ in range(2):
        assert torch.equal(tiny.run(twin, (4, 2, 3)), large)
        assert torch.equal(tiny.run(model, (3, 2, 4)), small)
    vmonarch.restore(twin)
    assert torch.equal(tiny.run(twin), stock)
    assert torch.equal(tiny.run(model, (3, 2, 4)), small)
    assert len(model._forward_pre_hooks) == 1
    vmonarch.restore(model)
    assert torch.equal(tiny.run(model), stock)


@pytest.mark.parametrize("dense_steps", [0, 1], ids=["sparse", "dense"])
def test_a_deep_copy_of_a_pipeline_is_independent(tiny, dense_steps):
    pipe = tiny.pipeline("t2v-2.2")
    stock = tiny.generate(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=dense_steps))
    expected = tiny.generate(pipe)
    twin = copy.deepcopy(pipe)
    vmonarch.restore(pipe)
    assert torch.equal(tiny.generate(pipe), stock)
    original = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert original() is None
    assert torch.equal(tiny.generate(twin), expected)
    assert torch.equal(tiny.generate(twin, width=64, height=16), tiny.generate(twin, width=64, height=16))
    vmonarch.restore(twin)
    assert torch.equal(tiny.generate(twin), stock)


def test_applying_keeps_no_pipeline_alive(tiny):
    pipe = tiny.pipeline()
    model = pipe.transformer
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    watched = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert watched() is None
    with pytest.raises(RuntimeError, match="dense_steps.*no pipeline calls"):
        tiny.run(model)


def test_from_pipe_shares_what_is_applied(tiny):
    pipe = tiny.pipeline("t2v")
    stock = tiny.generate(pipe)
    vmonarch.apply(pipe, VMonarchProcessor())
    expected = tiny.generate(pipe)
    other = diffusers.WanVideoToVideoPipeline.from_pipe(pipe)
    again = diffusers.WanPipeline.from_pipe(other)
    assert torch.equal(tiny.generate(again), expected)
    vmonarch.restore(again)
    assert torch.equal(tiny.generate(pipe), stock)


def test_a_replaced_transformer_is_stock_until_applied_again(tiny):
    pipe = tiny.pipeline("t2v")
    old = pipe.transformer
    vmonarch.apply(pipe, VMonarchProcessor())
    expected = tiny.generate(pipe)
    pipe.transformer = tiny.transformer()
    stock = tiny.generate(pipe)
    vmonarch.restore(pipe)
    vmonarch.apply(pipe, VMonarchProcessor())
    assert torch.equal(tiny.generate(pipe), expected)
    vmonarch.restore(pipe)
    assert torch.equal(tiny.generate(pipe), stock)
    vmonarch.restore(old)


def test_replacing_one_of_two_transformers_restores_the_other(tiny):
    pipe = tiny.applied("t2v-2.2")
    pipe.transformer = tiny.transformer()
    vmonarch.restore(pipe)
    assert not any(is_ours(p) for p in pipe.transformer_2.attn_processors.values())


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


def test_wrapped_transformers_are_found(tiny):
    model = tiny.transformer()
    stock = tiny.run(model)
    wrapper = torch.nn.Sequential(model)
    vmonarch.apply(wrapper, VMonarchProcessor())
    assert not torch.equal(tiny.run(model), stock)
    vmonarch.restore(model)
    assert torch.equal(tiny.run(model), stock)


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


def test_old_names_are_told_for_one_release(tiny):
    for old, processor in (("vmonarch-refresh", NEAR_LOSSLESS), ("vmonarch-refresh-fast", FAST)):
        with pytest.warns(FutureWarning, match=f"'{old}' is called '(near-lossless|fast)' now"):
            assert vmonarch.apply(tiny.transformer(), old).processor.config == processor.config
    record = resolve_method("fast:refresh=3").to_dict()
    old = {**record, "name": "vmonarch-refresh-fast", "label": "vmonarch-refresh-fast:refresh=3"}
    with warnings.catch_warnings(action="error"):
        assert resolve_method(old).to_dict() == record, "as records and checkpoints have it"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("near-lossles", "processor must be one of .*near-lossless.*got 'near-lossles' .did you mean near-lossless"),
        ("fast:refesh=3", "processor.refesh is no known key .did you mean refresh"),
        ("full", "processor cannot be 'full', the model's own attention, which vmonarch.restore puts back"),
        ("based", "processor cannot be 'based' with 'embedded': vmonarch.load_adapter applies adapters"),
        ("stack-fast", "processor must be an attention method, got the recipe 'stack-fast'"),
    ],
)
def test_a_name_that_is_no_preset_is_explained(name, problem, tiny):
    transformer = tiny.transformer()
    with pytest.raises(ValueError, match=problem):
        vmonarch.apply(transformer, name)
    vmonarch.restore(transformer)


def test_the_default_says_what_to_use_where_there_is_no_pipeline(tiny):
    transformer = tiny.transformer()
    vmonarch.apply(transformer)
    with pytest.raises(RuntimeError, match='no pipeline calls this transformer.* or the preset "vmonarch"'):
        tiny.run(transformer)
    vmonarch.apply(transformer, "vmonarch")
    tiny.run(transformer)


# The grid: from the arguments of the transformer, or from `grid=`


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", [(3, 2, 3), (1, 3, 2), (2, 1, 5), (5, 4, 1), (7, 1, 1)], ids=str)
def test_both_ways_agree(tiny, grid, dtype):
    model = tiny.transformer().to(dtype)
    installation = vmonarch.apply(model, VMonarchProcessor())
    applied = tiny.run(model, grid, dtype=dtype)
    assert installation.grid == grid
    vmonarch.apply(model, VMonarchProcessor(grid=grid))
    assert torch.equal(tiny.run(model, grid, dtype=dtype), applied)


def test_grids_of_equal_size_are_told_apart(tiny):
    model = tiny.transformer()
    grids = [(3, 2, 4), (3, 4, 2), (2, 3, 4), (1, 4, 6), (3, 2, 4)]
    # Whole frames would make no difference between 2 × 4 and 4 × 2.
    options = {"tiles": (1, 2), "exact": None}
    expected = []
    for grid in grids:
        vmonarch.apply(model, VMonarchProcessor(grid=grid, **options))
        expected.append(tiny.run(model, grid))
    vmonarch.apply(model, VMonarchProcessor(**options))
    for grid, output in zip(grids, expected, strict=True):
        assert torch.equal(tiny.run(model, grid), output), grid
    # The same latents on the wrong grid would give something else.
    wrong = LatentGrid(3, 4, 2)
    model.register_forward_pre_hook(lambda *_: running.now.update(call=current_call()._replace(grid=wrong)))
    assert not torch.equal(tiny.run(model, (3, 2, 4)), expected[0])


@pytest.mark.parametrize("grid", [(3, 3, 3), (3, 3, 2)], ids=["of-another-size", "of-equal-size"])
def test_a_grid_that_the_transformer_is_not_given_is_refused(tiny, grid):
    model = tiny.applied_transformer(grid=grid)
    with pytest.raises(ValueError, match=re.escape(f"grid={grid}, but the transformer was given the grid (3, 2, 3)")):
        tiny.run(model)


def test_a_block_outside_of_a_call_of_its_transformer_is_refused(tiny):
    model = tiny.applied_transformer()
    tiny.run(model)
    with pytest.raises(RuntimeError, match=r"call the transformer itself.*grid="):
        model.blocks[0].attn1(torch.randn(1, 6, 24))


def test_a_transformer_inside_a_call_of_another_leaves_it_its_call(tiny):
    outer, inner = tiny.applied_transformer(), tiny.applied_transformer()
    expected, of_inner = tiny.run(outer), tiny.run(inner, grid=(2, 2, 2))
    found = []
    outer.blocks[0].register_forward_hook(lambda *_: found.append(tiny.run(inner, grid=(2, 2, 2))) or None)
    assert torch.equal(tiny.run(outer), expected) and torch.equal(found[0], of_inner)
    assert running.now["call"] is None and not running.now["outer"]
