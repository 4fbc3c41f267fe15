"""Autocast changes no result and no gradient of any op, wherever the backward pass is run."""

import itertools

import pytest
import torch
from op_checks import assert_bits
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from vmonarch import flash_bias_attention, vmonarch_attention
from vmonarch.autocast import without_autocast
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
def test_no_op_is_rounded(op):
    case = case_of(op)
    expected = fuzz.results_of(case, case.tensors, "torch")
    with autocast():
        # The backward pass too.
        actual = fuzz.results_of(case, case.tensors, "torch")
        assert torch.is_autocast_enabled("cpu")
    assert actual.keys() == expected.keys() and any(name.startswith("d") for name in actual)
    for name, x in actual.items():
        assert x.dtype == expected[name].dtype and torch.equal(x, expected[name]), name


def with_factors(size=30.0):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()
    tensors = [draw(1, 24, 2, 8) for _ in range(3)]
    factors = [(draw(1, 24, 1, 5).detach() * size).requires_grad_() for _ in range(2)]
    return [*tensors, *factors]


def test_gradients_may_be_taken_twice_but_not_differentiated():
    query, key, value = with_factors()[:3]
    with autocast():
        out, lse = vmonarch_attention(query, key, value, grid=(2, 3, 4), return_lse=True)
        first = torch.autograd.grad(lse.sum(), (query, key), retain_graph=True)
        again = torch.autograd.grad(lse.sum(), (query, key), retain_graph=True)
        assert_bits(first, again)
        with pytest.raises(RuntimeError, match="does not require grad|differentiate twice"):
            torch.autograd.grad(torch.autograd.grad(out.sum(), query, create_graph=True)[0].sum(), query)


def test_only_the_nodes_of_the_op_turn_it_off():
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    op = without_autocast(lambda x: Spy.apply(x))
    x = torch.ones(3, requires_grad=True)
    with autocast():
        Spy.apply(op(Spy.apply(x))).sum().backward()
        assert seen == [True, False, True] and torch.is_autocast_enabled("cpu")


def test_checkpointed_it_keeps_nothing_and_is_computed_twice():
    kept = []

    def block(query, key, value):
        tensors = [x.sin() for x in (query, key, value)]
        out = vmonarch_attention(*tensors, grid=(2, 3, 4))
        kept.append([StorageWeakRef(x.untyped_storage()) for x in (*tensors, out)])
        return out.sum()

    with autocast():
        out = checkpoint(block, *with_factors()[:3], use_reentrant=False, early_stop=False)
    assert [x.expired() for x in kept[0]] == 4 * [True]
    out.backward()
    assert len(kept) == 2


@pytest.mark.deep
def test_compiled_there_is_no_graph_break(dynamo):
    tensors = with_factors(3.0)
    expected = flash_bias_attention(*tensors)
    compiled = torch.compile(flash_bias_attention, backend="aot_eager", fullgraph=True)
    # By default torch.compile runs a backward pass under the autocast of the forward pass.
    with autocast(), torch._functorch.config.patch(backward_pass_autocast="off"):
        actual = compiled(*tensors)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), tensors) for x in (actual, expected)))
