"""Flash-Entropy-Attention against softmax attention and the definition of entropy, in float64.

Of the kernels the error of plain torch is the budget. Here they run through Triton's interpreter, on tiles of 16 × 16,
so that small sizes cross several tiles; the tests marked `gpu` run them compiled, at real sizes.
"""

import pytest
import torch
from op_checks import (
    assert_bits,
    check_kernels,
    in_interpreter,
    quiet,
    with_gradients,
)

from vmonarch import ExactBlocks, flash_entropy_attention
from vmonarch.kernels.common.launch import launch_overrides
from vmonarch.kernels.flash_entropy import reference
from vmonarch.kernels.flash_entropy.segments import Segment
from vmonarch.kernels.monarch.reference import exact_part

pytest.importorskip("triton")
flash_forward = pytest.importorskip("vmonarch.kernels.flash_entropy.forward").flash_forward
flash_backward = pytest.importorskip("vmonarch.kernels.flash_entropy.backward").flash_backward

CPU = torch.device("cpu")
NAMES = ("out", "lse", "entropy", "dq", "dk", "dv")
pytestmark = quiet
ENTROPY_GRAD = pytest.mark.parametrize("entropy_grad", [False, True], ids=["stopped", "flowing"])


def qkv(queries, keys, dim=32, value_dim=None, *, batch=2, heads=2, dtype=torch.float32, device=CPU, spread=1.0):
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = ((queries, dim), (keys, dim), (keys, value_dim or dim))
    return tuple(
        (torch.randn(batch, n, heads, d, generator=generator) * spread).to(device=device, dtype=dtype)
        for n, d in shapes
    )


def plain(q, k, v, scale, dtype=torch.float64, mask=None):
    """Softmax attention by torch, with sums in float32 or float64 and operands of products rounded to `dtype`.

    The mask of pairs leaves no row empty.
    """
    wide = torch.promote_types(dtype, torch.float32)
    scores = torch.einsum("bshd,bthd->bhst", q.to(wide), k.to(wide)) * scale
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    log_p = scores.log_softmax(-1)
    P = log_p.exp()
    out = torch.einsum("bhst,bthd->bshd", P.to(dtype).to(wide), v.to(wide)).to(dtype)
    log_p = log_p if mask is None else log_p.masked_fill(~mask, 0.0)
    return out, scores.logsumexp(-1), -(P * log_p).sum(-1)


def cotangents(results):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator).to(x) for x in results]


@pytest.mark.parametrize("budget", [30, reference.MAX_CHUNK_SCORES], ids=["chunks", "whole"])
@pytest.mark.parametrize(("heads", "queries", "keys", "spread"), [(1, 1, 1, 1.0), (3, 13, 17, 1e-3), (2, 7, 63, 5.0)])
@ENTROPY_GRAD
def test_plain_torch_follows_the_definitions(monkeypatch, entropy_grad, heads, queries, keys, spread, budget):
    monkeypatch.setattr(reference, "MAX_CHUNK_SCORES", budget)
    tensors = qkv(queries, keys, 8, 5, heads=heads, dtype=torch.float64, spread=spread)
    grads = cotangents(plain(*tensors, 0.3))[: 3 if entropy_grad else 2]
    ours = with_gradients(lambda *x: flash_entropy_attention(*x, scale=0.3, entropy_grad=entropy_grad), tensors, grads)
    expected = with_gradients(lambda *x: plain(*x, 0.3), tensors, grads)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_logits_stay_finite(dtype):
    out, lse, entropy = flash_entropy_attention(*qkv(17, 33, 8, 5, dtype=dtype, spread=60.0))
    assert out.dtype == dtype and lse.dtype == entropy.dtype == torch.float32
    assert out.isfinite().all() and lse.abs().max() > 5e3 and (entropy >= 0).all()


# The kernels.


def check(tensors, *, slack=None, **options):
    attend = lambda how: lambda *x: flash_entropy_attention(*x, implementation=how, **options)
    grads = cotangents(plain(*tensors, 1.0, tensors[0].dtype))[: 3 if options.get("entropy_grad") else 2]
    check_kernels(attend, tensors, grads, slack=slack, own_units=True)


# queries, keys, head dimensions of keys and values, whether the entropy has a gradient
CASES = {
    **{
        "-".join(map(str, sizes)): qkv(*sizes[:4]) + sizes[4:]
        for sizes in (
            (1, 1, 32, 32, True), (7, 63, 32, 32, False), (16, 16, 64, 64, True), (17, 17, 72, 72, True),
            (1, 111, 40, 24, True), (111, 1, 24, 40, False), (111, 63, 40, 24, True), (16, 111, 1, 5, True),
            (9, 33, 256, 130, False))
    },
    **{
        "-".join(map(str, ("float16", *sizes))): qkv(*sizes[:4], dtype=torch.float16) + sizes[4:]
        for sizes in ((7, 16, 64, 64, False), (63, 111, 72, 80, True), (17, 63, 32, 96, False))
    },
}  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_match_float64(case):
    *tensors, entropy_grad = case
    check(tensors, entropy_grad=entropy_grad)


def far_from_zero(sign):
    q, k, v = qkv(17, 33, batch=1)
    q[..., 0], k[..., 0] = 100.0, sign * 100.0
    return q, k, v


# Tensors, and the scale of their logits: any, those of ±10,000, and rows whose logits all lie far from 0.
SCALED = {
    **{f"scale-{scale}": (qkv(17, 23, 24, batch=1), scale) for scale in (-0.4, 0.0, 2.0)},
    "large": (qkv(17, 33, batch=1, spread=40.0), 1.2),
    "large-float16": (qkv(17, 33, batch=1, spread=40.0, dtype=torch.float16), 1.2),
    "far-above": (far_from_zero(1), 1.0),
    "far-below": (far_from_zero(-1), 1.0),
}


@in_interpreter
@pytest.mark.parametrize("name", SCALED)
def test_any_size_of_logits_will_do(name):
    tensors, scale = SCALED[name]
    logits = torch.einsum("bshd,bthd->bhst", *(x.double() for x in tensors[:2])) * scale
    assert logits.abs().max() > 1e4 or "large" not in name
    # Probabilities are computed again from log-partitions that float32 holds to one unit in the last place.
    slack = 2**-22 * logits.abs().max() if logits.abs().max() > 1e3 else None
    for entropy_grad in (False, True):
        check(tensors, scale=scale, entropy_grad=entropy_grad, slack=slack)


FAR = {
    "batch": ((3, 5, 1, 16), (2**30 + 16, 16, 16, 1)),
    "heads": ((1, 5, 3, 16), (16, 16, 2**30 + 16, 1)),
    "tiles": ((1, 18, 1, 16), (16, 2**27, 16, 1)),
    "rows-of-a-tile": ((1, 10, 1, 16), (16, 2**28, 16, 1)),
}


@in_interpreter
@pytest.mark.parametrize("name", FAR)
def test_offsets_pass_two_to_the_thirty_one(tmp_path, name):
    shape, strides = FAR[name]
    S = shape[1]
    # The file is sparse: only the pages that hold elements take any room.
    space = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**31 + 2**29, dtype=torch.float16)
    close = qkv(S, S, 16, batch=shape[0], heads=shape[2], dtype=torch.float16)
    views = [space.as_strided(shape, strides, 2**20 * i) for i in range(3)]
    for view, x in zip(views, close, strict=True):
        view.copy_(x)
    segments = (Segment(0, S, ((0, S),)),)
    for splits in (1, 2):
        results = [
            flash_forward(*tensors, segments, scale=0.3, entropy=True, splits=splits) for tensors in (close, views)
        ]
        assert_bits(*results)
        out, lse, entropy = results[0]
        gradients = [
            flash_backward(out, lse, None, *tensors, out, lse, entropy, segments, scale=0.3, splits=splits)
            for tensors in (close, views)
        ]
        assert_bits(*gradients)


PATTERNS = {
    "first-frame": ExactBlocks(rows=(0,)),
    "band": ExactBlocks(band=1),
    "sink-and-own-frame": ExactBlocks(columns=(0,), band=0),
    "rows-and-columns": ExactBlocks(rows=(3,), columns=(1, 4)),
    "everything": ExactBlocks(band=5),
}
FRAMES, POSITIONS = 5, 21


def segments_of(pattern, P=POSITIONS):
    return tuple(
        Segment(l * P, (l + 1) * P, tuple((k * P, (k + 1) * P) for k in keys))
        for l, keys in enumerate(pattern.key_frames(FRAMES))
        if keys
    )


def mask_of(segments, queries, keys):
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for segment in segments:
        for start, stop in segment.key_ranges:
            mask[segment.query_start : segment.query_stop, start:stop] = True
    return mask


@in_interpreter
@ENTROPY_GRAD
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("name", PATTERNS)
def test_exact_blocks_match_float64_however_their_keys_are_split(name, splits, entropy_grad):
    S = FRAMES * POSITIONS
    tensors = qkv(S, S, 24, 40, batch=1)
    segments = segments_of(PATTERNS[name])
    mask = mask_of(segments, S, S)
    rows = mask.any(1)
    out, lse, entropy = flash_forward(*tensors, segments, scale=0.3, entropy=True, splits=splits)
    q, k, v = (x.double().requires_grad_() for x in tensors)
    expected = plain(q[:, rows], k, v, 0.3, mask=mask[rows])
    found = [x.double() for x in (out[:, rows], lse[..., rows], entropy[..., rows])]
    torch.testing.assert_close(found, list(expected), rtol=1e-5, atol=2e-6)
    assert (entropy[..., ~rows] == 0).all() and (out[:, ~rows] == 0).all() and (lse[..., ~rows] == -torch.inf).all()
    bare = flash_forward(*tensors, segments, scale=0.3, entropy=False, splits=splits)
    assert_bits(bare, (out, lse, None))

    grads = cotangents((out, lse, entropy))
    # Rows without any key have no gradient, whatever stands there.
    for grad in (grads[0].transpose(1, 2), *grads[1:]):
        grad[:, :, ~rows] = torch.nan
    used = 3 if entropy_grad else 2
    present = [x.double() for x in (grads[0][:, rows], grads[1][..., rows], grads[2][..., rows])][:used]
    expected = torch.autograd.grad(expected[:used], (q, k, v), present)
    arguments = (*grads[:2], grads[2] if entropy_grad else None, *tensors, out, lse, entropy, segments)
    fresh = flash_backward(*arguments, scale=0.3)
    torch.testing.assert_close([x.double() for x in fresh], list(expected), rtol=1e-5, atol=1e-5)
    given = [torch.randn(*x.shape[:3], x.shape[3] + 1)[..., :-1] for x in tensors]
    before = [x.clone() for x in given]
    added = flash_backward(*arguments, scale=0.3, splits=splits, **dict(zip(NAMES[3:], given, strict=True)))
    for accumulator, result, old, new in zip(given, added, before, fresh, strict=True):
        assert accumulator is result
        torch.testing.assert_close(accumulator, old + new, rtol=1e-6, atol=2e-6)


@in_interpreter
@pytest.mark.parametrize("block", [(16, 64), (32, 16)], ids=str)
def test_block_sizes_change_nothing_but_rounding(block):
    options = {"BLOCK_M": block[0], "BLOCK_N": block[1]}
    with launch_overrides({name: options for name in ("flash_forward", "flash_backward_q", "flash_backward_kv")}):
        check(qkv(50, 70, 24), entropy_grad=True)
        q, k, v = qkv(50, 150, 24)
        parts = flash_forward(q, k, v, (Segment(0, 50, ((0, 150),)),), scale=0.3, entropy=True, splits=2)
    whole = flash_entropy_attention(q, k, v, scale=0.3, implementation="torch")
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@in_interpreter
def test_without_entropy_grad_the_entropy_carries_no_gradient():
    tensors = [x.requires_grad_() for x in qkv(5, 6, 16)]
    out, lse, entropy = flash_entropy_attention(*tensors, implementation="triton")
    assert out.requires_grad and lse.requires_grad and not entropy.requires_grad
    assert flash_entropy_attention(*tensors, entropy_grad=True, implementation="triton")[2].requires_grad
    results = torch.ops.vmonarch.flash_entropy_forward(*tensors, 0.3, False)
    gradients = torch.autograd.grad(results[2].sum(), tensors, allow_unused=True, materialize_grads=True)
    assert all((x == 0).all() for x in gradients)


UNSUPPORTED = {
    "float64": (lambda: qkv(3, 3, 8, dtype=torch.float64), "the dtype is float64"),
    "bfloat16-in-the-interpreter": (lambda: qkv(3, 3, 8, dtype=torch.bfloat16), "interpreter computes bfloat16"),
    "meta": (lambda: qkv(3, 3, 8, device="meta"), r"the tensors are on meta \(supported: CUDA\)"),
    "on-the-cpu": (lambda: qkv(3, 3, 8), "the tensors are on the CPU"),
    "wide-head": (lambda: qkv(3, 3, 257), r"a head dimension is 257 \(supported: up to 256\)"),
    "wide-value": (lambda: qkv(3, 3, 8, 300), r"a head dimension is 300"),
    "strided-head": (lambda: [torch.ones(1, 3, 2, 16)[..., ::2]] * 3, "head dimension of a tensor is not contiguous"),
}


@in_interpreter
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernels_cannot_take_is_named_and_left_to_torch(name, monkeypatch):
    tensors, message = UNSUPPORTED[name]
    if name == "on-the-cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(NotImplementedError, match=f'flash_entropy_attention with implementation="triton": .*{message}'):
        flash_entropy_attention(*tensors(), implementation="triton")
    results = flash_entropy_attention(*tensors(), implementation="auto")
    expected = flash_entropy_attention(*tensors(), implementation="torch")
    assert all(x.is_meta or torch.equal(x, y) for x, y in zip(results, expected, strict=True))


# The compiled kernels, at real sizes: three latent frames of 28 × 52 tokens.

GPU_SHAPES = [(4368, 4368, 64, 64), (4368, 4368, 128, 128), (1456, 4368, 128, 64), (111, 4367, 72, 40), (1, 2, 256, 8)]
gpu_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.gpu
@gpu_dtypes
@ENTROPY_GRAD
@pytest.mark.parametrize(("queries", "keys", "dim", "value_dim"), GPU_SHAPES, ids=lambda n: str(n))
def test_on_the_device_results_and_gradients_match_float64(queries, keys, dim, value_dim, entropy_grad, dtype):
    check(qkv(queries, keys, dim, value_dim, batch=1, heads=3, dtype=dtype, device="cuda"), entropy_grad=entropy_grad)


@pytest.mark.gpu
@gpu_dtypes
@pytest.mark.parametrize("splits", [None, 1, 2, 5])
@pytest.mark.parametrize("name", PATTERNS)
def test_on_the_device_exact_blocks_match_the_reference(name, splits, dtype):
    S = FRAMES * 1456
    q, k, v = qkv(S, S, 128, batch=1, heads=2, dtype=dtype, device="cuda")
    segments = segments_of(PATTERNS[name], 1456)
    runs = [flash_forward(q, k, v, segments, scale=128**-0.5, entropy=True, splits=splits) for _ in range(2)]
    assert_bits(*runs)
    out, lse, _ = runs[0]
    q64, k64, v64 = (x.double().transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    expected_out, expected_lse = exact_part(q64 * 128**-0.5, k64, v64, PATTERNS[name].key_frames(FRAMES))
    error = (out.transpose(1, 2)[0].double() - expected_out).norm() / expected_out.norm()
    assert error <= max(2 * torch.finfo(dtype).eps, 4e-6)
    torch.testing.assert_close(lse[0].double(), expected_lse, rtol=1e-5, atol=1e-5)
