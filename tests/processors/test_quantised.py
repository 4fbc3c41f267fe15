"""Quantised linear layers: ones with packed float8 weights, and torchao's where that is installed (0.18.0 tested)."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from diffusers.models.transformers import transformer_wan
from op_checks import in_interpreter

import vmonarch
from vmonarch import BasedProcessor, VMonarchProcessor, vmonarch_attention

KINDS = ["float8-packed", "float8-weight", "int8-weight", "int8-dynamic"]
TORCHAO = KINDS[1:]


class PackedLinear(torch.nn.Module):
    """A linear layer in float8 that has no weight for others to use, as many libraries' have none."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        self.register_buffer("packed", (weight / scale).to(torch.float8_e4m3fn).view(torch.uint8))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", linear.bias.detach().clone())

    def forward(self, x):
        weight = self.packed.view(torch.float8_e4m3fn).to(self.scale.dtype) * self.scale
        return torch.nn.functional.linear(x, weight, self.shift)


def quantise(model, kind):
    """Quantise the attention's linear layers, in place."""
    if kind == "float8-packed":
        for attn in (attn for block in model.blocks for attn in (block.attn1, block.attn2)):
            for name, layer in list(attn.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    setattr(attn, name, PackedLinear(layer))
            attn.to_out[0] = PackedLinear(attn.to_out[0])
        return model
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    # Modules of the same class, whose weight is a tensor of another.
    config = {
        "float8-weight": quantization.Float8WeightOnlyConfig,
        "int8-weight": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "float8-dynamic": lambda: quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=quantization.PerRow()
        ),
    }[kind]()
    quantization.quantize_(model, config, lambda module, name: isinstance(module, torch.nn.Linear) and "attn" in name)
    return model


@pytest.fixture
def inside_diffusers(monkeypatch):
    """inside_diffusers(run): diffusers' own processor runs, with VMonarch in place of its softmax attention."""
    dispatch = transformer_wan.dispatch_attention_fn

    def attend(grid, query, key, value, **options):
        if key.shape[1] != query.shape[1]:
            return dispatch(query, key, value, **options)
        with torch.autocast("cpu", enabled=False):
            return vmonarch_attention(query, key, value, grid=grid, implementation="torch")

    def run(compute, grid):
        with monkeypatch.context() as patch:
            patch.setattr(transformer_wan, "dispatch_attention_fn", lambda *args, **kw: attend(grid, *args, **kw))
            return compute()

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("applied", ["before", "after"])
def test_projections_are_computed_by_their_modules(tiny, inside_diffusers, kind, autocast, applied):
    model = tiny.applied_transformer()
    unquantised = tiny.run(model)
    if applied == "after":
        vmonarch.restore(model)
    quantise(model, kind)
    if applied == "after":
        vmonarch.apply(model, VMonarchProcessor())

    def run():
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            return tiny.run(model).float()

    actual, twin = run(), copy.deepcopy(model)
    vmonarch.restore(model)
    stock = run()
    expected = inside_diffusers(run, tiny.GRID)
    close = {"rtol": 0.05, "atol": 0.05} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(actual, expected, **close)
    assert (actual - stock).abs().max() > 0.05
    assert (actual - unquantised).abs().max() > 1e-3
    if not autocast:
        assert torch.equal(tiny.run(twin), actual)


@in_interpreter
@pytest.mark.parametrize("kind", ["float8-packed", "float8-weight"])
def test_norm_and_rotation_stay_fused(tiny, monkeypatch, kind):
    grid, calls = (2, 3, 3), []
    model = quantise(tiny.transformer(num_layers=1), kind)
    vmonarch.apply(model, VMonarchProcessor(implementation="torch"))
    expected = tiny.run(model, grid)
    fused = vmonarch.projections.norm_rotary
    monkeypatch.setattr("vmonarch.projections.norm_rotary", lambda *a, **kw: calls.append(1) or fused(*a, **kw))
    vmonarch.apply(model, VMonarchProcessor(implementation="triton"))
    torch.testing.assert_close(tiny.run(model, grid), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2, "queries and keys"


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_go_through_a_file(tiny, tmp_path, kind):
    file = tmp_path / "adapter.safetensors"
    model = quantise(tiny.transformer(), kind)
    vmonarch.apply(model, BasedProcessor(layers=["conv", "both"], feature_dim=8))
    untouched = tiny.run(model)
    for name, parameter in model.named_parameters():
        if ".processor." in name:
            assert parameter.dtype == torch.float32
            torch.nn.init.normal_(parameter, std=0.3)
    expected = tiny.run(model)
    assert (expected - untouched).abs().max() > 1e-2
    vmonarch.save_adapter(model, file)
    other = quantise(tiny.transformer(), kind)
    vmonarch.load_adapter(other, file)
    assert torch.equal(tiny.run(other), expected)


@pytest.mark.parametrize("kind", TORCHAO)
def test_lora_on_quantised_layers(tiny, inside_diffusers, kind):
    model = quantise(tiny.transformer(), kind)
    vmonarch.apply(model, VMonarchProcessor())
    without = tiny.run(model)
    tiny.add_lora(model)
    actual = tiny.run(model)
    assert (actual - without).abs().max() > 1e-2
    vmonarch.restore(model)
    expected = inside_diffusers(lambda: tiny.run(model), tiny.GRID)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_repeated_blocks_share_one_graph(tiny, dynamo, kind):
    model = quantise(tiny.transformer(num_layers=3), kind)
    vmonarch.apply(model, VMonarchProcessor())
    tiny.check_one_graph(model, dynamo)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["float8-dynamic", "float8-weight", "int8-dynamic"])
def test_on_the_gpu(tiny, monkeypatch, kind, compiled):
    if kind == "float8-dynamic" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")
    # Products in float8 want multiples of 16.
    model = tiny.transformer(attention_head_dim=32, ffn_dim=64).to("cuda", torch.bfloat16)
    inputs = {name: x.to("cuda") if torch.is_tensor(x) else x for name, x in tiny.inputs().items()}
    # Products in int8, those of more than 16 rows.
    inputs["encoder_hidden_states"] = torch.randn(1, 24, inputs["encoder_hidden_states"].shape[2], device="cuda")
    inputs |= {name: inputs[name].bfloat16() for name in ("hidden_states", "encoder_hidden_states")}
    run = torch.no_grad()(lambda: model(**inputs)[0].float())
    vmonarch.apply(model, VMonarchProcessor(implementation="torch"))
    unquantised = run()
    quantise(model, kind)
    expected = run()
    assert 0 < (expected - unquantised).abs().max() < 1
    fused, calls = vmonarch.projections.norm_rotary, []
    monkeypatch.setattr("vmonarch.projections.norm_rotary", lambda *a, **kw: calls.append(1) or fused(*a, **kw))
    vmonarch.apply(model, VMonarchProcessor(implementation="triton"))
    actual = run()
    assert len(calls) == 4
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    if compiled:
        monkeypatch.undo()
        model.compile_repeated_blocks(fullgraph=True)
        torch.testing.assert_close(run(), expected, rtol=0.05, atol=0.05)
