"""What the tests of several ops share. Gradients are those of an objective, unless those of the results are given."""

import itertools
from importlib import import_module
from pathlib import Path

import pytest
import torch

import vmonarch
from vmonarch.kernels.common.launch import interpreted

# Whatever asks for kernels; `tiny_case` fails for one that has no case.
APIS = Path(vmonarch.__file__).parent.glob("kernels/*/api.py")
OPS = sorted(file.parent.name for file in APIS if "use_triton(" in file.read_text())

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
by_implementation = pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=in_interpreter)])
everywhere = pytest.mark.parametrize(
    ("implementation", "device"),
    [
        ("torch", "cpu"),
        pytest.param("triton", "cpu", marks=in_interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)
# The interpreter computes masked elements too, and NumPy complains about theirs.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def tiny_case(op, device):
    return import_module(f"vmonarch.kernels.{op}.api").tiny_case(device.type == "cuda")


def call_of(function, *good, **options):
    """bad(*tensors, **changes): a call of `function` that differs from the good one in what is given."""
    return lambda *tensors, **changes: lambda: function(*(tensors or good), **options | changes)


def refuses(catalogue):
    """The test that every bad call, by its name (call, error, pattern of its message), raises its error."""

    @pytest.mark.parametrize(("call", "error", "message"), catalogue.values(), ids=catalogue)
    def test(call, error, message):
        with pytest.raises(error, match=message):
            call()

    return test


def in_turns(names, others, each):
    """Pairs of every name with so many of the others, which take turns: all pairs would compile for hours on a GPU."""
    turns = itertools.cycle(others)
    return [(name, next(turns)) for name in names for _ in range(each)]


def qkv(Sq, Sk, dims=6, E=5, *, B=2, H=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * Sq + Sk)
    shapes = ((B, Sq, H, dims), (B, Sk, H, dims), (B, Sk, H, E))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def with_gradients(function, tensors, grads=None):
    """(*results, *gradients of the tensors): those that `grads` of the first results cause, or an objective.

    A log-partition that is infinite has no gradient.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = function(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else results
    if grads is None:
        total = results[0].sin().sum() + sum(x[~x.isneginf()].cos().sum() for x in results[1:])
        gradients = torch.autograd.grad(total, leaves)
    else:
        grads = [grad.to(x.dtype) for grad, x in zip(grads, results, strict=False)]
        infinite = [x.isneginf() for x in results]
        # Elsewhere the memory layout of what is given is kept.
        grads = [torch.where(i, 0.0, grad) if i.any() else grad for grad, i in zip(grads, infinite, strict=False)]
        gradients = torch.autograd.grad(results[: len(grads)], leaves, grads, materialize_grads=True)
    return *(x.detach() for x in results), *gradients


def assert_bits(results, expected):
    """Equal bit by bit, or both None."""
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def softmax_attention(q, k, v, *, scale=None, bias=0.0, attended=None):
    """(out, lse) of attention; the bias, and which pairs are `attended` if not all, broadcast to [B, H, Sq, Sk]."""
    logits = torch.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return attend_by(logits if attended is None else logits.masked_fill(~attended, -torch.inf), v)


def attend_by(logits, v):
    """(out, lse) of logits [B, H, Sq, Sk]; a row of which none is finite is 0 and -inf."""
    empty = logits.isneginf().all(-1, keepdim=True)
    lse = logits.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    out = torch.einsum("bhst,bthe->bshe", (logits - lse).exp(), v)
    return out, lse.masked_fill(empty, -torch.inf).squeeze(-1)


def check_kernels(attend, inputs, grads=None, *, slack=None, factor=2, own_units=False):
    """`attend(implementation)(*inputs)` and its gradients are as precise by the kernels as by plain torch.

    Errors are at most twice those of plain torch in the same precision, plus `slack` of the size. By default that is
    some units in the last place: of the input with the fewest bits, or for results their own with `own_units`.
    Log-partitions are infinite at the same places. Without gradients the results have the same bits.
    """
    exact = with_gradients(attend("torch"), [x.double() for x in inputs], grads)
    ours, plain = (with_gradients(attend(how), inputs, grads) for how in ("triton", "torch"))
    results = len(ours) - len(inputs)
    unit = max(torch.finfo(x.dtype).eps for x in inputs)
    for n, (x, y, expected) in enumerate(zip(ours, plain, exact, strict=True)):
        name = f"result {n}" if n < results else f"gradient {n - results}"
        assert x.dtype == y.dtype and x.shape == expected.shape, name
        finite = ~expected.isneginf()
        assert torch.equal(~x.isneginf(), finite), name
        error, allowed = ((z.double() - expected)[finite].norm().item() for z in (x, y))
        units = 8 * (torch.finfo(x.dtype).eps if own_units and n < results else unit)
        allowed = factor * allowed + (slack or units) * expected[finite].norm().item()
        assert error <= allowed, f"{name}: error {error:.3g} > {allowed:.3g}"
    with torch.no_grad():
        inference = attend("triton")(*inputs)
        assert_bits([inference] if results == 1 else inference, ours[:results])
