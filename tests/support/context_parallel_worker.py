"""What `test_context_parallel.py` runs: alone, in its own process, and on two ranks.

    torchrun --nproc-per-node 2 context_parallel_worker.py FOLDER CASE …

is both ranks; each writes what it found to the folder. With DEVICE=cuda in the environment each has a GPU.
"""

from __future__ import annotations

import copy
import datetime
import functools
import os
import sys
import traceback
from pathlib import Path

import tiny_pipelines
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from tiny_families import FAMILIES, GRID, first

import vmonarch
from vmonarch import AttentionPlan, BasedProcessor, ExactBlocks, FlashBiasProcessor, Refresh, TwoResolutionProcessor
from vmonarch import VMonarchProcessor as VMonarch
from vmonarch.base import FullAttentionProcessor
from vmonarch.bias import SpatioTemporalDecay
from vmonarch.families import FAMILIES as RECORDS
from vmonarch.hooks import record_of

RANKS = 2


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
        self.device = device
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


# Of three heads the first rank has t1 and full attention, in another order than its heads.
PLAN = AttentionPlan(
    {"t1": {"num_iterations": 1}, "own": {"exact": {"band": 0}}, "full": None},
    {"transformer": [["t1", "full", "own"], ["full", "t1", "own"]]},
)


def decay_of(heads):
    """A bias that differs from head to head."""
    decay = SpatioTemporalDecay(heads, reach=(2.0, 3.0, 3.0))
    decay.decay.data *= 1 + torch.arange(heads)[:, None]
    return decay


def table(heads, tokens):
    """The factors of a bias."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, tokens, heads, 2, generator=generator) for _ in range(2))


# For three heads.
PROCESSORS = {
    "vmonarch-exact-blocks": lambda: VMonarch(exact=ExactBlocks(columns=(0,), band=0), coarse=2),
    "vmonarch-bias": lambda: VMonarch(bias=decay_of(3)),
    "flash-bias": lambda: FlashBiasProcessor(decay_of(3)),
    "based": lambda: BasedProcessor(feature_dim=4, decay=True),
    "plan": lambda: VMonarch(plan=PLAN),
    "full": FullAttentionProcessor,
}


# Models with a processor and their inputs, by functions of `tiny_wan`.


def wan(processor=VMonarch, heads=2, grid=(5, 2, 3), cache=None):
    """One of tiny Wan models; `processor` makes the processor, `cache` is one of diffusers."""

    def build(tiny):
        model = tiny.transformer(num_attention_heads=heads)
        vmonarch.apply(model, processor())
        if cache is not None:
            model.enable_cache(cache)
        return tiny.jitter(model), tiny.inputs(grid, batch=2)

    return build


def family(name, processor=VMonarch, grid=GRID, **config):
    """A model beyond the Wan family, of which one sample in two may have a shorter prompt."""

    def build(tiny):
        case = FAMILIES[name]
        model = case.make(**config)
        vmonarch.apply(model, processor())
        return model, case.call(grid)

    return build


# What is done with them.


def run(model, inputs):
    with torch.no_grad():
        return first(model(**inputs))


def forward(build, compiled=False, **parallel):
    def case(tiny, ranks):
        model, inputs = build(tiny)
        ranks.enable(model, **parallel)
        if compiled and ranks.parallel:
            torch._dynamo.reset()
            model.compile_repeated_blocks(backend="eager")
        return {"out": run(model, inputs)}

    return case


def train(ranks, model, inputs):
    """The output, and gradients of all parameters and of biases, summed over ranks."""
    out = first(model(**inputs))
    (out * out.detach().cos()).sum().backward()
    bias = getattr(record_of(model).processor, "bias", None)
    parameters = [*model.named_parameters(), *(bias.named_parameters("bias") if bias is not None else ())]
    # A rank may have no part in a parameter.
    return {"out": out.detach()} | {
        name: ranks.total(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in parameters
    }


def gradients(build, checkpointed=False, **parallel):
    def case(tiny, ranks):
        model, inputs = build(tiny)
        ranks.enable(model, **parallel)
        if checkpointed:
            model.train().enable_gradient_checkpointing()
        found = train(ranks, model, inputs)
        # What moves all logits of a query alike has a gradient that is nothing but rounding.
        least = 1e-6 * max(grad.abs().max() for grad in found.values())
        return {name: grad for name, grad in found.items() if grad.abs().max() > least}

    return case


def applied_in_parallel(processor):
    """apply after enable_parallelism; a copy, and restore."""

    def case(tiny, ranks):
        model, inputs = tiny.transformer(), tiny.inputs((5, 2, 3))
        ranks.enable(model)
        vmonarch.apply(model, processor)
        tiny.jitter(model)
        found = {"applied": run(model, inputs), "copied": run(copy.deepcopy(model), inputs)}
        vmonarch.restore(model)
        return found | {"restored": run(model, inputs)}

    return case


def pipeline(kind, processor, heads=2, anything=False, report=False, **call):
    """A whole pipeline: its scheduler tells the steps, its cross-attention is with text and image."""

    def case(tiny, ranks):
        pipe = tiny.pipeline(kind)
        if heads != 2:
            pipe.transformer = tiny.transformer(num_attention_heads=heads)
        vmonarch.apply(pipe, processor)
        ranks.enable(pipe.transformer, ulysses_anything=anything)
        found = {"out": tiny.generate(pipe, **{"steps": 3, "guidance": 3.0} | call)}
        if report:
            ran = vmonarch.report(pipe)
            found |= {
                "exact": torch.tensor([*ran.exact]),
                "errors": torch.tensor([error or 0.0 for error in ran.exact.values()]),
                "predicted": torch.tensor([*ran.predicted]),
            }
        return found

    return case


def joint_pipeline(name, **options):
    """With conditions every token, or frame, has a noise level of its own; LTX then does not tell the grid."""
    options |= {"grid": tiny_pipelines.GRID} if name == "ltx-condition" else {}

    def case(tiny, ranks):
        pipe, call = tiny_pipelines.pipeline(name)
        vmonarch.apply(pipe, VMonarch(**options))
        ranks.enable(pipe.transformer)
        return {"out": tiny_pipelines.sample(pipe, call)}

    return case


# 105 tokens: 53 and 52.
ODD = (5, 7, 3)
# With a single frame, whose tokens are all a condition of HunyuanVideo's image-to-video model.
FRAME = (1, 4, 6)
FORWARD_ONLY = ("ltx2", "kandinsky5")
SUPPORTED = [name for name, case in FAMILIES.items() if RECORDS[case.model].spread is not None]
# Pipelines, some of which have names of their own.
REFRESHED = {*SUPPORTED, "skyreels", "ltx-condition", "cosmos-transfer"} & set(tiny_pipelines.PIPELINES)
THREE_HEADS = {
    "plan": lambda: VMonarch(plan=PLAN),
    "two-resolution": lambda: TwoResolutionProcessor(share=0.2),
    "flash-bias": lambda: FlashBiasProcessor(SpatioTemporalDecay(3)),
    "dense-layers": lambda: VMonarch(dense_layers=1),
}
SAME = {
    # Two heads and one, 23 tokens and 22.
    **{
        f"{name}-uneven": gradients(wan(processor, heads=3, grid=(5, 3, 3)), ulysses_anything=True)
        for name, processor in PROCESSORS.items()
    },
    "applied-in-parallel": applied_in_parallel(VMonarch()),
    "based-in-parallel": applied_in_parallel(BasedProcessor(feature_dim=4)),
    "dense-layers": gradients(wan(lambda: VMonarch(dense_layers=1))),
    "dense-steps": pipeline("t2v", VMonarch(dense_steps=(0, 2))),
    "bias-of-tensors": pipeline("t2v", FlashBiasProcessor(table(2, 18))),
    # Ranks measure the error of their own heads, and decide alike what is exact and what is predicted.
    "refresh-tolerance": pipeline(
        "t2v", VMonarch(refresh=Refresh(tolerance=0.2, cache=0.9)), heads=3, steps=10, guidance=5.0, anything=True,
        report=True),
    "image": pipeline("i2v-2.1", VMonarch()),
    "chronoedit": pipeline("chronoedit", VMonarch()),
    "timestep-per-token": pipeline("t2v-5b", VMonarch()),
    "cache": forward(wan(cache=MagCacheConfig(num_inference_steps=4, mag_ratios=[1.0] * 4))),
    "compiled": forward(wan(), compiled=True),
    **{f"joint-{name}": forward(family(name)) for name in SUPPORTED},
    **{f"joint-gradients-{name}": gradients(family(name)) for name in SUPPORTED if name not in FORWARD_ONLY},
    **{
        f"joint-odd-tokens-{name}": forward(family(name, grid=ODD), ulysses_anything=True)
        for name in ("hunyuan-i2v", "mochi", "ltx")
    },
    "joint-one-frame": forward(family("hunyuan-i2v", grid=FRAME)),
    **{
        f"joint-three-heads-{name}": forward(family("hunyuan", ours, num_attention_heads=3))
        for name, ours in THREE_HEADS.items()
    },
    "joint-dense-layers-unseen-mask": forward(family("hunyuan15", lambda: VMonarch(dense_layers=1))),
    "joint-gradients-three-heads": gradients(family("hunyuan-i2v", num_attention_heads=3)),
    "joint-gradients-checkpointed": gradients(family("hunyuan-i2v"), checkpointed=True),
    "joint-dense-steps": joint_pipeline("hunyuan", dense_steps=(0, 2)),
    **{f"joint-refresh-{name}": joint_pipeline(name, dense_steps=1, refresh=(1, 3)) for name in sorted(REFRESHED)},
    "joint-compiled": forward(family("hunyuan"), compiled=True),
}  # fmt: skip


def errors(tiny, ranks):
    """Relative errors in bfloat16 of output and gradients, by model, by the number of ranks and by tensor.

    240 tokens on each rank, two and a half frames; of three heads the first rank has two.
    """
    grid, heads = (5, 8, 12), {"num_attention_heads": 3, "attention_head_dim": 64}
    models = {
        "wan": lambda: (tiny.transformer(**heads), tiny.inputs(grid)),
        # Text of two lengths beside the video.
        "hunyuan": lambda: (
            FAMILIES["hunyuan"].make(**heads, rope_axes_dim=(16, 24, 24)), FAMILIES["hunyuan"].call(grid)),
    }  # fmt: skip

    def learnt(make, ranks_of, dtype, **options):
        model, inputs = make()
        model.to(ranks.device, dtype)
        vmonarch.apply(model, VMonarch(**options))
        ranks_of.enable(model)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                kept = not value.is_floating_point() or name == "timestep"
                inputs[name] = value.to(ranks.device, None if kept else dtype)
        return {name: tensor.double() for name, tensor in train(ranks_of, model, inputs).items()}

    report = {}
    for model, make in models.items():
        exact = learnt(make, Alone(), torch.float32, implementation="torch")
        # Some gradients are nothing but rounding.
        least = 1e-6 * max(tensor.norm() for tensor in exact.values())
        for number, ranks_of in ((1, Alone()), (2, ranks)):
            found = learnt(make, ranks_of, torch.bfloat16)
            report[model, number] = {
                name: ((found[name] - tensor).norm() / tensor.norm()).item()
                for name, tensor in exact.items()
                if tensor.norm() > least
            }
    return report


# What is refused: when a model is made, or when it runs.


def enabled_before(make, processor=None, **parallel):
    def act(tiny, ranks):
        model = make(tiny)
        ranks.enable(model, **parallel)
        try:
            vmonarch.apply(model, processor or VMonarch())
        except Exception:
            assert not hasattr(model, "_vmonarch_record")
            raise

    return act


def with_a_plan(tiny, ranks):
    model, _ = family("hunyuan")(tiny)
    model.enable_parallelism = functools.partial(model.enable_parallelism, cp_plan={})
    ranks.enable(model)


RING = {"ulysses_degree": 1, "ring_degree": RANKS, "mesh": None}
NO_RING = "NotImplementedError: ring_degree=2 is not supported"
# name -> (what is tried, its error)
REFUSED = {
    "ring": (forward(wan(), **RING), NO_RING),
    "ring-before-apply": (enabled_before(lambda tiny: tiny.transformer(), **RING), NO_RING),
    "few-heads": (
        forward(wan(heads=1)),
        "ValueError: ulysses_degree=2, but every rank needs a head of self-attention, which has 1: use at most 1"),
    "dense-layers-of-odd-heads": (
        enabled_before(lambda tiny: tiny.transformer(num_attention_heads=3), VMonarch(dense_layers=1)),
        "ValueError: dense_layers keeps the model's own attention, which shares heads evenly"),
    "bias-of-other-heads": (
        forward(wan(lambda: FlashBiasProcessor(table(2, 30)), heads=4)),
        "ValueError: bias has 2 heads, but attention has 4"),
    "first-block-cache": (
        forward(wan(cache=FirstBlockCacheConfig(threshold=0.1))),
        "NotImplementedError: First Block Cache is not supported under context parallelism"),
    **{
        f"joint-{name}": (
            forward(family(name)), f"NotImplementedError: context parallelism is not supported with {case.model}")
        for name, case in FAMILIES.items() if name not in SUPPORTED
    },
    "joint-enabled-before": (
        enabled_before(lambda tiny: FAMILIES["ltx"].make()),
        "ValueError: enable_parallelism has spread the tokens of a LTXVideoTransformer3DModel in another way"),
    "joint-plan": (with_a_plan, "ValueError: cp_plan must be left alone"),
    "joint-odd-heads-of-text": (
        forward(family("minimax-h3", num_attention_heads=3)),
        "ValueError: attention beside the video's to itself stays the model's own, which shares heads evenly: its 3 do"
        " not divide"),
    **{
        f"joint-gradients-{name}": (
            gradients(family(name)), "NotImplementedError: gradients are not supported under context")
        for name in FORWARD_ONLY
    },
}  # fmt: skip


def found_by(case, *given):
    """What a case finds, or its error."""
    try:
        return case(*given)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


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
    device = os.environ.get("DEVICE", "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        stand_for_accelerators()
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=300))
    cases = SAME | {name: case for name, (case, _) in REFUSED.items()} | {"errors": errors}
    ranks = Rank(device)
    results = {name: found_by(cases[name], tiny, ranks) for name in names}
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    import tiny_wan

    main(tiny_wan, sys.argv[1], sys.argv[2:])
