"""Whatever cannot be used fails with an error that names the argument and what is supported, and changes nothing."""

import diffusers
import pytest
import tiny_wan
import torch
from op_checks import call_of, refuses

import vmonarch
from vmonarch import (
    BasedProcessor,
    ExactBlocks,
    VMonarchProcessor,
    flash_entropy_attention,
    merge_partials,
    monarch_attention,
    vmonarch_attention,
)

Q = torch.randn(1, 12, 2, 4)
OUT, LSE = torch.zeros(1, 12, 2, 4), torch.zeros(1, 2, 12)
INF = float("inf")
vm = call_of(vmonarch_attention, Q, Q, Q, grid=(3, 2, 2))
mono = call_of(monarch_attention, Q, Q, Q, block_size=4)
flash = call_of(flash_entropy_attention, Q, Q, Q)
merge = call_of(merge_partials)
blocks = call_of(ExactBlocks)
CALLS = {
    "query-not-a-tensor": (vm([1.0], Q, Q), TypeError, "query must be a torch.Tensor"),
    "query-of-three-dimensions": (vm(Q[0], Q, Q), ValueError, r"query must have four dimensions \[B, S, H, D\]"),
    "value-of-integers": (vm(Q, Q, Q.long()), TypeError, "value must be one of float16, bfloat16, float32"),
    "mixed-dtypes": (vm(Q, Q.double(), Q), ValueError, "key must have the dtype of query"),
    "mixed-devices": (vm(Q, Q, Q.to("meta")), ValueError, r"value must lie on the device of query \(cpu\)"),
    "another-batch": (vm(Q, Q.repeat(2, 1, 1, 1), Q), ValueError, r"key must have the batch size of query \(1\)"),
    "other-heads": (vm(Q, Q, Q[:, :, :1]), ValueError, r"value must have as many heads as query \(2\)"),
    "fewer-values-than-keys": (vm(Q, Q, Q[:, :8]), ValueError, "value must have as many tokens as key"),
    "no-token": (vm(*[Q[:, :0]] * 3), ValueError, "no empty dimension"),
    "grid-of-other-length": (vm(grid=(3, 2, 3)), ValueError, r"grid \(3, 2, 3\) has 18 tokens, but query has 12"),
    "exact-row-outside": (vm(exact=ExactBlocks(rows=(3,))), ValueError, "rows names frame 3, but there are 3"),
    "exact-row-negative": (blocks(rows=(-1,)), ValueError, "rows must be at least 0"),
    "exact-band-negative": (blocks(band=-1), ValueError, "band must be at least 0"),
    "infinite-scale": (vm(scale=INF), ValueError, "scale must be finite"),
    "triton-of-float64": (
        vm(*[Q.double()] * 3, implementation="triton"), NotImplementedError,
        "the dtype is float64 .supported: float16, bfloat16, float32."),
    "key-mask-of-floats": (mono(key_mask=torch.ones(1, 12)), TypeError, "key_mask must be a boolean tensor"),
    "merge-nothing": (merge(), ValueError, "at least one partial result"),
    "merge-other-shape": (
        merge((OUT, LSE), (OUT[:, :6], LSE[..., :6])), ValueError, "partial result 1 must have the shape of the first"),
}  # fmt: skip

EXACT = 'exact must be None, "first_frame" or an ExactBlocks'
# Of the processor, which the op checks by the same object.
OPTIONS = {
    "num_iterations-zero": ({"num_iterations": 0}, ValueError, "num_iterations must be at least 1"),
    "coarse-useless": ({"coarse": 2, "num_iterations": 1}, ValueError, "coarse.*with num_iterations=1 it must be 1"),
    "exact-unknown": ({"exact": "last_frame"}, ValueError, EXACT),
    "row_share-zero": ({"row_share": 0}, ValueError, "row_share must be above 0 and at most 1, got 0"),
    "row_share-without-rows": (
        {"row_share": 0.5, "exact": None}, ValueError, "row_share must be 1 where exact has no rows"),
    "last_l_update-in-one-iteration": (
        {"last_l_update": False, "num_iterations": 1}, ValueError, "last_l_update must be True with num_iterations=1"),
    "min_mass-negative": ({"min_mass": -0.1}, ValueError, "min_mass must be at least 0"),
    "implementation-unknown": (
        {"implementation": "cuda"}, ValueError, "implementation must be one of auto, triton, torch"),
    "grid-two-entries": ({"grid": (3, 4)}, ValueError, "grid must have three entries"),
    "grid-float": ({"grid": (3.0, 2, 2)}, TypeError, "grid.frames must be a positive integer, got 3.0"),
}  # fmt: skip
NO_STEP = "refresh must name at least one step"
OF_PROCESSORS = {
    "dense_steps-too-large-fraction": ({"dense_steps": 1.5}, ValueError, "dense_steps as a fraction"),
    "dense_steps-bool": ({"dense_steps": True}, TypeError, "dense_steps must be a count"),
    "refresh-zero": ({"refresh": 0}, ValueError, NO_STEP),
    "refresh-other-key": (
        {"refresh": {"steps": 2, "type": "int8"}}, ValueError, "refresh.type is no known key; known: steps, offload"),
    "refresh-neither": ({"refresh": {"offload": True}}, ValueError, "refresh needs either steps or a tolerance"),
    "refresh-tolerance": ({"refresh": {"tolerance": 0}}, ValueError, r"refresh.tolerance must be in \(0, inf\), got 0"),
    "refresh-at-most": (
        {"refresh": {"steps": 8, "at_most": 2}}, ValueError, "refresh.at_most is for a tolerance, got 2 with steps=8"),
    "refresh-precision-with-a-bias": (
        {"refresh": {"steps": 2, "precision": "int8"}, "bias": {"reach": [1.0] * 3}}, ValueError,
        "refresh.precision must be None with a bias, got 'int8'"),
}  # fmt: skip
OF_BASED = {
    "layers-name": ({"layers": "linaer"}, ValueError, "layers must be one of linear, window"),
    "layers-entry": ({"layers": ["both", "based"]}, ValueError, "layers must be one of .* got .'both', 'based'"),
    "feature-map": ({"feature_map": "exp"}, ValueError, "feature_map must be one of taylor"),
    "window": ({"window": 3}, TypeError, "window must be three integers"),
}  # fmt: skip
MADE = (
    (call_of(VMonarchProcessor), "processor", OPTIONS | OF_PROCESSORS),
    (call_of(BasedProcessor), "based", OF_BASED),
)
CALLS |= {
    f"{name}-{of}": (make(**options), error, message)
    for make, of, table in MADE
    for name, (options, error, message) in table.items()
}
test_a_bad_call_names_the_argument_and_what_is_supported = refuses(CALLS)


def test_options_are_keyword_only_and_unknown_ones_are_named():
    with pytest.raises(TypeError):
        VMonarchProcessor(2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        VMonarchProcessor(steps=1, iterations=2)


class Pipe:
    def __init__(self, transformer=None):
        self.transformer = transformer


TARGETS = {
    "other-transformer": (lambda: Pipe(torch.nn.Linear(1, 1)), TypeError, "Pipe.transformer must be .*got Linear"),
    "pipeline-class": (lambda: diffusers.WanPipeline, TypeError, "got <class .*WanPipeline"),
    "no-transformer": (Pipe, ValueError, "transformer and transformer_2 are both None"),
    "two-transformers": (
        lambda: torch.nn.ModuleList([tiny_wan.transformer(), tiny_wan.transformer()]), TypeError,
        "pipe_or_transformer must be .*got ModuleList"),
}  # fmt: skip


@pytest.mark.parametrize("build, error, message", TARGETS.values(), ids=TARGETS)
def test_bad_targets(build, error, message):
    target = build()
    for act in (lambda: vmonarch.apply(target, VMonarchProcessor()), lambda: vmonarch.restore(target)):
        with pytest.raises(error, match=message):
            act()


def test_arguments_of_other_models_are_refused():
    attention = tiny_wan.applied_transformer().blocks[0].attn1
    for name in ("image_rotary_emb", "window"):
        with pytest.raises(TypeError, match=f"supports no {name} in WanAttention"):
            attention.processor(attention, torch.randn(1, 6, 24), **{name: 1})
    with pytest.raises(ValueError, match="attention_mask"):
        attention(torch.randn(1, 6, 24), None, torch.ones(1, 6, dtype=torch.bool))
