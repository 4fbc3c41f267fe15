"""What holds for every op, by its tiny case: memory of its results, views, NaN, autocast, the rules of operators,
compilation; forward-mode AD (`torch.func.jvp`, dual numbers), where plain torch is right and the kernels refuse.
"""

from functools import partial

import pytest
import torch
from op_checks import OPS, assert_bits, by_implementation, everywhere, in_interpreter, quiet, tiny_case, with_gradients
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vmonarch import first_order_attention, flash_entropy_attention, monarch_attention
from vmonarch.kernels.common import launch
from vmonarch.kernels.common.trust import Case
from vmonarch.kernels.flash_entropy import reference as softmax
from vmonarch.kernels.residual.api import attention_residual

pytestmark = quiet
CPU = torch.device("cpu")
DIFFERENTIABLE = [op for op in OPS if tiny_case(op, CPU).gradients]
ATTENTION = [op for op in OPS if "query" in tiny_case(op, CPU).inputs]
QKV = dict.fromkeys(("query", "key", "value"), (1, 6, 2, 4))
# What has no kernels, or those of another op.
OTHERS = {
    "first_order": Case(QKV, partial(first_order_attention, grid=(1, 2, 3), return_lse=True)),
    "sequence": Case(QKV, partial(monarch_attention, block_size=4, return_lse=True)),
}


def drawn(op, dtype=torch.float64, device=CPU):
    """The case of an op, its inputs and their tangents."""
    case = OTHERS.get(op) or tiny_case(op, device)
    generator = torch.Generator().manual_seed(0)
    inputs, tangents = (
        tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
            for shape in case.inputs.values()
        )
        for _ in range(2)
    )
    return case, inputs, tangents


def outcome(case, how, inputs):
    """Results of an op and, if it has any, gradients."""
    call = partial(case.call, implementation=how)
    return with_gradients(call, inputs) if case.gradients else call(*inputs)


def dual(function, inputs, tangents):
    """Tangents of the results; those of inputs may be None."""
    with forward_ad.dual_level():
        duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        found = [forward_ad.unpack_dual(result) for result in function(*duals)]
        return [torch.zeros_like(x) if tangent is None else tangent for x, tangent in found]


def inner(xs, ys):
    return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("learns", [False, True], ids=["", "learns"])
@by_implementation
@pytest.mark.parametrize("op", [*OPS, *OTHERS])
def test_no_result_holds_the_memory_of_another(op, implementation, learns):
    case, inputs, _ = drawn(op, torch.float32)
    leaves = [x.requires_grad_(learns and case.gradients) for x in inputs]
    for result in case.call(*leaves, implementation=implementation):
        assert result.untyped_storage().nbytes() == result.numel() * result.itemsize


def amid_nan(x):
    """The numbers of x, with NaN around them along every dimension."""
    inside = (slice(1, -1),) * x.ndim
    return torch.nn.functional.pad(x, (1, 1) * x.ndim, value=torch.nan)[inside]


def turned(x):
    return x.transpose(0, -2).contiguous().transpose(0, -2) if x.ndim > 1 else x


@in_interpreter
@pytest.mark.parametrize("op", OPS)
def test_views_give_the_kernels_the_same_bits_as_contiguous_tensors(op):
    case, inputs, _ = drawn(op, torch.float32)
    attend = partial(case.call, implementation="triton")
    run = partial(with_gradients, attend) if case.gradients else lambda tensors: attend(*tensors)
    expected = run(inputs)
    for view in (amid_nan, turned):
        assert_bits(run([view(x) for x in inputs]), expected)


@in_interpreter
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_of_sums_arrive_expanded_and_are_those_of_tensors_of_ones(op):
    case, inputs, _ = drawn(op, torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    results = case.call(*leaves, implementation="triton")
    expanded = torch.autograd.grad(sum(x.sum() for x in results), leaves, retain_graph=True)
    assert_bits(expanded, torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_plain_torch_rounds_16_bit_only_once(op, dtype):
    case, inputs, _ = drawn(op, dtype)
    attend = partial(case.call, implementation="torch")
    for x, y in zip(attend(*inputs), attend(*(x.double() for x in inputs)), strict=True):
        assert x.dtype == (dtype if x.ndim == 4 else torch.float32)
        torch.testing.assert_close(x.double(), y.double(), rtol=2 * torch.finfo(x.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("op", [*DIFFERENTIABLE, *OTHERS])
def test_autocast_rounds_no_result_and_no_gradient(op):
    case, inputs, _ = drawn(op, torch.float32)
    attend = partial(case.call, implementation="torch")

    def under_autocast(*tensors):
        with torch.autocast("cpu", torch.bfloat16):
            results = attend(*tensors)
            assert torch.is_autocast_enabled("cpu")
        return results

    assert_bits(with_gradients(under_autocast, inputs), with_gradients(attend, inputs))


@everywhere
@pytest.mark.parametrize("op", ATTENTION)
def test_nan_in_a_head_shows_there_and_leaves_the_other_as_it_is(op, implementation, device):
    case, inputs, _ = drawn(op, torch.float32 if device == "cpu" else torch.float16, torch.device(device))
    run = partial(outcome, case, implementation)
    clean = run(inputs)
    for n in range(len(inputs)):
        spoilt = [x.clone() for x in inputs]
        spoilt[n][:, -1, 1] = torch.nan
        for x, y in zip(found := run(spoilt), clean, strict=True):
            assert torch.equal(*(z.select(z.ndim - 2, 0) for z in (x, y)))
        assert found[0][:, :, 1].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("op", ATTENTION)
def test_on_a_gpu_bits_repeat(op):
    case, inputs, _ = drawn(op, torch.bfloat16, torch.device("cuda"))
    run = lambda: outcome(case, "triton", inputs)
    first = run()
    for _ in range(250):
        assert_bits(run(), first)


class Operators(TorchDispatchMode):
    """The calls of our operators, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "vmonarch":
            self.calls.append((function, tree_map_only(torch.Tensor, torch.clone, args)))
        return function(*args, **(kwargs or {}))


@in_interpreter
@pytest.mark.parametrize("op", OPS)
def test_operators_keep_torchs_rules(op):
    case, inputs, _ = drawn(op, torch.float32)
    attend = partial(case.call, implementation="triton")
    with Operators() as operators:
        attend(*inputs)
        if case.gradients:
            with_gradients(attend, inputs)
    assert operators.calls or not case.gradients
    for function, args in operators.calls:
        if "backward" not in function.name():
            args = tree_map_only(torch.Tensor, lambda x: x.requires_grad_(x.is_floating_point()), args)
        torch.library.opcheck(function, args)


@in_interpreter
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_compiled_the_kernels_give_the_same_without_a_graph_break(dynamo, op):
    case, inputs, _ = drawn(op, torch.float32)
    attend = partial(case.call, implementation="triton")
    # How operators are traced, backward too, is what `opcheck` looks at.
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(with_gradients(compiled, inputs), with_gradients(attend, inputs))


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_tangents_of_plain_torch_are_those_of_its_gradients(op, monkeypatch):
    """⟨g, J·t⟩ = ⟨Jᵀ·g, t⟩, whole and in chunks; Jᵀ is compared with float64 where gradients are tested."""
    case, inputs, tangents = drawn(op)
    attend = partial(case.call, implementation="torch")
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = attend(*leaves)
    weights = [torch.randn_like(x) for x in results]
    gradients = torch.autograd.grad(results, leaves, weights)
    for _ in range(2):
        results, found = torch.func.jvp(attend, tuple(leaves), tangents)
        torch.testing.assert_close(inner(weights, found), inner(gradients, tangents), rtol=1e-5, atol=1e-5)
        # And the other way round: what was computed under tangents has a backward pass, when they have gone.
        torch.testing.assert_close(torch.autograd.grad(results, leaves, weights), gradients, rtol=1e-5, atol=1e-6)
        transformed = torch.func.grad(lambda *x: inner(weights, attend(*x)), tuple(range(len(inputs))))(*inputs)
        torch.testing.assert_close(transformed, gradients, rtol=1e-5, atol=1e-6)
        for n, tangent in enumerate(tangents):
            alone = dual(attend, inputs, [t if i == n else None for i, t in enumerate(tangents)])
            expected = (gradients[n] * tangent).sum()
            torch.testing.assert_close(inner(weights, alone), expected, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(softmax, "MAX_CHUNK_SCORES", 8)


@in_interpreter
@pytest.mark.parametrize("op", ["window", "taylor", "flash_entropy"])
def test_kernels_are_mapped_over_a_batch_of_calls(op):
    case, inputs, _ = drawn(op, torch.float32)
    call = partial(case.call, implementation="triton")
    batch = torch.stack([inputs[0], 2 * inputs[0]])
    mapped = torch.func.vmap(lambda x: call(x, *inputs[1:]))(batch)
    for n, x in enumerate(batch):
        torch.testing.assert_close(tuple(y[n] for y in mapped), tuple(call(x, *inputs[1:])))


@in_interpreter
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_kernels_refuse_tangents_of_any_input_and_auto_is_plain_torch(op, monkeypatch):
    case, inputs, tangents = drawn(op, torch.float32)
    refused = pytest.raises(NotImplementedError, match='with implementation="triton": forward-mode AD goes through')
    kernels = partial(case.call, implementation="triton")
    for n in range(len(inputs)):
        with refused:
            dual(kernels, inputs, [t if i == n else None for i, t in enumerate(tangents)])
    first = lambda x: kernels(x, *inputs[1:])[0].sum()
    batch = inputs[0].expand(2, *inputs[0].shape)
    for transformed in (first, torch.func.grad(first)):
        with refused:
            torch.func.jvp(transformed, inputs[:1], tangents[:1])
    with refused:
        torch.func.jvp(torch.func.vmap(first), (batch,), (batch,))
    monkeypatch.setattr(launch, "auto_takes_kernels", lambda device: True)
    found, expected = (dual(partial(case.call, implementation=how), inputs, tangents) for how in ("auto", "torch"))
    assert all(map(torch.equal, found, expected))
    with forward_ad.dual_level():
        assert all(map(torch.equal, kernels(*inputs), case.call(*inputs, implementation="auto")))


@in_interpreter
def test_compiled_code_knows_tangents_too():
    q = torch.randn(1, 4, 2, 16, generator=torch.Generator().manual_seed(0))
    attend = lambda how: lambda q: flash_entropy_attention(q, q, q, implementation=how)[:1]
    expected = dual(attend("torch"), (q,), (q,))
    inside = torch.compile(lambda q: torch.func.jvp(attend("torch"), (q,), (q,))[1], backend="eager", fullgraph=True)
    torch.testing.assert_close(list(inside(q)), expected)
    # Compiled without tangents, called with them.
    compiled = torch.compile(attend("triton"), backend="eager")
    compiled(q)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        dual(compiled, (q,), (q,))


def test_residuals_refuse_tangents():
    out = torch.ones(1, 4, 2, 16)
    with pytest.raises(RuntimeError, match="approximate must not require a gradient or carry a tangent"):
        dual(lambda x: attention_residual(out, x), (out,), (out,))
