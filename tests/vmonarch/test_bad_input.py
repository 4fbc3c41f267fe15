"""Every unusable call of the attention ops fails with an error that names the argument and what is supported."""

import pytest
import torch

from vmonarch import (
    ExactBlocks,
    LatentGrid,
    flash_entropy_attention,
    merge_partials,
    monarch_attention,
    vmonarch_attention,
)

Q = torch.randn(1, 12, 2, 4)
GRID = (3, 2, 2)
OUT, LSE = torch.zeros(1, 12, 2, 4), torch.zeros(1, 2, 12)


def vm(query=Q, key=Q, value=Q, **options):
    return vmonarch_attention(query, key, value, **{"grid": GRID, **options})


def mono(**options):
    return monarch_attention(Q, Q, Q, **{"block_size": 4, **options})


CALLS = {
    "query-not-a-tensor": (lambda: vm(query=[1.0]), TypeError, "query must be a torch.Tensor"),
    "query-of-three-dimensions": (
        lambda: vm(query=Q[0]),
        ValueError,
        r"query must have four dimensions \[B, S, H, D\]",
    ),
    "key-of-five-dimensions": (lambda: vm(key=Q[None]), ValueError, "key must have four dimensions"),
    "value-of-integers": (lambda: vm(value=Q.long()), TypeError, "value must be one of float16, bfloat16, float32"),
    "complex-query": (lambda: vm(query=Q.to(torch.complex64)), TypeError, "query must be one of .*, got complex64"),
    "mixed-dtypes": (lambda: vm(key=Q.double()), ValueError, "key must have the dtype of query"),
    "mixed-devices": (lambda: vm(value=Q.to("meta")), ValueError, r"value must lie on the device of query \(cpu\)"),
    "another-batch": (lambda: vm(key=Q.repeat(2, 1, 1, 1)), ValueError, r"key must have the batch size of query \(1\)"),
    "other-heads": (lambda: vm(value=Q[:, :, :1]), ValueError, r"value must have as many heads as query \(2\)"),
    "another-head-dimension": (lambda: vm(key=Q[..., :3]), ValueError, r"key must have the head dimension of query"),
    "fewer-values-than-keys": (lambda: vm(value=Q[:, :8]), ValueError, "value must have as many tokens as key"),
    "fewer-keys-than-queries": (
        lambda: vm(key=Q[:, :8], value=Q[:, :8]),
        ValueError,
        "key must have as many tokens as query",
    ),
    "no-token": (lambda: vm(query=Q[:, :0], key=Q[:, :0], value=Q[:, :0]), ValueError, "no empty dimension"),
    "no-head": (lambda: vm(query=Q[:, :, :0]), ValueError, "query must have no empty dimension"),
    "grid-missing": (lambda: vmonarch_attention(Q, Q, Q), TypeError, "grid"),
    "grid-a-number": (lambda: vm(grid=12), TypeError, "grid must be a LatentGrid or three integers"),
    "grid-a-string": (lambda: vm(grid="3x2x2"), TypeError, "grid must be a LatentGrid or three integers"),
    "grid-of-two": (lambda: vm(grid=(3, 4)), ValueError, "grid must have three entries"),
    "grid-of-floats": (lambda: vm(grid=(3.0, 2, 2)), TypeError, "grid.frames must be an integer, got 3.0"),
    "grid-without-frames": (lambda: vm(grid=(0, 2, 2)), ValueError, "grid.frames must be at least 1"),
    "grid-with-negative-height": (lambda: vm(grid=(3, -2, -2)), ValueError, "grid.height must be at least 1"),
    "grid-of-other-length": (
        lambda: vm(grid=(3, 2, 3)),
        ValueError,
        r"grid \(3, 2, 3\) has 18 tokens, but query has 12",
    ),
    "no-iteration": (lambda: vm(num_iterations=0), ValueError, "num_iterations must be at least 1"),
    "half-an-iteration": (lambda: vm(num_iterations=1.5), TypeError, "num_iterations must be a positive integer"),
    "iterations-true": (lambda: vm(num_iterations=True), TypeError, "num_iterations must be a positive integer"),
    "no-frame-per-block": (lambda: vm(frames_per_block=0), ValueError, "frames_per_block must be at least 1"),
    "tiles-a-number": (lambda: vm(tiles=2), TypeError, "tiles must be a pair"),
    "tiles-of-three": (lambda: vm(tiles=(1, 1, 1)), TypeError, "tiles must be a pair"),
    "tiles-of-zero": (lambda: vm(tiles=(1, 0)), ValueError, r"tiles\[1\] must be at least 1"),
    "more-tiles-than-rows": (lambda: vm(tiles=(3, 1)), ValueError, r"tiles \(3, 1\) must not exceed"),
    "coarse-zero": (lambda: vm(coarse=0), ValueError, "coarse must be at least 1"),
    "coarse-without-effect": (lambda: vm(coarse=2, num_iterations=1), ValueError, "with num_iterations=1 it must be 1"),
    "unknown-exact": (lambda: vm(exact="last_frame"), ValueError, 'exact must be None, "first_frame" or an Exact'),
    "exact-true": (lambda: vm(exact=True), TypeError, 'exact must be None, "first_frame" or an ExactBlocks'),
    "exact-row-outside": (lambda: vm(exact=ExactBlocks(rows=(3,))), ValueError, "rows names frame 3, but there are 3"),
    "exact-column-outside": (lambda: vm(exact=ExactBlocks(columns=7)), ValueError, "columns names frame 7"),
    "exact-row-negative": (lambda: ExactBlocks(rows=(-1,)), ValueError, "rows must hold frame indices of at least 0"),
    "exact-row-a-float": (lambda: ExactBlocks(rows=(0.5,)), TypeError, "rows must hold frame indices"),
    "exact-row-a-string": (lambda: ExactBlocks(rows="all"), TypeError, "rows must hold frame indices"),
    "exact-band-negative": (lambda: ExactBlocks(band=-1), ValueError, "band must be at least 0"),
    "exact-band-a-float": (lambda: ExactBlocks(band=1.0), TypeError, "band must be None or an integer"),
    "exact-aware-a-string": (lambda: ExactBlocks(aware="yes"), TypeError, "aware must be True or False"),
    "negative-min-mass": (lambda: vm(min_mass=-0.1), ValueError, "min_mass must be finite and at least 0"),
    "nan-min-mass": (lambda: vm(min_mass=float("nan")), ValueError, "min_mass must be finite"),
    "min-mass-a-string": (lambda: vm(min_mass="0.1"), TypeError, "min_mass must be a number"),
    "infinite-scale": (lambda: vm(scale=float("inf")), ValueError, "scale must be finite"),
    "scale-a-tensor": (lambda: vm(scale=torch.ones(1)), TypeError, "scale must be None or a number"),
    "entropy-grad-a-number": (lambda: vm(entropy_grad=1), TypeError, "entropy_grad must be True or False"),
    "return-lse-a-string": (lambda: vm(return_lse="lse"), TypeError, "return_lse must be True or False"),
    "unknown-implementation": (lambda: vm(implementation="cuda"), ValueError, "must be one of auto, triton, torch"),
    "implementation-none": (lambda: vm(implementation=None), TypeError, "implementation must be a string"),
    "triton-of-float64": (
        lambda: vmonarch_attention(*(t.double() for t in (Q, Q, Q)), grid=GRID, implementation="triton"),
        NotImplementedError,
        "the dtype is float64 .supported: float16, bfloat16, float32.",
    ),
    "an-attention-mask": (lambda: vm(attn_mask=None), TypeError, "attn_mask"),
    "block-size-missing": (lambda: monarch_attention(Q, Q, Q), TypeError, "block_size"),
    "block-size-zero": (lambda: mono(block_size=0), ValueError, "block_size must be at least 1"),
    "unknown-padding": (lambda: mono(padding="both"), ValueError, "padding must be one of post, pre"),
    "key-mask-of-floats": (lambda: mono(key_mask=torch.ones(1, 12)), TypeError, "key_mask must be a boolean tensor"),
    "key-mask-of-other-shape": (
        lambda: mono(key_mask=torch.ones(12, dtype=torch.bool)),
        ValueError,
        r"key_mask must be \[B, S\]",
    ),
    "key-mask-elsewhere": (
        lambda: mono(key_mask=torch.ones(1, 12, dtype=torch.bool, device="meta")),
        ValueError,
        "key_mask must lie on the device of query",
    ),
    "flash-triton-of-float64": (
        lambda: flash_entropy_attention(Q.double(), Q.double(), Q.double(), implementation="triton"),
        NotImplementedError,
        'flash_entropy_attention with implementation="triton": the',
    ),
    "flash-entropy-grad": (lambda: flash_entropy_attention(Q, Q, Q, entropy_grad=None), TypeError, "entropy_grad"),
    "merge-nothing": (lambda: merge_partials(), ValueError, "at least one partial result"),
    "merge-a-tensor": (lambda: merge_partials(OUT), TypeError, "partial result 0 must be a pair"),
    "merge-without-lse": (
        lambda: merge_partials((OUT, None)),
        TypeError,
        "lse of partial result 0 must be a torch.Ten",
    ),
    "merge-integers": (
        lambda: merge_partials((OUT.long(), LSE)),
        TypeError,
        "out of partial result 0 must be floating",
    ),
    "merge-rank": (
        lambda: merge_partials((OUT[0], LSE)),
        ValueError,
        r"out of partial result 0 must be \[B, S, H, D\]",
    ),
    "merge-lse-shape": (lambda: merge_partials((OUT, LSE.transpose(1, 2))), ValueError, r"must be \[B, H, S\]"),
    "merge-other-shape": (
        lambda: merge_partials((OUT, LSE), (OUT[:, :6], LSE[..., :6])),
        ValueError,
        "partial result 1 must have the shape of the first",
    ),
    "merge-elsewhere": (
        lambda: merge_partials((OUT, LSE), (OUT.to("meta"), LSE.to("meta"))),
        ValueError,
        "partial result 1 must lie on the device of the first",
    ),
    "latent-grid-none": (lambda: LatentGrid.parse(None), TypeError, "grid must be a LatentGrid"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_names_the_argument_and_what_is_supported(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()


def test_the_call_that_the_bad_ones_are_made_from_is_good():
    assert vm().shape == Q.shape
    assert mono().shape == Q.shape
    assert merge_partials((OUT, LSE))[0].shape == OUT.shape
