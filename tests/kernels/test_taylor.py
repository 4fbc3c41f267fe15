"""Linear attention against its weights written out as a matrix, in float64."""

import math

import pytest
import torch

from vmonarch import taylor_attention
from vmonarch.kernels.taylor import reference
from vmonarch.kernels.taylor.feature_maps import FEATURE_MAPS, performer_directions
from vmonarch.kernels.taylor.reference import LinearState

by_map = pytest.mark.parametrize("name", FEATURE_MAPS)


def qkv(Sq, Sk, dims=6, E=5, *, B=2, H=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * Sq + Sk)
    shapes = ((B, Sq, H, dims), (B, Sk, H, dims), (B, Sk, H, E))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def weights_of(name, q, k, scale, max_tokens):
    """w [B, H, Sq, Sk] by the formula of each map, without its features."""
    s = torch.einsum("bshd,bthd->bhst", q, k) * scale
    q, k = (math.sqrt(scale) * x.transpose(1, 2) for x in (q, k))
    if name == "taylor":
        return 1 + s + s.square() / 2
    if name == "performer":
        omega = performer_directions(q.shape[-1])
        q, k = (torch.exp(x @ omega.T - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
        return q @ k.transpose(-1, -2) / q.shape[-1]
    if name == "cosformer":
        i, j = (torch.arange(x.shape[2], dtype=x.dtype) for x in (q, k))
        cosine = torch.cos((i[:, None] - j) * (math.pi / 2 / max_tokens))
        return (q.relu() @ k.relu().transpose(-1, -2)) * cosine
    function = {
        "relu": torch.relu, "elu": lambda x: torch.nn.functional.elu(x) + 1, "square": torch.square,
        "identity": lambda x: x,
    }[name]  # fmt: skip
    return function(q) @ function(k).transpose(-1, -2)


def written_out(name, q, k, v, *, causal=False, scale=None, max_tokens=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    w = weights_of(name, q, k, scale, max_tokens or max(q.shape[1], k.shape[1]))
    w = w.tril() if causal else w
    return torch.einsum("bhst,bthe->bshe", w / w.sum(-1, keepdim=True), v)


@pytest.fixture(params=[7, 256], ids=["many-chunks", "one-chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", request.param)


@by_map
@pytest.mark.parametrize(
    ("Sq", "Sk", "causal"), [(1, 1, True), (23, 23, True), (23, 23, False), (9, 30, False)], ids=str
)
def test_it_is_what_the_weights_give(name, Sq, Sk, causal, chunk):
    inputs = [x.requires_grad_() for x in qkv(Sq, Sk)]
    results = []
    for out in (
        taylor_attention(*inputs, feature_map=name, causal=causal),
        written_out(name, *inputs, causal=causal),
    ):
        # A row that weighs nothing is 0 here and NaN there.
        valid = ~written_out(name, *inputs, causal=causal).isnan()
        assert (out.detach()[~valid] == 0).all() or out.isnan().any()
        gradients = torch.autograd.grad(torch.where(valid, out, 0.0).sin().sum(), inputs)
        results.append([torch.where(valid, out, 0.0), *(torch.nan_to_num(g) for g in gradients)])
    compared = results if name in ("taylor", "elu", "performer", "identity") else [r[:1] for r in results]
    for ours, theirs in zip(*compared, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_taylor_map_is_close_to_softmax_for_small_logits(scale):
    q, k, v = qkv(20, 30)
    errors = []
    for size in (0.3, 0.1):
        out = taylor_attention(q * size, k * size, v, scale=scale)
        logits = torch.einsum("bshd,bthd->bhst", q * size, k * size) * scale
        errors.append((out - torch.einsum("bhst,bthe->bshe", logits.softmax(-1), v)).abs().max())
    # The first term left out is s³/6: logits 9 times smaller, error 729 times.
    assert errors[1] < errors[0] / 300 and errors[0] < 0.1


def test_the_taylor_weights_are_never_negative():
    q, k, v = qkv(50, 60)
    for size in (1.0, 10.0, 100.0):
        out = taylor_attention(size * q, size * -k.abs(), v)
        low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
        assert (out >= low - 1e-9).all() and (out <= high + 1e-9).all()


@by_map
@pytest.mark.parametrize("pieces", [(1,) * 12, (5, 1, 6)], ids=["token-by-token", "in-pieces"])
def test_decoding_from_a_state_is_the_same_as_all_at_once(name, pieces):
    q, k, v = qkv(12, 12)
    whole, after = taylor_attention(q, k, v, causal=True, feature_map=name, return_state=True)
    state, outs = None, []
    for q_piece, k_piece, v_piece in zip(*(x.split(pieces, 1) for x in (q, k, v)), strict=True):
        out, state = taylor_attention(
            q_piece, k_piece, v_piece, causal=True, feature_map=name, state=state, return_state=True, max_tokens=12
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    assert state.tokens == after.tokens == 12
    torch.testing.assert_close(state.kv, after.kv)
    torch.testing.assert_close(state.k, after.k)


def test_queries_also_attend_to_what_the_state_holds():
    q, k, v = qkv(9, 20)
    _, state = taylor_attention(q, k[:, :15], v[:, :15], return_state=True)
    out = taylor_attention(q, k[:, 15:], v[:, 15:], state=state)
    torch.testing.assert_close(out, taylor_attention(q, k, v))


@pytest.mark.parametrize("name", ["relu", "square", "cosformer"])
def test_a_query_that_weighs_nothing_gets_zeros(name):
    q, k, v = qkv(4, 4)
    out = taylor_attention(q * 0, k, v, feature_map=name)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_are_summed_in_float32(dtype):
    q, k, v = (x.to(dtype) for x in qkv(1, 4000, dims=4, B=1, H=1))
    v = v + 8
    out, state = taylor_attention(q, k, v, return_state=True)
    assert out.dtype == dtype and state.kv.dtype == state.k.dtype == torch.float32
    exact = taylor_attention(*(x.double() for x in (q, k, v)))
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


Q = torch.randn(1, 4, 2, 3)
STATE = LinearState(torch.zeros(1, 2, 13, 3), torch.zeros(1, 2, 13), 5)
BAD = {
    "map": (lambda: taylor_attention(Q, Q, Q, feature_map="exp"), ValueError, "feature_map must be one of taylor"),
    "causal": (lambda: taylor_attention(Q, Q, Q, causal=1), TypeError, "causal must be True or False"),
    "causal-lengths": (
        lambda: taylor_attention(Q, Q[:, :3], Q[:, :3], causal=True), ValueError, "key must have as many tokens"),
    "state-kind": (lambda: taylor_attention(Q, Q, Q, state=(1, 2)), TypeError, "state must be None or what"),
    "state-shape": (
        lambda: taylor_attention(Q, Q, Q, state=STATE, feature_map="relu"), ValueError, r"state.kv must be \(1, 2, 3"),
    "state-device": (
        lambda: taylor_attention(Q, Q, Q, state=STATE._replace(kv=STATE.kv.to("meta"))), ValueError, "state.kv must"),
    "max-tokens": (
        lambda: taylor_attention(Q, Q, Q, feature_map="cosformer", max_tokens=3), ValueError, "max_tokens=3, but"),
    "scale": (lambda: taylor_attention(Q, Q, Q, scale=-1.0), ValueError, "scale must be above 0"),
    "return-state": (lambda: taylor_attention(Q, Q, Q, return_state=None), TypeError, "return_state must be True or"),
    "triton": (lambda: taylor_attention(Q, Q, Q, implementation="triton"), NotImplementedError, "there is no kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
