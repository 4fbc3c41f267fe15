"""The pipelines that sample videos: everything that differs between their classes in diffusers.

To add one: a record in `TRAITS`, an entry in `configs/defaults.yaml`, and a tiny pipeline in
`tests/support/tiny_folders.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError

if TYPE_CHECKING:
    from vmonarch.pipelines.config import SamplingConfig

TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "WanPipeline", "WanImageToVideoPipeline"
TextLength = tuple[int, int, str]


@dataclass(frozen=True)
class Traits:
    """What the pipelines of one class do not tell about themselves.

    The functions get a pipeline of the class, whose models need no weights (`ModelFolder.outline`).

    Args:
        arguments: what the pipeline's call names the settings that not every pipeline has, by their own names.
        lengths: for each text encoder how many tokens a prompt has, how many the encoder sees, after which the pipeline
            cuts it off, and which of its words are counted ("" for all); of the pipeline, the prompt, and the setting
            `max_sequence_length`.
        recommended: defaults that the model's configs tell, over those of the class in `configs/defaults.yaml`; an
            InputError that names the model where these configs are not supported.
        factor: what the pipeline calls how many pixels (frames) one latent pixel (frame) stands for.
        most_tokens: the most that a video may have along frames, height and width, of the transformer's config: the
            length of its rotary tables; None where these are made for the video.
        prepare: sets on a pipeline what its call has no argument for.
        tiled: whether the model's card decodes in tiles, for want of memory.
        wan: of the Wan family, which can be trained, and whose videos several GPUs can share.
    """

    arguments: Mapping[str, str]
    lengths: Callable[[Any, str, int | None], list[TextLength]]
    recommended: Callable[[Any], dict[str, Any]] = lambda pipe: {}
    factor: str = "vae_scale_factor_{}"
    most_tokens: Callable[[Any], tuple[int | None, ...]] = lambda config: (None, None, None)
    prepare: Callable[[Any, SamplingConfig], None] = lambda pipe, config: None
    tiled: bool = False
    wan: bool = False


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, truncation=False, verbose=False).input_ids)


def _lengths(pipe: Any, text: str, most: int | None) -> list[TextLength]:
    """For pipelines with one text encoder, which cut its text at `max_sequence_length`, given or their own."""
    most = most or inspect.signature(pipe.__call__).parameters["max_sequence_length"].default
    return [(_count(pipe.tokenizer, text), min(most, pipe.tokenizer.model_max_length), "")]


_GUIDED = {"guidance": "guidance_scale", "max_sequence_length": "max_sequence_length"}


def _wan_lengths(pipe: Any, text: str, most: int | None) -> list[TextLength]:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return _lengths(pipe, prompt_clean(text), most)


def _hunyuan_lengths(pipe: Any, text: str, most: int | None) -> list[TextLength]:
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    assert most is not None
    # The second text encoder sums up the first 77 tokens in one vector, whatever comes after them.
    whole = _count(pipe.tokenizer, DEFAULT_PROMPT_TEMPLATE["template"].format(text))
    return [(whole - DEFAULT_PROMPT_TEMPLATE["crop_start"], most, "")]


def _hunyuan15_recommended(pipe: Any) -> dict[str, Any]:
    guider = pipe.guider.config
    scale = guider.get("guidance_scale") if guider.get("enabled", True) else 1.0
    if scale is None:
        raise InputError("model", "has no guider with a guidance_scale; supported: ClassifierFreeGuidance")
    width, height = pipe.default_aspect_ratio
    height, width = pipe.video_processor.calculate_default_height_width(height, width, pipe.target_size)
    return {"guidance": scale, "height": height, "width": width}


def _hunyuan15_lengths(pipe: Any, text: str, most: int | None) -> list[TextLength]:
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input

    messages = format_text_input([text], pipe.system_message)
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    chat = pipe.tokenizer.apply_chat_template(messages, **options)
    found = [(len(chat["input_ids"][0]) - pipe.prompt_template_encode_start_idx, pipe.tokenizer_max_length, "")]
    written = extract_glyph_texts(text)
    if written is not None:
        found.append((_count(pipe.tokenizer_2, written), pipe.tokenizer_2_max_length, " in quotation marks"))
    return found


def _hunyuan15_prepare(pipe: Any, config: SamplingConfig) -> None:
    assert config.guidance is not None
    wanted, has = {"guidance_scale": config.guidance, "enabled": config.guidance > 1}, pipe.guider.config
    # diffusers warns of every guider that is made.
    if any(has[name] != value for name, value in wanted.items()):
        pipe.guider = pipe.guider.new(**wanted)


def _cogvideox_most_tokens(config: Any) -> tuple[int | None, ...]:
    """CogVideoX-1.5 cuts its rotary tables out of those of the largest size."""
    if config.patch_size_t is None:
        return None, None, None
    return None, config.sample_height // config.patch_size, config.sample_width // config.patch_size


def _cogvideox_recommended(pipe: Any) -> dict[str, Any]:
    config, spatial = pipe.transformer.config, pipe.vae_scale_factor_spatial
    return {
        "height": config.sample_height * spatial,
        "width": config.sample_width * spatial,
        "num_frames": config.sample_frames,
        # CogVideoX-1.5, whose tokens are of two latent frames, is trained on twice the rate.
        "fps": 8.0 if config.patch_size_t is None else 16.0,
    }


_WAN = Traits(
    arguments=_GUIDED | {"guidance_2": "guidance_scale_2"},
    lengths=_wan_lengths,
    most_tokens=lambda config: (config.rope_max_seq_len,) * 3,
    wan=True,
)

# By the class in `model_index.json`.
TRAITS = {
    TEXT_TO_VIDEO: _WAN,
    IMAGE_TO_VIDEO: _WAN,
    "HunyuanVideoPipeline": Traits(
        arguments=_GUIDED | {"true_guidance": "true_cfg_scale"},
        lengths=_hunyuan_lengths,
        tiled=True,
    ),
    "HunyuanVideo15Pipeline": Traits(
        arguments={},
        lengths=_hunyuan15_lengths,
        recommended=_hunyuan15_recommended,
        prepare=_hunyuan15_prepare,
        tiled=True,
    ),
    "LTXPipeline": Traits(
        arguments=_GUIDED | {"fps": "frame_rate"},
        factor="vae_{}_compression_ratio",
        lengths=_lengths,
    ),
    "CogVideoXPipeline": Traits(
        arguments={"guidance": "guidance_scale"},
        lengths=_lengths,
        recommended=_cogvideox_recommended,
        most_tokens=_cogvideox_most_tokens,
        tiled=True,
    ),
}
