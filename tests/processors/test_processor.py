"""The processor computes what the stock one does, except for the softmax of self-attention, by kernels as without."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import tiny_families
import torch
from diffusers.models.transformers import transformer_wan
from op_checks import in_interpreter

import vmonarch
from vmonarch import BasedProcessor, ExactBlocks, VMonarchProcessor, own
from vmonarch.attend import Exact
from vmonarch.base import FullAttentionProcessor
from vmonarch.bias import SpatioTemporalDecay
from vmonarch.call import Call
from vmonarch.engines import fa3_backend
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common import launch, trust
from vmonarch.own import project


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-with-float32-rope", "float16"])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_all_but_the_softmax_is_bit_identical_to_the_stock_processor(tiny, dtype, fused):
    model = tiny.transformer(attention_head_dim=24)
    model.to(getattr(torch, dtype.split("-")[0]))
    if dtype.endswith("rope"):
        model.rope.float()
    if fused:
        model.fuse_qkv_projections()
    stock = tiny.run(model, batch=2, dtype=model.dtype)
    model.set_attn_processor(FullAttentionProcessor())
    assert torch.equal(tiny.run(model, batch=2, dtype=model.dtype), stock)


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


def test_a_chosen_backend_is_that_of_exact_attention_and_not_of_the_original(tiny, monkeypatch):
    pipe, backends, dispatch = tiny.pipeline("t2v"), [], transformer_wan.dispatch_attention_fn

    def record(*tensors, backend=None, **options):
        backends.append(backend)
        return dispatch(*tensors, backend=backend, **options)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", record)
    model, originals = pipe.transformer, list(pipe.transformer.attn_processors.values())
    vmonarch.apply(pipe, VMonarchProcessor())
    model.set_attention_backend("_native_math")
    try:
        vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[1]))
        assert {processor._attention_backend.value for processor in model.attn_processors.values()} == {"_native_math"}
        tiny.generate(pipe)
    finally:
        model.reset_attention_backend()
    # Two layers, three steps, guidance; self-attention in the one dense step.
    assert len(backends) == 2 * 3 * 2 + 2 * 2
    assert {backend.value for backend in backends} == {"_native_math"}
    vmonarch.restore(pipe)
    assert list(model.attn_processors.values()) == originals
    assert all(processor._attention_backend is None for processor in originals)


@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_3_is_exact_attention_with_its_log_partition(compiled, fa3):
    query, key, value = torch.randn(3, 2, 9, 3, 16).bfloat16()
    call = Call(LatentGrid(1, 3, 3), backend=fa3_backend(query.device))
    attend = lambda lse: Exact()(query, key[:, :7], value[:, :7], call._replace(lse=lse))
    attend = torch.compile(attend, fullgraph=True, backend="eager") if compiled else attend
    scores = torch.einsum("bshd,bthd->bhst", query.double(), key[:, :7].double()) / 4
    exact = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), value[:, :7].double())
    for ask in (False, True):
        out, lse = attend(ask)
        assert (out - exact).norm() < 4e-3 * exact.norm()
        assert (lse - scores.logsumexp(-1)).abs().max() < 1e-5 if ask else lse is None
    transformer_wan.dispatch_attention_fn(query, query, query, is_causal=True, scale=0.5, backend=call.backend)
    assert fa3 == [(9, 7, None, False)] * 2 + [(9, 9, 0.5, True)]


@pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"requires_grad": True}, {"mask": True}], ids=str)
def test_what_flash_attention_3_does_not_support_is_said(change, fa3):
    mask = torch.ones(1, 4, dtype=torch.bool) if change.pop("mask", False) else None
    query = torch.ones(1, 4, 2, 16, **{"dtype": torch.bfloat16} | change)
    call = Call(LatentGrid(1, 2, 2), key_mask=mask, backend=fa3_backend(query.device))
    with pytest.raises(NotImplementedError, match="'fa3' supports bfloat16 and float16 without attn_mask and grad"):
        Exact()(query, query, query, call)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exact": ExactBlocks(rows=(0, 2), band=1, aware=False), "dense_steps": 0.25, "dense_layers": [1, 0]},
        {"exact": {"band": np.int64(1)}, "min_mass": np.float32(0.5), "refresh": {"tolerance": np.float32(0.1)}},
        {"grid": (np.int64(3), 2, 3), "dense_steps": np.array([1, 2]), "refresh": {"steps": np.float32(0.5)}},
    ],
    ids=["defaults", "exact-blocks", "options-of-numpy", "steps-of-numpy"],
)
def test_config_goes_through_json(options):
    processor = VMonarchProcessor(**options)
    config = json.loads(json.dumps(processor.config))
    again = VMonarchProcessor(**config)
    assert again.config == processor.config
    assert repr(again) == repr(processor)
    assert again.exact == processor.exact and again.grid == processor.grid


def test_options_do_not_change_and_no_others_are_set():
    processor = VMonarchProcessor(refresh=2)
    for name in ("refresh", "dense_layers", "implementation", "grid", "plan", "bias", "coarse", "options", "refrehs"):
        with pytest.raises(AttributeError, match=f"cannot assign to field '{name}'"):
            setattr(processor, name, 1)
    for twin in (pickle.loads(pickle.dumps(processor)), copy.deepcopy(processor), copy.copy(processor)):
        assert twin.config == processor.config


def test_what_a_layer_prints_is_what_it_computes(tiny):
    model = tiny.transformer()
    vmonarch.apply(model, BasedProcessor(layers=["both", "window"], feature_dim=8))
    shown = [repr(block.attn1.processor).split()[1] for block in model.blocks]
    assert shown[0] == "Merged()" and shown[1].startswith("Window(")
    decay = SpatioTemporalDecay(2)
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor(bias=decay))
    assert "bias=BiasOption(SpatioTemporalDecay)" in repr(model.blocks[0].attn1.processor)
    joint = tiny_families.FAMILIES["cogvideox"].make()
    vmonarch.apply(joint, VMonarchProcessor(dense_layers=[0]))
    kept = next(iter(joint.attn_processors.values()))
    assert repr(kept).splitlines()[1] == "  CogVideoXAttnProcessor2_0()"


def outputs_and_gradients(tiny, implementation, device="cpu", compiled=False):
    """(output, gradient of every parameter that has one)."""
    model = tiny.transformer().to(device)
    vmonarch.apply(model, VMonarchProcessor(implementation=implementation))
    forward = torch.compile(model, fullgraph=True)
    inputs = {
        name: value.to(device) if torch.is_tensor(value) else value for name, value in tiny.inputs((2, 3, 3)).items()
    }
    out = (forward if compiled else model)(**inputs)[0]
    out.square().mean().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@in_interpreter
def test_a_model_runs_without_kernels_that_fail_a_check(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    planted = {"TESTED_TRITON": (), "check": lambda kernels: "planted", "_verdicts": {}}
    for name, value in planted.items():
        monkeypatch.setattr(trust, name, value)
    for module in (launch, own):
        monkeypatch.setattr(module, "auto_takes_kernels", lambda device: True)
    with pytest.warns(RuntimeWarning) as caught:
        actual = outputs_and_gradients(tiny, "auto")
    families = [str(warning.message).split(" for ")[0] for warning in caught if "planted" in str(warning.message)]
    assert families == ["the portable kernels of norm_rotary", "the portable kernels of monarch"]
    torch.testing.assert_close(actual, outputs_and_gradients(tiny, "torch"), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gpu_kernels_and_torch_train_the_same_model(tiny, compiled):
    actual = outputs_and_gradients(tiny, "triton", "cuda", compiled=compiled)
    torch.testing.assert_close(actual, outputs_and_gradients(tiny, "torch", "cuda"), rtol=1e-3, atol=1e-5)
