"""The benchmark of text in the sequence of the video: what its ways compute, and that it can call a result wrong."""

import pytest
import torch

from vmonarch.eval.bench import sequence
from vmonarch.eval.bench.gate import compare
from vmonarch.eval.bench.sequence import Case, sequence_table, standard_cases, ways
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch import api

CPU = torch.device("cpu")
SMALL = [
    Case("small", LatentGrid(3, 4, 5), 8, 2, masked, training, 16)
    for masked in (False, True)
    for training in (False, True)
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda attend, **options: attend)
    monkeypatch.setattr(sequence, "sdpa", lambda backend, *tensors: sequence.flash_entropy_attention(*tensors)[0])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_every_way_passes_the_gate(case):
    outs = {}
    for method, make in ways(case, CPU, torch.float32).items():
        way = make()
        results = way.run()
        assert len(results) == (4 if case.training else 1)
        _, problem = compare(way.found(results), way.expected(), torch.float32)
        assert not problem, method
        outs[method] = results[0]
    tokens = case.grid.tokens
    assert outs["video"].shape[1] == tokens and outs["joint"].shape == outs["exact"].shape
    # The text is exact; padding makes the difference where there is some.
    difference = (outs["joint"] - outs["exact"]).abs()
    assert (difference[:, tokens:].max() < 1e-5) == (not case.masked) and difference[:, :tokens].max() > 1e-3


def test_a_wrong_partition_function_gets_no_speed(monkeypatch):
    attend = api.vmonarch_attention

    def wrong(*tensors, return_lse=False, **options):
        out, lse = attend(*tensors, return_lse=True, **options)
        return (out, lse + 1) if return_lse else out

    way = ways(SMALL[0], CPU, torch.float32)["joint"]()
    expected = way.expected()
    monkeypatch.setattr(sequence, "vmonarch_attention", wrong)
    _, problem = compare(way.found(way.run()), expected, torch.float32)
    assert "out is off by" in problem


def test_cases_are_told_apart_and_the_table_says_what_text_adds():
    cases = standard_cases()
    assert len({case.label for case in cases}) == len(cases) == 8
    rows = [
        {"method": method, "status": "ok", "ms": {"median": ms}}
        for method, ms in zip(sequence.METHODS, (40, 10, 12, 11), strict=True)
    ]
    results = {
        "cases": [{**vars(cases[0]), "grid": list(cases[0].grid), "case": cases[0].label, "rows": rows}],
        "versions": {"torch_build": "2.11.0", "triton": "3.6.0"},
        "settings": {"dtype": "bfloat16", "rounds": 5, "timing": "events"},
        "hardware": "H200",
        "date": "2026-11-26",
        "command": "vmonarch bench sequence",
        "left_out": [],
        "formulae": sequence.FORMULAE,
    }
    expected = "| 33×45×80 + 256 | 24 | forward | 40.0 | 10.0 | 12.0 (+20%) | 11.0 (+10%) |"
    assert expected in sequence_table(results)
