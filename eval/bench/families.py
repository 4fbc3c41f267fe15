"""A forward call of transformers beyond Wan, with VMonarch and with exact attention: `vmonarch bench families`.

Models have random weights, their real widths, and a few of their blocks, which are all alike. Blocks are compiled. One
sample of a prompt that fills its places; the stock models mask it nevertheless, and their attention with a mask is not
that of the fastest kernels. `exact` is therefore there too: exact attention without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch.utils._pytree import tree_map_only

from vmonarch.attend import Exact, Result
from vmonarch.base import FullAttentionProcessor, Layer
from vmonarch.call import Call
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways
from vmonarch.eval.wan_models import random_model, share_weights
from vmonarch.families import known_family
from vmonarch.grid import LatentGrid
from vmonarch.installation import apply
from vmonarch.options import ExactBlocks
from vmonarch.processors import VMonarchProcessor

PRESETS = ("vmonarch", "vmonarch-lite")
METHODS = ("stock", "exact", *PRESETS)
FORMULAE = {
    "forward": "a call of the transformer: its blocks, of which there are fewer than in the model, and what is around",
    "blocks": "block.compile(fullgraph=True, dynamic=False) of every block",
    "error": "‖x − x₀‖ / ‖x₀‖, x₀ by stock diffusers, eager; for VMonarch that of all blocks exact, by its kernels",
}
Inputs = dict[str, Any]


# `config` is what differs from the defaults of the class in diffusers, with few of the `of` blocks of the real model;
# `inputs` makes what forward is called with, by a function that makes tensors of the model's dtype.
CASES = (
    Case(
        label="HunyuanVideo 720p 33x45x80",
        model="HunyuanVideoTransformer3DModel",
        config={"num_layers": 1, "num_single_layers": 1},
        grid=LatentGrid(33, 45, 80),
        of=60,
        inputs=lambda grid, noise: {
            "hidden_states": noise(1, 16, grid.frames, 2 * grid.height, 2 * grid.width),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": noise(1, 256, 4096),
            "encoder_attention_mask": torch.ones(1, 256),
            "pooled_projections": noise(1, 768),
            "guidance": torch.tensor([6000.0]),
        },
    ),
    Case(
        label="HunyuanVideo-1.5 720p 31x45x80",
        model="HunyuanVideo15Transformer3DModel",
        config={"num_layers": 2, "task_type": "t2v"},
        grid=LatentGrid(31, 45, 80),
        of=54,
        inputs=lambda grid, noise: {
            "hidden_states": noise(1, 65, *grid),
            # In the dtype of the weights, as the pipeline gives it.
            "timestep": 500 + 0 * noise(1),
            "encoder_hidden_states": noise(1, 1000, 3584),
            "encoder_attention_mask": torch.ones(1, 1000),
            "encoder_hidden_states_2": noise(1, 256, 1472),
            "encoder_attention_mask_2": torch.ones(1, 256),
            # Nothing but zeros says that there is no image.
            "image_embeds": 0 * noise(1, 729, 1152),
        },
    ),
    Case(
        label="LTX-2 1088p 16x34x60",
        model="LTX2VideoTransformer3DModel",
        config={"num_layers": 4},
        grid=LatentGrid(16, 34, 60),
        of=48,
        inputs=lambda grid, noise: {
            "hidden_states": noise(1, grid.tokens, 128),
            "audio_hidden_states": noise(1, 126, 128),
            "encoder_hidden_states": noise(1, 1024, 3840),
            "audio_encoder_hidden_states": noise(1, 1024, 3840),
            "timestep": torch.tensor([500.0]),
            "num_frames": grid.frames,
            "height": grid.height,
            "width": grid.width,
            "fps": 24.0,
            "audio_num_frames": 126,
        },
    ),
    Case(
        label="Kandinsky 5 Lite 10 s 61x32x48",
        model="Kandinsky5Transformer3DModel",
        config={"model_dim": 1792, "ff_dim": 7168, "num_visual_blocks": 2},
        grid=LatentGrid(61, 32, 48),
        of=32,
        inputs=lambda grid, noise: {
            "hidden_states": noise(1, grid.frames, 2 * grid.height, 2 * grid.width, 4),
            "encoder_hidden_states": noise(1, 256, 3584),
            "timestep": torch.tensor([500.0]),
            "pooled_projections": noise(1, 768),
            "visual_rope_pos": tuple(torch.arange(size) for size in grid),
            "text_rope_pos": torch.arange(256),
        },
    ),
    Case(
        label="Cosmos 2.5 2B 704p 24x44x80",
        model="CosmosTransformer3DModel",
        config={"num_attention_heads": 16, "num_layers": 4, "extra_pos_embed_type": None, "concat_padding_mask": False},
        grid=LatentGrid(24, 44, 80),
        of=28,
        inputs=lambda grid, noise: {
            "hidden_states": noise(1, 16, grid.frames, 2 * grid.height, 2 * grid.width),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": noise(1, 512, 1024),
            "fps": 24,
        },
    ),
)


class Unmasked(Exact):
    """Exact attention of prompts that fill their places: a mask would tell nothing."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        return super().__call__(query, key, value, call._replace(key_mask=None))


class UnmaskedAttentionProcessor(FullAttentionProcessor):
    """`Unmasked` in all layers."""

    def attention(self, layer: Layer) -> Unmasked:
        return Unmasked()


def inputs_of(case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
    """What the model is called with, on the device."""
    generator = torch.Generator(device).manual_seed(1)
    noise = lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype)
    inputs: Inputs = tree_map_only(torch.Tensor, lambda x: x.to(device), case.inputs(case.grid, noise))
    return inputs | {"return_dict": False}


def compiled(model: Any) -> Any:
    """The model with compiled blocks."""
    for name in known_family(model).blocks:
        for block in getattr(model, name):
            block.compile(fullgraph=True, dynamic=False)
    return model


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case, by transformers that share their weights."""
    # Code for the sizes before would count against torch's limit of variants.
    torch.compiler.reset()
    stock = random_model(getattr(diffusers, case.model), case.config, device, dtype)
    inputs = inputs_of(case, device, dtype)

    @torch.no_grad()
    def forward(model: Any) -> torch.Tensor:
        out = model(**inputs)
        return out[0] if isinstance(out, tuple) else out

    @functools.cache
    def all_exact() -> torch.Tensor:
        model = share_weights(stock)
        apply(model, VMonarchProcessor(exact=ExactBlocks(band=case.grid.frames)))
        return forward(model)

    def way(method: str) -> Way:
        model = share_weights(stock)
        if method == "exact":
            apply(model, UnmaskedAttentionProcessor())
        elif method in PRESETS:
            resolve_method(method).install(model)
        compiled(model)
        # The fastest there is takes no mask, as the stock models have.
        backend = "_native_cudnn" if method == "exact" and device.type == "cuda" else "native"

        def run() -> tuple[torch.Tensor, ...]:
            with attention_backend(backend):
                return (forward(model),)

        def found(results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
            if not bool(results[0].isfinite().all()):
                raise RuntimeError("the output is not finite")
            return {"out": all_exact() if method in PRESETS else results[0]}

        of = sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor))
        return Way(run, found, expected, input_bytes=of)

    expected = functools.cache(lambda: {"out": forward(stock).float()})
    return {method: functools.partial(way, method) for method in METHODS}


def bench() -> Bench:
    """The benchmark, for the registry."""
    return Bench(
        name="families",
        methods=METHODS,
        ours=PRESETS,
        cases=CASES,
        ways=ways,
        base="stock",
        formulae=FORMULAE,
        settings={"inputs": "standard normal; random weights", "reference": FORMULAE["error"]},
        describe=lambda case, clock: {name: value for name, value in vars(case).items() if name != "inputs"},
        way_seconds=3.0,
        flushes=1,
    )
