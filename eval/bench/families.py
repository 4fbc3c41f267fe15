"""A forward call of transformers beyond Wan, with VMonarch and with exact attention: `vmonarch bench families`.

Models have random weights, their real widths, and a few of their blocks, which are all alike. Blocks are compiled. One
sample of a prompt that fills its places; the stock models mask it nevertheless, and their attention with a mask is not
that of the fastest kernels. `exact` is therefore there too: exact attention without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch.utils._pytree import tree_map_only

from vmonarch.attend import Exact, Result
from vmonarch.base import FullAttentionProcessor, Layer
from vmonarch.call import Call
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways, bytes_of
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


def case_of(
    name: str, model: str, config: Inputs, grid: LatentGrid, of: int, inputs: Callable[[LatentGrid, Any], Inputs]
) -> Case:
    """A model at a size.

    Args:
        model: class in diffusers. config: what differs from its defaults, with few blocks.
        grid: of the video. of: how many blocks the real model has.
        inputs: (grid, noise) -> what forward is called with; `noise` makes tensors of the model's dtype.
    """
    label = f"{name} {'x'.join(map(str, grid))}"
    return Case(label=label, model=model, config=config, grid=grid, of=of, inputs=inputs)


CASES = (
    case_of(
        "HunyuanVideo 720p",
        "HunyuanVideoTransformer3DModel",
        {"num_layers": 1, "num_single_layers": 1},
        LatentGrid(33, 45, 80),
        60,
        lambda grid, noise: {
            "hidden_states": noise(1, 16, grid.frames, 2 * grid.height, 2 * grid.width),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": noise(1, 256, 4096),
            "encoder_attention_mask": torch.ones(1, 256),
            "pooled_projections": noise(1, 768),
            "guidance": torch.tensor([6000.0]),
        },
    ),
    case_of(
        "HunyuanVideo-1.5 720p",
        "HunyuanVideo15Transformer3DModel",
        {"num_layers": 2, "task_type": "t2v"},
        LatentGrid(31, 45, 80),
        54,
        lambda grid, noise: {
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
    case_of(
        "LTX-2 1088p",
        "LTX2VideoTransformer3DModel",
        {"num_layers": 4},
        LatentGrid(16, 34, 60),
        48,
        lambda grid, noise: {
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
    case_of(
        "Kandinsky 5 Lite 10 s",
        "Kandinsky5Transformer3DModel",
        {"model_dim": 1792, "ff_dim": 7168, "num_visual_blocks": 2},
        LatentGrid(61, 32, 48),
        32,
        lambda grid, noise: {
            "hidden_states": noise(1, grid.frames, 2 * grid.height, 2 * grid.width, 4),
            "encoder_hidden_states": noise(1, 256, 3584),
            "timestep": torch.tensor([500.0]),
            "pooled_projections": noise(1, 768),
            "visual_rope_pos": tuple(torch.arange(size) for size in grid),
            "text_rope_pos": torch.arange(256),
        },
    ),
    case_of(
        "Cosmos 2.5 2B 704p",
        "CosmosTransformer3DModel",
        {"num_attention_heads": 16, "num_layers": 4, "extra_pos_embed_type": None, "concat_padding_mask": False},
        LatentGrid(24, 44, 80),
        28,
        lambda grid, noise: {
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

        of = bytes_of(x for x in inputs.values() if isinstance(x, torch.Tensor))
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
