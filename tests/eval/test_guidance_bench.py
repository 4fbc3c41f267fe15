"""The benchmark of guidance: all ways compute both predictions, and its table shows what was measured."""

import pytest
import torch
import yaml
from diffusers import WanTransformer3DModel

from vmonarch.eval.bench import guidance
from vmonarch.eval.bench.guidance import METHODS, Case, ways
from vmonarch.processors import VMonarchProcessor

CPU = torch.device("cpu")


@pytest.fixture
def small(tiny, tmp_path, monkeypatch):
    """The benchmark with a tiny model and one tiny video; what was asked of torch.compile."""
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump({**tiny._TRANSFORMER, "patch_size": [1, 2, 2], "text_encoder": {"d_model": 16}}))
    monkeypatch.setattr(guidance, "MODEL", str(model))
    monkeypatch.setattr(guidance, "CASES", (Case(9, 32, 48),))
    asked = []
    monkeypatch.setattr(
        WanTransformer3DModel, "compile_repeated_blocks", lambda model, **options: asked.append(options)
    )
    return asked


def test_every_way_computes_both_predictions(small):
    found = ways(guidance.CASES[0], CPU, torch.float32)
    assert tuple(found) == METHODS
    batches = []
    for method, make in found.items():
        way = make()
        transformer = way.run.__self__.transformer
        assert isinstance(transformer.blocks[0].attn1.processor, VMonarchProcessor)
        transformer.register_forward_hook(lambda module, inputs, output: batches.append(len(output[0])))
        results, expected = way.found(way.run()), way.expected()
        assert batches == ([1, 1] if method.startswith("two") else [2])
        batches.clear()
        assert list(results) == list(expected) == ["negative", "positive"]
        for name, prediction in results.items():
            assert prediction.shape == (1, 16, 3, 4, 6)
            torch.testing.assert_close(prediction, expected[name], rtol=1e-4, atol=1e-5)
        assert (results["negative"] - results["positive"]).abs().max() > 1e-2
    compiled = {"fullgraph": True, "dynamic": False}
    assert small == 2 * [compiled | {"mode": None}] + 2 * [compiled | {"mode": "reduce-overhead"}]


def test_the_command_writes_what_the_table_shows(small, run_command, monkeypatch):
    words = ["guidance", "--rounds", "3", "--methods", "two-eager", "one-eager"]
    code, results = run_command(*words)
    assert code == 0
    two, one = results["cases"][0]["rows"]
    two["ms"]["median"], one["ms"]["median"] = 30.0, 20.0
    row = guidance.guidance_table(results).splitlines()[2]
    assert row == "| 9×32×48 | 30.0 | 20.0 (1.50×) | – | – | – | – | – | – |"
    half = lambda predictions: tuple(0.5 * out for out in guidance.Predictions.two(predictions))
    monkeypatch.setattr(guidance.Predictions, "one", half)
    code, results = run_command(*words)
    assert code == 1 and "| wrong |" in guidance.guidance_table(results).splitlines()[2]
