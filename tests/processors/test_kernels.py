"""A model whose processors run the fused kernels computes what it computes with plain torch."""

from __future__ import annotations

import pytest
import torch
from op_checks import in_interpreter

import vmonarch
from vmonarch import ExactBlocks, VMonarchProcessor, projections
from vmonarch.kernels.common import launch, trust

GRID = (2, 3, 3)


def outputs_and_gradients(tiny, implementation, device="cpu", compiled=False, num_layers=2, **options):
    """(output, gradient of every parameter that has one)."""
    model = tiny.transformer(num_layers=num_layers).to(device)
    vmonarch.apply(model, VMonarchProcessor(implementation=implementation, **options))
    forward = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in tiny.inputs(GRID).items()}
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
