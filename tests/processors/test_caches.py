"""Together with the caches of diffusers (`enable_cache`): steps count whether or not a cache skips them."""

from __future__ import annotations

import pytest
import tiny_pipelines
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
)

import vmonarch
from vmonarch import Refresh, VMonarchProcessor
from vmonarch.call import running

STEPS = 6
DENSE_STEPS = (0, 3)


def taylor(pipe):
    # diffusers' default patterns match no module of Wan.
    where = {"cache_identifiers": [r"blocks\.\d+\.attn1"], "taylor_factors_dtype": torch.float32}
    return TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, **where)


def pyramid(pipe):
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: float(pipe.current_timestep),
    )


# By name, the configuration for a pipeline, and a step that it skips.
CACHES = {
    "first-block": (lambda pipe: FirstBlockCacheConfig(threshold=0.095), 2),
    "mag": (lambda pipe: MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, max_skip_steps=1), 3),
    "sea": (lambda pipe: SeaCacheConfig(threshold=100.0, max_consecutive_cached=1), 3),
    "taylor": (taylor, 2),
    "pyramid": (pyramid, 3),
}
by_cache = pytest.mark.parametrize("name", CACHES)


def watch(model):
    """(whether the last block's attention is computed in each call, (call, whether exact) where it is)."""
    computed, exact = [], []
    model.register_forward_pre_hook(lambda *_: computed.append(False))

    def note(*_):
        computed[-1] = True
        call = running.now.get("call")
        exact.append((len(computed) - 1, call is not None and call.dense))

    model.blocks[-1].attn1.to_q.register_forward_hook(note)
    return computed, exact


def generate(tiny, pipe, name):
    # diffusers' pyramid counts calls, not steps: the second of guidance would be given what the first computed.
    return tiny.generate(pipe, steps=STEPS, guidance=1.0 if name == "pyramid" else 5.0)


def three_layers(tiny):
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=3)
    return pipe


@by_cache
@pytest.mark.parametrize("applied", ["before", "after"])
def test_a_cache_skips_some_of_what_vmonarch_computes(tiny, name, applied):
    config, _ = CACHES[name]
    pipe, calls = three_layers(tiny), 1 if name == "pyramid" else 2
    stock = generate(tiny, pipe, name)
    attention = VMonarchProcessor(dense_steps=DENSE_STEPS)
    with vmonarch.apply(pipe, attention):
        uncached = generate(tiny, pipe, name)
    on = [lambda: vmonarch.apply(pipe, attention), lambda: pipe.transformer.enable_cache(config(pipe))]
    off = [pipe.transformer.disable_cache, lambda: vmonarch.restore(pipe)]
    for step in on if applied == "before" else reversed(on):
        step()
    computed, exact = watch(pipe.transformer)
    cached = generate(tiny, pipe, name)
    assert len(computed) == calls * STEPS and set(computed[::calls]) == {False, True}
    assert all(dense == (call // calls in DENSE_STEPS) for call, dense in exact) and any(dense for _, dense in exact)
    assert torch.equal(generate(tiny, pipe, name), cached), "every run begins with an empty cache"
    assert (cached - uncached).abs().max() > 2e-3
    for step in off if applied == "before" else reversed(off):
        step()
    assert torch.equal(generate(tiny, pipe, name), stock)


@by_cache
def test_a_refresh_that_a_cache_skips_is_made_up_for(tiny, used, name):
    config, skipped = CACHES[name]
    pipe, calls = three_layers(tiny), 1 if name == "pyramid" else 2
    pipe.transformer.enable_cache(config(pipe))
    vmonarch.apply(pipe, VMonarchProcessor(refresh=[0, skipped]))
    # What the last layer's attention is in the calls that compute it.
    computed, _ = watch(pipe.transformer)
    generate(tiny, pipe, name)
    own = [residual is None for (layer, *_), residual in used if layer == 2]
    places = [call for call, done in enumerate(computed) if done]
    exact = [call for call, is_exact in zip(places, own, strict=True) if is_exact]
    assert not computed[calls * skipped] and sum(computed) > len(exact), "a refresh is skipped, residuals are used"
    assert exact == [calls * step + call for step in (0, skipped + 1) for call in range(calls)]


@by_cache
def test_no_step_is_predicted_beside_a_cache(tiny, name):
    pipe, found = three_layers(tiny), []
    pipe.transformer.enable_cache(CACHES[name][0](pipe))
    for error in (None, 9.0):
        vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh([0, 3], cache=error)))
        found.append(generate(tiny, pipe, name))
    assert torch.equal(*found) and not vmonarch.report(pipe).predicted
    pipe.transformer.disable_cache()
    generate(tiny, pipe, name)
    assert vmonarch.report(pipe).predicted


def test_faster_cache_leaves_half_of_a_batch_out_which_has_residuals_of_its_own(used):
    # Whose guidance has both predictions in one batch.
    pipe, call = tiny_pipelines.pipeline("cogvideox")
    vmonarch.apply(pipe, VMonarchProcessor(refresh=[0, 4]))
    config = FasterCacheConfig(
        spatial_attention_block_skip_range=1,
        unconditional_batch_skip_range=3,
        unconditional_batch_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: float(pipe.current_timestep),
        attention_weight_callback=lambda module: 0.5,
    )
    pipe.transformer.enable_cache(config)
    tiny_pipelines.sample(pipe, call | {"num_inference_steps": 7})
    exact = [(samples, residual is None) for (layer, samples, _), residual in used if layer == 0]
    assert exact == [(2, True), (1, True), (1, False), (2, False), (1, True), (1, False), (2, True)]
