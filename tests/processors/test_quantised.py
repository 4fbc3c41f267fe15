"""Quantised linear layers: ones with packed float8 weights, and torchao's where that is installed (0.18.0 tested)."""

from __future__ import annotations

import pytest
import torch

import vmonarch
from vmonarch.base import FullAttentionProcessor

KINDS = ["float8-packed", "float8-weight", "int8-dynamic"]


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
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
    }[kind]()
    quantization.quantize_(model, config, lambda module, name: isinstance(module, torch.nn.Linear) and "attn" in name)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast, applied", [(False, "before"), (True, "after")], ids=["float32", "autocast"])
def test_projections_are_computed_by_their_modules(tiny, kind, autocast, applied):
    model = tiny.transformer()
    unquantised = tiny.run(model)
    steps = [lambda: model.set_attn_processor(FullAttentionProcessor()), lambda: quantise(model, kind)]
    for step in steps if applied == "before" else reversed(steps):
        step()

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return tiny.run(model).float()

    ours = run()
    vmonarch.restore(model)
    stock = run()
    torch.testing.assert_close(ours, stock, **({"rtol": 0.05, "atol": 0.05} if autocast else {}))
    assert (stock - unquantised).abs().max() > 1e-3
