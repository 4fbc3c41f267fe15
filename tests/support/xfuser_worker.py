"""What `test_xfuser.py` runs: alone, in its own process, and on two ranks of xfuser.

    torchrun --nproc-per-node 2 xfuser_worker.py DEVICE FOLDER CASE …

is both ranks, on a cpu or cuda; each writes what it found to the folder. On the CPU, where xfuser refuses to be
imported, it is told while it is imported that there is an accelerator with gloo, and its runner's clocks are stopped;
its groups, all-to-alls, models, state and runner are its own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import context_parallel_worker as parts
import torch

import vmonarch
from vmonarch import VMonarchProcessor

RANKS = 2
# 15 tokens on each rank, none of them at a frame's end; of 45, xfuser pads the second rank's 22 to 23.
EVEN, PADDED = (5, 2, 3), (5, 3, 3)


def dtype_on(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


def place(model, ranks):
    return model if ranks.device == "cpu" else model.to(ranks.device, ranks.dtype)


def build(tiny, **options):
    return tiny.transformer(attention_head_dim=16, **options)


class Alone:
    """One process with all tokens, and diffusers' transformers."""

    def __init__(self, device):
        self.device, self.dtype = device, dtype_on(device)

    def convert(self, model, **options):
        return model

    def choose(self, model, processor, name):
        """Self-attention by `processor`, as a backend of xfuser with this name."""
        vmonarch.apply(model, processor)

    def backend(self, name):
        pass


class Rank:
    """One of two."""

    def __init__(self, device, rank, folder):
        from xfuser.core import distributed

        self.device = "cpu" if device == "cpu" else f"cuda:{rank}"
        self.dtype = dtype_on(device)
        self.communication = "gloo" if device == "cpu" else "nccl"
        distributed.init_distributed_environment(
            RANKS, rank, f"file://{folder}/rendezvous", local_rank=rank, backend=self.communication
        )
        self.spread(ulysses=RANKS)

    def spread(self, ulysses=1, ring=1):
        """How xfuser's attention is spread from now on."""
        from xfuser import xFuserArgs
        from xfuser.core import distributed
        from xfuser.core.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        alone = RANKS // (ulysses * ring)
        distributed.initialize_model_parallel(
            data_parallel_degree=alone, ulysses_degree=ulysses, ring_degree=ring, backend=self.communication
        )
        arguments = xFuserArgs(
            model="none",
            ulysses_degree=ulysses,
            ring_degree=ring,
            data_parallel_degree=alone,
            attention_backend="SDPA" if ring == 1 else "SDPA_FLASH",
        )
        # Of the pipeline it only asks for the sizes.
        pipe = mock.Mock(spec=["transformer"])
        pipe.transformer.config = mock.Mock(patch_size=2, in_channels=16, num_attention_heads=2, attention_head_dim=12)
        distributed.initialize_runtime_state(pipe, arguments.create_config()[0])
        self.state = distributed.get_runtime_state()

    def convert(self, model, **options):
        """A transformer of xfuser with the configuration and weights of one of diffusers."""
        from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

        config = {name: value for name, value in model.config.items() if not name.startswith("_")}
        twin = xFuserWanTransformer3DWrapper(**config, **{"attention_kwargs": {}} | options).eval()
        twin.load_state_dict(model.state_dict())
        return twin

    def choose(self, model, processor, name):
        vmonarch.xfuser.register(processor, name)
        self.backend(name)

    def backend(self, name):
        self.state.set_attention_backend(name)


def run(ranks, model, inputs):
    """The output of a transformer in float32."""
    placed = {name: x.to(ranks.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    placed = {n: x.to(ranks.dtype) if n.endswith("hidden_states") else x for n, x in placed.items()}
    with torch.no_grad():
        return model(**placed)[0].cpu().float()


def output(tiny, ranks, model, grid=EVEN):
    return run(ranks, model, tiny.inputs(grid, batch=2))


def backend(tiny, ranks):
    """Two heads, one for each rank."""
    model = place(ranks.convert(build(tiny)), ranks)
    ranks.choose(model, VMonarchProcessor(bias=parts.decay_of(2)), "vmonarch")
    return output(tiny, ranks, model, PADDED)


def applied(processor):
    """`vmonarch.apply`; three heads, of which the first rank has two."""

    def case(tiny, ranks):
        model = ranks.convert(build(tiny, num_attention_heads=3))
        ranks.backend("SDPA")
        vmonarch.apply(model, parts.PROCESSORS[processor]())
        return output(tiny, ranks, place(tiny.jitter(model), ranks), PADDED)

    return case


def pipeline(tiny, ranks):
    """A whole pipeline, whose scheduler tells the dense steps, with a dense layer; and without ours again."""
    pipe = tiny.pipeline("t2v")
    pipe.transformer = ranks.convert(build(tiny))
    place(pipe, ranks)
    ranks.backend("SDPA")
    with vmonarch.apply(pipe, VMonarchProcessor(dense_steps=(0, 2), dense_layers=1)):
        first = tiny.generate(pipe, steps=3, guidance=3.0)
    found = torch.stack([first, tiny.generate(pipe, steps=3, guidance=3.0)]).cpu().float()

    # 9 tokens: theirs attends to the padding, too, and so do dense steps.
    def generate():
        return tiny.generate(pipe, steps=2, height=16)

    theirs = generate()
    with vmonarch.apply(pipe, VMonarchProcessor(dense_steps=2)):
        assert torch.equal(generate(), theirs)
    return found


def refreshed(tiny, ranks):
    """Two steps refresh, two use residuals; the ranks have 2 and 1 heads, 5 and 4 tokens, and one of padding."""
    pipe = tiny.pipeline("t2v")
    pipe.transformer = ranks.convert(build(tiny, num_attention_heads=3))
    place(pipe, ranks)
    ranks.backend("SDPA")
    vmonarch.apply(pipe, VMonarchProcessor(refresh=(0, 2)))
    return tiny.generate(pipe, steps=4, height=16).cpu().float()


def runner(tiny, ranks):
    """xfuser's runner on a tiny model, with arguments as on the command line: the frames of its video."""
    pipe = tiny.pipeline("t2v")
    pipe.transformer = build(tiny)
    place(pipe, ranks)
    call = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4, "guidance_scale": 3.0}
    words = [word for name, value in call.items() for word in (f"--{name}", str(value))]
    if isinstance(ranks, Alone):
        # Steps 0 and 3 with full attention.
        vmonarch.apply(pipe, VMonarchProcessor(coarse=2, dense_steps=(0, 3)))
        generator = torch.Generator().manual_seed(42)
        return torch.from_numpy(pipe(prompt=tiny.PROMPT, negative_prompt="", generator=generator, **call).frames)

    from xfuser.model_executor.models.runner_models.base_model import MODEL_REGISTRY
    from xfuser.model_executor.models.runner_models.wan import xFuserWan21T2VModel

    frames = []

    class TinyModel(xFuserWan21T2VModel):
        def _load_model(self):
            pipe.transformer = place(ranks.convert(pipe.transformer), ranks)
            if ranks.device == "cpu":
                pipe.to = lambda device: pipe
            return pipe

        def _make_generator(self, seed):
            return torch.Generator().manual_seed(seed)

        def _run_pipe(self, input_args):
            result = super()._run_pipe(input_args | {"negative_prompt": ""})
            frames.append(torch.from_numpy(result.videos[0])[None])
            return result

        def save_output(self, output):
            pass

    MODEL_REGISTRY["tiny"] = TinyModel
    words += ["--model", "tiny", "--prompt", tiny.PROMPT, "--ulysses_degree", str(RANKS), "--output_directory", "."]
    words += ["--flow_shift", "3.0"]
    words += ["--use_hybrid_attn_schedule", "--num_hybrid_attn_high_precision_steps", "1"]
    words += ["--hybrid_attn_low_precision_backend", "vmonarch", "--hybrid-attn-high-precision-backend", "sdpa"]
    with contextlib.ExitStack() as stack:
        if ranks.device == "cpu":
            clock = lambda **options: mock.Mock(elapsed_time=lambda other: 0.0)
            for name, value in {"Event": clock, "synchronize": lambda: None, "empty_cache": lambda: None}.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(sys, "argv", ["run.py", *words]))
        vmonarch.xfuser.register(VMonarchProcessor(coarse=2))
        runpy.run_module("xfuser.runner", run_name="__main__", alter_sys=True)
    return frames[-1]


SAME = {
    "backend": backend,
    **{f"applied-{processor}": applied(processor) for processor in ("flash-bias", "based")},
    "applied-pipeline": pipeline,
    "applied-refresh": refreshed,
    "runner": runner,
}


def run_backend(grid=None, **options):
    def act(tiny, ranks):
        model = place(ranks.convert(build(tiny), **options), ranks)
        ranks.choose(model, VMonarchProcessor(grid=grid), "vmonarch")
        output(tiny, ranks, model)

    return act


def ring(tiny, ranks):
    ranks.spread(ring=RANKS)
    try:
        run_backend()(tiny, ranks)
    finally:
        ranks.spread(ulysses=RANKS)


# name -> (what is tried, its error)
REFUSED = {
    "ring": (ring, "NotImplementedError: ring_degree=2 is not supported"),
    "no-grid": (
        run_backend(attention_kwargs=None),
        "RuntimeError: xfuser's backend vmonarch was given 30 tokens without a grid"),
    "other-grid": (
        run_backend(grid=(5, 3, 2)),
        "ValueError: grid=(5, 3, 2), but xfuser's transformer was given the grid (5, 2, 3)"),
    "name-of-theirs": (
        lambda tiny, ranks: vmonarch.xfuser.register(VMonarchProcessor(), "sdpa"),
        "ValueError: name must not be that of another member of AttentionBackendType, got 'SDPA'"),
}  # fmt: skip


def import_xfuser(device):
    """Import it, on a machine without an accelerator too."""
    if device != "cpu":
        import xfuser  # noqa: F401

        return
    # It takes a torch that was built for CUDA for one that has a GPU, and cuDNN for what can be called.
    torch.version.cuda = None
    torch.backends.cudnn.is_available = lambda: False
    with mock.patch.object(torch.backends.mps, "is_available", lambda: True):
        from xfuser.model_executor.layers import usp
    from yunchang.globals import PROCESS_GROUP

    usp.PROCESS_GROUP = PROCESS_GROUP
    # yunchang makes the groups, but is only looked for where there is a GPU.
    for name, module in list(sys.modules.items()):
        if name.startswith("xfuser.") and hasattr(module, "HAS_LONG_CTX_ATTN"):
            module.HAS_LONG_CTX_ATTN = True


def main(device, folder, names):
    torch.set_num_threads(1)
    os.chdir(folder)
    rank = int(os.environ["RANK"])
    ranks, results = Rank(device, rank, folder), {}
    # The runner ends with the groups.
    for name in sorted(names, key=lambda name: name == "runner"):
        results[name] = parts.found_by(SAME[name] if name in SAME else REFUSED[name][0], tiny_wan, ranks)
    torch.save(results, Path(folder) / f"{rank}.pt")


if __name__ == "__main__":
    kind, output_folder, *words = sys.argv[1:]
    import_xfuser(kind)
    import tiny_wan

    import vmonarch.xfuser

    main(kind, output_folder, words)
