"""Linear attention against its weights written out as a matrix, in float64: plain torch, and the kernels (Triton).

Here the kernels run through Triton's interpreter on tiles of 16 × 16 and chunks of 32 tokens.
"""

import math

import pytest
import torch
from op_checks import (
    by_implementation,
    call_of,
    check_kernels,
    in_interpreter,
    in_turns,
    qkv,
    quiet,
    refuses,
    with_gradients,
)

from vmonarch import taylor_attention
from vmonarch.kernels.taylor import reference
from vmonarch.kernels.taylor.reference import FEATURE_MAPS

pytestmark = quiet
by_map = pytest.mark.parametrize("name", FEATURE_MAPS)


def weights_of(name, q, k, scale):
    """w [B, H, Sq, Sk] by the formula of each map, without its features."""
    s = torch.einsum("bshd,bthd->bhst", q, k) * scale
    q, k = (math.sqrt(scale) * x.transpose(1, 2) for x in (q, k))
    if name == "taylor":
        return 1 + s + s.square() / 2
    function = {"relu": torch.relu, "elu": lambda x: torch.where(x > 0, x + 1, x.exp())}[name]
    return function(q) @ function(k).transpose(-1, -2)


def frame_weights_of(T, H=3):
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs().double()
    weights = torch.exp(-torch.tensor([0.1, 0.7, 3.0], dtype=torch.float64)[:H, None, None] * distance)
    # Not symmetric, so that a transposed matrix shows.
    return weights * (1 + torch.arange(T) / 7)


def written_out(name, q, k, v, *frames, causal=False, scale=None):
    """(out, lse); a row that weighs nothing is 0 and -inf."""
    w = weights_of(name, q, k, q.shape[-1] ** -0.5 if scale is None else scale)
    for weights in frames:
        frame = torch.arange(q.shape[1]) * weights.shape[1] // q.shape[1]
        w = w * weights[:, frame][:, :, frame]
    total = (w := w.tril() if causal else w).sum(-1)
    some = total != 0
    total = torch.where(some, total, 1.0)
    return torch.einsum("bhst,bthe->bshe", w / total[..., None], v), torch.where(some, total.log(), -torch.inf)


def attend(implementation="auto", **options):
    """Of query, key, value and, if there are any, the weights of frames."""

    def call(q, k, v, *frames):
        more = {"frame_weights": frames[0]} if frames else {}
        return taylor_attention(q, k, v, implementation=implementation, **more, **options)

    return call


@pytest.fixture(params=[7, 256], ids=["many-chunks", "one-chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", request.param)


@by_map
@pytest.mark.parametrize(
    ("Sq", "Sk", "causal", "T"),
    [(1, 1, True, 0), (23, 23, True, 0), (23, 23, False, 0), (9, 30, False, 0), (11, 11, False, 1), (11, 11, False, 11),
     (21, 21, False, 3)],
    ids=str,
)  # fmt: skip
def test_results_and_gradients_are_those_of_the_weights(name, Sq, Sk, causal, T, chunk):
    frames = [frame_weights_of(T)] if T else []
    ours = attend(feature_map=name, causal=causal, scale=0.3, return_lse=True)
    theirs = lambda *x: written_out(name, *x, causal=causal, scale=0.3)
    found, expected = (with_gradients(way, [*qkv(Sq, Sk), *frames]) for way in (ours, theirs))
    # Rows of "relu" may weigh next to nothing, and have no gradient then.
    compared = slice(2 if name == "relu" else None)
    torch.testing.assert_close(found[compared], expected[compared], rtol=1e-7, atol=1e-9)


def check_case(case, device="cpu"):
    case = dict(case)
    dtype = case.pop("dtype", torch.float32)
    options = {name: case.pop(name, False) for name in ("causal", "return_lse")}
    T, sizes, mean, size = (case.pop(*given) for given in (("T", 0), ("sizes", (1, 1, 1)), ("mean", 0), ("dout", None)))
    q, k, v = (size * x for size, x in zip(sizes, qkv(**case), strict=True))
    # Of the output, if not those of an objective.
    grads = size and [(size * torch.linspace(1, 2, v.numel()).view(v.shape).to(dtype)).to(device)]
    if mean:
        # What a large mean leaves of gradients depends on how the output was rounded: that channel has none.
        v[..., 0] += mean
        grads[0][..., 0] = 0
    inputs = [x.to(device, dtype) for x in (q, k, v)]
    if T:
        inputs.append(frame_weights_of(T, q.shape[2]).to(device, torch.float32))
    check_kernels(lambda how: attend(how, **options), inputs, grads)


FEW, ONE = dict(B=1, H=2), dict(B=1, H=1, dtype=torch.float16)
CASES = {
    "not-causal": dict(Sq=40, Sk=70),
    "causal": dict(Sq=75, Sk=75, causal=True),
    "whole-chunks": dict(Sq=64, Sk=64, dims=16, E=16, causal=True, **FEW),
    "a-few-tokens": dict(Sq=5, Sk=3),
    "values-in-tiles": dict(Sq=20, Sk=20, dims=4, E=40, causal=True, **FEW),
    "lse": dict(Sq=40, Sk=70, return_lse=True, **FEW),
    "causal-lse": dict(Sq=75, Sk=75, causal=True, return_lse=True, **FEW),
    "frames": dict(Sq=66, Sk=66, T=3, return_lse=True, **FEW),
    "frames-of-a-token": dict(Sq=7, Sk=7, T=7),
    "float16": dict(Sq=40, Sk=70, **ONE),
    "float16-causal": dict(Sq=75, Sk=75, causal=True, **ONE),
    "float16-frames": dict(Sq=66, Sk=66, T=3, return_lse=True, **ONE),
    # Sums over tokens, weights of pairs and what gradients are divided by, all beyond the range of float16.
    "range-of-keys": dict(Sq=40, Sk=40, dims=4, sizes=(1, 50, 1), dout=1.0, **ONE),
    "range-of-values": dict(Sq=40, Sk=40, dims=4, mean=20000, dout=1.0, **ONE),
    "range-of-gradients": dict(Sq=60, Sk=60, dims=4, sizes=(5, 5, 1), dout=1e-4, **ONE),
    "range-causal": dict(Sq=60, Sk=60, dims=4, sizes=(30, 30, 1), causal=True, dout=1e-4, **ONE),
    "range-of-frames": dict(Sq=40, Sk=40, dims=4, sizes=(1, 50, 1), T=2, dout=1e-4, **ONE),
}


@in_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernels_are_as_precise_as_plain_torch(case):
    check_case(case)


GPU_CASES = [
    *(dict(Sq=1333, Sk=1333, dims=dims, E=E, causal=causal) for causal in (False, True)
      for dims, E in ((16, 64), (16, 128), (24, 40), (32, 64), (5, 16))),
    *(dict(Sq=T * P, Sk=T * P, dims=16, E=64, T=T) for T, P in ((5, 300), (81, 21), (16, 64))),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case,dtype", in_turns(GPU_CASES, (torch.float32, torch.bfloat16, torch.float16), 2), ids=str)
def test_gpu_results_and_gradients_match_float64(case, dtype):
    check_case({**case, "return_lse": True, "dtype": dtype}, "cuda")


GPU_RANGES = {
    "keys": dict(Sq=40_000, Sk=40_000, dims=4, sizes=(1, 2, 1), dout=1.0),
    "values": dict(Sq=20_000, Sk=20_000, dims=16, mean=12, dout=1.0),
    "gradients": dict(Sq=4096, Sk=4096, dims=16, dout=1e-4),
    "large-gradients": dict(Sq=4096, Sk=4096, dims=16, sizes=(4, 4, 1), dout=1000.0),
    "frames": dict(Sq=21 * 1024, Sk=21 * 1024, dims=16, sizes=(1, 4, 1), T=21, dout=1e-4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", GPU_RANGES.values(), ids=GPU_RANGES)
def test_gpu_float16_has_the_range_of_bfloat16(case, causal, dtype):
    if causal and "T" in case:
        pytest.skip("frames have weights of their own")
    check_case({**case, "E": 64, "B": 1, "H": 2, "causal": causal, "dtype": dtype}, "cuda")


@by_implementation
def test_where_nothing_weighs_there_are_zeros_and_no_gradient(implementation):
    inputs, nothing = qkv(20, 20, dtype=torch.float32), torch.zeros(3, 2, 2)
    out, lse, *gradients, _ = with_gradients(attend(implementation, return_lse=True), [*inputs, nothing])
    assert lse.isneginf().all() and all((x == 0).all() for x in (out, *gradients))


Q = torch.randn(1, 4, 2, 3)
M = torch.ones(2, 2, 2)
bad = call_of(taylor_attention, Q, Q, Q)
BAD = {
    "map": (bad(feature_map="exp"), ValueError, "feature_map must be one of taylor"),
    "causal-lengths": (bad(Q, Q[:, :3], Q[:, :3], causal=True), ValueError, "key must have as many tokens"),
    "scale": (bad(scale=-1.0), ValueError, "scale must be above 0"),
    "frames-heads": (bad(frame_weights=M[:1]), ValueError, r"frame_weights must be \[2, T, T\]"),
    "frames-divide": (
        bad(*[Q[:, :3]] * 3, frame_weights=M), ValueError,
        "frame_weights has 2 frames, which do not divide the 3 tokens"),
    "triton-dims": (
        bad(*[torch.randn(1, 4, 1, 33)] * 3, implementation="triton"), NotImplementedError,
        "key has 33 dimensions .supported: up to 32"),
    "triton-features": (
        bad(feature_map="relu", implementation="triton"), NotImplementedError,
        "feature_map is 'relu' .supported: taylor"),
}  # fmt: skip
test_bad_input_is_named = in_interpreter(refuses(BAD))
