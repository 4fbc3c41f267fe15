"""Controls against maps of all pairs, built in float64; methods that carry them; those that learn."""

import itertools
import math

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers import transformer_wan
from tiny_families import FAMILIES, first
from torch.utils.flop_counter import FlopCounterMode

import vmonarch
from vmonarch import ExactBlocks, LatentGrid
from vmonarch.call import Call
from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.engines import FA3
from vmonarch.eval.controls import CONTROLS, ControlProcessor, KernelExact
from vmonarch.families import known_family
from vmonarch.own import project
from vmonarch.pipelines.embedded import embedded_model_path


def qkv(grid, *, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    size = (2, math.prod(grid), 3, 8)
    query, key, value = (1.5 * torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    # A first frame that draws attention, so that its mass and entropy differ from the others'.
    key[:, : grid[1] * grid[2]] *= 2
    return query.to(dtype), key.to(dtype), value[..., :5].contiguous().to(dtype)


def attend(control, q, k, v, grid, **options):
    return ControlProcessor(control, **options).options.attend(q, k, v, LatentGrid(*grid))


def per_head(attention_map, q, k, v):
    """Apply a function of one head's scaled query and key [N, D] to a map [N, N]; [B, S, H, E]."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for i, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        out[i, :, h] = attention_map(q[i, :, h] * q.shape[-1] ** -0.5, k[i, :, h]) @ v[i, :, h]
    return out


def masked(allowed):
    """The map of softmax over the keys that `allowed` [N, N] names."""
    return lambda Q, K: (Q @ K.T).masked_fill(~allowed, -torch.inf).softmax(-1)


def monarch_map(block, position, iterations, *, held_cR=(), held_cL=(), clamp=0.1):
    """A function to the map M = L·R, all pairs written out, with cR and cL of the held blocks at their initial value.

    block, position: [N] place of every token.
    """
    N, m, b = len(block), int(block.max()) + 1, int(position.max()) + 1
    inside = block[None, :] == torch.arange(m)[:, None]  # [m, N]
    at = (position[None, :] == torch.arange(b)[:, None]).double()  # [b, N]

    def attention_map(Q, K):
        z = torch.einsum("kn,jn,nd->kjd", inside.double(), at, Q)
        for _ in range(iterations):
            R = (z @ K.T).masked_fill(~inside[:, None], -torch.inf).softmax(-1)  # [m, b, N]
            aL, cL = R @ K, torch.xlogy(R, R).sum(-1)
            for k in held_cL:
                cL[k] = -math.log(int(inside[k].sum()))
            Z = torch.einsum("nd,knd->nk", Q, aL[:, position]) - cL[:, position].T
            L = Z.softmax(-1)  # [N, m]
            cR = torch.einsum("nk,jn->kj", L, at)
            for k in held_cR:
                cR[k] = 1.0
            z = torch.einsum("nk,jn,nd->kjd", L, at, Q) / cR.clamp(min=clamp)[..., None]
        M = L[:, block] * R[block, position[:, None].expand(N, N), torch.arange(N)[None, :].expand(N, N)]
        assert torch.allclose(M.sum(-1), torch.ones(N, dtype=M.dtype))
        return M

    return attention_map


def coordinates(grid):
    return torch.cartesian_prod(*(torch.arange(n) for n in grid)).reshape(-1, 3).unbind(1)


def with_exact_first_frame(out, q, k, v, grid):
    exact = per_head(masked(torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)), q, k, v)
    first = grid[1] * grid[2]
    return torch.cat([exact[:, :first], out[:, first:]], 1)


@pytest.mark.parametrize(
    ("grid", "iterations", "fix_cr", "fix_cl"),
    [
        ((3, 2, 5), 1, "none", "first"),
        ((3, 2, 5), 3, "first", "all"),
        ((5, 7, 3), 2, "all", "none"),
        ((1, 3, 2), 2, "first", "first"),
        ((5, 7, 3), 2, "none", "none"),
    ],
    ids=str,
)
def test_control_holds_the_terms_of_the_frames_it_names(grid, iterations, fix_cr, fix_cl):
    q, k, v = qkv(grid)
    time, row, column = coordinates(grid)
    held = {"none": (), "first": (0,), "all": range(grid[0])}
    terms = dict(held_cR=held[fix_cr], held_cL=held[fix_cl], clamp=0.02)
    expected = per_head(monarch_map(time, row * grid[2] + column, iterations, **terms), q, k, v)
    options = dict(num_iterations=iterations, fix_cr=fix_cr, fix_cl=fix_cl, min_mass=0.02)
    torch.testing.assert_close(attend("controlled", q, k, v, grid, **options), expected, rtol=0, atol=1e-12)
    out = attend("controlled", q, k, v, grid, recompute=True, **options)
    torch.testing.assert_close(out, with_exact_first_frame(expected, q, k, v, grid), rtol=0, atol=1e-12)


def test_the_sink_average_is_the_mean_of_two_maps():
    grid = (5, 7, 3)
    q, k, v = qkv(grid)
    time, row, column = coordinates(grid)
    monarch = per_head(monarch_map(time, row * grid[2] + column, 2), q, k, v)
    sink = per_head(masked((time == 0).expand(len(time), -1)), q, k, v)
    torch.testing.assert_close(attend("sink_average", q, k, v, grid), (monarch + sink) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("grid", "axis", "options"),
    [
        ((5, 7, 3), "T", {"blocks": 3}),
        ((4, 8, 4), "H", {"blocks": 3}),
        ((7, 5, 11), "W", {"blocks": 3}),
    ],
    ids=["frames", "rows", "columns"],
)
def test_factors_along_an_axis_are_a_monarch_map_of_permuted_tokens(grid, axis, options):
    q, k, v = qkv(grid)
    numbers = dict(zip("THW", coordinates(grid), strict=True))
    sizes = dict(zip("THW", grid, strict=True))
    size, blocks = sizes[axis], options["blocks"]
    bounds = [p * size // blocks for p in range(blocks)]
    block = sum((numbers[axis] >= bound).long() for bound in bounds[1:]) + 0 * numbers[axis]
    # The paper's order of the others: (HWT), (WHT), (THW).
    second, third = {"T": "HW", "H": "WT", "W": "HT"}[axis]
    offset = numbers[axis] - torch.tensor(bounds)[block]
    position = (offset * sizes[second] + numbers[second]) * sizes[third] + numbers[third]
    expected = per_head(monarch_map(block, position, 2), q, k, v)
    expected = with_exact_first_frame(expected, q, k, v, grid)
    out = attend("factorised", q, k, v, grid, axis=axis, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "pattern",
    [dict(band=1, columns=(0,)), dict(columns=(0,)), dict(band=0, rows=(0,))],
    ids=["band and first", "first", "own and first row"],
)
def test_local_attention_is_softmax_over_the_pattern(pattern):
    grid = (5, 7, 3)
    q, k, v = qkv(grid)
    time = coordinates(grid)[0]
    allowed = (time[:, None] - time[None, :]).abs() <= pattern.get("band", -1)
    if "columns" in pattern:
        allowed = allowed | (time == 0)[None, :]
    if "rows" in pattern:
        allowed = allowed | (time == 0)[:, None]
    out = attend("local", q, k, v, grid, exact=ExactBlocks(**pattern))
    torch.testing.assert_close(out, per_head(masked(allowed), q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tau, share, rest", [(0.0, None, True), (0.8, None, True), (None, 0.35, False)], ids=str)
def test_sol_attends_to_blocks_of_high_scores_and_to_the_means_of_others(tau, share, rest):
    grid = (5, 8, 16)
    q, k, v = qkv(grid)
    # Blocks differ, or all score alike.
    k += 2 * torch.randn(2, 10, 1, 3, 8, dtype=k.dtype, generator=torch.Generator().manual_seed(1)).expand(
        -1, -1, 64, -1, -1
    ).flatten(1, 2)
    block = torch.arange(640) // 64
    mean = lambda x: x.unflatten(0, (10, 64)).mean(1)

    def attention_map(Q, K):
        means = mean(K)
        centred = means - means.mean(0)
        deviation = (mean(Q).square() @ centred.square().mean(0)).sqrt()
        near = (torch.arange(10)[:, None] - torch.arange(10)).abs() <= 1
        scores = mean(Q) @ centred.T
        least = tau * deviation[:, None] if share is None else scores.sort(-1).values[:, -5:-4]
        exact = (near | (scores > least))[block]  # [N, m]
        assert 0.3 < exact.double().mean() < 0.8
        logits = torch.cat([Q @ K.T, Q @ means.T + math.log(64)], 1)
        allowed = torch.cat([exact[:, block], ~exact & rest], 1)
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        return weights[:, :640] + weights[:, 640:][:, block] / 64

    found = attend("sol", q, k, v, grid, tau=tau, share=share, rest=rest)
    torch.testing.assert_close(found, per_head(attention_map, q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", [0, 4, 2], ids=["frames", "rows and columns", "cubes"])
def test_vmoba_attends_to_own_blocks_and_to_the_best_pairs_of_a_head(layer):
    grid, box = (4, 6, 8), [(1, 6, 8), (4, 3, 4), (2, 2, 4)][layer % 3]
    q, k, v = qkv(grid)
    options = ControlProcessor("vmoba", threshold=0.4, boxes=[[1, 0, 0], [0, 3, 4], [2, 2, 4]]).options
    places = [axis // edge for axis, edge in zip(coordinates(grid), box, strict=True)]
    block = torch.stack(places, 1).unique(dim=0, return_inverse=True)[1]
    flops = []

    def attention_map(Q, K):
        means = torch.stack([K[block == i].mean(0) for i in range(block.max() + 1)])
        scores = Q @ means.T  # [N, m]
        scores = ((scores - scores.min()) / (scores.max() - scores.min())).flatten()
        exact = (block[:, None] == torch.arange(len(means))).flatten()
        for pair in scores.argsort(descending=True):
            exact[pair] |= scores[exact].sum() < 0.4 * scores.sum()
        allowed = exact.view(-1, len(means))[:, block]
        flops.append(8 * (4 * allowed.sum() + 2 * len(scores)))
        return (Q @ K.T).masked_fill(~allowed, -torch.inf).softmax(-1)

    found = options.of_layer(layer).attend(q, k, v, LatentGrid(*grid))
    torch.testing.assert_close(found, per_head(attention_map, q, k, v), rtol=0, atol=1e-12)
    most = options.of_layer(layer).flops(LatentGrid(*grid), 8)
    assert all(0.6 * most < of_head <= most for of_head in flops)


@pytest.mark.parametrize(
    ("control", "options"),
    [
        ("controlled", {"num_iterations": 3}),
        ("controlled", {"recompute": True}),
        ("sink_average", {}),
        ("factorised", {"axis": "W", "blocks": 3}),
        ("factorised", {"axis": "T", "blocks": 3}),
        ("local", {"exact": ExactBlocks(band=1, columns=(0,))}),
        ("none", {}),
    ],
    ids=["controlled", "recomputed", "sink average", "columns", "two frames", "local", "none"],
)
def test_the_flops_are_those_that_torch_counts(control, options):
    grid = LatentGrid(5, 7, 3)
    tensors = [torch.randn(2, grid.tokens, 3, 8) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        attend(control, *tensors, grid, **options)
    assert counter.get_total_flops() == 2 * 3 * ControlProcessor(control, **options).options.flops(grid, 8)


# --- Methods ---

NAMES = {
    "exact": "full-triton:implementation=torch",
    "controlled": "vmonarch-controlled:fix_cr=all,fix_cl=first,recompute=true",
    "sink_average": "vmonarch-sink-average",
    "factorised": "monarch-w4:blocks=2",
    "local": "local",
    "none": "reuse:refresh=null",
    "sol": "sol",
    "vmoba": "vmoba",
    "vsa": "vsa:tile=[2,2,2],query_tile=[2,2,2],share=0.5",
    "sla": "sla:share=0.5",
}


@pytest.fixture(scope="module")
def transformer():
    return WanTransformer3DModel.from_pretrained(embedded_model_path() / "transformer").eval()


def forward(transformer):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 5, 12, 32, generator=generator)
    text = torch.randn(1, 7, 128, generator=generator)
    with torch.no_grad():
        return transformer(latents, torch.tensor([500.0]), text, return_dict=False)[0]


@pytest.mark.parametrize("control", CONTROLS)
def test_a_method_runs_its_control_in_every_layer_and_goes_away(transformer, control):
    before = forward(transformer)
    method = resolve_method(NAMES[control])
    assert resolve_method(method.to_dict()) == method
    method.install(transformer)
    processors = [block.attn1.processor.spec for block in transformer.blocks]
    assert all(isinstance(p, ControlProcessor) and p.control == control for p in processors)
    boxes = {getattr(block.attn1.processor.attend, "boxes", None) for block in transformer.blocks}
    assert len(boxes) == (3 if control == "vmoba" else 1)
    again = ControlProcessor(**processors[0].config)
    assert again.config == processors[0].config == method.processor().config
    changed = forward(transformer)
    assert (vmonarch.report(transformer).work is None) == (control in ("vsa", "sla", "sol"))
    least, most = (0, 1e-4) if control == "exact" else (1e-3, math.inf)
    assert torch.isfinite(changed).all() and least < (changed - before).abs().max() < most
    resolve_method("full").install(transformer)
    assert torch.equal(forward(transformer), before)


def test_another_exact_kernel_takes_every_softmax_and_nothing_else(tiny, monkeypatch):
    calls = []

    def softmax_of_the_stock_model(query, key, value, *, implementation):
        calls.append(implementation)
        return transformer_wan.dispatch_attention_fn(query, key, value), None, None

    model = tiny.transformer().bfloat16()
    stock = tiny.run(model, dtype=torch.bfloat16)
    monkeypatch.setattr("vmonarch.attend.flash_entropy_attention", softmax_of_the_stock_model)
    # As where kernels could compute norms and rotary embeddings, too.
    monkeypatch.setattr("vmonarch.own.why_not_triton", lambda *tensors: None)
    monkeypatch.setattr("vmonarch.own.norm_rotary", lambda *given, **options: pytest.fail("norms are a kernel's"))
    model.set_attn_processor(resolve_method("full-triton").processor())
    assert torch.equal(tiny.run(model, dtype=torch.bfloat16), stock)
    assert calls == ["triton"] * len(model.blocks)


@torch.no_grad()
def test_another_exact_kernel_attends_to_text_and_masks_it(monkeypatch):
    model, inputs = FAMILIES["hunyuan"].make(), FAMILIES["hunyuan"].call()
    stock = first(model(**inputs))
    resolve_method(NAMES["exact"]).install(model)
    of_diffusers = "diffusers.models.attention_dispatch.dispatch_attention_fn"
    monkeypatch.setattr(of_diffusers, lambda *given, **options: pytest.fail("a backend attends"))
    torch.testing.assert_close(first(model(**inputs)), stock, rtol=1e-4, atol=1e-5)
    # FlashAttention-3 gives the log-partition, too.
    KernelExact("torch")(*[torch.randn(1, 4, 1, 8)] * 3, Call(LatentGrid(4, 1, 1), backend=FA3))


def test_bad_options_are_errors_that_name_them():
    for spec, words in (
        ("vmonarch-controlled:fix_cr=some", "fix_cr must be one of none, first, all"),
        ("vmonarch-controlled:fix=all", "fix is no known key.*fix_cr, fix_cl"),
        ("monarch-h4:axis=D", "axis must be one of T, H, W"),
        ("local:exact={columns: [], band: null}", "exact must have a band or columns"),
        ("local:exact=first_frame", "exact must be a mapping"),
        ("vsa:rest=true", "rest must be False"),
        ("sla:refresh=2", "refresh must be None with 'sla'"),
        ("two-resolution:share=0", "share must .*above 0"),
        ("sol:share=0.1", "tau must be None with share, got 1.0"),
        ("sol:tau=null", "tau must be a number, got None"),
        ("sol:tau=.nan", "tau must be finite, got nan"),
        ("sol:tau=null,share=2", "share must .*at most 1"),
        ("vmoba:threshold=0", "threshold must .*above 0"),
        ("vmoba:boxes=[]", "boxes must be one or several of"),
        ("vmoba:boxes=[[1,2]]", r"boxes must be one or several of \(frames"),
        ("vmoba:boxes=[[1,2,-1]]", "an edge in boxes must be at least 0, got -1"),
    ):
        with pytest.raises(InputError, match=words):
            resolve_method(spec)


# --- Those that learn ---

GRID = LatentGrid(8, 6, 5)
# Four tiles of keys.
TILES = dict(tile=(4, 3, 5), query_tile=(4, 3, 5))


def tiles():
    """[S] the tile of every token."""
    t, h, w = torch.meshgrid(*(torch.arange(size) for size in GRID), indexing="ij")
    return (t // 4 * 2 + h // 3).flatten() + 0 * w.flatten()


def means(x):
    """Of x [B, H, S, D] over every tile, [B, H, 4, D]."""
    return torch.stack([x[:, :, tiles() == i].mean(2) for i in range(4)], 2)


@pytest.fixture
def inputs(tiny):
    """(transformer, its first self-attention, hidden states, rotary embedding)."""
    model = tiny.transformer()
    _, attn = next(iter(known_family(model).layers(model)))
    given = []
    attn.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    tiny.run(model, tuple(GRID))
    (args, kwargs), *_ = given
    found = dict(zip(("hidden_states", "encoder", "mask", "rotary_emb"), args, strict=False)) | kwargs
    return model, attn, found["hidden_states"], found["rotary_emb"]


@pytest.mark.parametrize("control", ["vsa", "sla"])
@torch.no_grad()
def test_what_is_learnt_is_added_to_block_sparse_attention(inputs, control):
    model, attn, x, rotary = inputs
    vmonarch.apply(model, ControlProcessor(control, share=0.25, **TILES))
    layer = attn.processor
    q, k, v = (y.transpose(1, 2) for y in project(attn, x, rotary, "torch"))
    best = (means(q) @ means(k).mT).topk(1, -1).indices
    chosen = torch.zeros(*q.shape[:2], 4, 4, dtype=torch.bool).scatter(-1, best, True)[:, :, tiles()][..., tiles()]
    scale = q.shape[-1] ** -0.5
    near = ((q @ k.mT * scale).masked_fill(~chosen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    before = layer.mix(attn, x, rotary, Call(GRID))
    torch.testing.assert_close(before, near)
    layer.learnt.weight.normal_(generator=torch.Generator().manual_seed(1))
    if control == "vsa":
        compressed = ((means(q) @ means(k).mT * scale).softmax(-1) @ means(v))[:, :, tiles()]
        added = compressed.transpose(1, 2).flatten(2) * layer.learnt(x)
    else:
        weights = (q.softmax(-1) @ k.softmax(-1).mT).masked_fill(chosen, 0)
        added = layer.learnt(weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.mix(attn, x, rotary, Call(GRID)) - before, added, atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_what_was_learnt_is_a_method_by_its_file(tiny, tmp_path):
    model, file = tiny.transformer(), tmp_path / "vsa.safetensors"
    vmonarch.apply(model, ControlProcessor("vsa", share=0.25, **TILES))
    for _, attn in known_family(model).layers(model):
        attn.processor.learnt.weight.normal_(generator=torch.Generator().manual_seed(1))
    vmonarch.save_adapter(model, file)
    expected = tiny.run(model, tuple(GRID))
    vmonarch.restore(model)
    assert not torch.equal(tiny.run(model, tuple(GRID)), expected)
    resolve_method(f"vsa:share=0.25,tile=[4,3,5],query_tile=[4,3,5],adapter={file}").install(model)
    assert torch.equal(tiny.run(model, tuple(GRID)), expected)
    with pytest.raises(InputError, match="adapter .* cannot be used"):
        resolve_method(f"sol:adapter={file}").install(model)
