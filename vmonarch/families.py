"""The families of video transformers in diffusers: where the video is in their calls, modules and sequences.

Shapes: B batch, C channels, T × H × W the latent grid in tokens, S tokens of a sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.grid import LatentGrid

Arguments = Mapping[str, Any]
# Arguments of a forward call that change from one denoising step to the next, in any of the models.
BY_STEP = {
    "hidden_states", "timestep", "timestep_r", "r_timestep", "timestep_indices", "sigma",
    "audio_hidden_states", "audio_timestep", "audio_sigma", "block_controlnet_hidden_states",
    *(f"{kind}_{what}" for kind in ("vision", "sound", "action") for what in ("tokens", "timesteps")),
}  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """How the tokens of a model beyond the Wan family are spread over ranks, for diffusers' `enable_parallelism`.

    diffusers has a `cp_plan` for few of these models. Our plans split the video's tokens, keep all others (text,
    images, sound) whole on every rank, and gather the video at the end. Attention to text then needs no other rank,
    whatever its masks.

    Args:
        cp_plan: makes diffusers' plan, what is split and gathered, from a model's config; None where the class has one.
        others_whole: whether every rank has all tokens beside the video's in its sequence. Otherwise ranks have
            consecutive parts of the whole sequence.
        across: names, in a block, of other attention modules whose keys are the video's. The model's own attention
            computes them, with all ranks.
        leading: name of the blocks' argument that says how many of the video's first tokens are a condition.
        differentiable: whether the ranks' gradients add up to those of one process. They do not where all ranks
            compute an output from whole tokens.
    """

    cp_plan: Callable[[Any], dict[str, Any]] | None
    others_whole: bool = False
    across: tuple[str, ...] = ()
    leading: str | None = None
    differentiable: bool = True


@dataclass(frozen=True)
class Family:
    """What the package knows about the models of one class.

    Args:
        grid: reads the grid from the arguments of a forward call and the config; None where they do not give it.
        blocks: names of the lists of transformer blocks, in the order in which they run.
        attention: name of the video's self-attention module in a block.
        before: number of other tokens before the video in a joint sequence, from the call's arguments; None for all.
        own: whether our processor replaces the module's own completely (`vmonarch.own`). In other families the
            module's processor stays, and only its softmax is replaced (`vmonarch.borrowed`).
        unseen_mask: name of an argument of the module's processor: a mask of its last keys [B, X], from which the
            processor would make a mask of all pairs of tokens.
        sparse: name of an argument of the module's processor: a mapping that chooses the model's own sparse attention,
            which ours replaces. Its "to_fractal" says that the tokens of a frame are not in raster order.
        videos: number of videos of the grid's size in a layer's sequence, one after the other, from the config, the
            layer's number and the number of layers.
        spread: how tokens are spread over ranks; None for models that context parallelism does not support, and for
            the Wan family, whose tokens are all the video's.
    """

    grid: Callable[[Arguments, Any], LatentGrid | None]
    blocks: tuple[str, ...] = ("transformer_blocks",)
    attention: str = "attn1"
    before: Callable[[Arguments], int | None] = lambda arguments: 0
    own: bool = False
    unseen_mask: str | None = None
    sparse: str | None = None
    videos: Callable[[Any, int, int], int] = lambda config, layer, layers: 1
    spread: Spread | None = None

    def layers(self, transformer: Any) -> list[tuple[int, torch.nn.Module]]:
        """(layer, module) of every self-attention module of the video, in the order of `blocks`."""
        blocks = list(enumerate(self.blocks_of(transformer)))
        if hasattr(transformer, "vace_blocks"):
            # A control block of VACE counts as the layer that it feeds.
            blocks += zip(transformer.config.vace_layers, transformer.vace_blocks, strict=True)
        return [(layer, module) for layer, block in blocks for module in self.attention_in(block)]

    def attention_in(self, block: torch.nn.Module) -> list[torch.nn.Module]:
        """The video's self-attention in a block."""
        return _modules_named(block, (self.attention,))

    def sharing(self, transformer: Any) -> list[torch.nn.Module]:
        """The attention modules whose keys include the video, which `spread` splits."""
        assert self.spread is not None
        names = (self.attention, *self.spread.across)
        return [module for block in self.blocks_of(transformer) for module in _modules_named(block, names)]

    def blocks_of(self, transformer: Any) -> list[torch.nn.Module]:
        return [block for name in self.blocks for block in getattr(transformer, name)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (next(name for name, family in FAMILIES.items() if family is self),)


def _modules_named(block: torch.nn.Module, names: Collection[str]) -> list[torch.nn.Module]:
    # Names of wrappers (torch.compile, FSDP, checkpointing) are left out.
    unwrapped = lambda name: ".".join(part for part in name.split(".") if not part.startswith("_"))
    return [module for name, module in block.named_modules() if unwrapped(name) in names]


def _patch(config: Any) -> tuple[int, int, int]:
    size = config.patch_size
    return (getattr(config, "patch_size_t", None) or 1, size, size) if isinstance(size, int) else tuple(size)


def _of_latents(*axes: int) -> Callable[[Arguments, Any], LatentGrid | None]:
    """Reads the grid from latents with five dimensions; `axes` are frames, rows and columns."""

    def grid(arguments: Arguments, config: Any) -> LatentGrid | None:
        latents = arguments.get("hidden_states")
        # The transformer refuses anything else.
        if not isinstance(latents, torch.Tensor) or latents.ndim != 5:
            return None
        return LatentGrid(*(latents.shape[axis] // n for axis, n in zip(axes, _patch(config), strict=True)))

    return grid


_BCTHW, _BTCHW, _BTHWC = _of_latents(2, 3, 4), _of_latents(1, 3, 4), _of_latents(1, 2, 3)


def _of_arguments(arguments: Arguments, config: Any) -> LatentGrid | None:
    sizes = [arguments.get(name) for name in ("num_frames", "height", "width")]
    return None if None in sizes else LatentGrid(*sizes)  # type: ignore[arg-type]


def _raster(places: torch.Tensor) -> LatentGrid | None:
    """The grid whose raster order gives the tokens' coordinates [3, S] (frame, row, column); None if there is none."""
    # Frames may occur twice, rows and columns do not.
    height, width = (len(axis.unique()) for axis in places[1:])
    frames = places.shape[1] // max(height * width, 1)
    if not frames or frames * height * width != places.shape[1]:
        return None
    time, rows, columns = places = places.unflatten(1, (frames, height, width))
    raster = torch.broadcast_tensors(time[:, :1, :1], rows[:1, :, :1], columns[:1, :1])
    return LatentGrid(frames, height, width) if torch.equal(torch.stack(raster), places) else None


def _of_ltx(arguments: Arguments, config: Any) -> LatentGrid | None:
    """The grid of LTX; from its coordinates [B, 3, S] where the multi-prompt pipeline leaves the sizes at 1."""
    grid, coordinates = _of_arguments(arguments, config), arguments.get("video_coords")
    return grid if grid != (1, 1, 1) or coordinates is None else _raster(coordinates[0])


def _of_packed(arguments: Arguments, config: Any) -> LatentGrid | None:
    """The grid of MiniMax-H3, from the coordinates [S, 3] after the last sound: those of the video to be made."""
    places, sound = arguments.get("position_ids"), arguments.get("audio_indices")
    # torch.compile of a whole transformer does not know values.
    if places is None or sound is None or not len(sound) or torch.compiler.is_compiling():
        return None
    return _raster(places[int(sound[-1]) + 1 :].T)


def _of_one_item(arguments: Arguments, config: Any) -> LatentGrid | None:
    shapes = arguments.get("vision_token_shapes")
    return LatentGrid(*shapes[0]) if shapes is not None and len(shapes) == 1 else None


def _framepack_history(arguments: Arguments) -> int:
    """Number of tokens of earlier frames, whose patches grow with their age."""
    patches = {"latents_clean": (1, 2, 2), "latents_history_2x": (2, 4, 4), "latents_history_4x": (4, 8, 8)}
    count = 0
    for name, patch in patches.items():
        latents, places = arguments.get(name), arguments.get(f"indices_{name}")
        if latents is not None and places is not None:
            count += LatentGrid(*(-(-n // p) for n, p in zip(latents.shape[2:], patch, strict=True))).tokens
    return count


def _all_before(arguments: Arguments) -> None:
    return None


def _input(dim: int, dims: int | None = None, split_output: bool = False) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelInput

    return ContextParallelInput(dim, expected_dims=dims, split_output=split_output)


def _outputs(dim: int, count: int = 1) -> dict[int, Any]:
    """Plan entry that splits the first outputs of a module."""
    return dict.fromkeys(range(count), _input(dim, split_output=True))


def _gathered() -> Any:
    from diffusers.models._modeling_parallel import ContextParallelOutput

    return ContextParallelOutput(1)


def _at_embedding(config: Any) -> dict[str, Any]:
    return {"x_embedder": _outputs(1), "rope": _outputs(0, 2), "proj_out": _gathered()}


def _at_first_block(config: Any) -> dict[str, Any]:
    return {
        "transformer_blocks.0": {"hidden_states": _input(1)},
        "transformer_blocks.*": {"image_rotary_emb": [_input(0), _input(0)]},
        "proj_out": _gathered(),
    }


def _mochi(config: Any) -> dict[str, Any]:
    return {"transformer_blocks.0": {"hidden_states": _input(1)}, "rope": _outputs(0, 2), "proj_out": _gathered()}


def _cosmos(config: Any) -> dict[str, Any]:
    # With a condition, every token has its own noise level.
    levels = {"embedded_timestep": _input(1, 3), "temb": _input(1, 3)}
    of_blocks = {"extra_pos_emb": _input(1), "controlnet_residual": _input(1), **levels}
    return _mochi(config) | {"transformer_blocks.*": of_blocks, "norm_out": levels}


def _ltx(config: Any) -> dict[str, Any]:
    # With conditions, every token has its own noise level.
    inputs = {"hidden_states": _input(1), "timestep": _input(1, 2)}
    return {"": inputs, "rope": _outputs(1, 2), "proj_out": _gathered()}


def _ltx2(config: Any) -> dict[str, Any]:
    rotary = _outputs(2 if config.rope_type == "split" else 1, 2)
    return _ltx(config) | {"rope": rotary, "cross_attn_rope": rotary}


def _kandinsky5(config: Any) -> dict[str, Any]:
    blocks = "visual_transformer_blocks"
    return {
        f"{blocks}.0": {"visual_embed": _input(1)},
        f"{blocks}.*": {"rope": _input(1)},
        f"{blocks}.{config.num_visual_blocks - 1}": _gathered(),
    }


_TEXT_WHOLE = Spread(_at_first_block, others_whole=True)
_WAN = Family(_BCTHW, ("blocks",), own=True)
_TWO_STREAMS = ("transformer_blocks", "single_transformer_blocks")
_COGVIDEOX = Family(_BTCHW, before=_all_before, spread=_TEXT_WHOLE)

# By the class of the model in diffusers.
FAMILIES = {
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN,
    "WanAnimateTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": _WAN,
    "HunyuanVideoTransformer3DModel": Family(
        _BCTHW, _TWO_STREAMS, "attn", spread=Spread(_at_embedding, others_whole=True, leading="num_tokens")
    ),
    "HunyuanVideoFramepackTransformer3DModel": Family(_BCTHW, _TWO_STREAMS, "attn", before=_framepack_history),
    "HunyuanVideo15Transformer3DModel": Family(
        _BCTHW, attention="attn", unseen_mask="attention_mask", spread=Spread(_at_embedding, others_whole=True)
    ),
    # Conditions come before the video in one pipeline of LTX, and after it in those of LTX-2.
    "LTXVideoTransformer3DModel": Family(_of_ltx, before=_all_before, spread=Spread(_ltx)),
    "LTX2VideoTransformer3DModel": Family(
        _of_arguments, spread=Spread(_ltx2, across=("video_to_audio_attn",), differentiable=False)
    ),
    "Kandinsky5Transformer3DModel": Family(
        _BTHWC,
        ("visual_transformer_blocks",),
        "self_attention",
        sparse="sparse_params",
        spread=Spread(_kandinsky5, differentiable=False),
    ),
    "Kandinsky6Transformer3DModel": Family(_BTHWC, ("visual_transformer_blocks",), "video_dec_block.self_attention"),
    # In the decoder's blocks, the second video is the encoder's output for the first.
    "MotifVideoTransformer3DModel": Family(
        _BCTHW,
        _TWO_STREAMS,
        "attn",
        videos=lambda config, layer, layers: 1 + (layer >= layers - config.num_decoder_layers),
    ),
    "CosmosTransformer3DModel": Family(_BCTHW, spread=Spread(_cosmos)),
    "Cosmos3OmniTransformer": Family(
        _of_one_item, ("layers",), "self_attn", before=lambda arguments: arguments["und_len"]
    ),
    "CogVideoXTransformer3DModel": _COGVIDEOX,
    "ConsisIDTransformer3DModel": _COGVIDEOX,
    "MochiTransformer3DModel": Family(_BCTHW, spread=Spread(_mochi, others_whole=True)),
    "EasyAnimateTransformer3DModel": Family(_BCTHW, before=_all_before, spread=_TEXT_WHOLE),
    "AllegroTransformer3DModel": Family(_BCTHW),
    "HeliosTransformer3DModel": Family(_BCTHW, ("blocks",), before=_all_before),
    "AnyFlowTransformer3DModel": Family(_BTCHW, ("blocks",)),
    "MiniMaxH3Transformer3DModel": Family(_of_packed, attention="attn", before=_all_before, spread=Spread(None)),
}


def _named(name: str) -> Family:
    return FAMILIES[name]


def heads_of(attn: Any) -> int:
    """The number of heads of an attention module."""
    names = ("heads", "num_heads", "num_attention_heads")
    heads: int = next(getattr(attn, name) for name in names if hasattr(attn, name))
    return heads


SUPPORTED = ", ".join(FAMILIES)
# Names of transformers in pipelines; the last is that of MiniMax-H3's pipelines from references.
_COMPONENTS = ("transformer", "transformer_2", "transformer_ref")


def diffusers_class(module: object) -> type | None:
    """The class of `FAMILIES` that a module is an instance of, or None."""
    for base in type(module).__mro__:
        if base.__name__ in FAMILIES and base.__module__.startswith("diffusers."):
            return base
    return None


def known_family(transformer: object) -> Family:
    """The family of a transformer that `apply` takes."""
    cls: Any = diffusers_class(transformer)
    return FAMILIES[cls.__name__]


def forward_arguments(transformer: Any) -> tuple[str, ...]:
    """Names of the arguments of a transformer's forward."""
    # The signature of a derived class may be generic.
    cls: Any = diffusers_class(transformer)
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def transformers_in(pipe: object) -> dict[str, Any]:
    """The transformers of a pipeline, supported or not, by component name.

    Raises:
        TypeError: this is no pipeline with a transformer.
        ValueError: its transformers are all None.
    """
    if isinstance(pipe, type) or not any(hasattr(pipe, name) for name in _COMPONENTS):
        raise TypeError(
            "pipe_or_transformer must be a pipeline with a video transformer, or such a transformer, got"
            f" {pipe if isinstance(pipe, type) else type(pipe).__name__}; supported: {SUPPORTED}"
        )
    present = {name: found for name in _COMPONENTS if (found := getattr(pipe, name, None)) is not None}
    if not present:
        raise ValueError(f"the {type(pipe).__name__} has no transformer: transformer and transformer_2 are both None")
    return present
