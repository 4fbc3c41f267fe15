"""What the tests of several ops share. Gradients are those of an objective, unless those of the results are given."""

import pytest
import torch

from vmonarch.kernels.common.launch import interpreted

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
by_implementation = pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=in_interpreter)])
# The interpreter computes masked elements too, and NumPy complains about theirs.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


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


def assert_precise(names, ours, plain, exact, dtype):
    """Errors are at most twice those of plain torch in the same precision, plus some units in the last place.

    Log-partitions are infinite at the same places.
    """
    for name, x, y, expected in zip(names, ours, plain, exact, strict=True):
        assert x.dtype == (torch.float32 if name in ("lse", "dframes") else dtype), name
        assert x.shape == expected.shape, name
        finite = ~expected.isneginf()
        assert torch.equal(~x.isneginf(), finite), name
        error, allowed = ((z.double() - expected)[finite].norm().item() for z in (x, y))
        allowed = 2 * allowed + 8 * torch.finfo(dtype).eps * expected[finite].norm().item()
        assert error <= allowed, f"{name}: error {error:.3g} > {allowed:.3g}"


def check_kernels(attend, inputs):
    """`attend(implementation)(*inputs)` gives (out, lse): both, and gradients, are as precise as plain torch's."""
    exact = with_gradients(attend("torch"), [x.double() for x in inputs])
    ours, plain = (with_gradients(attend(how), inputs) for how in ("triton", "torch"))
    assert_precise(("out", "lse", "dq", "dk", "dv"), ours, plain, exact, inputs[0].dtype)
