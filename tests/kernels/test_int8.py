"""Exact attention in eight bits: its error against float64, its bytes, and on a GPU the form for Hopper."""

import math

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanPipeline
from op_checks import by_implementation, in_interpreter, qkv, quiet, softmax_attention
from torch._subclasses import FakeTensorMode

from vmonarch import int8_attention
from vmonarch.kernels.flash_entropy.reference import SCALE_BLOCK
from vmonarch.kernels.int8.reference import attended_first, rotated
from vmonarch.pipelines.embedded import embedded_model_path

pytestmark = quiet


def tensors(kind, Sq, Sk, D, E=None, *, B=1, H=2, dtype=torch.float32, device="cpu"):
    """Queries, keys and values: normal, or keys with a mean of five deviations, or with a few that dominate."""
    q, k, v = qkv(Sq, Sk, D, E or D, B=B, H=H)
    if kind == "mean":
        k = k + 5 * torch.randn(1, 1, H, D, dtype=k.dtype, generator=torch.Generator().manual_seed(1))
    elif kind == "dominant":
        k[:, ::97] *= 8
    return [x.to(device, dtype) for x in (q, k, v)]


def mask_of(Sk, B=1, device="cpu"):
    return torch.rand(B, Sk, generator=torch.Generator().manual_seed(2)).to(device) < 0.6


def error_of(found, expected):
    """‖found - expected‖ / ‖expected‖ of each head of [B, S, H, D]."""
    of_heads = [x.transpose(0, 2).flatten(1).norm(dim=1) for x in (found.double() - expected, expected)]
    return of_heads[0] / of_heads[1]


@by_implementation
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "some keys"])
@pytest.mark.parametrize("kind", ["normal", "mean", "dominant"])
def test_the_error_is_that_of_rounded_scores(kind, masked, implementation):
    q, k, v = tensors(kind, 70, SCALE_BLOCK + 90, 24, 20, B=2)
    mask = mask_of(k.shape[1], 2) if masked else None
    out, lse = int8_attention(q, k, v, key_mask=mask, return_lse=True, implementation=implementation)
    attended = None if mask is None else mask[:, None, None]
    expected, of_rows = softmax_attention(*(x.double() for x in (q, k, v)), attended=attended)
    assert error_of(out, expected).max() < 0.02
    # A logit of size s is off by about 0.6 % of s.
    assert (lse.double() - of_rows).abs().max() < (0.4 if kind == "dominant" else 0.02)


@in_interpreter
@pytest.mark.parametrize("scale", [None, 0.0, -0.3], ids=str)
@pytest.mark.parametrize("D, dtype", [(16, torch.float32), (160, torch.float32), (24, torch.float16)], ids=str)
def test_kernels_are_plain_torch_of_the_same_bytes(D, dtype, scale):
    q, k, v = tensors("mean", 33, 2 * SCALE_BLOCK + 1, D, 24, dtype=dtype, B=2)
    given = {"scale": scale, "key_mask": mask_of(k.shape[1], 2), "return_lse": True}
    ours, plain = (int8_attention(q, k, v, implementation=how, **given) for how in ("triton", "torch"))
    # A number amid two bytes may become either.
    assert ours[0].dtype == dtype and error_of(ours[0], plain[0].double()).max() < 3e-3
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-3, atol=2e-3)


@by_implementation
def test_keys_that_do_not_count_are_as_if_they_were_not_there(implementation):
    q, k, v = tensors("normal", 5, SCALE_BLOCK + 40, 16, B=2)
    mask = mask_of(k.shape[1], 2)
    mask[1] = False
    out, lse = int8_attention(q, k, v, key_mask=mask, return_lse=True, implementation=implementation)
    there = mask[0].nonzero().squeeze(1)
    fewer = int8_attention(q[:1], k[:1, there], v[:1, there], return_lse=True, implementation=implementation)
    torch.testing.assert_close((out[:1], lse[:1]), fewer, rtol=1e-5, atol=1e-6)
    assert not out[1].any() and lse[1].isneginf().all()


def values_of(quantised):
    """Values [B, H, tokens, D] without their scale, in float64, in the order of tokens."""
    place = torch.arange(quantised.key.shape[2], device=quantised.key.device)
    values = torch.empty_like(quantised.key, dtype=torch.float64)
    order = place // 16 * 16 + place % 16 // 4 * 2 + place // 2 % 2 * 8 + place % 2
    values[:, :, order] = quantised.value.double().transpose(2, 3)
    return values


@in_interpreter
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "some keys"])
def test_bytes_stand_for_the_tensors(masked):
    """Of queries and keys to half a unit, of values the nearest in fp8; all in their places."""
    from vmonarch.kernels.int8.op import quantise

    q, k, v = tensors("mean", 300, 2 * SCALE_BLOCK + 18, 24, B=2)
    mask = mask_of(k.shape[1], 2) if masked else None
    k, v, counts = attended_first(k, v, mask)
    found = quantise(q, k, v, counts, scale=0.3, values=True)
    values = values_of(found).float() * found.value_scale[:, :, None]
    keys = found.key.float() * found.key_scale.repeat_interleave(SCALE_BLOCK, 2)[..., None]
    queries = found.query.float() * found.query_scale[..., None] * math.log(2)
    for b, n in enumerate([k.shape[1]] * 2 if counts is None else counts.tolist()):
        expected = q[b].transpose(0, 1) * 0.3
        assert (queries[b] - rotated(expected)).abs().max() <= 0.501 * rotated(expected).abs().max() / 127
        own, of_values = (x[b, :n].transpose(0, 1) for x in (k, v))
        mean = own.mean(1, keepdim=True)
        centred = rotated(own - mean)
        for first in range(0, n, SCALE_BLOCK):
            block, ours = (x[:, first : min(first + SCALE_BLOCK, n)] for x in (centred, keys[b]))
            unit = block.abs().amax((1, 2), keepdim=True) / 127
            assert ((ours - block).abs() <= 0.51 * unit).all() and ours.abs().amax() > 126 * unit.amin()
        of_mean = (expected @ mean.transpose(1, 2)).squeeze(2) / math.log(2)
        torch.testing.assert_close(found.query_mean[b], of_mean, rtol=1e-4, atol=1e-4)
        largest = of_values.abs().amax(1, keepdim=True)
        nearest = (of_values / largest * 448).to(torch.float8_e4m3fn).float() * largest / 448
        right = torch.isclose(values[b, :, :n, :24], nearest, rtol=1e-5, atol=0)
        assert right.float().mean() > 0.95, "the interpreter itself is wrong just below powers of two"
        rest = (of_values - values[b, :, :n, :24]).mean(1)
        torch.testing.assert_close(found.value_rest[b, :, :24], rest, rtol=1e-3, atol=1e-6)
        assert not keys[b, :, n:].any() and not values[b, :, n:].any() and not values[..., 24:].any()


def test_derivatives_and_devices_without_kernels_are_refused():
    for refused in (
        lambda *x: int8_attention(*(each.requires_grad_() for each in x)),
        lambda *x: torch.func.jvp(int8_attention, x, x),
    ):
        with pytest.raises(NotImplementedError, match="int8_attention has no derivatives"):
            refused(*tensors("normal", 3, 4, 8))
    with FakeTensorMode():
        elsewhere = [torch.empty(1, 4, 2, 16, device="mps") for _ in range(3)]
    with pytest.raises(NotImplementedError, match='refresh.precision="int8".*the tensors are on mps'):
        int8_attention(*elsewhere)


def by_bytes(q, k, v, mask=None):
    """What the kernel for Hopper computes, in float64: pairs of blocks, the last first, and e4m3 bytes."""
    from vmonarch.kernels.int8.op import quantise

    k, v, counts = attended_first(k, v, mask)
    made = quantise(q, k, v, counts, scale=q.shape[3] ** -0.5, values=True)
    n = k.shape[1] if counts is None else int(counts[0])
    place, values = torch.arange(made.key.shape[2], device=q.device), values_of(made)
    scores = made.query.double() @ made.key.double().transpose(2, 3)
    scores = scores * made.query_scale.double()[..., None] * made.key_scale.repeat_interleave(256, 2)[:, :, None]
    top = torch.full_like(scores[..., 0], -math.inf)
    acc = total = 0.0
    reference = top
    pairs = max(-(-n // 256), 1)
    for pair in (pairs - 1, *range(pairs - 1)):
        own = slice(256 * pair, 256 * pair + 256)
        best = scores[..., own].amax(-1)
        top = torch.maximum(top, best)
        new = torch.maximum(best, top - 40)
        codes = torch.round(8 * (scores[..., own] - new[..., None] + 8.75 + 7)).clamp(0, 255).to(torch.uint8)
        weights = codes.view(torch.float8_e4m3fn).double() * (place[own] < n)
        alpha = torch.exp2(reference - new)[..., None]
        acc, total = acc * alpha + weights @ values[:, :, own], total * alpha + weights.sum(-1, keepdim=True)
        reference = new
    out = acc / total * made.value_scale.double()[:, :, None] + made.value_rest.double()[:, :, None]
    lse = reference + torch.log2(total.squeeze(-1)) - 8.75 - math.log2(1.0407) + made.query_mean
    return out.transpose(1, 2), lse * math.log(2)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "some keys"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("Sq", "Sk"), [(1, 1), (64, 256), (130, 77), (300, 513), (129, 1500)], ids=str)
def test_gpu_every_byte_of_the_form_for_hopper(Sq, Sk, D, masked):
    """Up to what tensor cores cut, about 2⁻¹³ of the largest weight, and a byte where a score lies between two."""
    q, k, v = tensors("mean", Sq, Sk, D, H=3, dtype=torch.bfloat16, device="cuda")
    mask = mask_of(Sk, device="cuda") if masked and Sk > 1 else None
    out, lse = int8_attention(q, k, v, key_mask=mask, return_lse=True, implementation="triton")
    expected, of_rows = by_bytes(q, k, v, mask)
    assert error_of(out, expected).max() < 5e-3
    assert (lse - of_rows).abs().max() < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_random_cases_for_hopper(D):
    """Errors of median and worst head, perhaps of one query, and of lse are as in int8.json's `random`; bits repeat."""
    random = torch.Generator().manual_seed(D)
    budgets = {"normal": (0.038, 0.045, 0.05), "mean": (0.038, 0.047, 0.05), "dominant": (0.034, 0.07, 0.45)}
    found, of_lse = {kind: [] for kind in budgets}, dict.fromkeys(budgets, 0.0)
    for kind in 170 * list(budgets):
        Sq, Sk, B, H, masked = (int(torch.randint(1, n, (), generator=random)) for n in (900, 900, 3, 4, 5))
        q, k, v = tensors(kind, Sq, Sk, D, B=B, H=H, dtype=torch.bfloat16, device="cuda")
        mask = mask_of(Sk, B, "cuda") if masked == 1 and Sk > 40 else None
        out, lse = int8_attention(q, k, v, key_mask=mask, return_lse=True, implementation="triton")
        again = int8_attention(q, k, v, key_mask=mask, implementation="triton")
        assert torch.equal(out, again) and lse.isfinite().all()
        attended = None if mask is None else mask[:, None, None]
        expected, of_rows = softmax_attention(q.double(), k.double(), v.double(), attended=attended)
        found[kind] += error_of(out, expected).tolist()
        of_lse[kind] = max(of_lse[kind], (lse.double() - of_rows).abs().max().item())
    for kind, (median, worst, worst_lse) in budgets.items():
        errors = sorted(found[kind])
        assert errors[len(errors) // 2] < median and errors[-1] < worst and of_lse[kind] < worst_lse, kind


@pytest.mark.gpu
def test_gpu_activations_of_the_embedded_model(monkeypatch):
    """Errors of all heads of all layers in four steps are within the budget of activations."""
    errors, exact = [], F.scaled_dot_product_attention

    def compare(query, key, value, *others, **options):
        # Not the text encoder's, which has another number of tokens.
        if query.shape[2] == key.shape[2] == 960:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
            expected, _ = softmax_attention(q.double(), k.double(), v.double())
            errors.extend(error_of(int8_attention(q, k, v, implementation="triton"), expected).tolist())
        return exact(query, key, value, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", compare)
    pipe = WanPipeline.from_pretrained(embedded_model_path(), torch_dtype=torch.bfloat16).to("cuda")
    size = {"num_frames": 61, "height": 96, "width": 160, "num_inference_steps": 4}
    pipe("a red circle moves to the right", **size, generator=torch.Generator().manual_seed(0), output_type="latent")
    assert len(errors) == 4 * 2 * 6 * 4 and sum(errors) / len(errors) < 0.02 and max(errors) < 0.06
