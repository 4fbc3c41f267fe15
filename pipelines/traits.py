"""The pipelines that videos are sampled from: all that differs between their classes in diffusers.

To add one: a record in `TRAITS`, an entry in `configs/defaults.yaml`, and a tiny pipeline in
`tests/support/tiny_folders.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError

if TYPE_CHECKING:
    from vmonarch.pipelines.config import SamplingConfig

TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "WanPipeline", "WanImageToVideoPipeline"
TextLength = tuple[int, int, str]
# Contents of the config.json of a component, by the component's name.
Configs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Traits:
    """What there is to know of the pipelines of one class.

    Args:
        defaults: the entry in `configs/defaults.yaml` with the defaults of the class.
        sizes: `spatial`, `temporal`, `patch` and `axis_tokens` of `ModelFolder`, of the components' configs.
        layers: entries of the transformer's config that add up to its number of layers.
        arguments: what the pipeline's call names the settings that not every pipeline has, by their own names.
        lengths: for each text encoder how many tokens a prompt has, how many the encoder sees, after which the pipeline
            cuts it off, and which of its words are counted ("" for all); of the tokenizers by their components' names,
            the prompt, and the setting `max_sequence_length`.
        recommended: defaults that the model's configs tell, over those of the class; an InputError that names the
            model where these configs are not supported.
        prepare: sets on a pipeline what its call has no argument for.
        tiled: whether the model's card decodes in tiles, for want of memory.
        wan: of the Wan family, which can be trained, and whose videos several GPUs can share.
    """

    defaults: str
    sizes: Callable[[Configs], dict[str, Any]]
    arguments: Mapping[str, str]
    lengths: Callable[[Mapping[str, Any], str, int | None], list[TextLength]]
    layers: tuple[str, ...] = ("num_layers",)
    recommended: Callable[[Configs], dict[str, Any]] = lambda configs: {}
    prepare: Callable[[Any, SamplingConfig], None] = lambda pipe, config: None
    tiled: bool = False
    wan: bool = False


def _sizes(
    spatial: int, temporal: int, patch: tuple[int, int, int], most: tuple[int | None, ...] = (None, None, None)
) -> dict[str, Any]:
    return {"spatial": spatial, "temporal": temporal, "patch": patch, "axis_tokens": most}


def _default(function: Any, argument: str) -> Any:
    """The default of a function's argument."""
    return inspect.signature(function).parameters[argument].default


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, truncation=False, verbose=False).input_ids)


def _lengths(tokenizers: Mapping[str, Any], text: str, most: int | None) -> list[TextLength]:
    """Of pipelines with one text encoder, which cut its text at `max_sequence_length`."""
    assert most is not None
    tokenizer = tokenizers["tokenizer"]
    return [(_count(tokenizer, text), min(most, tokenizer.model_max_length), "")]


_GUIDED = {"guidance": "guidance_scale", "max_sequence_length": "max_sequence_length"}


def _wan_sizes(configs: Configs) -> dict[str, Any]:
    vae, transformer = configs["vae"], configs["transformer"]
    # The length of the transformer's rotary tables.
    most = (transformer.get("rope_max_seq_len", 1024),) * 3
    spatial, temporal = vae.get("scale_factor_spatial") or 8, vae.get("scale_factor_temporal") or 4
    return _sizes(spatial, temporal, tuple(transformer.get("patch_size", (1, 2, 2))), most)


def _wan_lengths(tokenizers: Mapping[str, Any], text: str, most: int | None) -> list[TextLength]:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return _lengths(tokenizers, prompt_clean(text), most)


def _hunyuan_sizes(configs: Configs, *, spatial: int = 8, patch: int = 2) -> dict[str, Any]:
    """The defaults of the VAE and the transformer are those of HunyuanVideo."""
    vae, transformer = configs["vae"], configs["transformer"]
    size = transformer.get("patch_size", patch)
    return _sizes(
        vae.get("spatial_compression_ratio", spatial),
        vae.get("temporal_compression_ratio", 4),
        (transformer.get("patch_size_t", 1), size, size),
    )


def _hunyuan_lengths(tokenizers: Mapping[str, Any], text: str, most: int | None) -> list[TextLength]:
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    assert most is not None
    # The second text encoder sums up the first 77 tokens in one vector, whatever comes after them.
    whole = _count(tokenizers["tokenizer"], DEFAULT_PROMPT_TEMPLATE["template"].format(text))
    return [(whole - DEFAULT_PROMPT_TEMPLATE["crop_start"], most, "")]


_hunyuan15_sizes = functools.partial(_hunyuan_sizes, spatial=16, patch=1)


def _hunyuan15_recommended(configs: Configs) -> dict[str, Any]:
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    guider = configs.get("guider", {})
    scale = guider.get("guidance_scale") if guider.get("enabled", True) else 1.0
    if scale is None:
        raise InputError("model", "has no guider with a guidance_scale; supported: ClassifierFreeGuidance")
    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=_hunyuan15_sizes(configs)["spatial"])
    target = configs["transformer"].get("target_size", 640)
    height, width = processor.calculate_default_height_width(9, 16, target)
    return {"guidance": scale, "height": height, "width": width}


def _hunyuan15_lengths(tokenizers: Mapping[str, Any], text: str, most: int | None) -> list[TextLength]:
    from diffusers import HunyuanVideo15Pipeline
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input

    embed, glyphs = HunyuanVideo15Pipeline._get_mllm_prompt_embeds, HunyuanVideo15Pipeline._get_byt5_prompt_embeds
    messages = format_text_input([text], _default(embed, "system_message"))
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    chat = tokenizers["tokenizer"].apply_chat_template(messages, **options)
    tokens = len(chat["input_ids"][0]) - _default(embed, "crop_start")
    found = [(tokens, _default(embed, "tokenizer_max_length"), "")]
    written = extract_glyph_texts(text)
    if written is not None:
        limit = _default(glyphs, "tokenizer_max_length")
        found.append((_count(tokenizers["tokenizer_2"], written), limit, " in quotation marks"))
    return found


def _hunyuan15_prepare(pipe: Any, config: SamplingConfig) -> None:
    assert config.guidance is not None
    wanted, has = {"guidance_scale": config.guidance, "enabled": config.guidance > 1}, pipe.guider.config
    # diffusers warns of every guider that is made.
    if any(has[name] != value for name, value in wanted.items()):
        pipe.guider = pipe.guider.new(**wanted)


def _ltx_sizes(configs: Configs) -> dict[str, Any]:
    vae, transformer = configs["vae"], configs["transformer"]
    size = transformer.get("patch_size", 1)
    # A VAE that does not tell has a factor of 2 for every level that it scales, and its patches.
    factor = 2 ** sum(vae.get("spatio_temporal_scaling", (True, True, True, False)))
    return _sizes(
        vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * factor,
        vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * factor,
        (transformer.get("patch_size_t", 1), size, size),
    )


def _cogvideox_sizes(configs: Configs) -> dict[str, Any]:
    vae, transformer = configs["vae"], configs["transformer"]
    size, frames = transformer.get("patch_size", 2), transformer.get("patch_size_t")
    # CogVideoX-1.5 cuts its rotary tables out of those of the largest size.
    largest = (transformer.get("sample_height", 60) // size, transformer.get("sample_width", 90) // size)
    spatial = 2 ** (len(vae.get("block_out_channels", (128, 256, 256, 512))) - 1)
    temporal = int(vae.get("temporal_compression_ratio", 4))
    return _sizes(spatial, temporal, (frames or 1, size, size), (None, *((None, None) if frames is None else largest)))


def _cogvideox_recommended(configs: Configs) -> dict[str, Any]:
    transformer, spatial = configs["transformer"], _cogvideox_sizes(configs)["spatial"]
    return {
        "height": transformer.get("sample_height", 60) * spatial,
        "width": transformer.get("sample_width", 90) * spatial,
        "num_frames": transformer.get("sample_frames", 49),
        # CogVideoX-1.5, whose tokens are of two latent frames, is trained on twice the rate.
        "fps": 8.0 if transformer.get("patch_size_t") is None else 16.0,
    }


def _cogvideox_lengths(tokenizers: Mapping[str, Any], text: str, most: int | None) -> list[TextLength]:
    from diffusers import CogVideoXPipeline

    return _lengths(tokenizers, text, _default(CogVideoXPipeline.__call__, "max_sequence_length"))


_WAN = Traits(
    defaults="wan",
    sizes=_wan_sizes,
    arguments=_GUIDED | {"guidance_2": "guidance_scale_2"},
    lengths=_wan_lengths,
    wan=True,
)

# By the class in `model_index.json`.
TRAITS = {
    TEXT_TO_VIDEO: _WAN,
    IMAGE_TO_VIDEO: _WAN,
    "HunyuanVideoPipeline": Traits(
        defaults="hunyuan-video",
        sizes=_hunyuan_sizes,
        arguments=_GUIDED | {"true_guidance": "true_cfg_scale"},
        lengths=_hunyuan_lengths,
        layers=("num_layers", "num_single_layers"),
        tiled=True,
    ),
    "HunyuanVideo15Pipeline": Traits(
        defaults="hunyuan-video-1.5",
        sizes=_hunyuan15_sizes,
        arguments={},
        lengths=_hunyuan15_lengths,
        recommended=_hunyuan15_recommended,
        prepare=_hunyuan15_prepare,
        tiled=True,
    ),
    "LTXPipeline": Traits(
        defaults="ltx",
        sizes=_ltx_sizes,
        arguments=_GUIDED | {"fps": "frame_rate"},
        lengths=_lengths,
    ),
    "CogVideoXPipeline": Traits(
        defaults="cogvideox",
        sizes=_cogvideox_sizes,
        arguments={"guidance": "guidance_scale"},
        lengths=_cogvideox_lengths,
        recommended=_cogvideox_recommended,
        tiled=True,
    ),
}
