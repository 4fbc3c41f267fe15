"""Partial attentions merge into attention to all keys, in plain torch and by the kernels."""

import pytest
import torch
from op_checks import by_implementation, check_kernels, in_interpreter, quiet

from vmonarch import flash_entropy_attention, merge_partials


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 30), (7, 8, 9, 20)], ids=str)
def test_attention_over_pieces_of_the_keys_merges_into_attention_over_all(cuts):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 31, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bounds = [0, *cuts, 31]
    parts = [
        flash_entropy_attention(q, k[:, start:stop], v[:, start:stop])[:2]
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    # Where nothing is attended the value means nothing.
    nothing = torch.ones_like(q), torch.full_like(parts[0][1], -torch.inf)
    merged, whole = merge_partials(nothing, *parts), flash_entropy_attention(q, k, v)[:2]
    torch.testing.assert_close(merged, whole, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(out.sin().sum() + lse.cos().sum(), (q, k, v)) for out, lse in (merged, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


ON_GPU = pytest.mark.gpu
SHAPES = {"odd": (2, 7, 3, 20), "one-number": (1, 1, 1, 1), "power-of-two": (1, 40, 2, 64), "widest": (1, 5, 2, 256)}


def parts_of(B, S, H, E, dtype=torch.float32, device="cpu", empty=True):
    """out, lse, out, lse; both parts empty at the first token, one at the second and at the third, if there are any."""
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(2, B, S, H, E, generator=generator).to(dtype)
    lses = 3 * torch.randn(2, B, H, S, generator=generator)
    if empty and S > 2:
        lses[:, ..., 0] = lses[0, ..., 1] = lses[1, ..., 2] = -torch.inf
        # What an empty part holds means nothing.
        outs[:, :, 0] = torch.nan
    return [x.to(device) for pair in zip(outs, lses, strict=True) for x in pair]


def merged(implementation):
    return lambda *tensors: merge_partials(tensors[:2], tensors[2:], implementation=implementation)


def check_precision(tensors):
    def without_empty(out_1, lse_1, out_2, lse_2):
        """The reference has no gradient of what is empty; that of the kernels is 0."""
        none = (lse_1.isneginf() & lse_2.isneginf()).transpose(1, 2)[..., None]
        return merged("torch")(out_1.masked_fill(none, 0.0), lse_1, out_2.masked_fill(none, 0.0), lse_2)

    check_kernels(lambda how: merged(how) if how == "triton" else without_empty, tensors)


@by_implementation
def test_a_nan_shows_where_it_is(implementation):
    tensors = parts_of(*SHAPES["odd"], empty=False)
    for index in (1, 3):
        spoilt = [x.clone() for x in tensors]
        spoilt[index][0, 1, 4] = torch.nan
        out, lse = merged(implementation)(*spoilt)
        assert out[0, 4, 1].isnan().all() and lse[0, 1, 4].isnan()
        assert int(out.isnan().sum()) == out.shape[-1] and int(lse.isnan().sum()) == 1


@quiet
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_as_precise_as_the_reference(name, dtype, device):
    check_precision(parts_of(*SHAPES[name], dtype, device))


@ON_GPU
def test_a_video_in_bfloat16():
    check_precision(parts_of(2, 9973, 12, 128, torch.bfloat16, "cuda"))


@in_interpreter
def test_what_the_kernels_cannot_take_is_said():
    out, lse, *_ = parts_of(*SHAPES["odd"])
    for partials, message in (
        (3 * [(out, lse)], "there are 3 partial results"),
        ([(out, lse), (out.half(), lse)], "out is torch.float32 and torch.float16"),
        (2 * [(out, lse.double())], "lse is torch.float64"),
        ([(out, lse), (out, lse.double())], "lse is .*torch.float64"),
        ([(out, lse.double()), (out, lse)], "lse is .*torch.float64"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            merge_partials(*partials, implementation="triton")
