"""VMonarch attention over several processes, forward and backward, against `vmonarch_attention` on one.

Three gloo processes run all cases in one go (`frame_parallel_ranks.py`), those of fewer ranks in smaller groups.
"""

import functools
import math

import frame_parallel_ranks
import pytest
import torch
import torch.distributed as dist
from frame_parallel_ranks import CASES, RANKS, REGROUPED, RESULTS, sequences, tensors, with_gradients

from vmonarch import ExactBlocks, vmonarch_attention
from vmonarch.exact import FIRST_FRAME
from vmonarch.kernels.distributed import exchange
from vmonarch.kernels.distributed.api import frame_parallel_vmonarch_attention
from vmonarch.kernels.distributed.exact import exact_routes
from vmonarch.kernels.distributed.exchange import places_leaving, places_of, split_evenly
from vmonarch.kernels.distributed.traffic import frame_parallel_bytes, ulysses_bytes

by_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def reports(made_once, forks):
    """What every rank has saved of its cases."""

    def run_ranks(folder):
        environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        code, output = forks(folder, frame_parallel_ranks.__file__, folder, processes=RANKS, **environment)
        assert code == 0, output[-9000:]

    folder = made_once("frame-parallel", run_ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def joined(reports, name):
    """The results of all ranks, joined along the tokens."""
    frames = CASES[name if name in CASES else "three-ranks-band"][0]
    parts = [report["results"][name] for report in reports[: len(frames)]]
    return [torch.cat(x, 2 if what == "lse" else 1) for what, x in zip(RESULTS, zip(*parts, strict=True), strict=True)]


def one_process(name, dtype):
    _, sizes, _, options = CASES[name]
    options = {**options, "implementation": "torch"}
    return with_gradients(lambda *qkv: vmonarch_attention(*qkv, return_lse=True, **options), *tensors(sizes, dtype))


def assert_same(ours, truth):
    """Equal to rounding in float64."""
    for what, a, b in zip(RESULTS, ours, truth, strict=True):
        assert a.dtype == b.dtype == torch.float64
        assert (a - b).abs().max() <= 1e-13 * (1 + b.abs().max()), what


@by_case
def test_equals_one_process(reports, name):
    dtype = CASES[name][2]
    ours, truth = joined(reports, name), one_process(name, torch.float64)
    if dtype == torch.float64:
        assert_same(ours, truth)
        return
    # Other orders of summation: our error is at most twice that of one process in the same precision.
    for what, a, b, c in zip(RESULTS, ours, one_process(name, dtype), truth, strict=True):
        assert a.dtype == b.dtype
        error, budget = (a.double() - c).abs().max(), (b.double() - c).abs().max()
        assert error <= 2 * budget + 2e-6 * c.abs().max(), (what, error, budget)


def test_can_be_recomputed_in_the_backward_pass(reports):
    assert_same(joined(reports, "checkpointed"), one_process("three-ranks-band", torch.float64))


def test_gradient_of_one_input_alone(reports):
    _, sizes, dtype, options = CASES["three-ranks-band"]
    query, key, value, grad_out, _ = tensors(sizes, dtype)
    value.requires_grad_(True)
    vmonarch_attention(query, key, value, **options).backward(grad_out)
    ours = torch.cat([report["dv_alone"] for report in reports], 1)
    assert (ours - value.grad).abs().max() <= 1e-13 * value.grad.abs().max()


def test_nothing_outlives_the_results(reports):
    for report in reports:
        saved, kept = report["leaked"]
        assert saved > 0 and kept == 0


def expected_bytes(name, rank):
    frames, (grid, B, H), dtype, options = CASES[name]
    wanted = {key: options[key] for key in ("num_iterations", "exact", "implementation") if key in options}
    dims = {"head_dim": frame_parallel_ranks.DIM, "value_dim": frame_parallel_ranks.VALUE_DIM}
    wanted |= {"batch": B, "heads": H, "dtype": dtype, **dims}
    return frame_parallel_bytes(grid, frames=frames, rank=rank, **wanted)


@by_case
def test_bytes_sent_are_those_counted(reports, name):
    frames, (grid, B, H), dtype, options = CASES[name]
    sent = [report["sent"][name] for report in reports[: len(frames)]]
    counted = [expected_bytes(name, rank) for rank in range(len(frames))]
    # Pieces of float64 need no alignment.
    most = 0 if dtype == torch.float64 else 7 * 40
    assert all(0 <= a - b <= most for a, b in zip(sent, counted, strict=True)), (sent, counted)
    # The backward pass sends everything back but cL.
    iterations = 0 if options.get("entropy_grad") else options.get("num_iterations", 2)
    b = grid[1] * grid[2]
    places = sum(T_r * (b - b_r) for T_r, b_r in zip(frames, split_evenly(b, len(frames)), strict=True))
    cL = B * H * iterations * places * max(4, dtype.itemsize)
    sent_back = sum(report["sent_back"][name] for report in reports[: len(frames)])
    assert abs(sum(sent) - cL - sent_back) <= most * len(frames)


@pytest.mark.parametrize("num_iterations", [1, 2, 3])
def test_moves_a_half_more_than_ulysses_for_each_iteration_after_the_first(num_iterations):
    grid, sizes = (8, 4, 6), dict(rank=1, batch=2, heads=8, head_dim=64, dtype=torch.bfloat16)
    S, P = 8 * 4 * 6, 4
    rows = (P - 1) * S * 2 * 8 // P**2
    assert ulysses_bytes(tokens=(48,) * 4, **sizes) == 4 * rows * 64 * 2
    ours = frame_parallel_bytes(grid, frames=(2,) * 4, num_iterations=num_iterations, exact=None, **sizes)
    statistics = rows * (num_iterations + 1) * 4
    assert ours - statistics == (2 + 2 * num_iterations) * rows * 64 * 2


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "refusal": "query has 45 tokens, which are no whole frames of 12 (grid (5, 3, 4))",
        "unknown-frame": "ExactBlocks.rows names frame 5, but there are 5 latent frames",
        "grid": "grid is (5, 5, 3), not (5, 3, 5)",
        "option": "num_iterations is 3, not 2",
        "exact": "exact is ExactBlocks(rows=(), columns=(), band=1, aware=True), not None",
        "dtype": "the dtype is 'torch.float64', not 'torch.float32'",
        "heads": "the number of heads is 2, not 3",
        "gradients": "whether gradients are required is True, not False",
    }.items(),
)
def test_every_rank_learns_which_rank_departs_and_in_what(reports, name, message):
    for rank, report in enumerate(reports):
        error = report["errors"][name]
        assert error.startswith("ValueError: ") and message in error, error
        refused_own = rank == 1 and name in ("refusal", "unknown-frame")
        assert refused_own or "rank 1 of the group" in error, error


def test_frames_that_do_not_make_up_the_grid_are_refused(reports):
    for report in reports:
        assert report["errors"]["frames"] == (
            "ValueError: the ranks must have the 7 frames of grid (7, 3, 5); they have [1, 3, 1]"
        )


def test_kernels_say_why_they_refuse(reports):
    for error in (report["errors"]["kernels"] for report in reports):
        assert error.startswith("NotImplementedError") and "float64" in error


def test_needs_a_group_and_a_rank_in_it(reports):
    assert "TypeError: group must be" in reports[0]["errors"]["group"]
    assert reports[2]["outsider"] == ("RuntimeError: this process is not a member of the group that it calls with")
    with pytest.raises(RuntimeError, match="init_process_group first"):
        frame_parallel_vmonarch_attention(*tensors(*[CASES["paper"][n] for n in (1, 2)])[:3], grid=(5, 3, 5))


@pytest.fixture
def alone(tmp_path):
    """alone(backend): a group of this process only."""

    def start(backend):
        dist.init_process_group(backend, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_tangents_do_not_travel(alone, implementation):
    alone("gloo")
    attend = lambda q: frame_parallel_vmonarch_attention(q, q, q, grid=(2, 1, 3), implementation=implementation)
    q = torch.ones(1, 6, 1, 4)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(attend, (q,), (q,))


# Bounds of relative errors (Frobenius norm). The gradients that the stages hand each other are rounded to 16 bit.
@pytest.mark.parametrize(
    ("device", "grid", "head_dim", "dtype", "bound"),
    [
        ("cpu", (4, 2, 3), 16, torch.float32, 1e-5),
        pytest.param("cuda", (9, 16, 20), 128, torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
        pytest.param("cuda", (24, 11, 13), 64, torch.float16, 5e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", (7, 8, 8), 128, torch.float32, 1e-4, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 3, "coarse": 2, "exact": None, "entropy_grad": True},
        {"exact": ExactBlocks(rows=(0,), band=1, aware=True)},
    ],
    ids=["default", "coarse", "band"],
)
def test_the_kernels_stage_by_stage_are_those_of_one_call(alone, device, grid, head_dim, dtype, bound, options):
    alone("nccl" if device == "cuda" else "gloo")
    generator = torch.Generator().manual_seed(0)
    size = (1, math.prod(grid), 3, head_dim)
    q, k, v, grad = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(4))

    def run(attend):
        tensors = [x.clone().requires_grad_(True) for x in (q, k, v)]
        out, lse = attend(*tensors, grid=grid, return_lse=True, implementation="triton", **options)
        return out, lse, *torch.autograd.grad((out, lse), tensors, (grad, torch.ones_like(lse)))

    found, expected = run(frame_parallel_vmonarch_attention), run(vmonarch_attention)
    for name, ours, theirs in zip(RESULTS, found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert (ours - theirs).float().norm() <= bound * theirs.float().norm(), name


@pytest.mark.parametrize(
    "option",
    [{"tiles": (1, 2)}, {"frames_per_block": 2}, {"row_share": 0.5}, {"r_share": 0.5}, {"last_l_update": False}],
    ids=lambda option: next(iter(option)),
)
def test_blocks_that_are_no_whole_frames_are_refused(alone, option):
    alone("gloo")
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be left alone"):
        frame_parallel_vmonarch_attention(*torch.randn(3, 1, 24, 2, 4), grid=(3, 2, 4), **option)


def test_a_rank_keeps_its_frames(monkeypatch):
    class Group:
        pass

    asked = []

    def ask(group, device, answer):
        asked.append(answer)
        return [answer, (answer[0], 2)]

    monkeypatch.setattr(exchange, "_ask", ask)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    group, device = Group(), torch.device("cpu")
    for grid, frames in (("a", 3), ("b", 1), ("a", 3)):
        assert exchange.agree(group, device, {"grid": grid}, "the frames of a rank", frames) == [frames, 2]
    assert len(asked) == 2, "what is known is not asked again"
    with pytest.raises(ValueError, match="the frames of a rank must be as in the calls before.*, 3, got 2"):
        exchange.agree(group, device, {"grid": "a"}, "the frames of a rank", 2)
    assert len(asked) == 2, "the other ranks would not hear of it"


@pytest.mark.parametrize("name", REGROUPED)
def test_only_what_crosses_a_border_moves_and_gradients_go_back(reports, name):
    before, after = REGROUPED[name]
    *tensors, w, v = sequences()
    for rank, report in enumerate(reports):
        moved, gradients, sent, sent_back = report["regrouped"][name]
        for found, whole in zip(moved, tensors, strict=True):
            assert torch.equal(found, whole.split(after, 1)[rank])
        for found, whole in zip(gradients, (w, v), strict=True):
            assert torch.equal(found, whole.split(before, 1)[rank])
        # Six float64 and one float32 for every place, and what aligns the pieces for two ranks.
        for counted, places in (
            (sent, places_leaving(before, after, rank)),
            (sent_back, places_leaving(after, before, rank)),
        ):
            assert 0 <= counted - places * (6 * 8 + 4) <= 2 * (exchange.ALIGNMENT - 4)


def laid_out(kind, dtype):
    """Numbers in rows of whole words, with gaps between or not, in rows that start beside a word, or end within one."""
    x = torch.arange(3 * 5 * 6 * 24).view(3, 5, 6, 24).to(dtype)
    return {
        "whole": x,
        "gaps": x[:, :, 1:4],
        "turned": x.transpose(1, 2),
        "rows-turned": x.transpose(2, 3),
        "beside-a-word": x[..., 1:17],
        "part-of-a-word": x[..., :3],
        "empty": x[:, :0],
        "scalar": x[0, 0, 0, 7],
    }[kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "kind", ["whole", "gaps", "turned", "rows-turned", "beside-a-word", "part-of-a-word", "empty", "scalar"]
)
def test_copies_by_words_are_copies(kind, dtype):
    x = laid_out(kind, dtype)
    in_words = exchange._words(x)
    assert (in_words is not None) == (kind in ("whole", "gaps", "turned", "empty"))
    for to in (
        torch.zeros_like(x, memory_format=torch.contiguous_format),
        torch.zeros(*x.shape, 2, dtype=dtype)[..., 0],
    ):
        exchange._copy(to, x)
        assert torch.equal(to, x)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_joined_parts_and_their_gradients_are_those_of_cat(dim):
    whole = torch.randn(4, 5, 6, 8, dtype=torch.float64)
    weights = torch.randn(4, 5, 6, 8, dtype=torch.float64)
    parts = [part.clone().requires_grad_() for part in whole.split((2, 0, whole.shape[dim] - 2), dim)]
    turned = [part.transpose(0, 2).contiguous().transpose(0, 2) for part in parts]
    joined = exchange._Join.apply(dim, *turned)
    assert torch.equal(joined, whole)
    gradients = torch.autograd.grad((joined * weights).sum(), parts)
    for found, part in zip(gradients, weights.split((2, 0, whole.shape[dim] - 2), dim), strict=True):
        assert torch.equal(found, part)


PATTERNS = {
    "first-frame": FIRST_FRAME,
    "band": ExactBlocks(band=1),
    "wide-band": ExactBlocks(band=4),
    "column": ExactBlocks(columns=(0,)),
    "mixed": ExactBlocks(rows=(0, 5), columns=(2, 6), band=0),
}


@pytest.mark.parametrize("frames", [(3, 4), (1, 5, 1), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_exact_block_is_computed_once(pattern, frames):
    key_frames = pattern.key_frames(7)
    routes = exact_routes(key_frames, frames)
    own = [places_of(frames, r) for r in range(len(frames))]
    for r, mine in enumerate(own):
        for l in mine:
            computed = [k for k in key_frames[l] if k in mine]
            for s, theirs in enumerate(own):
                assert r != s or not routes.queries[r][s] + routes.keys[r][s]
                computed += [k for k in routes.keys[r][s] if k in key_frames[l]]
                if l in routes.queries[r][s]:
                    computed += [k for k in key_frames[l] if k in theirs]
            assert sorted(computed) == list(key_frames[l])


def test_the_fewer_of_query_and_key_frames_travel():
    row = exact_routes(FIRST_FRAME.key_frames(6), (2, 4))
    assert row.queries[0] == ((), (0,)) and not any(map(any, row.keys))
    column = exact_routes(ExactBlocks(columns=(5,)).key_frames(6), (2, 4))
    assert column.keys[0] == ((), (5,)) and not any(map(any, column.queries))
    # As many of both: the rank with less work by then computes.
    tie = exact_routes(ExactBlocks(rows=(0,)).key_frames(2), (1, 1))
    assert tie.queries[0] == ((), (0,))


by_frames = functools.partial(frame_parallel_bytes, (5, 2, 3), frames=(2, 3))
by_heads = functools.partial(ulysses_bytes, tokens=(12, 18))


@pytest.mark.parametrize(
    ("count", "change", "error"),
    [
        (by_frames, dict(frames=(2, 2)), "frames must sum to the 5 frames"),
        (by_frames, dict(frames=(0, 5)), r"frames\[0\] must be at least 1"),
        (by_frames, dict(rank=2), "rank must be one of the 2 ranks"),
        (by_heads, dict(rank=2), "rank must be one of the 2 ranks"),
        (by_heads, dict(tokens=(8, 0)), r"tokens\[1\] must be at least 1"),
        (by_heads, dict(heads=1), "heads must be at least the number of ranks, 2"),
    ],
)
def test_counts_refuse_what_makes_no_sense(count, change, error):
    sizes = dict(rank=0, batch=1, heads=2, head_dim=8, dtype=torch.float32)
    assert count(**sizes) > 0
    with pytest.raises(ValueError, match=error):
        count(**sizes | change)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_positions_are_split_evenly(parts):
    sizes = split_evenly(11, parts)
    assert sum(sizes) == 11 and len(sizes) == parts and max(sizes) - min(sizes) <= 1
