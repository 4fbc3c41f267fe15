"""The processor computes what the stock one does, except for the softmax of self-attention, by kernels as without."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_wan
from op_checks import in_interpreter

import vmonarch
from vmonarch import ExactBlocks, LatentGrid, VMonarchOptions, VMonarchProcessor, projections
from vmonarch.base import FullAttentionProcessor, VideoAttentionProcessor
from vmonarch.kernels.common import launch, trust
from vmonarch.kernels.norm_rotary.reference import norm_rotary_reference
from vmonarch.plan import _OPS
from vmonarch.projections import project

ALL_EXACT = ExactBlocks(band=1000)


class Spy(VideoAttentionProcessor):
    """Records what it is asked to attend."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def attention(self, layer):
        return lambda query, key, value, call: (self.seen.append((query, key, value, call.grid)) or value, None)


def qkv_of_stock(monkeypatch, model, inputs):
    seen = []

    def record(query, key, value, **options):
        seen.append((query, key, value))
        return value if key.shape == query.shape else query

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", record)
    with torch.no_grad():
        model(**inputs)
    monkeypatch.undo()
    return [entry for entry in seen if entry[0].shape == entry[1].shape]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-with-float32-rope", "float16"])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("batch", [1, 2])
def test_query_key_and_value_are_bit_identical_to_the_stock_processors(tiny, monkeypatch, dtype, fused, batch):
    model = tiny.transformer(attention_head_dim=24)
    model.to(getattr(torch, dtype.split("-")[0]))
    if dtype.endswith("rope"):
        model.rope.float()
    if fused:
        model.fuse_qkv_projections()
    inputs = tiny.inputs(batch=batch, dtype=model.dtype)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :5]  # differs from S, so that it is told apart
    expected = qkv_of_stock(monkeypatch, model, inputs)

    spy = Spy()
    model.set_attn_processor(spy)
    # The stand-in for cross-attention of the recording above.
    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", lambda query, key, value, **options: query)
    with torch.no_grad():
        model(**inputs)

    assert len(expected) == len(spy.seen) == 2
    for stock, (query, key, value, grid) in zip(expected, spy.seen, strict=True):
        assert grid == tiny.GRID
        for ours, theirs in zip((query, key, value), stock, strict=True):
            assert ours.dtype == theirs.dtype == model.dtype
            assert torch.equal(ours, theirs)
        assert value.stride(1) == 48 * (3 if fused else 1), "value was copied"


@pytest.mark.parametrize("build", ["transformer", "vace_transformer", "chronoedit_transformer", "skyreels_transformer"])
def test_all_blocks_exact_equals_the_stock_processor(tiny, build):
    model = getattr(tiny, build)()
    inputs = tiny.inputs(batch=2)
    if build.startswith("vace"):
        inputs["control_hidden_states"] = torch.randn(2, 96, 3, 4, 6)
    with torch.no_grad():
        expected = model(**inputs)[0]
        vmonarch.apply(model, VMonarchProcessor(exact=ALL_EXACT))
        actual = model(**inputs)[0]
        vmonarch.apply(model, VMonarchProcessor())
        approximate = model(**inputs)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (approximate - expected).abs().max() > 1e-3, "VMonarch did not run"


def test_full_attention_equals_the_stock_processor(tiny):
    model = tiny.transformer()
    stock = tiny.run(model, (3, 2, 4))
    vmonarch.apply(model, FullAttentionProcessor())
    torch.testing.assert_close(tiny.run(model, (3, 2, 4)), stock, atol=1e-6, rtol=1e-5)


def test_patch_sizes_other_than_1x2x2(tiny):
    model = tiny.transformer(patch_size=(2, 1, 3))
    inputs = tiny.inputs()
    inputs["hidden_states"] = torch.randn(1, 16, 4, 5, 6)
    with torch.no_grad():
        installation = vmonarch.apply(model, VMonarchProcessor())
        applied = model(**inputs)[0]
        assert installation.grid == (2, 5, 2)
        vmonarch.apply(model, VMonarchProcessor(grid=(2, 5, 2)))
        assert torch.equal(model(**inputs)[0], applied)


@pytest.mark.parametrize(
    "blocks", [{"frames_per_block": 2, "tiles": (1, 2)}, {"r_share": 0.4, "last_l_update": False}], ids=list
)
def test_every_option_reaches_the_op(tiny, monkeypatch, blocks):
    options = {
        "num_iterations": 3,
        "coarse": 2,
        "exact": ExactBlocks(rows=(1,), columns=(0,), band=1),
        "row_share": 0.4,
        "min_mass": 0.2,
        **blocks,
    }
    more = {
        "bias": (torch.ones(1, math.prod(tiny.GRID), 1, 1), torch.zeros(1, math.prod(tiny.GRID), 1, 1)),
        "implementation": "torch",
    }
    seen = {}
    monkeypatch.setitem(_OPS, VMonarchOptions, lambda query, key, value, **given: seen.update(given) or value)
    model = tiny.transformer()
    model.set_attn_processor(VMonarchProcessor(**options, **more))
    tiny.run(model)
    assert seen == more | {"grid": LatentGrid(*tiny.GRID), "options": VMonarchOptions(**options), "return_lse": False}
    assert len(seen["options"].changed()) == len(options)
    assert (
        options.keys() | {"frames_per_block", "tiles", "r_share", "last_l_update"} == VMonarchOptions().__dict__.keys()
    )


@pytest.mark.parametrize("name", ["attn1", "attn2"])
def test_one_that_is_set_on_a_single_module_says_how_to_apply_it(tiny, name):
    model = tiny.transformer()
    getattr(model.blocks[0], name).set_processor(VMonarchProcessor())
    with pytest.raises(RuntimeError, match="VMonarchProcessor was set on a single.*vmonarch.apply.*set_attn_processor"):
        tiny.run(model)


HOOKS = {
    "forward-hook": lambda norm, note: norm.register_forward_hook(note),
    "forward-pre-hook": lambda norm, note: norm.register_forward_pre_hook(note),
    "backward-hook": lambda norm, note: norm.register_full_backward_hook(note),
    "backward-pre-hook": lambda norm, note: norm.register_full_backward_pre_hook(note),
    # As offloading and casting do it.
    "own-forward": lambda norm, note: setattr(norm, "forward", lambda x: note() or type(norm).forward(norm, x)),
}


@pytest.mark.parametrize("way", HOOKS)
def test_a_norm_with_hooks_is_called_and_not_fused(tiny, monkeypatch, way):
    model = tiny.transformer(num_layers=1)
    attn, video = model.blocks[0].attn1, tiny.inputs()["hidden_states"]
    states, rotary = torch.randn(1, 18, 24), model.rope(video)
    fused, called = [], []

    def norm_rotary(x, weight, *angles, heads, eps, implementation):
        fused.append(weight)
        return norm_rotary_reference(x, weight, *angles, heads=heads, eps=eps)

    monkeypatch.setattr("vmonarch.projections.why_not_triton", lambda *_: None)
    monkeypatch.setattr("vmonarch.projections.norm_rotary", norm_rotary)
    expected = project(attn, states, rotary, "triton")
    assert [id(weight) for weight in fused] == [id(attn.norm_q.weight), id(attn.norm_k.weight)]
    HOOKS[way](attn.norm_q, lambda *_: called.append(1))
    found = project(attn, states, rotary, "triton")
    sum(x.sum() for x in found).backward()
    assert called == [1] and len(fused) == 3
    for x, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("rotary", [True, False], ids=["rotated", "plain"])
def test_query_and_key_have_the_dtype_of_value_whatever_their_norms_return(tiny, rotary):
    model = tiny.transformer(num_layers=1)
    attn, angles = model.blocks[0].attn1.bfloat16(), model.rope(tiny.inputs()["hidden_states"])
    for norm in (attn.norm_q, attn.norm_k):
        # As under autocast on a GPU.
        norm.register_forward_hook(lambda module, inputs, output: output.float())
    states = torch.randn(1, 18, 24, dtype=torch.bfloat16)
    found = project(attn, states, angles if rotary else None, "torch")
    assert [x.dtype for x in found] == [torch.bfloat16] * 3


def test_attention_mask_in_self_attention_is_refused(tiny):
    model = tiny.applied_transformer()
    with pytest.raises(ValueError, match="attention_mask"):
        model.blocks[0].attn1(torch.randn(1, 6, 24), None, torch.ones(1, 6, dtype=torch.bool))


def test_causal_skyreels_is_refused(tiny):
    model = tiny.skyreels_transformer(num_frame_per_block=3)
    vmonarch.apply(model, VMonarchProcessor())
    with pytest.raises(ValueError, match="attention_mask"):
        tiny.run(model)


def test_attention_backend_reaches_exact_attention_and_leaves_the_original_alone(tiny, monkeypatch):
    pipe = tiny.pipeline("t2v")
    backends = []
    dispatch = transformer_wan.dispatch_attention_fn

    def record(*tensors, backend=None, **options):
        backends.append(backend)
        return dispatch(*tensors, backend=backend, **options)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", record)
    originals = list(pipe.transformer.attn_processors.values())
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[1]))
    tiny.generate(pipe)
    assert set(backends) == {None}
    backends.clear()
    pipe.transformer.set_attention_backend("_native_math")
    try:
        tiny.generate(pipe)
    finally:
        pipe.transformer.reset_attention_backend()
    # Two layers, three steps, guidance; self-attention in the one dense step.
    assert len(backends) == 2 * 3 * 2 + 2 * 2
    assert {backend.value for backend in backends} == {"_native_math"}
    assert all(processor._attention_backend is None for processor in originals)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exact": None, "grid": (3, 2, 3), "dense_steps": 0.25, "dense_layers": [1, 0]},
        {"exact": ExactBlocks(rows=(0, 2), band=1, aware=False), "tiles": [2, 1], "coarse": 2, "dense_steps": range(3)},
        {"exact": {"band": np.int64(1)}, "tiles": [np.int64(2), 1], "coarse": np.int32(2), "min_mass": np.float32(0.5)},
        {"grid": (np.int64(3), 2, 3), "dense_steps": np.array([1, 2]), "refresh": np.float32(0.5)},
    ],
    ids=["defaults", "fractions", "exact-blocks", "options-of-numpy", "steps-of-numpy"],
)
def test_config_goes_through_json(options):
    processor = VMonarchProcessor(**options)
    config = json.loads(json.dumps(processor.config))
    again = VMonarchProcessor.from_config(config)
    assert again.config == processor.config
    # As it was written when ranks could share something else.
    assert VMonarchProcessor.from_config(config | {"parallel_by": "heads"}).config == processor.config
    with pytest.raises(TypeError, match="no option parallel_by"):
        VMonarchProcessor.from_config(config | {"parallel_by": "frames"})
    assert repr(again) == repr(processor)
    assert again.exact == processor.exact and again.grid == processor.grid


def test_runs_leave_no_state_in_classes(tiny):
    model = tiny.transformer()
    before = [dict(vars(kind)) for kind in (VMonarchProcessor, VideoAttentionProcessor)]
    vmonarch.apply(model, VMonarchProcessor(exact=None))
    tiny.run(model)
    assert [dict(vars(kind)) for kind in (VMonarchProcessor, VideoAttentionProcessor)] == before


def outputs_and_gradients(tiny, implementation, device="cpu", compiled=False, num_layers=2, **options):
    """(output, gradient of every parameter that has one)."""
    model = tiny.transformer(num_layers=num_layers).to(device)
    vmonarch.apply(model, VMonarchProcessor(implementation=implementation, **options))
    forward = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    inputs = {
        name: value.to(device) if torch.is_tensor(value) else value for name, value in tiny.inputs((2, 3, 3)).items()
    }
    out = (forward if compiled else model)(**inputs)[0]
    out.square().mean().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@in_interpreter
@pytest.mark.parametrize("options", [{}, {"exact": ExactBlocks(band=0)}], ids=["first-frame", "own-frame"])
def test_kernels_and_torch_train_the_same_model(tiny, options):
    expected, actual = (outputs_and_gradients(tiny, how, num_layers=1, **options) for how in ("torch", "triton"))
    assert len(actual) == len(expected) > 20
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@in_interpreter
def test_a_model_with_kernels_compiles_without_graph_breaks(tiny):
    expected, compiled = (outputs_and_gradients(tiny, "triton", compiled=c, num_layers=1) for c in (False, True))
    assert len(expected) > 20
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-7)


@in_interpreter
def test_a_model_runs_without_kernels_that_fail_a_check(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    planted = {"TESTED_TRITON": (), "check": lambda kernels: "planted", "_verdicts": {}, "_warned": set()}
    for name, value in planted.items():
        monkeypatch.setattr(trust, name, value)
    for module in (launch, projections):
        monkeypatch.setattr(module, "auto_takes_kernels", lambda device: True)
    with pytest.warns(RuntimeWarning) as caught:
        actual = outputs_and_gradients(tiny, "auto")
    families = [str(warning.message).split(" for ")[0] for warning in caught if "planted" in str(warning.message)]
    assert families == ["the portable kernels of norm_rotary", "the portable kernels of flash_entropy"]
    torch.testing.assert_close(actual, outputs_and_gradients(tiny, "torch"), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gpu_kernels_and_torch_train_the_same_model(tiny, compiled):
    actual = outputs_and_gradients(tiny, "triton", "cuda", compiled=compiled)
    torch.testing.assert_close(actual, outputs_and_gradients(tiny, "torch", "cuda"), rtol=1e-3, atol=1e-5)
