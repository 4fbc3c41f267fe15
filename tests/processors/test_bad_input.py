"""Bad input gets an error that names the argument and says what is supported; nothing is changed by it."""

from __future__ import annotations

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import vmonarch
from vmonarch import ExactBlocks, VMonarchProcessor

BAD_OPTIONS = [
    ("num_iterations-zero", {"num_iterations": 0}, ValueError, "num_iterations must be at least 1"),
    ("num_iterations-float", {"num_iterations": 2.0}, TypeError, "num_iterations must be a positive integer"),
    ("num_iterations-bool", {"num_iterations": True}, TypeError, "num_iterations must be a positive integer"),
    ("frames_per_block-negative", {"frames_per_block": -1}, ValueError, "frames_per_block must be at least 1"),
    ("frames_per_block-text", {"frames_per_block": "2"}, TypeError, "frames_per_block must be a positive integer"),
    ("tiles-number", {"tiles": 2}, TypeError, "tiles must be a pair"),
    ("tiles-triple", {"tiles": (1, 1, 1)}, TypeError, "tiles must be a pair"),
    ("tiles-zero", {"tiles": (1, 0)}, ValueError, r"tiles\[1\] must be at least 1"),
    ("coarse-zero", {"coarse": 0}, ValueError, "coarse must be at least 1"),
    ("coarse-useless", {"coarse": 2, "num_iterations": 1}, ValueError, "coarse.*num_iterations=1"),
    ("exact-unknown", {"exact": "last_frame"}, ValueError, "exact must be None, .first_frame. or an ExactBlocks"),
    ("exact-bool", {"exact": True}, TypeError, "exact must be None, .first_frame. or an ExactBlocks"),
    ("min_mass-negative", {"min_mass": -0.1}, ValueError, "min_mass must be finite and at least 0"),
    ("min_mass-text", {"min_mass": "0.1"}, TypeError, "min_mass must be a number"),
    ("implementation-unknown", {"implementation": "cuda"}, ValueError, "implementation must be one of"),
    ("implementation-none", {"implementation": None}, TypeError, "implementation must be a string"),
    ("dense_steps-too-large-fraction", {"dense_steps": 1.5}, ValueError, "dense_steps as a fraction"),
    ("dense_steps-negative-fraction", {"dense_steps": -0.1}, ValueError, "dense_steps as a fraction"),
    ("dense_steps-nan", {"dense_steps": float("nan")}, ValueError, "dense_steps as a fraction"),
    ("dense_steps-negative", {"dense_steps": -1}, ValueError, "dense_steps as a count must be at least 0"),
    ("dense_steps-bool", {"dense_steps": True}, TypeError, "dense_steps must be a count"),
    ("dense_steps-none", {"dense_steps": None}, TypeError, "dense_steps must be a count"),
    ("dense_steps-text", {"dense_steps": "first"}, TypeError, "dense_steps must be a count"),
    ("dense_steps-mixed", {"dense_steps": [0, 0.5]}, TypeError, "dense_steps as a collection must hold integers"),
    ("dense_layers-negative-index", {"dense_layers": [-1]}, ValueError, "dense_layers as a collection"),
    ("dense_layers-dict", {"dense_layers": {0: True}}, TypeError, "dense_layers must be a count"),
    ("dense_layers-bool-index", {"dense_layers": [True]}, TypeError, "dense_layers as a collection"),
    ("grid-two-entries", {"grid": (3, 2)}, ValueError, "grid must have three entries"),
    ("grid-zero", {"grid": (0, 2, 3)}, ValueError, "grid.frames must be at least 1"),
    ("grid-float", {"grid": (3, 2.0, 3)}, TypeError, "grid.height must be an integer"),
    ("grid-number", {"grid": 18}, TypeError, "grid must be a LatentGrid or three integers"),
    ("grid-text", {"grid": "3x2x3"}, TypeError, "grid must be a LatentGrid or three integers"),
    ("parallel_by-unknown", {"parallel_by": "rows"}, ValueError, "parallel_by must be one of heads, frames"),
    ("parallel_by-none", {"parallel_by": None}, TypeError, "parallel_by must be a string"),
    ("unknown-option", {"iterations": 2}, TypeError, "iterations"),
]


@pytest.mark.parametrize("options, error, message", [case[1:] for case in BAD_OPTIONS], ids=[c[0] for c in BAD_OPTIONS])
def test_bad_options_fail_when_the_processor_is_made(options, error, message):
    with pytest.raises(error, match=message):
        VMonarchProcessor(**options)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        VMonarchProcessor(2)


def test_unknown_keys_of_a_config_are_named():
    with pytest.raises(TypeError, match="no option iterations, steps; it has num_iterations"):
        VMonarchProcessor.from_config({"steps": 1, "iterations": 2})


class Empty:
    transformer = None


class Odd:
    transformer = "a path"


class OtherPipeline:
    def __init__(self):
        self.transformer = diffusers.CogVideoXTransformer3DModel(
            num_layers=1, num_attention_heads=1, attention_head_dim=16
        )


BAD_TARGETS = [
    ("other-pipeline", lambda tiny: OtherPipeline(), TypeError, "OtherPipeline.transformer must be .*got CogVideoX"),
    ("none", lambda tiny: None, TypeError, "pipe_or_transformer must be .*WanTransformer3DModel.*got None"),
    ("text", lambda tiny: "Wan-AI/Wan2.1", TypeError, "pipe_or_transformer must be .*got 'Wan-AI/Wan2.1'"),
    ("pipeline-class", lambda tiny: diffusers.WanPipeline, TypeError, "got the class WanPipeline"),
    ("vae", lambda tiny: torch.nn.Linear(1, 1), TypeError, "pipe_or_transformer must be .*got Linear"),
    ("block", lambda tiny: tiny.transformer().blocks, TypeError, "pipe_or_transformer must be .*got ModuleList"),
    ("no-transformer", lambda tiny: Empty(), ValueError, "transformer and transformer_2 are both None"),
    ("odd-transformer", lambda tiny: Odd(), TypeError, "Odd.transformer must be one of .*got str"),
    (
        "two-transformers",
        lambda tiny: torch.nn.ModuleList([tiny.transformer(), tiny.transformer()]),
        TypeError,
        "pipe_or_transformer must be .*got ModuleList",
    ),
    (
        "another-transformer",
        lambda tiny: diffusers.CogVideoXTransformer3DModel(num_layers=1, num_attention_heads=1, attention_head_dim=16),
        TypeError,
        "WanTransformer3DModel.*SkyReelsV2.*got CogVideoXTransformer3DModel",
    ),
]


@pytest.mark.parametrize("build, error, message", [case[1:] for case in BAD_TARGETS], ids=[c[0] for c in BAD_TARGETS])
def test_bad_targets(tiny, build, error, message):
    target = build(tiny)
    with pytest.raises(error, match=message):
        vmonarch.apply(target, VMonarchProcessor())
    with pytest.raises(error, match=message):
        vmonarch.restore(target)


BAD_PROCESSORS = [
    ("text", "vmonarch", "processor must be a VMonarchProcessor.*got 'vmonarch'"),
    ("none", None, "processor must be a VMonarchProcessor.*got None.*vmonarch.restore switches it off"),
    ("class", VMonarchProcessor, "got the class VMonarchProcessor .not an instance"),
    ("stock", WanAttnProcessor(), "got WanAttnProcessor"),
    ("dict", {"num_iterations": 2}, "got dict"),
]


@pytest.mark.parametrize(
    "processor, message", [case[1:] for case in BAD_PROCESSORS], ids=[c[0] for c in BAD_PROCESSORS]
)
def test_bad_processors(tiny, processor, message):
    pipe = tiny.pipeline("t2v")
    before = dict(vars(pipe.transformer))
    with pytest.raises(TypeError, match=message):
        vmonarch.apply(pipe, processor)
    assert vars(pipe.transformer) == before


@pytest.mark.parametrize(
    "dense, message",
    [
        (3, "dense_layers=3, but there are only 2 layers"),
        ([0, 2], r"dense_layers names index 2, but there are only 2 layers \(0 to 1\)"),
    ],
    ids=["count", "index"],
)
def test_layers_that_do_not_exist(tiny, dense, message):
    model = tiny.transformer()
    with pytest.raises(ValueError, match=message):
        vmonarch.apply(model, VMonarchProcessor(dense_layers=dense))
    assert not model._forward_pre_hooks


def test_exact_frames_that_do_not_exist(tiny):
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor(exact=ExactBlocks(rows=(5,))))
    with pytest.raises(ValueError, match="rows names frame 5.* 3 latent frames"):
        tiny.run(model)


def test_tiles_larger_than_a_frame(tiny):
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor(tiles=(3, 1)))
    with pytest.raises(ValueError, match=r"tiles \(3, 1\) must not exceed"):
        tiny.run(model)


def test_attention_of_other_models_is_refused(tiny):
    processor = VMonarchProcessor()
    attention = diffusers.models.attention_processor.Attention(8, heads=1, dim_head=8)
    with pytest.raises(TypeError, match="supports the attention of Wan.*got Attention"):
        processor(attention, torch.randn(1, 6, 8))
    with pytest.raises(TypeError, match="got WanAttention called with image_rotary_emb"):
        processor(tiny.transformer().blocks[0].attn1, torch.randn(1, 6, 24), image_rotary_emb=None)


def test_a_transformer_called_without_latents_says_what_stock_says(tiny):
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor())
    with pytest.raises(TypeError, match="hidden_states"):
        model()
    with pytest.raises(ValueError, match="not enough values|unpack|5"):
        model(torch.randn(1, 16, 4, 4), torch.tensor([1]), torch.randn(1, 7, 16))
