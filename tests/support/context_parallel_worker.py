"""What `test_context_parallel.py` runs: alone, in its own process, and on two ranks.

    torchrun --nproc-per-node 2 context_parallel_worker.py FOLDER CASE …

is both ranks; each writes what it found to the folder.
"""

from __future__ import annotations

import copy
import datetime
import os
import sys
import traceback
from pathlib import Path

import joint_parallel
import torch
import torch.distributed as dist
from count_sent import Sent
from diffusers import FirstBlockCacheConfig, MagCacheConfig

import vmonarch
from vmonarch import AttentionPlan, BasedProcessor, ExactBlocks, FlashBiasProcessor, VMonarchProcessor
from vmonarch.base import FullAttentionProcessor
from vmonarch.bias import SpatioTemporalDecay

RANKS = 2
METHODS = {"t1": {"num_iterations": 1}, "own": {"exact": {"band": 0}}, "full": None}
# Heads, grid and options: 15 tokens on each rank, none of them at a frame's end; 23 and 22 with odd ones.
SPLITS = {
    "even": (2, (5, 2, 3), {}),
    "uneven-heads": (3, (5, 2, 3), {}),
    "odd-tokens": (3, (5, 3, 3), {"ulysses_anything": True}),
}


class Alone:
    """One process with all tokens."""

    parallel = False

    def enable(self, model, **options):
        pass

    def total(self, x):
        return x


class Rank:
    """One of two."""

    parallel = True

    def __init__(self, device="cpu"):
        self.mesh = dist.device_mesh.init_device_mesh(device, (1, RANKS), mesh_dim_names=("ring", "ulysses"))

    def enable(self, model, **options):
        from diffusers import ContextParallelConfig

        options = {"ulysses_degree": RANKS, "mesh": self.mesh} | options
        model.enable_parallelism(config=ContextParallelConfig(**options))

    def total(self, x):
        """The sum over ranks."""
        x = x.clone()
        dist.all_reduce(x)
        return x


def plan_of(heads):
    """Rank 0 has t1 and full attention, in another order than its heads; the others own frames."""
    first, second = (["t1", "own"], ["full", "own"]) if heads == 2 else (["t1", "full", "own"], ["full", "t1", "own"])
    return AttentionPlan(METHODS, {"transformer": [first, second]})


def decay_of(heads):
    """A bias that differs from head to head."""
    decay = SpatioTemporalDecay(heads, reach=(2.0, 3.0, 3.0))
    decay.decay.data *= 1 + torch.arange(heads)[:, None]
    return decay


def table(heads, tokens):
    """The factors of a bias."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, tokens, heads, 2, generator=generator) for _ in range(2))


PROCESSORS = {
    "vmonarch": lambda heads: VMonarchProcessor(),
    "vmonarch-exact-blocks": lambda heads: VMonarchProcessor(exact=ExactBlocks(columns=(0,), band=0), coarse=2),
    "vmonarch-bias": lambda heads: VMonarchProcessor(bias=decay_of(heads)),
    "flash-bias": lambda heads: FlashBiasProcessor(decay_of(heads)),
    "based": lambda heads: BasedProcessor(feature_dim=4, decay=True),
    "based-mixed": lambda heads: BasedProcessor(layers=["linear", "conv", "window"], feature_dim=4),
    "plan": lambda heads: VMonarchProcessor(plan=plan_of(heads)),
    "full": lambda heads: FullAttentionProcessor(),
}


def train(ranks, model, inputs, processor=None, autocast=False):
    """The output, and gradients of all parameters and of the bias, summed over ranks."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(**inputs)[0]
    (out * out.detach().cos()).sum().backward()
    bias = getattr(processor, "bias", None)
    parameters = [*model.named_parameters(), *(bias.named_parameters("bias") if bias is not None else ())]
    # A rank may have no part in a parameter.
    return {"out": out.detach()} | {
        name: ranks.total(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in parameters
    }


def same(processor, split):
    def case(tiny, ranks):
        heads, grid, options = SPLITS[split]
        model = tiny.transformer(num_attention_heads=heads, num_layers=3 if processor == "based-mixed" else 2)
        applied = vmonarch.apply(model, PROCESSORS[processor](heads)).processor
        jitter(model)
        ranks.enable(model, **options)
        return train(ranks, model, tiny.inputs(grid, batch=2), applied)

    return case


def jitter(model):
    """What processors learn begins alike in all heads and channels, or as identity: move it away from there."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "processor" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def orders(tiny, ranks):
    """apply before and after enable_parallelism, twice; a copy and restore in each case."""
    found = {}
    inputs = tiny.inputs((5, 2, 3))

    def output(model):
        with torch.no_grad():
            return model(**inputs)[0]

    def apply(model):
        vmonarch.apply(model, VMonarchProcessor())

    ways = {
        "apply-enable": [apply, ranks.enable],
        "enable-apply": [ranks.enable, apply],
        "apply-enable-apply": [apply, ranks.enable, apply],
        "based": [ranks.enable, lambda model: vmonarch.apply(model, BasedProcessor(feature_dim=4))],
    }
    for name, steps in ways.items():
        model = tiny.transformer()
        for step in steps:
            step(model)
        found[name] = output(model)
        found[f"{name}, copied"] = output(copy.deepcopy(model))
        vmonarch.restore(model)
        found[f"{name}, restored"] = output(model)
    return found


def dense_layers(tiny, ranks):
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor(dense_layers=1))
    ranks.enable(model)
    return train(ranks, model, tiny.inputs((5, 2, 3)))


def pipeline(kind, processor):
    """A whole pipeline: its scheduler tells the dense steps, its cross-attention is with text and image."""

    def case(tiny, ranks):
        pipe = tiny.pipeline(kind)
        vmonarch.apply(pipe, processor())
        ranks.enable(pipe.transformer)
        return {"out": tiny.generate(pipe, steps=3, guidance=3.0)}

    return case


def refreshed(make, heads, height=32):
    """Two steps refresh, two use residuals, in a pipeline whose guidance has two branches."""

    def case(tiny, ranks):
        pipe = tiny.pipeline("t2v")
        pipe.transformer = tiny.transformer(num_attention_heads=heads)
        vmonarch.apply(pipe, make())
        ranks.enable(pipe.transformer, ulysses_anything=True)
        return {"out": tiny.generate(pipe, steps=4, height=height)}

    return case


def cached(tiny, ranks):
    """A cache that reuses some of what the transformer computes."""
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    # The other way round, the first block's cache would be given all tokens.
    pipe.transformer.enable_cache(MagCacheConfig(num_inference_steps=4, mag_ratios=[1.0] * 4, max_skip_steps=1))
    ranks.enable(pipe.transformer)
    return {"out": tiny.generate(pipe, steps=4, guidance=3.0)}


def checkpointed(tiny, ranks, **options):
    """Blocks computed again in backward, when the transformer has seen another grid of as many tokens."""
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor(**options))
    ranks.enable(model)
    model.train()
    model.enable_gradient_checkpointing()
    outputs = [model(**tiny.inputs(grid))[0] for grid in ((3, 2, 4), (4, 2, 3))]
    sum((out * out.detach().cos()).sum() for out in outputs).backward()
    return {name: ranks.total(p.grad) for name, p in model.named_parameters()}


def autocast(tiny, ranks, **options):
    model = tiny.transformer(num_attention_heads=3)
    vmonarch.apply(model, VMonarchProcessor(**options))
    ranks.enable(model)
    with torch.autocast("cpu", torch.bfloat16):
        return {"out": tiny.run(model, (5, 2, 3))}


def autocast_full(tiny, ranks):
    """Forward and backward where autocast computes the norms of queries and keys in float32, as it does on CUDA."""
    model = tiny.transformer(num_attention_heads=3)
    vmonarch.apply(model, FullAttentionProcessor())
    for block in model.blocks:
        for norm in (block.attn1.norm_q, block.attn1.norm_k):
            norm.register_forward_hook(lambda module, inputs, output: output.float())
    ranks.enable(model)
    return train(ranks, model, tiny.inputs((5, 2, 3), batch=2), autocast=True)


def compiled(tiny, ranks):
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor())
    ranks.enable(model)
    if ranks.parallel:
        torch._dynamo.reset()
        model.compile_repeated_blocks(backend="eager")
    return {"out": tiny.run(model, (5, 2, 3))}


def adapter(tiny, ranks):
    """What an adapter holds, loaded where parallelism is enabled already."""
    path = Path(os.environ["ADAPTER"])
    model = tiny.transformer(num_attention_heads=3)
    ranks.enable(model)
    vmonarch.load_adapter(model, path)
    return {"out": tiny.run(model, (5, 2, 3))}


COUNTED = {"heads": 3, "grid": (5, 3, 3)}
SAME = {
    **{f"{processor}-{split}": same(processor, split) for processor in PROCESSORS for split in SPLITS},
    "orders": orders,
    "dense-layers": dense_layers,
    "dense-steps": pipeline("t2v", lambda: VMonarchProcessor(dense_steps=(0, 2))),
    "bias-of-tensors": pipeline("t2v", lambda: FlashBiasProcessor(table(2, 18))),
    "refresh": refreshed(lambda: VMonarchProcessor(refresh=(0, 2)), 2),
    "refresh-uneven-heads": refreshed(lambda: VMonarchProcessor(refresh=(0, 2), bias=decay_of(3)), 3),
    "image": pipeline("i2v-2.1", VMonarchProcessor),
    "chronoedit": pipeline("chronoedit", VMonarchProcessor),
    "timestep-per-token": pipeline("t2v-5b", VMonarchProcessor),
    "cache": cached,
    "checkpointed": checkpointed,
    "autocast": autocast,
    "autocast-full": autocast_full,
    "compiled": compiled,
    "adapter": adapter,
    **joint_parallel.SAME,
}


def sent(tiny, ranks):
    """Bytes that this rank sends in a forward call of one layer."""
    model = tiny.transformer(num_attention_heads=COUNTED["heads"], num_layers=1)
    vmonarch.apply(model, VMonarchProcessor())
    ranks.enable(model, ulysses_anything=True)
    counted = dist.all_to_all_single = Sent()
    tiny.run(model, COUNTED["grid"])
    dist.all_to_all_single = counted.all_to_all_single
    return counted.bytes


def refused(act):
    """The error of `act(tiny, ranks)`."""

    def case(tiny, ranks):
        try:
            act(tiny, ranks)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return case


def refused_on(build, grid=(5, 2, 3), **options):
    """A model under parallelism: when it is made, or when it runs."""
    return refused(lambda tiny, ranks: tiny.run(build(tiny, lambda model: ranks.enable(model, **options)), grid))


def refused_by_apply(processor=None, heads=2, **options):
    def act(tiny, ranks):
        model = tiny.transformer(num_attention_heads=heads)
        ranks.enable(model, **options)
        try:
            vmonarch.apply(model, processor or VMonarchProcessor())
        except Exception:
            assert not hasattr(model, "_vmonarch_record")
            raise

    return refused(act)


def applied(processor, heads=2):
    def build(tiny, enable):
        model = tiny.transformer(num_attention_heads=heads)
        vmonarch.apply(model, processor)
        enable(model)
        return model

    return build


def with_first_block_cache(*steps):
    def build(tiny, enable):
        model = tiny.transformer()
        take = {
            "apply": lambda: vmonarch.apply(model, VMonarchProcessor()),
            "cache": lambda: model.enable_cache(FirstBlockCacheConfig(threshold=0.1)),
            "parallel": lambda: enable(model),
        }
        for step in steps:
            take[step]()
        return model

    return build


def compiled_whole(tiny, enable):
    model = applied(VMonarchProcessor())(tiny, enable)
    # diffusers' hooks read signatures in their first call, which cannot be compiled.
    tiny.run(model, (5, 2, 3))
    torch._dynamo.reset()
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    return model


RING = {"ulysses_degree": 1, "ring_degree": RANKS, "mesh": None}
NO_RING = "NotImplementedError: ring_degree=2 is not supported"
NO_HEAD = "ValueError: ulysses_degree=2, but every rank needs a head of self-attention"
# name -> (what is tried, its error)
REFUSED = {
    "ring": (refused_on(applied(VMonarchProcessor()), **RING), NO_RING),
    "ring-before-apply": (refused_by_apply(**RING), NO_RING),
    "few-heads": (refused_on(applied(VMonarchProcessor(), heads=1)), NO_HEAD),
    "few-heads-before-apply": (refused_by_apply(heads=1), NO_HEAD),
    "dense-layers-of-odd-heads": (
        refused_by_apply(VMonarchProcessor(dense_layers=1), heads=3),
        "ValueError: dense_layers keeps the model's own attention, which shares heads evenly"),
    "odd-tokens": (
        refused_on(applied(VMonarchProcessor()), grid=(5, 3, 3)),
        "AssertionError: Tensor size along dimension to be sharded must be divisible by mesh size"),
    "bias-of-other-heads": (
        refused_on(applied(FlashBiasProcessor(table(2, 30)), heads=4)),
        "ValueError: bias has 2 heads, but attention has 4"),
    "other-grid": (
        refused_on(applied(VMonarchProcessor(grid=(5, 1, 3)))),
        "ValueError: grid=(5, 1, 3), but the transformer was given the grid (5, 2, 3)"),
    **{
        f"first-block-cache-{'-'.join(steps)}": (
            refused_on(with_first_block_cache(*steps)),
            "NotImplementedError: First Block Cache is not supported under context parallelism")
        for steps in (("apply", "cache", "parallel"), ("parallel", "cache", "apply"))
    },
    "compiled-whole": (
        refused_on(compiled_whole), "attention under context parallelism exchanges tokens between processes"),
    **{name: (refused(act), error) for name, (act, error) in joint_parallel.REFUSED.items()},
}  # fmt: skip


def stand_for_accelerators():
    """Let diffusers take processes on the CPU for ranks that have an accelerator each."""
    torch.accelerator.device_count = lambda: 1
    # A torch that was built for CUDA names it where there is none, too.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    dist.all_gather = all_gather_of_any_sizes


def all_gather_of_any_sizes(outputs, x, group=None):
    """diffusers gathers parts of different sizes by `all_gather`, which NCCL can and gloo cannot."""
    for rank, out in enumerate(outputs):
        if rank == dist.get_rank(group):
            out.copy_(x)
        dist.broadcast(out, rank, group)


def main(tiny, folder, names):
    torch.set_num_threads(1)
    stand_for_accelerators()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    ranks, results = Rank(), {}
    for name in names:
        try:
            case = REFUSED[name][0] if name in REFUSED else (SAME | {"sent": sent})[name]
            results[name] = case(tiny, ranks)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    import tiny_wan

    main(tiny_wan, sys.argv[1], sys.argv[2:])
