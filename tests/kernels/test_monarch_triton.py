"""The fused kernels of Monarch attention, forward and backward.

On the CPU they run through Triton's interpreter, in float32 and float16, on sizes that cross several 16×16 tiles; the
tests marked `gpu` run bfloat16 at the sizes of videos. The truth is plain torch in float64, which test_monarch.py
holds against the papers; a kernel may err twice as much as plain torch in the same precision.
B batch, S tokens, H heads, D head dim, m blocks, b positions per block.
"""

import math
from functools import partial

import pytest
import torch
from op_checks import assert_bits, check_kernels, in_interpreter, in_turns, with_gradients

from vmonarch import ExactBlocks, LatentGrid, VMonarchOptions, monarch_attention, vmonarch_attention
from vmonarch.kernels.common.blocks import grid_places
from vmonarch.kernels.common.launch import launch_overrides
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.l_step import LStep

L_KERNELS = ("l_centroids", "l_rows", "l_output", "l_backward_rows", "l_backward_columns")
SEVERAL_L_TILES = {kernel: {"MAX_TILE": 8} for kernel in L_KERNELS}


def qkv(tokens, *, batch=1, heads=1, dim=16, value_dim=None, spread=1.5, device="cpu"):
    """float64 [B, S, H, D] tensors that every dtype holds exactly enough: rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        (torch.randn(batch, tokens, heads, size, generator=generator) * spread).bfloat16().double().to(device)
        for size in (dim, dim, value_dim or dim)
    )


def run(how, op=vmonarch_attention, **options):
    return lambda *tensors: op(*tensors, return_lse=True, implementation=how, **options)


def check_float32(tensors, op=vmonarch_attention, overrides=None, **options):
    with launch_overrides(overrides or {}):
        check_kernels(lambda how: run(how, op, **options), [x.float() for x in tensors])


FIRST_FRAME = {"exact": "first_frame"}
CASES = {
    "paper": dict(grid=(3, 3, 6), **FIRST_FRAME),
    "one-iteration": dict(grid=(3, 3, 6), num_iterations=1, exact=None),
    "three-iterations": dict(grid=(2, 3, 6), num_iterations=3, exact=None),
    "no-clamp": dict(grid=(5, 2, 3), exact=None, min_mass=0.0),
    "strong-clamp": dict(grid=(5, 2, 3), exact=None, min_mass=1.0),
    "one-token": dict(grid=(1, 1, 1), **FIRST_FRAME),
    "one-frame": dict(grid=(1, 3, 6), **FIRST_FRAME),
    "one-position": dict(grid=(7, 1, 1), exact=None),
    "primes": dict(grid=(5, 3, 7), **FIRST_FRAME),
    "scale-0": dict(grid=(2, 3, 6), scale=0.0, **FIRST_FRAME),
    "negative-scale": dict(grid=(2, 3, 6), scale=-0.3, **FIRST_FRAME),
    "coarse": dict(grid=(3, 5, 6), coarse=2, **FIRST_FRAME),
    "coarse-3": dict(grid=(2, 7, 6), coarse=3, num_iterations=3, exact=None),
    "coarse-band": dict(grid=(3, 4, 5), coarse=2, exact=ExactBlocks(band=0)),
    "coarse-rows-and-band": dict(grid=(3, 5, 4), row_share=0.4, exact=ExactBlocks(rows=(0, 2), band=0)),
    "last-values": dict(grid=(3, 7, 5), last_l_update=False, coarse=2, **FIRST_FRAME),
    "last-values-band": dict(grid=(3, 4, 5), last_l_update=False, num_iterations=3, exact=ExactBlocks(band=0)),
    "own-frame": dict(grid=(3, 2, 5), exact=ExactBlocks(band=0)),
    "band": dict(grid=(4, 3, 4), exact=ExactBlocks(band=1)),
    "sink-column": dict(grid=(3, 2, 5), exact=ExactBlocks(columns=(0,))),
    "rows-and-columns": dict(grid=(4, 3, 4), exact=ExactBlocks(rows=(1,), columns=(0, 2))),
}
# Of query and key, and of values.
SIZES = {
    **{f"{D}-{E}": (dict(dim=D, value_dim=E), dict(grid=(2, 3, 6), exact=ExactBlocks(columns=(0,))))
       for D, E in ((20, 20), (8, 24), (80, 40))},
    "batch": (dict(batch=2, heads=3, dim=8, value_dim=12), dict(grid=(2, 5, 3), coarse=2, min_mass=1.0)),
}  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("name", [*CASES, *SIZES])
def test_vmonarch_forward_and_backward(name):
    sizes, options = SIZES.get(name) or ({}, CASES[name])
    check_float32(qkv(math.prod(options["grid"]), **sizes), **options)


@in_interpreter
@pytest.mark.parametrize("overrides", [None, SEVERAL_L_TILES], ids=["one-tile", "several"])
def test_exact_blocks_beyond_the_first_word_of_bits(overrides):
    exact = ExactBlocks(columns=(31, 33), band=0)
    check_float32(qkv(35), overrides=overrides, grid=(35, 1, 1), exact=exact)


@in_interpreter
@pytest.mark.parametrize("grid", [(3, 1, 7), (20, 1, 1)], ids=["one-tile", "several-tiles"])
def test_hoppers_way_of_storing_changes_nothing(grid):
    tensors = [tensor.float() for tensor in qkv(math.prod(grid), dim=12)]
    attend = run("triton", grid=grid, exact=ExactBlocks(columns=(0,)))
    with launch_overrides(SEVERAL_L_TILES):
        expected = with_gradients(attend, tensors)
    with launch_overrides({kernel: {**options, "TMA": 1} for kernel, options in SEVERAL_L_TILES.items()}):
        assert_bits(with_gradients(attend, tensors), expected)


@in_interpreter
@pytest.mark.parametrize("padding", ["post", "pre"])
@pytest.mark.parametrize("masked", [False, True], ids=["all-keys", "key-mask"])
def test_plain_sequences(padding, masked):
    mask = torch.rand(2, 43, generator=torch.Generator().manual_seed(3)) > 0.4 if masked else None
    if mask is not None:
        mask[0] = mask[1, :30] = False
    check_float32(qkv(43, batch=2), monarch_attention, block_size=20, padding=padding, key_mask=mask)


# --- Half precision: compared with plain torch that works in half precision throughout. ---


def plain_vmonarch(query, key, value, *, grid):
    """The papers' algorithm as one would write it in torch, every tensor in the dtype of the inputs; m = T, b = H·W."""
    T, scale = grid[0], query.shape[-1] ** -0.5
    q, k, v = (tensor.transpose(1, 2).unflatten(2, (T, -1)) for tensor in (query, key, value))  # [B, H, m, b, D]
    z = q
    for iteration in range(2):
        log_R = torch.log_softmax(z @ k.transpose(-1, -2) * scale, -1)
        R = log_R.exp()
        aL, cL = R @ k, (R * log_R).sum(-1).detach()
        Z = torch.einsum("zhljd,zhkjd->zhjlk", q, aL) * scale - cL.transpose(2, 3).unsqueeze(3)
        L = torch.softmax(Z, -1)
        if iteration == 0:
            z = torch.einsum("zhjlk,zhljd->zhkjd", L, q) / L.sum(3).transpose(2, 3).clamp(min=0.1).unsqueeze(-1)
    out = torch.einsum("zhjlk,zhkjd->zhljd", L, R @ v)
    scores = q[:, :, 0] @ k.flatten(2, 3).transpose(-1, -2) * scale
    first = torch.softmax(scores, -1) @ v.flatten(2, 3)
    out = torch.cat([first.unsqueeze(2), out[:, :, 1:]], 2)
    lse = torch.cat([scores.logsumexp(-1).unsqueeze(2), Z.logsumexp(-1).transpose(2, 3)[:, :, 1:]], 2)
    return out.flatten(2, 3).transpose(1, 2), lse.flatten(2, 3).to(torch.promote_types(lse.dtype, torch.float32))


def test_plain_vmonarch_is_the_reference():
    tensors = qkv(3 * 20, heads=2)
    expected = vmonarch_attention(*tensors, grid=(3, 4, 5), return_lse=True, implementation="torch")
    torch.testing.assert_close(plain_vmonarch(*tensors, grid=(3, 4, 5)), expected, rtol=1e-9, atol=1e-9)


def check_half(tensors, dtype, grid, **bounds):
    def plain(query, *others):
        way = run("torch", grid=grid) if query.dtype == torch.float64 else partial(plain_vmonarch, grid=grid)
        return way(query, *others)

    attend = lambda how: plain if how == "torch" else run(how, grid=grid)
    check_kernels(attend, [x.to(dtype) for x in tensors], **bounds)


@in_interpreter
@pytest.mark.parametrize("overrides", [{}, SEVERAL_L_TILES], ids=["one-tile", "several-tiles"])
def test_centroids_of_blocks_that_hardly_any_query_weighs_in_float16(overrides):
    """Without a least mass z is a mean of queries even where each of their weights rounds to 0."""
    places = grid_places(LatentGrid(20, 1, 2), coarse=1)
    query, aL, dz = qkv(40)
    aL, dz = (x.view(1, 20, 2, 1, 16).movedim(3, 1) for x in (aL, dz))
    # Their mass is e⁻³⁰ or so.
    cL = torch.zeros(1, 1, 20, 2).double()
    cL[:, :, ::3] = 30.0
    truth = [*(x.clone().requires_grad_() for x in (query, aL)), cL]
    q = truth[0].view(20, 2, 16)
    L = torch.softmax(torch.einsum("ljd,kjd->jlk", q, truth[1][0, 0]) * 0.25 - truth[2][0, 0].T.unsqueeze(1), -1)
    z = torch.einsum("jlk,ljd->kjd", L / L.sum(1, keepdim=True), q).view_as(aL)
    z.backward(dz)
    # [B, H, T, P, …] -> [B·H·T, P, …], the same memory.
    rows = lambda x: x.view(-1, *x.shape[3:])
    query, aL, cL, dz = query.half(), aL.half().contiguous(), cL.float(), dz.half().contiguous()
    z_ours, cR, lse = torch.empty_like(aL), torch.empty_like(cL), torch.empty(1, 1, 40)
    dq, daL, delta = torch.zeros_like(query), torch.empty_like(aL), torch.empty_like(cL)
    step = LStep(query, MonarchCall(places, VMonarchOptions(exact=None, min_mass=0.0), 0.25))
    with launch_overrides(overrides):
        step.centroids(rows(aL), rows(cL), z=rows(z_ours), lse=lse, cR=rows(cR), lse_exact=None)
        # z = αR / cR
        dcR = -(dz.float() * z_ours.float()).sum(-1)
        gradients = dict(dq=dq, daL=rows(daL), delta_r=rows(delta))
        step.backward(rows(aL), rows(cL), lse, daR=rows(dz), dcR=rows(dcR), cR=rows(cR), **gradients)
    for a, b in zip((z_ours, dq, daL), (z, truth[0].grad, truth[1].grad), strict=True):
        assert (a.double() - b).abs().max() <= 3e-3 * b.abs().max()


@in_interpreter
@pytest.mark.parametrize("exact", [None, "first_frame", ExactBlocks(band=0)], ids=["none", "first-frame", "band"])
def test_large_logits(exact):
    tensors = qkv(2 * 18, spread=160.0)  # logits of ±1e4 and beyond
    logits = torch.einsum("bshd,bthd->bhst", tensors[0], tensors[1]) * 0.25
    assert logits.abs().max() > 1e4
    options = dict(grid=(2, 3, 6), exact=exact)
    # Probabilities are computed again from log-partitions that float32 holds to one unit in the last place.
    check_kernels(lambda how: run(how, **options), [x.float() for x in tensors], slack=2**-22 * logits.abs().max())


# --- On a GPU. ---


@pytest.fixture
def shared_gpu():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


GPU_GRIDS = [(16, 28, 52), (5, 45, 80), (21, 30, 52), (7, 13, 17), (43, 9, 11), (150, 3, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("grid", GPU_GRIDS, ids=lambda g: "x".join(map(str, g)))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gpu_half_precision(shared_gpu, grid, dim, dtype):
    check_half(qkv(math.prod(grid), heads=2, dim=dim, device="cuda"), dtype, grid, slack=1e-5, factor=1.1)


GPU_CASES = {
    name: CASES[name]
    for name in ("three-iterations", "coarse", "coarse-3", "coarse-band", "band", "rows-and-columns",
                 "coarse-rows-and-band", "last-values", "last-values-band", "negative-scale", "scale-0")
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dim,name", [(64, "last-values"), (72, "coarse-band"), (96, "negative-scale"), (256, "band")])
def test_gpu_float32(shared_gpu, dim, name):
    options = GPU_CASES[name]
    check_float32(qkv(math.prod(options["grid"]), heads=2, dim=dim, device="cuda"), **options)


def check_bfloat16(tensors, **options):
    """Close to the float64 reference of the same bfloat16 inputs."""
    tensors = [x.bfloat16() for x in tensors]
    truth = with_gradients(run("torch", **options), [x.double() for x in tensors])
    ours = with_gradients(run("triton", **options), tensors)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, truth, strict=True):
        error, size = (a.double() - b).norm(), b.norm()
        assert error <= 0.01 * size, (name, error, size)


FIRST, BAND = "first_frame", ExactBlocks(band=1)
VIDEOS = [(21, FIRST), (43, BAND), (81, FIRST), (172, BAND), (21, BAND), (43, FIRST), (81, BAND), (172, FIRST)]
# Every kernel is compiled for every option and head dimension, so that few head dimensions see all options.
GPU_OPTIONS = [(128, name) for name in GPU_CASES] + [
    (dim, name) for dim in (32, 64, 72, 80, 96, 256) for name in ("three-iterations", "coarse-band")
]


@pytest.mark.gpu
@pytest.mark.parametrize("dim,name", GPU_OPTIONS)
def test_gpu_options_in_bfloat16(shared_gpu, dim, name):
    """Every option at a larger grid.

    Logits spread less than elsewhere. With a spread of 1.5, an error of 1e-3 in the inputs changes dq of these options
    by 2 to 3 %, in float64 too: blocks that hardly anybody looks at make large gradients of what nearly cancels.
    """
    T, H, W = (3 * size for size in GPU_CASES[name]["grid"])
    tensors = qkv(T * H * W, heads=2, dim=dim, spread=1.0, device="cuda")
    check_bfloat16(tensors, **GPU_CASES[name] | {"grid": (T, H, W)})


@pytest.mark.gpu
@pytest.mark.parametrize("dim,shape", in_turns([32, 64, 80, 128, 256], VIDEOS, 4), ids=str)
def test_gpu_tiles_of_the_l_step(shared_gpu, dim, shape):
    """Every size of a tile, and several tiles."""
    frames, exact = shape
    check_bfloat16(qkv(frames * 3 * 5, heads=3, dim=dim, device="cuda"), grid=(frames, 3, 5), exact=exact)


@pytest.mark.gpu
def test_gpu_many_groups(shared_gpu):
    """B·H·T beyond 65,535, the limit of the second grid axis."""
    tensors = [tensor.half() for tensor in qkv(600 * 4, batch=10, heads=12, dim=16, device="cuda")]
    out = vmonarch_attention(*tensors, grid=(600, 2, 2), implementation="triton")
    few = [tensor[9:, :, 11:].double() for tensor in tensors]
    expected = vmonarch_attention(*few, grid=(600, 2, 2), implementation="torch")
    assert (out[9:, :, 11:].double() - expected).abs().max() < 0.02


@pytest.mark.gpu
def test_gpu_beyond_two_to_the_31(shared_gpu):
    """Tensors of more than 2³¹ elements; the last head must be as good as if it were alone."""
    B, S, H, D = 2, 24 * 3520, 104, 128
    assert B * S * H * D > 2**31
    tensors = [torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    out = vmonarch_attention(*tensors, grid=(24, 44, 80), implementation="triton")[1:, :, -1:].clone()
    last = [tensor[1:, :, -1:].clone() for tensor in tensors]
    del tensors
    alone = vmonarch_attention(*last, grid=(24, 44, 80), implementation="triton")
    expected = vmonarch_attention(*(x.float() for x in last), grid=(24, 44, 80), implementation="torch")
    # Not equal in bits: how the keys of the first frame are split among programs depends on the number of heads.
    errors = [((x.float() - expected).norm() / expected.norm()).item() for x in (out, alone)]
    assert errors[0] <= 1.1 * errors[1] and errors[1] < 5e-3, errors


@pytest.mark.gpu
@pytest.mark.parametrize("frames", [16, 43])
def test_gpu_memory_of_the_forward_pass(shared_gpu, frames):
    """At most 3.5 tensors of the size of the query, output included (bfloat16, D = 128)."""
    tensors = [torch.randn(1, frames * 1456, 12, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = vmonarch_attention(*tensors, grid=(frames, 28, 52), implementation="triton")
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 3.5 * out.numel() * out.element_size(), extra / (out.numel() * out.element_size())
