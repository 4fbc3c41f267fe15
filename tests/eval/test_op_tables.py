"""The tables of the operators' benchmarks say what their JSON says, and what was asked for."""

import copy
import json

import pytest

from vmonarch.eval.bench import based, bias
from vmonarch.eval.bench.tables import based_table, flash_bias_table

HEAD = {
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": "a chip",
    "versions": {"torch_build": "2.0", "triton": "3.0"},
    "command": "python -m bench",
    "settings": {"dtype": "bfloat16", "rounds": 9, "timing": "CUDA events"},
    "rates": {"matmul_flops_per_second": 5e14, "copy_bytes_per_second": 4e12},
    "formulae": {"legend": "S tokens"},
    "left_out": [],
}


def row(method, ms, peak=1_000_000, inputs=1_000_000, **more):
    return {
        "method": method, "status": "ok", "ms": {"median": ms}, "peak_bytes": peak, "input_bytes": inputs, **more
    }  # fmt: skip


def bias_case(rank, *rows):
    case = bias.Case("4096 d=64", 1, 4096, 12, 64, rank)
    return {"case": case.label, **vars(case), "rows": list(rows)}


BIAS = {
    **HEAD,
    "cases": [
        bias_case(
            9,
            row("flash-bias", 1.1, inputs=1_200_000),
            row("no-bias", 1.0),
            row("sdpa", 3.3, inputs=10_000_000),
            row("flex", 2.2, inputs=10_000_000),
        ),
        bias_case(
            64,
            row("flash-bias", 1.5),
            row("no-bias", 1.0),
            {"method": "sdpa", "status": "out of memory", "problem": "x"},
        ),
        bias_case(2, row("flash-bias", 1.2), row("no-bias", 1.0)),
    ],
}


def based_case(case, *rows):
    return json.loads(json.dumps({"case": case.label, **vars(case), "rows": list(rows)}))


BASED = {
    **HEAD,
    "cases": [
        based_case(
            based.Case("video", 1, 23296, 16, 64),
            row("taylor", 0.1, byte_floor_ms=0.04, flop_floor_ms=0.05),
            row("taylor-torch", 2.0),
            row("cudnn", 5.0),
        ),
        based_case(based.Case("prefill", 4, 4096, 16, 64, True), row("taylor", 0.5), row("flash", 0.25)),
        based_case(based.Case("decode", 128, 65536, 16, 64), row("taylor", 0.128), row("sdpa-65536", 12.8)),
        based_case(based.Case("window", 1, 16384, 16, 64, window=64), row("window", 0.5), row("flex", 1.0)),
        based_case(
            based.Case("window", 1, 40, 12, 128, window=(1, 3, 3), grid=(2, 4, 5)),
            row("window", 2.0),
            row("cudnn", 1.0),
        ),
    ],
}


def test_flash_bias_has_ratios_and_bars():
    text = flash_bias_table(BIAS)
    assert (
        "| 4,096, 12 heads, d = 64 | 9 | 1.10 | 1.10× | 3.30 (3.00×) | 2.20 (2.00×) | 2 | 1.10× (1.00×) | 5.00× |"
        in text
    )
    assert "| 64 | 1.50 | 1.50× | out of memory | – |" in text
    assert "| time / no bias, R ≤ 16 | ≤ 1.15 | 1 of 2 | 1.20 (4096 d=64 R=2 forward) |" in text
    assert "| time / no bias, R above 16 | ≤ 1.35 | 0 of 1 | 1.50 (4096 d=64 R=64 forward) |" in text
    assert "| SDPA's time / ours | ≥ 2 | 1 of 1 | 3.00 (4096 d=64 R=9 forward) |" in text
    assert "| memory / no bias | ≤ 1.1 | 3 of 3 | 1.10 (4096 d=64 R=9 forward) |" in text


def test_linear_attention_has_floors_and_tokens_per_second():
    text = based_table(BASED)
    assert "| 23,296, 16 heads, d = 64 | forward | 0.100 | 2.50× | 2.00× | 2.00 (20.0×) | 5.00 (50.0×) |" in text
    assert "| 4 × 4,096 | forward+backward | 0.500 | – | – | 0.250 (0.500×) |" in text
    assert "| 128 | 1,000 | 10 |" in text and "exact, 65,536 keys" in text
    assert "| 64, causal | 16,384, 16 heads, d = 64 | forward | 0.500 | 1.00 (2.00×) | – |" in text
    assert "| 1×3×3 of 2×4×5 | 40, 12 heads, d = 128 | forward | 2.00 | – | 1.00 (0.500×) |" in text
    assert "| video: time / byte floor | ≤ 3 | 1 of 1 | 2.50 (" in text


@pytest.mark.parametrize(("table", "results"), [(flash_bias_table, BIAS), (based_table, BASED)], ids=["bias", "based"])
def test_what_was_left_out_is_said(table, results):
    assert "Left out" not in table(results)
    assert "over: the last case." in table({**results, "left_out": ["the last case"]})


@pytest.mark.parametrize(("table", "results"), [(flash_bias_table, BIAS), (based_table, BASED)], ids=["bias", "based"])
def test_every_time_is_shown(table, results):
    for i, case in enumerate(results["cases"]):
        for j, cell in enumerate(case["rows"]):
            changed = copy.deepcopy(results)
            if "ms" in cell:
                changed["cases"][i]["rows"][j]["ms"]["median"] += 7.7
                assert table(changed) != table(results), (case["case"], cell["method"])
