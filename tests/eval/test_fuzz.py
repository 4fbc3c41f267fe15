"""The fuzzer finds planted bugs, and does not err by itself."""

import json

import pytest
import torch

from vmonarch.eval.studies import fuzz
from vmonarch.kernels.common.launch import interpreted
from vmonarch.kernels.flash_bias import api as flash_bias
from vmonarch.kernels.flash_entropy import reference as flash_entropy

PLAIN = {"device": "cpu", "configurations": None}


def first_failure(numbers, ops=tuple(fuzz.OPS), implementation="torch"):
    outcomes = (fuzz.outcome_of(number, implementation, ops=ops, **PLAIN) for number in numbers)
    return next((outcome for outcome in outcomes if outcome["failure"]), None)


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", ["window_attention", "flash_entropy_attention"])
def test_kernels_too(op):
    assert first_failure(range(2), [op], "triton") is None


def ignore_strides(right):
    """Tensors are read as if they were contiguous."""
    return lambda x: right(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))


def leave_the_last_row(right):
    """The last row of the result is never written; in most processes it would hold what was there before."""

    def wrong(query, *args, **options):
        out, lse = right(query, *args, **options)
        unwritten = torch.empty_like(out)
        unwritten[:, : max(1, out.shape[1] - 1)] = out[:, : max(1, out.shape[1] - 1)]
        return (out if query.dtype == torch.float64 else unwritten), lse

    return wrong


@pytest.mark.parametrize("plant", [ignore_strides, leave_the_last_row])
def test_the_fuzzer_finds_a_planted_bug(monkeypatch, plant):
    if plant is ignore_strides:
        monkeypatch.setattr("vmonarch.kernels.flash_bias.reference.to_groups", plant(flash_entropy.to_groups))
    else:
        name = "flash_bias_attention_reference"
        monkeypatch.setattr(flash_bias, name, plant(getattr(flash_bias, name)))
    assert first_failure(range(40), ["flash_bias_attention"]) is not None


def test_a_run_is_recorded(tmp_path):
    words = ["--ops", "window_attention", "--output", str(tmp_path / "fuzz.json")]
    assert fuzz.main(["--cases", "4", *words]) == 0
    record = json.loads((tmp_path / "fuzz.json").read_text())
    assert record["cases"] == record["by_op"]["window_attention"]["cases"] == 4 and not record["failed"]
