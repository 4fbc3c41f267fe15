"""The fused kernels of Monarch attention, forward and backward.

On the CPU they run through Triton's interpreter, in float32 and float16, on sizes that cross several 16×16 tiles; the
tests marked `gpu` run bfloat16 at the sizes of videos. The truth is plain torch in float64, which test_monarch.py
holds against the papers; a kernel may err twice as much as plain torch in the same precision.
B batch, S tokens, H heads, D head dim, m blocks, b positions per block.
"""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from op_checks import assert_bits, call_of, in_interpreter, refuses

from vmonarch import ExactBlocks, LatentGrid, VMonarchOptions, monarch_attention, vmonarch_attention
from vmonarch.kernels.common.launch import launch_overrides
from vmonarch.kernels.monarch.blocks import grid_layout
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.l_step import LStep
from vmonarch.kernels.monarch.last_r_step import LastRStep
from vmonarch.kernels.monarch.places import grid_places, token_at
from vmonarch.kernels.monarch.r_step import RStep
from vmonarch.kernels.monarch.reference import r_step_in_two_resolutions

L_KERNELS = ("l_centroids", "l_rows", "l_output", "l_backward_rows", "l_backward_columns")
SEVERAL_L_TILES = {kernel: {"MAX_TILE": 8} for kernel in L_KERNELS}


def qkv(tokens, *, batch=1, heads=1, dim=16, value_dim=None, spread=1.5, device="cpu"):
    """float64 [B, S, H, D] tensors that every dtype holds exactly enough: rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        (torch.randn(batch, tokens, heads, size, generator=generator) * spread).bfloat16().double().to(device)
        for size in (dim, dim, value_dim or dim)
    )


def with_gradients(attention, tensors, dtype):
    """(out, lse, dq, dk, dv) of an attention that returns (out, lse), for fixed upstream gradients of both."""
    inputs = [tensor.detach().to(dtype).requires_grad_(True) for tensor in tensors]
    out, lse = attention(*inputs)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).bfloat16().to(out)
    grad_lse = torch.randn(lse.shape, generator=generator).bfloat16().to(lse)
    there = torch.isfinite(lse)
    (torch.where(there, lse * grad_lse, 0).sum() + (out * grad_out).sum()).backward()
    return [out.detach(), lse.detach(), *(tensor.grad for tensor in inputs)]


def assert_as_good_as_torch(ours, plain, truth, *, slack, max_factor=2.0, mean_factor=None):
    """No result errs more than `max_factor` times what `plain` errs, plus `slack` relative to the largest element."""
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        there = torch.isfinite(c)
        assert torch.equal(torch.isfinite(a), there), name
        error, budget = (a.double() - c).abs()[there], (b.double() - c).abs()[there]
        size = c[there].abs().max().item()
        assert error.max() <= max_factor * budget.max() + slack * size, (name, error.max(), budget.max(), size)
        if mean_factor is not None:
            assert error.mean() <= mean_factor * budget.mean() + slack * size, (name, error.mean(), budget.mean())


def run(how, op=vmonarch_attention, **options):
    return lambda *tensors: op(*tensors, return_lse=True, implementation=how, **options)


def check_float32(tensors, op=vmonarch_attention, overrides=None, **options):
    truth, plain = (with_gradients(run("torch", op, **options), tensors, x) for x in (torch.float64, torch.float32))
    with launch_overrides(overrides or {}):
        ours = with_gradients(run("triton", op, **options), tensors, torch.float32)
        with torch.no_grad():
            inference = run("triton", op, **options)(*(tensor.float() for tensor in tensors))
    assert_as_good_as_torch(ours, plain, truth, slack=2e-6)
    # Inference uses its buffers again, training does not: the arithmetic is the same.
    assert_bits(inference, ours[:2])


FIRST_FRAME = {"exact": "first_frame"}
CASES = {
    "paper": dict(grid=(3, 3, 6), **FIRST_FRAME),
    "one-iteration": dict(grid=(3, 3, 6), num_iterations=1, exact=None),
    "three-iterations": dict(grid=(2, 3, 6), num_iterations=3, exact=None),
    "no-recomputation": dict(grid=(2, 3, 6), exact=None),
    "no-clamp": dict(grid=(5, 2, 3), exact=None, min_mass=0.0),
    "strong-clamp": dict(grid=(5, 2, 3), exact=None, min_mass=1.0),
    "one-token": dict(grid=(1, 1, 1), **FIRST_FRAME),
    "one-frame": dict(grid=(1, 3, 6), **FIRST_FRAME),
    "one-position": dict(grid=(7, 1, 1), exact=None),
    "primes": dict(grid=(5, 3, 7), **FIRST_FRAME),
    "three-tiles": dict(grid=(2, 5, 7), exact=None),
    "scale": dict(grid=(2, 3, 6), scale=0.7, **FIRST_FRAME),
    "scale-0": dict(grid=(2, 3, 6), scale=0.0, **FIRST_FRAME),
    "negative-scale": dict(grid=(2, 3, 6), scale=-0.3, **FIRST_FRAME),
    "two-frames-per-block": dict(grid=(5, 3, 3), frames_per_block=2, **FIRST_FRAME),
    "all-frames-in-a-block": dict(grid=(2, 3, 3), frames_per_block=9, exact=None),
    "tiles": dict(grid=(2, 5, 7), tiles=(2, 2), **FIRST_FRAME),
    "tiles-and-frames": dict(grid=(4, 4, 5), tiles=(1, 2), frames_per_block=3, exact=None),
    "coarse": dict(grid=(3, 5, 6), coarse=2, **FIRST_FRAME),
    "coarse-tiles": dict(grid=(2, 7, 6), coarse=2, tiles=(2, 1), num_iterations=3, exact=None),
    "coarse-frames": dict(grid=(3, 4, 5), coarse=3, frames_per_block=2, exact=None),
    "entropy-gradient": dict(grid=(3, 3, 6), entropy_grad=True, **FIRST_FRAME),
    "entropy-gradient-coarse": dict(grid=(2, 5, 4), entropy_grad=True, coarse=2, exact=None),
    "coarse-rows": dict(grid=(4, 5, 4), row_share=0.3, **FIRST_FRAME),
    "coarse-rows-and-band": dict(grid=(3, 5, 4), row_share=0.4, exact=ExactBlocks(rows=(0, 2), band=0)),
    "coarse-last-r-step": dict(grid=(2, 7, 5), r_share=0.4, coarse=2, **FIRST_FRAME),
    "coarse-last-r-step-entropy": dict(grid=(2, 6, 7), r_share=0.3, entropy_grad=True, exact=ExactBlocks(band=0)),
    "coarse-only-r-step": dict(grid=(2, 6, 7), r_share=0.3, num_iterations=1, entropy_grad=True, exact=None),
    "last-values": dict(grid=(3, 7, 5), last_l_update=False, coarse=2, **FIRST_FRAME),
    "last-values-entropy": dict(
        grid=(3, 4, 5), last_l_update=False, num_iterations=3, entropy_grad=True, exact=ExactBlocks(band=0)
    ),
    "coarse-last-values": dict(grid=(2, 6, 7), last_l_update=False, r_share=0.3, entropy_grad=True, exact=None),
    "own-frame": dict(grid=(3, 2, 5), exact=ExactBlocks(band=0)),
    "own-frame-unaware": dict(grid=(3, 2, 5), exact=ExactBlocks(band=0, aware=False)),
    "band": dict(grid=(4, 3, 4), exact=ExactBlocks(band=1)),
    "sink-column": dict(grid=(3, 2, 5), exact=ExactBlocks(columns=(0,))),
    "rows-and-columns": dict(grid=(4, 3, 4), exact=ExactBlocks(rows=(1,), columns=(0, 2))),
    "rows-aware": dict(grid=(3, 2, 4), exact=ExactBlocks(rows=(0, 2))),
    "all-exact": dict(grid=(3, 3, 4), exact=ExactBlocks(band=2)),
    "band-frames-per-block": dict(grid=(5, 2, 3), exact=ExactBlocks(band=0), frames_per_block=2),
    "band-tiles-coarse": dict(grid=(3, 4, 5), exact=ExactBlocks(band=0), tiles=(2, 2), coarse=2),
}


@in_interpreter
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_vmonarch_forward_and_backward(options):
    check_float32(qkv(math.prod(options["grid"])), **options)


@in_interpreter
@pytest.mark.parametrize("dims", [(20, 20), (8, 24), (80, 40), (96, 72)], ids=lambda d: f"{d[0]}-{d[1]}")
def test_head_dimensions(dims):
    tensors = qkv(2 * 18, dim=dims[0], value_dim=dims[1])
    check_float32(tensors, grid=(2, 3, 6), exact=ExactBlocks(columns=(0,)))


@in_interpreter
@pytest.mark.parametrize(
    "exact", [None, ExactBlocks(band=0), ExactBlocks(rows=(1, 17))], ids=["monarch", "band", "rows"]
)
def test_more_blocks_than_one_tile_of_the_l_step(exact):
    check_float32(qkv(20 * 2), overrides=SEVERAL_L_TILES, grid=(20, 1, 2), exact=exact, num_iterations=3)


@in_interpreter
@pytest.mark.parametrize("overrides", [None, SEVERAL_L_TILES], ids=["one-tile", "several"])
def test_exact_blocks_beyond_the_first_word_of_bits(overrides):
    exact = ExactBlocks(columns=(31, 33), band=0)
    check_float32(qkv(35 * 2), overrides=overrides, grid=(35, 1, 2), exact=exact)


@in_interpreter
@pytest.mark.parametrize(
    "grid,tiles,frames_per_block",
    [((5, 5, 7), (2, 3), 2), ((3, 4, 6), (2, 2), 1), ((4, 5, 3), (1, 2), 3)],
    ids=["ragged", "even", "ragged-in-time"],
)
def test_tokens_packed_in_the_order_of_blocks(grid, tiles, frames_per_block):
    """What the kernels for Hopper read where the tokens of a tile are not consecutive."""
    grid = LatentGrid(*grid)
    tokens = qkv(grid.tokens, batch=2, heads=3, dim=8)[0].float()
    layout = grid_layout(grid, frames_per_block=frames_per_block, tiles=tiles, coarse=1, device=tokens.device)
    options = VMonarchOptions(frames_per_block=frames_per_block, tiles=tiles)
    places = grid_places(grid, **options.cut(grid.frames))
    step = RStep(tokens, tokens, None, MonarchCall(places, options, 1.0, False))
    m, b = places.blocks, places.positions
    packed = torch.full((step.groups, b, 8), 9.0)
    counts = step.pack(tokens, packed, tokens_first=False)
    expected = layout.to_blocks(tokens)
    assert torch.equal(packed.view(2, 3, m, b, 8), expected)
    present = torch.ones(m, b, dtype=torch.bool) if layout.valid is None else layout.valid
    assert torch.equal(counts, present.sum(1).int())
    found = step.with_packed().packed
    assert (found.counts is None) == bool(present.all())
    for k in range(m):
        own = found.value.view(2, 3, m, b, 8)[:, :, k]
        assert torch.equal(own[:, :, : counts[k]], expected[:, :, k, present[k]]) and not own[:, :, counts[k] :].any()


@in_interpreter
@pytest.mark.parametrize("grid", [(3, 2, 7), (20, 1, 2)], ids=["one-tile", "several-tiles"])
def test_hoppers_way_of_storing_changes_nothing(grid):
    tensors = [tensor.float() for tensor in qkv(math.prod(grid), heads=2, dim=12)]
    attend = run("triton", grid=grid, exact=ExactBlocks(columns=(0,)))
    with launch_overrides(SEVERAL_L_TILES):
        expected = with_gradients(attend, tensors, torch.float32)
    with launch_overrides({kernel: {**options, "TMA": 1} for kernel, options in SEVERAL_L_TILES.items()}):
        assert_bits(with_gradients(attend, tensors, torch.float32), expected)


@in_interpreter
@pytest.mark.parametrize(
    "more",
    [{}, {"r_share": 0.3, "coarse": 2, "min_mass": 1.0}, {"last_l_update": False}],
    ids=["", "coarse-last-r-step", "last-values"],
)
def test_batch_and_heads(more):
    check_float32(qkv(2 * 15, batch=2, heads=3, dim=8, value_dim=12), grid=(2, 5, 3), **more)


@in_interpreter
@pytest.mark.parametrize("padding", ["post", "pre"])
@pytest.mark.parametrize("masked", [False, True], ids=["all-keys", "key-mask"])
def test_plain_sequences(padding, masked):
    mask = torch.rand(2, 43, generator=torch.Generator().manual_seed(3)) > 0.4 if masked else None
    if mask is not None:
        mask[1, :30] = False
    check_float32(qkv(43, batch=2), monarch_attention, block_size=20, padding=padding, key_mask=mask)


@in_interpreter
def test_a_row_without_any_key_is_zero():
    tensors = [tensor.float() for tensor in qkv(12)]
    mask = torch.zeros(1, 12, dtype=torch.bool)
    out, lse = monarch_attention(*tensors, block_size=4, key_mask=mask, return_lse=True, implementation="triton")
    assert torch.equal(out, torch.zeros_like(out)) and torch.isneginf(lse).all()


# --- Half precision: compared with plain torch that works in half precision throughout. ---


def plain_vmonarch(query, key, value, *, grid, num_iterations=2):
    """The papers' algorithm as one would write it in torch, every tensor in the dtype of the inputs; m = T, b = H·W."""
    T, scale = grid[0], query.shape[-1] ** -0.5
    q, k, v = (tensor.transpose(1, 2).unflatten(2, (T, -1)) for tensor in (query, key, value))  # [B, H, m, b, D]
    z = q
    for iteration in range(num_iterations):
        log_R = torch.log_softmax(z @ k.transpose(-1, -2) * scale, -1)
        R = log_R.exp()
        aL, cL = R @ k, (R * log_R).sum(-1).detach()
        Z = torch.einsum("zhljd,zhkjd->zhjlk", q, aL) * scale - cL.transpose(2, 3).unsqueeze(3)
        L = torch.softmax(Z, -1)
        if iteration < num_iterations - 1:
            z = torch.einsum("zhjlk,zhljd->zhkjd", L, q) / L.sum(3).transpose(2, 3).clamp(min=0.1).unsqueeze(-1)
    out = torch.einsum("zhjlk,zhkjd->zhljd", L, R @ v)
    scores = q[:, :, 0] @ k.flatten(2, 3).transpose(-1, -2) * scale
    first = torch.softmax(scores, -1) @ v.flatten(2, 3)
    out = torch.cat([first.unsqueeze(2), out[:, :, 1:]], 2)
    lse = torch.cat([scores.logsumexp(-1).unsqueeze(2), Z.logsumexp(-1).transpose(2, 3)[:, :, 1:]], 2)
    return out.flatten(2, 3).transpose(1, 2), lse.flatten(2, 3)


def test_plain_vmonarch_is_the_reference():
    tensors = qkv(3 * 20, heads=2)
    expected = vmonarch_attention(*tensors, grid=(3, 4, 5), return_lse=True, implementation="torch")
    torch.testing.assert_close(plain_vmonarch(*tensors, grid=(3, 4, 5)), expected, rtol=1e-9, atol=1e-9)


def check_half(tensors, dtype, grid, slack, **factors):
    truth = with_gradients(run("torch", grid=grid), tensors, torch.float64)
    plain = with_gradients(lambda *t: plain_vmonarch(*t, grid=grid), tensors, dtype)
    ours = with_gradients(run("triton", grid=grid), tensors, dtype)
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    assert_as_good_as_torch(ours, plain, truth, slack=slack, **factors)


@in_interpreter
@pytest.mark.parametrize("grid", [(3, 3, 6), (2, 7, 5)], ids=str)
def test_float16(grid):
    check_half(qkv(math.prod(grid), heads=2), torch.float16, grid, slack=5e-4)


@in_interpreter
@pytest.mark.parametrize("overrides", [{}, SEVERAL_L_TILES], ids=["one-tile", "several-tiles"])
def test_centroids_of_blocks_that_hardly_any_query_weighs_in_float16(overrides):
    """Without a least mass z is a mean of queries even where each of their weights rounds to 0."""
    places = grid_places(LatentGrid(20, 1, 2), frames_per_block=1, tiles=(1, 1), coarse=1)
    query, aL, dz = qkv(40)
    aL, dz = (x.view(1, 20, 2, 1, 16).movedim(3, 1) for x in (aL, dz))
    # Their mass is e⁻³⁰ or so.
    cL = torch.zeros(1, 1, 20, 2).double()
    cL[:, :, ::3] = 30.0
    truth = [x.clone().requires_grad_() for x in (query, aL, cL)]
    q = truth[0].view(20, 2, 16)
    L = torch.softmax(torch.einsum("ljd,kjd->jlk", q, truth[1][0, 0]) * 0.25 - truth[2][0, 0].T.unsqueeze(1), -1)
    z = torch.einsum("jlk,ljd->kjd", L / L.sum(1, keepdim=True), q).view_as(aL)
    z.backward(dz)
    # [B, H, T, P, …] -> [B·H·T, P, …], the same memory.
    rows = lambda x: x.view(-1, *x.shape[3:])
    query, aL, cL, dz = query.half(), aL.half().contiguous(), cL.float(), dz.half().contiguous()
    z_ours, cR, lse = torch.empty_like(aL), torch.empty_like(cL), torch.empty(1, 1, 40)
    dq, daL, dcL, delta = torch.zeros_like(query), torch.empty_like(aL), torch.empty_like(cL), torch.empty_like(cL)
    step = LStep(query, MonarchCall(places, VMonarchOptions(exact=None, min_mass=0.0), 0.25, False))
    with launch_overrides(overrides):
        step.centroids(rows(aL), rows(cL), z=rows(z_ours), lse=lse, cR=rows(cR), lse_exact=None)
        # z = αR / cR
        dcR = -(dz.float() * z_ours.float()).sum(-1)
        gradients = dict(dq=dq, daL=rows(daL), dcL=rows(dcL), delta_r=rows(delta))
        step.backward(rows(aL), rows(cL), lse, daR=rows(dz), dcR=rows(dcR), cR=rows(cR), **gradients)
    for a, b in zip((z_ours, dq, daL, dcL), (z, *(x.grad for x in truth)), strict=True):
        assert (a.double() - b).abs().max() <= 3e-3 * b.abs().max()


# --- Memory layouts, extreme values, independence. ---


@in_interpreter
@pytest.mark.parametrize("options", [dict(tiles=(1, 2), coarse=2), dict()], ids=["tiles-coarse", "plain"])
def test_fused_qkv_and_other_strides_change_nothing(options):
    options = dict(grid=(2, 3, 4), exact=ExactBlocks(columns=(0,)), **options)
    tokens = math.prod(options["grid"])
    tensors = [tensor.float() for tensor in qkv(tokens, batch=2, heads=2)]
    query, _, value = torch.stack(tensors, 2).unbind(2)  # views of [B, S, 3, H, D]
    key = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
    expected = with_gradients(run("triton", **options), tensors, torch.float32)
    assert_bits(with_gradients(run("triton", **options), (query, key, value), torch.float32), expected)


@in_interpreter
@pytest.mark.parametrize("exact", [None, "first_frame", ExactBlocks(band=0)], ids=["none", "first-frame", "band"])
def test_large_logits(exact):
    tensors = qkv(2 * 18, spread=160.0)  # logits of ±1e4 and beyond
    logits = torch.einsum("bshd,bthd->bhst", tensors[0], tensors[1]) * 0.25
    assert logits.abs().max() > 1e4
    options = dict(grid=(2, 3, 6), exact=exact)
    ours = with_gradients(run("triton", **options), tensors, torch.float32)
    truth, plain = (with_gradients(run("torch", **options), tensors, x) for x in (torch.float64, torch.float32))
    # Probabilities are recomputed from log-partitions that float32 holds to one unit in the last place.
    ulp = 2.0 ** (math.floor(math.log2(truth[1].abs().max())) - 23)
    assert_as_good_as_torch(ours, plain, truth, slack=2 * ulp)


@in_interpreter
def test_repeated_runs_are_bit_equal():
    attend = run("triton", grid=(2, 2, 4), exact=ExactBlocks(band=0))
    first, again = (with_gradients(attend, qkv(16, heads=1), torch.float32) for _ in range(2))
    assert_bits(again, first)


# --- The operator. ---


@in_interpreter
def test_compiled_without_graph_breaks_or_recompilation():
    attention = run("triton", grid=(2, 3, 6), exact=ExactBlocks(band=0))
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    for _ in range(3):
        results = with_gradients(compiled, qkv(36), torch.float32)
    assert len(compilations) == 1
    expected = with_gradients(attention, qkv(36), torch.float32)
    assert_bits(results, expected)
    traced = with_gradients(torch.compile(attention, fullgraph=True, backend="aot_eager"), qkv(36), torch.float32)
    assert_bits(traced, expected)


@in_interpreter
def test_no_gradient_no_saved_tensors():
    tensors = [tensor.float().requires_grad_(True) for tensor in qkv(36)]
    attend = run("triton", grid=(2, 3, 6))
    with torch.no_grad():
        out, lse = attend(*tensors)
    assert not out.requires_grad and not lse.requires_grad
    only_value = [tensor.detach() for tensor in tensors[:2]] + [tensors[2]]
    attend(*only_value)[0].sum().backward()
    assert tensors[2].grad is not None and only_value[0].grad is None


@in_interpreter
def test_a_loss_of_the_log_partition_alone():
    tensors = [tensor.float().requires_grad_(True) for tensor in qkv(36)]
    lses = [run(how, grid=(2, 3, 6))(*tensors)[1] for how in ("triton", "torch")]
    gradients = [torch.autograd.grad(lse.sum(), tensors[:2]) for lse in lses]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


CANNOT = {
    "float64": (lambda: qkv(36), "the dtype is float64 .supported: float16, bfloat16, float32."),
    "wide-head": (lambda: [t.float() for t in qkv(36, dim=257)], "a head dimension is 257 .supported: up to 256."),
    "bfloat16-interpreted": (lambda: [t.bfloat16() for t in qkv(36)], "computes bfloat16 products wrongly"),
    "strided-head": (
        lambda: [t.float().transpose(1, 3).contiguous().transpose(1, 3) for t in qkv(36)],
        "the head dimension of a tensor is not contiguous",
    ),
    "meta": (lambda: [t.float().to("meta") for t in qkv(36)], "the tensors are on meta .supported: CUDA."),
}
test_what_the_kernels_cannot_do_is_said = in_interpreter(
    refuses({
        f"{op.__name__}-{name}": (
            call_of(op, *tensors(), implementation="triton", **options)(), NotImplementedError,
            f'{op.__name__} with implementation="triton": .*{message}')
        for name, (tensors, message) in CANNOT.items()
        for op, options in ((vmonarch_attention, {"grid": (2, 3, 6)}), (monarch_attention, {"block_size": 6}))
    })
)  # fmt: skip


# --- Places: arithmetic and index tables agree. ---


@triton.jit
def _places_kernel(token_ptr, valid_ptr, places, n, TILED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, valid = token_at(places, place // places.positions, place % places.positions, TILED)
    tl.store(token_ptr + place, token, mask=place < n)
    tl.store(valid_ptr + place, valid.to(tl.int8), mask=place < n)


@in_interpreter
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 4, 5), (5, 7, 3), (4, 7, 7)], ids=str)
@pytest.mark.parametrize("frames_per_block", [1, 2, 3])
def test_places_agree_with_the_layout(grid, frames_per_block):
    for tiles in itertools.product((1, 2, 3), (1, 2)):
        if tiles[0] > grid[1] or tiles[1] > grid[2] or frames_per_block > grid[0]:
            continue
        places = grid_places(LatentGrid(*grid), frames_per_block=frames_per_block, tiles=tiles, coarse=1)
        layout = grid_layout(
            LatentGrid(*grid), frames_per_block=frames_per_block, tiles=tiles, coarse=1, device=torch.device("cpu")
        )
        assert (places.blocks, places.positions) == (layout.blocks, layout.positions)
        n = places.blocks * places.positions
        expected = torch.arange(n) if layout.index is None else layout.index.flatten()
        there = torch.ones(n, dtype=torch.bool) if layout.valid is None else layout.valid.flatten()
        for tiled in {True, tiles != (1, 1)}:
            token, valid = torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int8)
            _places_kernel[(triton.cdiv(n, 128),)](token, valid, places, n, TILED=tiled, BLOCK=128)
            assert torch.equal(valid.bool(), there)
            assert torch.equal(token[there].long(), expected[there])


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
    check_half(qkv(math.prod(grid), heads=2, dim=dim, device="cuda"), dtype, grid, slack=1e-5, mean_factor=1.1)


GPU_CASES = {
    name: CASES[name]
    for name in ("three-iterations", "tiles", "tiles-and-frames", "coarse-tiles", "entropy-gradient-coarse", "band",
                 "rows-and-columns", "coarse-rows-and-band", "coarse-only-r-step", "last-values",
                 "band-frames-per-block", "band-tiles-coarse", "negative-scale", "scale-0")
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dim,name",
    [
        (32, "three-iterations"),
        (64, "coarse-only-r-step"),
        (72, "band-tiles-coarse"),
        (96, "negative-scale"),
        (128, "entropy-gradient-coarse"),
        (256, "band"),
    ],
)
def test_gpu_float32(shared_gpu, dim, name):
    options = GPU_CASES[name]
    check_float32(qkv(math.prod(options["grid"]), heads=2, dim=dim, device="cuda"), **options)


def check_bfloat16(tensors, **options):
    """Close to the float64 reference by the measure of one bfloat16 rounding."""
    truth = with_gradients(run("torch", **options), tensors, torch.float64)
    ours = with_gradients(run("triton", **options), tensors, torch.bfloat16)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, truth, strict=True):
        error, size = (a.double() - b).norm(), b.norm()
        assert error <= 0.02 * size, (name, error, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("grid", [(3, 28, 52), (2, 45, 80), (3, 13, 17)], ids=str)
def test_gpu_last_r_step_in_two_resolutions(grid, D, dtype):
    """Of given centroids, so that rounding chooses no other tiles than the reference; y may take their memory."""
    grid, B, H = LatentGrid(*grid), 2, 3
    k, v = (x.to(dtype) for x in qkv(grid.tokens, batch=B, heads=H, dim=D, device="cuda")[1:])
    z = 1.5 * torch.randn(B * H * grid.frames, grid.tokens_per_frame, D, device="cuda").to(dtype)
    options = VMonarchOptions(r_share=0.4)
    call = MonarchCall(grid_places(grid, **options.cut(grid.frames)), options, D**-0.5, False)
    blocks = lambda x: x.double().unflatten(1, (grid.frames, -1)).permute(0, 3, 1, 2, 4)
    scaled = z.double().unflatten(0, (B, H, -1)) * D**-0.5
    expected = r_step_in_two_resolutions(scaled, blocks(k), blocks(v), grid, options, False)
    aL, cL, lse = torch.empty_like(z), *(torch.empty(z.shape[:2], device="cuda") for _ in range(2))
    LastRStep(k, v, call).forward(z, aL=aL, cL=cL, y=z, lse=lse)
    for found, wanted in zip((aL, cL, z), expected, strict=True):
        wanted = wanted.flatten(0, 2)
        assert (found - wanted).norm() <= 0.01 * wanted.norm()
    lse_wanted = (scaled * expected[0]).sum(-1) - expected[1]
    assert (lse - lse_wanted.flatten(0, 2)).abs().max() < 0.05


# Every kernel is compiled for every option and head dimension, so that few head dimensions see all options.
GPU_OPTIONS = [(128, name) for name in GPU_CASES] + [
    (dim, name) for dim in (32, 64, 72, 80, 96, 256) for name in ("three-iterations", "band-tiles-coarse")
]


@pytest.mark.gpu
@pytest.mark.parametrize("dim,name", GPU_OPTIONS)
def test_gpu_options_in_bfloat16(shared_gpu, dim, name):
    """Every option at a larger grid."""
    T, H, W = (3 * size for size in GPU_CASES[name]["grid"])
    check_bfloat16(qkv(T * H * W, heads=2, dim=dim, device="cuda"), **GPU_CASES[name] | {"grid": (T, H, W)})


@pytest.mark.gpu
@pytest.mark.parametrize("frames", [21, 43, 81, 172])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("exact", ["first_frame", ExactBlocks(band=1)], ids=["first-frame", "band"])
def test_gpu_tiles_of_the_l_step(shared_gpu, frames, dim, exact):
    """Every size of a tile, and several tiles."""
    tensors = qkv(frames * 3 * 5, heads=3, dim=dim, device="cuda")
    check_bfloat16(tensors, grid=(frames, 3, 5), exact=exact)


@pytest.mark.gpu
def test_gpu_repeated_runs_are_bit_equal(shared_gpu):
    tensors = qkv(5 * 1456, heads=4, dim=128, device="cuda")
    attend = run("triton", grid=(5, 28, 52), exact=ExactBlocks(rows=(0,), band=1))
    first = with_gradients(attend, tensors, torch.bfloat16)
    for _ in range(250):
        assert_bits(with_gradients(attend, tensors, torch.bfloat16), first)


@pytest.mark.gpu
def test_gpu_fused_qkv_is_bit_equal(shared_gpu):
    tensors = [tensor.bfloat16() for tensor in qkv(4 * 391, batch=2, heads=3, dim=72, device="cuda")]
    attend = run("triton", grid=(4, 17, 23), exact=ExactBlocks(columns=(0,)))
    assert_bits(attend(*torch.stack(tensors, 2).unbind(2)), attend(*tensors))


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
