"""Autocast changes no result and no gradient of any op."""

import itertools

import pytest
import torch

from vmonarch.eval.studies import fuzz

# Residuals have no gradient, and no product that autocast would round.
OPS = [op for op in fuzz.OPS if op not in ("processor", "residual")]


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def case_of(op):
    """The first random case of an op in float32 with gradients of all results."""
    for case in (fuzz.make_case(number, ops=[op]) for number in itertools.count()):
        if case.dtype == torch.float32 and not case.forward_only and case.cotangents.keys() - {"lse", "entropy"}:
            return case


@pytest.mark.parametrize("op", OPS)
def test_no_op_is_rounded(op, monkeypatch):
    case, function = case_of(op), fuzz.OPS[op].function
    expected = fuzz.results_of(case, case.tensors, "torch")

    def under_autocast(**given):
        with autocast():
            results = function(**given)
            assert torch.is_autocast_enabled("cpu")
        return results

    monkeypatch.setitem(fuzz.OPS, op, fuzz.OPS[op]._replace(function=under_autocast))
    actual = fuzz.results_of(case, case.tensors, "torch")
    assert actual.keys() == expected.keys() and any(name.startswith("d") for name in actual)
    for name, x in actual.items():
        assert x.dtype == expected[name].dtype and torch.equal(x, expected[name]), name
