"""Cases of `context_parallel_worker.py` beyond the Wan family, where text may be beside the video."""

from __future__ import annotations

import copy
import functools

import tiny_pipelines
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_helios import HeliosTransformer3DModel
from tiny_families import FAMILIES, GRID, first

import vmonarch
from vmonarch import AttentionPlan, FlashBiasProcessor, TwoResolutionProcessor, VMonarchProcessor
from vmonarch.base import FullAttentionProcessor
from vmonarch.bias import SpatioTemporalDecay
from vmonarch.families import FAMILIES as RECORDS
from vmonarch.installation import self_attention_modules

# 105 tokens: 53 and 52.
ODD = (5, 7, 3)
# With a single frame, whose tokens are all a condition of HunyuanVideo's image-to-video model.
FRAME = (1, 4, 6)
FORWARD_ONLY = ("ltx2", "kandinsky5")
SUPPORTED = [name for name, case in FAMILIES.items() if RECORDS[case.model].spread is not None]


def applied(name, processor=None, **config):
    case = FAMILIES[name]
    model = case.make(**config)
    grid = {"grid": GRID} if case.needs_grid else {}
    vmonarch.apply(model, processor or VMonarchProcessor(**grid))
    return model


def run(model, inputs):
    with torch.no_grad():
        return first(model(**inputs))


def forward(name, processor=None, grid=GRID, anything=False, heads=None):
    """A call of a model, of which one sample in two may have a shorter prompt."""

    def case(tiny, ranks):
        config = {} if heads is None else {"num_attention_heads": heads}
        model = applied(name, processor, **config)
        ranks.enable(model, ulysses_anything=anything)
        return {"out": run(model, FAMILIES[name].call(grid))}

    return case


# The second layer is the model's own.
PLAN = AttentionPlan(
    {"t1": {"num_iterations": 1}, "own": {"exact": {"band": 0}}, "full": None},
    {"transformer": [["full", "t1", "own"], ["full"] * 3]},
)
THREE_HEADS = {
    "plain": VMonarchProcessor(),
    "plan": VMonarchProcessor(plan=PLAN),
    "two-resolution": TwoResolutionProcessor(share=0.2),
    "flash-bias": FlashBiasProcessor(SpatioTemporalDecay(3)),
    "full": FullAttentionProcessor(),
    "dense-layers": VMonarchProcessor(dense_layers=1),
}


def gradients(name, checkpointed=False, **config):
    """The output, and gradients of all parameters that have one, summed over ranks."""

    def case(tiny, ranks):
        model = applied(name, **config).train()
        ranks.enable(model)
        if checkpointed:
            model.enable_gradient_checkpointing()
        out = first(model(**FAMILIES[name].call()))
        (out * out.detach().cos()).sum().backward()
        found = {
            name: ranks.total(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for name, parameter in model.named_parameters()
        }
        # What moves all logits of a query alike has a gradient that is nothing but rounding.
        least = 1e-6 * max(grad.abs().max() for grad in found.values())
        return {"out": out.detach()} | {name: grad for name, grad in found.items() if grad.abs().max() > least}

    return case


def pipeline(name, **options):
    """A pipeline, whose scheduler tells the step. LTX with conditions does not tell the grid."""
    options |= {"grid": tiny_pipelines.GRID} if name == "ltx-condition" else {}

    def case(tiny, ranks):
        pipe, call = tiny_pipelines.pipeline(name)
        vmonarch.apply(pipe, VMonarchProcessor(**options))
        ranks.enable(pipe.transformer)
        return {"out": tiny_pipelines.sample(pipe, call)}

    return case


def orders(tiny, ranks):
    """apply twice, a copy, and the model whose plan is diffusers' own: before apply, and restored."""
    found, inputs = {}, FAMILIES["hunyuan"].call()
    model = applied("hunyuan", VMonarchProcessor(num_iterations=1))
    ranks.enable(model)
    vmonarch.apply(model, VMonarchProcessor())
    found["again"] = run(model, inputs)
    found["copied"] = run(copy.deepcopy(model), inputs)
    model, inputs = FAMILIES["minimax-h3"].make(), FAMILIES["minimax-h3"].call()
    ranks.enable(model)
    vmonarch.apply(model, VMonarchProcessor(grid=GRID, dense_layers=1))
    found["enabled before"] = run(model, inputs)
    vmonarch.restore(model)
    found["restored"] = run(model, inputs)
    return found


def masked(tiny, ranks):
    """A mask of a sequence of which every rank has a part, as it has of the mask."""
    model, inputs = applied("minimax-h3"), FAMILIES["minimax-h3"].call()
    ranks.enable(model)
    mask = torch.ones(1, 1, 1, len(inputs["token_tags"]), dtype=torch.bool)
    mask[..., :3] = False

    def with_a_mask(module, args):
        tokens, rotary, _ = args
        parts = mask.split(tokens.shape[1], -1)
        return tokens, rotary, parts[torch.distributed.get_rank() if ranks.parallel else 0]

    for _, attn in self_attention_modules(model):
        attn.register_forward_pre_hook(with_a_mask)
    out = run(model, inputs)
    mask[...] = True
    assert not torch.allclose(run(model, inputs), out)
    return {"out": out}


def compiled(tiny, ranks):
    model, inputs = applied("hunyuan"), FAMILIES["hunyuan"].call()
    ranks.enable(model)
    if ranks.parallel:
        torch._dynamo.reset()
        model.single_transformer_blocks[0].compile(backend="eager")
    return {"out": run(model, inputs)}


def conditions(tiny, ranks):
    """A noise level for every token, and conditions before the video (LTX); for every frame, and control (Cosmos)."""
    found = {}
    model, inputs = applied("ltx", VMonarchProcessor(grid=GRID)), FAMILIES["ltx"].call()
    ranks.enable(model)
    T, H, W = (inputs.pop(name) for name in ("num_frames", "height", "width"))
    tokens = 8 + T * H * W
    generator = torch.Generator().manual_seed(2)
    inputs |= {
        "hidden_states": torch.randn(2, tokens, 4, generator=generator),
        "timestep": torch.rand(2, tokens, generator=generator) * 1000,
        "video_coords": torch.rand(2, 3, tokens, generator=generator),
    }
    found["ltx"] = run(model, inputs)
    model, inputs = applied("cosmos", controlnet_block_every_n=2), FAMILIES["cosmos"].call()
    ranks.enable(model)
    inputs["block_controlnet_hidden_states"] = [torch.randn(1, T * H * W, 24, generator=generator)]
    inputs["timestep"] = torch.rand(1, 1, T, 1, 1, generator=generator) * 1000
    found["cosmos"] = run(model, inputs)
    return found


# Pipelines, some of which have names of their own. Mochi has no `refresh`.
REFRESHED = [
    name for name in tiny_pipelines.PIPELINES if (name in SUPPORTED or name not in FAMILIES) and name != "mochi"
]

SAME = {
    **{f"joint-{name}": forward(name) for name in SUPPORTED},
    **{f"joint-odd-tokens-{name}": forward(name, grid=ODD, anything=True) for name in ("hunyuan-i2v", "mochi", "ltx")},
    "joint-one-frame": forward("hunyuan-i2v", grid=FRAME),
    **{f"joint-three-heads-{name}": forward("hunyuan", ours, heads=3) for name, ours in THREE_HEADS.items()},
    "joint-dense-layers-unseen-mask": forward("hunyuan15", VMonarchProcessor(dense_layers=1)),
    **{f"joint-gradients-{name}": gradients(name) for name in SUPPORTED if name not in FORWARD_ONLY},
    "joint-gradients-three-heads": gradients("hunyuan-i2v", num_attention_heads=3),
    "joint-gradients-checkpointed": gradients("hunyuan-i2v", checkpointed=True),
    "joint-dense-steps": pipeline("hunyuan", dense_steps=(0, 2)),
    **{f"joint-refresh-{name}": pipeline(name, dense_steps=1, refresh=(1, 3)) for name in REFRESHED},
    "joint-orders": orders,
    "joint-masked": masked,
    "joint-compiled": compiled,
    "joint-conditions": conditions,
}  # fmt: skip


def enabled(name, processor=None, config=None, **options):
    def act(tiny, ranks):
        ranks.enable(applied(name, processor, **(config or {})), **options)

    return act


def enabled_before(tiny, ranks):
    model = FAMILIES["ltx"].make()
    ranks.enable(model)
    vmonarch.apply(model, VMonarchProcessor())


def enabled_before_unsupported(tiny, ranks):
    model = FAMILIES["helios"].make()
    model._cp_plan = {"proj_out": HeliosTransformer3DModel._cp_plan["blocks.0.attn1"]}
    ranks.enable(model)
    vmonarch.apply(model, VMonarchProcessor())


def restored(tiny, ranks):
    model, inputs = applied("hunyuan"), FAMILIES["hunyuan"].call()
    ranks.enable(model)
    before = run(model, inputs)
    try:
        vmonarch.restore(model)
    finally:
        assert torch.equal(run(model, inputs), before)


def with_a_plan(tiny, ranks):
    model = applied("hunyuan")
    model.enable_parallelism = functools.partial(model.enable_parallelism, cp_plan={})
    ranks.enable(model)


def odd_tokens(tiny, ranks):
    model = applied("hunyuan")
    ranks.enable(model)
    run(model, FAMILIES["hunyuan"].call(ODD))


def first_block_cache(tiny, ranks):
    model = applied("hunyuan")
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    ranks.enable(model)
    run(model, FAMILIES["hunyuan"].call())


def sparse(tiny, ranks):
    model = applied("kandinsky5", VMonarchProcessor(dense_layers=1))
    ranks.enable(model)
    params = {"to_fractal": False, "P": 0.9, "sta_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}
    run(model, FAMILIES["kandinsky5"].call((3, 8, 16)) | {"sparse_params": params})


UNSUPPORTED = "NotImplementedError: context parallelism is not supported with "
OWN = "ValueError: attention beside the video's to itself stays the model's own, which shares heads evenly: its "
# name -> (what is tried, its error)
REFUSED = {
    **{
        f"joint-{name}": (enabled(name), UNSUPPORTED + case.model)
        for name, case in FAMILIES.items()
        if name not in SUPPORTED
    },
    "joint-enabled-before-unsupported": (enabled_before_unsupported, UNSUPPORTED + "HeliosTransformer3DModel"),
    "joint-enabled-before": (
        enabled_before,
        "ValueError: enable_parallelism has spread the tokens of a LTXVideoTransformer3DModel in another way"),
    "joint-restored": (
        restored, "RuntimeError: a HunyuanVideoTransformer3DModel cannot be restored under context parallelism"),
    "joint-plan": (with_a_plan, "ValueError: cp_plan must be left alone"),
    "joint-ring": (
        enabled("hunyuan", ulysses_degree=1, ring_degree=2, mesh=None),
        "NotImplementedError: ring_degree=2 is not supported"),
    "joint-few-heads": (
        enabled("hunyuan", config={"num_attention_heads": 1}),
        "ValueError: ulysses_degree=2, but every rank needs a head of self-attention, which has 1: use at most 1"),
    "joint-few-heads-of-sound": (
        enabled("ltx2", config={"audio_num_attention_heads": 1, "audio_cross_attention_dim": 4}),
        OWN + "1 do not divide"),
    "joint-odd-heads-of-text": (
        enabled("minimax-h3", config={"num_attention_heads": 3}),
        OWN + "3 do not divide"),
    **{
        f"joint-gradients-{name}": (gradients(name), "NotImplementedError: gradients are not supported under context")
        for name in FORWARD_ONLY
    },
    "joint-odd-tokens": (
        odd_tokens, "AssertionError: Tensor size along dimension to be sharded must be divisible by mesh size"),
    "joint-first-block-cache": (
        first_block_cache, "NotImplementedError: First Block Cache is not supported under context parallelism"),
    "joint-sparse": (sparse, "NotImplementedError: dense_steps and dense_layers keep the model's sparse attention"),
}  # fmt: skip
