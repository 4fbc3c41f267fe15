"""The benchmark of transformers beyond Wan: what its ways compute, and that it can call a result wrong."""

import dataclasses

import diffusers
import pytest
import torch
from tiny_families import FAMILIES, GRID
from torch.utils._pytree import tree_map_only

from vmonarch.eval.bench import families
from vmonarch.eval.bench.families import CASES, Case, inputs_of, number_of_blocks, ways
from vmonarch.eval.bench.gate import compare
from vmonarch.families import family_of
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch import api
from vmonarch.video_processor import VideoAttentionProcessor

CPU = torch.device("cpu")


def small(name):
    tiny = FAMILIES[name]

    def inputs(grid, noise):
        return {
            # One sample, whose prompt fills its places.
            key: torch.ones_like(value[:1]) if key.endswith("mask") else value[: 1 if value.ndim else None]
            for key, value in tiny.inputs(*grid).items()
            if isinstance(value, torch.Tensor)
        }

    return Case(name, tiny.model, tiny.config, LatentGrid(*GRID), 60, inputs)


@pytest.fixture
def uncompiled(monkeypatch):
    blocks = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: blocks.append((self, options)))
    return blocks


@pytest.mark.parametrize("name", ["hunyuan", "cosmos"])
def test_every_way_passes_the_gate_and_vmonarch_approximates(name, uncompiled):
    found = {}
    for method, make in ways(small(name), CPU, torch.float32).items():
        way = make()
        (found[method],) = results = way.run()
        errors, problem = compare(way.found(results), way.expected(), torch.float32)
        assert not problem, (method, errors)
    assert (found["exact"] - found["stock"]).norm() < 1e-4 * found["stock"].norm()
    for method in families.PRESETS:
        assert (found[method] - found["stock"]).norm() > 1e-4 * found["stock"].norm()
    assert {tuple(options.items()) for _, options in uncompiled} == {(("fullgraph", True), ("dynamic", False))}
    assert len({id(block) for block, _ in uncompiled}) == 2 * len(families.METHODS)


def test_a_wrong_kernel_or_an_infinite_result_gets_no_speed(uncompiled, monkeypatch):
    attend = api.vmonarch_attention
    way = ways(small("hunyuan"), CPU, torch.float32)["vmonarch"]()
    results = way.run()
    with pytest.raises(RuntimeError, match="not finite"):
        way.found((results[0] * torch.inf,))

    def wrong(*tensors, **options):
        out, lse = attend(*tensors, **options)
        return out, lse + 1

    monkeypatch.setattr("vmonarch.processors.vmonarch_attention", wrong)
    _, problem = compare(way.found(results), way.expected(), torch.float32)
    assert "out is off by" in problem


def test_exact_attention_sees_no_mask(uncompiled, monkeypatch):
    masks = []
    attend = VideoAttentionProcessor.attend_joint

    def noted(self, query, key, value, key_mask):
        masks.append(key_mask)
        return attend(self, query, key, value, key_mask)

    monkeypatch.setattr(VideoAttentionProcessor, "attend_joint", noted)
    made = ways(small("hunyuan"), CPU, torch.float32)
    made["exact"]().run()
    assert masks == [None, None]
    made["vmonarch"]().run()
    assert all(mask is not None and mask.all() for mask in masks[2:]) and len(masks) == 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_are_models_that_can_be_called(case, monkeypatch):
    inputs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), inputs_of(case, CPU, torch.float32))
    with torch.device("meta"):
        model = getattr(diffusers, case.model)(**case.config)
    family = family_of(model)
    assert family.grid(inputs, model.config) == case.grid
    assert number_of_blocks(case) == family.number_of_layers(model) < case.of
    # HunyuanVideo-1.5 asks whether there is an image, and looks for what is no padding.
    of_axes = torch.all
    monkeypatch.setattr(torch, "all", lambda x, **axes: of_axes(x, **axes) if axes else True)
    with torch.no_grad(), torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):
        out = model(**inputs)
    assert out[0].device.type == "meta"


def test_the_table_has_all_ways_and_ratios():
    times = dict(zip(families.METHODS, (9, 6, 3, 2), strict=True))
    rows = [{"method": method, "status": "ok", "ms": {"median": ms}} for method, ms in times.items()]
    rows[0]["peak_bytes"] = rows[2]["peak_bytes"] = 2.5e9
    results = {
        "cases": [{**families._describe(CASES[0]), "case": CASES[0].label, "rows": rows}],
        "versions": {"torch_build": "2.11.0", "triton": "3.6.0"},
        "settings": {"dtype": "bfloat16", "rounds": 5, "timing": "events"},
        "hardware": "H200",
        "date": "2026-11-25",
        "command": "vmonarch bench families",
        "left_out": [],
        "formulae": families.FORMULAE,
    }
    text = families.families_table(results)
    assert "| 118,800 | 2 of 60 | 9.00 | 6.00 | 3.00 (3.00×, 2.00×) | 2.00 (4.50×, 3.00×) |" in text
    rows[2].update(status="wrong")
    assert "| wrong |" in families.families_table(results)
    assert dataclasses.replace(CASES[0], name="x").label == "x 33x45x80"
