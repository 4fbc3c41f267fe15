"""The benchmark of norm and rotary embedding: what it compares, and that it can call a result wrong."""

import pytest
import torch

from vmonarch.eval.bench import norm
from vmonarch.eval.bench.norm import Case, Inputs, diffusers_code, judge, standard_cases, way
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import interpreted

CPU = torch.device("cpu")
SMALL = [Case("small", LatentGrid(2, 3, 4), 2, 12), Case("small", LatentGrid(2, 3, 4), 2, 12, training=True)]


def test_the_code_measured_for_diffusers_is_that_of_its_processor(tiny, monkeypatch):
    from diffusers.models.transformers import transformer_wan

    module = tiny.transformer().blocks[0].attn1
    inputs = Inputs(SMALL[0], CPU, torch.float32)
    seen = []
    dispatch = transformer_wan.dispatch_attention_fn

    def see(query, *rest, **options):
        seen.append(query)
        return dispatch(query, *rest, **options)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", see)
    angles = inputs.cosines, inputs.sines
    with torch.no_grad():
        transformer_wan.WanAttnProcessor()(module, inputs.x, None, None, angles)
        found = diffusers_code(module.to_q(inputs.x), module.norm_q.weight, *angles, heads=2)
    assert module.norm_q.eps == norm.EPS
    assert torch.equal(found, seen[0])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
@pytest.mark.parametrize("method", norm.METHODS)
def test_every_way_computes_the_same(case, method, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    chosen = way(method, case, CPU, torch.float32)
    results = chosen.run()
    expected = chosen.expected()
    assert list(expected) == (["out", "dx", "dweight"] if case.training else ["out"])
    for name, found in chosen.found(results).items():
        assert expected[name].dtype == torch.float64
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-5)
    assert compiled == ([{"fullgraph": True, "dynamic": False}] if method == "compiled" else [])


def test_bytes_are_those_of_the_formula():
    # 24 tokens of 24 channels, heads of 12, 4 bytes each.
    assert [case.bytes(4) for case in SMALL] == [
        (2 * 24 * 24 + 2 * 24 * 12 + 24) * 4,
        (5 * 24 * 24 + 4 * 24 * 12 + 4 * 24) * 4,
    ]


def test_the_cases_are_those_of_the_end_to_end_benchmark():
    cases = standard_cases()
    assert [(case.tokens, case.heads, case.head_dim) for case in cases[:5]] == [
        (23296, 12, 128),
        (52416, 12, 128),
        (57600, 12, 128),
        (84480, 40, 128),
        (21120, 24, 128),
    ]
    assert len({case.label for case in cases}) == len(cases) == 10


@pytest.mark.parametrize("ours, status", [(0.0019, "ok"), (0.0021, "wrong"), (float("nan"), "wrong")])
def test_more_than_twice_the_error_of_diffusers_is_wrong(ours, status):
    rows = [
        {"method": "vmonarch", "status": "ok", "errors": {"out": {"relative": ours}}, "ms": {"median": 1.0}},
        {"method": "diffusers", "status": "ok", "errors": {"out": {"relative": 0.001}}, "ms": {"median": 9.0}},
    ]
    judge(rows)
    assert [row["status"] for row in rows] == [status, "ok"]
    assert ("ms" in rows[0]) == (status == "ok"), "a wrong result has no speed"


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
def test_the_command_writes_what_the_table_shows(run_command, monkeypatch):
    monkeypatch.setattr(norm, "standard_cases", lambda: SMALL)
    words = ["norm", "--rounds", "2", "--methods", "vmonarch", "diffusers"]
    code, document = run_command(*words)
    assert code == 0 and [case["case"] for case in document["cases"]] == ["small forward", "small forward+backward"]
    assert "float64" in document["settings"]["reference"]
    row = document["cases"][1]["rows"][0]
    row["ms"]["median"] = 2.0
    table = norm.norm_table(document)
    assert f"2.00 ({row['bytes'] / 2e6:.0f} GB/s)" in table and "forward+backward" in table
    monkeypatch.setattr(norm, "norm_rotary", lambda *tensors, **_: 1.00001 * diffusers_code(*tensors, heads=2))
    code, document = run_command(*words)
    assert code == 1, "within the general bound, but more than twice what diffusers errs"
    assert {row["status"] for case in document["cases"] for row in case["rows"]} == {"wrong", "ok"}
    assert "wrong" in norm.norm_table(document)
