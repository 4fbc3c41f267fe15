"""Autocast changes no result and no gradient of any op."""

import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from vmonarch import vmonarch_attention
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


def test_checkpointed_it_keeps_nothing_and_is_computed_twice():
    kept = []

    def block(query, key, value):
        tensors = [x.sin() for x in (query, key, value)]
        out = vmonarch_attention(*tensors, grid=(2, 3, 4))
        kept.append([StorageWeakRef(x.untyped_storage()) for x in (*tensors, out)])
        return out.sum()

    given = [x.requires_grad_() for x in torch.randn(3, 1, 24, 2, 8)]
    with autocast():
        out = checkpoint(block, *given, use_reentrant=False, early_stop=False)
    assert [x.expired() for x in kept[0]] == 4 * [True]
    out.backward()
    assert len(kept) == 2
