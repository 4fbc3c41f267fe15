"""Tiny random pipelines of the families beyond Wan, without text encoders: prompts are given as embeddings."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import tiny_wan
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.modular_pipelines.minimax_h3 import modular_blocks_minimax_h3
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from PIL import Image
from tiny_families import FAMILIES, TEXT

# 3 × 4 × 6 tokens in all of them but MiniMax-H3; latents of LTX are of 32 × 32 pixels and 8 frames.
SIZE = {"num_frames": 9, "height": 64, "width": 96}
LTX_SIZE = {"num_frames": 17, "height": 128, "width": 192}
GRID = (3, 4, 6)
# Five seconds, the least.
MINIMAX_GRID = (37, 2, 3)
Pipeline = tuple[Any, dict[str, Any]]

_VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_COGVIDEOX_VAE = _VAE | {
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _pipe(cls: Any, name: str, **parts: Any) -> Any:
    """A pipeline with a transformer of `FAMILIES`; of what it has besides, what is not given is None."""
    parts = {"transformer": FAMILIES[name].make(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()} | parts
    needed = [part.name for part in inspect.signature(cls.__init__).parameters.values() if part.default is part.empty]
    return cls(**dict.fromkeys(needed[1:]) | parts)


def _both(masks: dict[str, Any], **embeds: torch.Tensor) -> dict[str, Any]:
    """Of a prompt and of a negative one: embeddings of opposite signs, and masks that are alike."""
    negative = {f"negative_{name}": -x for name, x in embeds.items()}
    return embeds | negative | masks | {f"negative_{name}": mask for name, mask in masks.items()}


def _prompts(dim: int, text: int = TEXT, **masks: torch.Tensor) -> dict[str, Any]:
    return _both(masks, prompt_embeds=_noise(1, text, dim))


def _guided(dim: int, text: int = TEXT) -> dict[str, Any]:
    return _prompts(dim, text, prompt_attention_mask=torch.ones(1, text, dtype=torch.long))


def _image(height: int = SIZE["height"], width: int = SIZE["width"]) -> Image.Image:
    return Image.fromarray(np.zeros((height, width, 3), np.uint8))


def _hunyuan(cls: Any = diffusers.HunyuanVideoPipeline, **parts: Any) -> Pipeline:
    mask = torch.ones(1, TEXT)
    mask[:, TEXT - 2 :] = 0
    pipe = _pipe(cls, "hunyuan", vae=diffusers.AutoencoderKLHunyuanVideo(**_VAE).eval(), **parts)
    prompt = {
        "prompt_embeds": _noise(1, TEXT, 16),
        "pooled_prompt_embeds": _noise(1, 8),
        "prompt_attention_mask": mask,
    }
    return pipe, SIZE | prompt


def _skyreels() -> Pipeline:
    transformer = FAMILIES["hunyuan"].make(in_channels=8)
    pipe, call = _hunyuan(diffusers.HunyuanSkyreelsImageToVideoPipeline, transformer=transformer)
    negative = {f"negative_{name}": 1 - call[name] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    return pipe, call | negative | {
        "negative_prompt_attention_mask": call["prompt_attention_mask"],
        "image": _image(),
        "true_cfg_scale": 2.0,
    }


def _hunyuan15() -> Pipeline:
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    guider = ClassifierFreeGuidance(guidance_scale=2.0)
    pipe = _pipe(diffusers.HunyuanVideo15Pipeline, "hunyuan15", vae=vae.eval(), guider=guider)
    masks = dict.fromkeys(("prompt_embeds_mask", "prompt_embeds_mask_2"), torch.ones(1, TEXT))
    return pipe, SIZE | _both(masks, prompt_embeds=_noise(1, TEXT, 16), prompt_embeds_2=_noise(1, TEXT, 8))


def _ltx(cls: Any = diffusers.LTXPipeline) -> Pipeline:
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    return _pipe(cls, "ltx", vae=vae.eval()), LTX_SIZE | _guided(16)


def _ltx_condition() -> Pipeline:
    pipe, call = _ltx(diffusers.LTXConditionPipeline)
    image = _image(LTX_SIZE["height"], LTX_SIZE["width"])
    # In the middle, so that its tokens are added before the video's.
    return pipe, call | {"image": image, "frame_index": 8}


class _LTXOfPrompts(diffusers.LTXI2VLongMultiPromptPipeline):
    """Without an encoder of prompts."""

    def encode_prompt(self, **_: Any) -> tuple[torch.Tensor, ...]:
        embeds, negative, mask, negative_mask = _guided(16).values()
        return embeds, mask, negative, negative_mask


def ltx_of_prompts() -> Pipeline:
    """Two windows in time that overlap, of 4 and 3 frames; the last calls of a window's schedule are left out."""
    pipe, _ = _ltx(_LTXOfPrompts)
    pipe.set_progress_bar_config(disable=True)
    windows = {"num_frames": 33, "temporal_tile_size": 24, "temporal_overlap": 8}
    call = {"prompt": "a|b", "guidance_scale": 2.0, "num_inference_steps": 4, "output_type": "latent"}
    return pipe, LTX_SIZE | windows | call


def _ltx2() -> Pipeline:
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
    )
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, latent_channels=2, mel_bins=8, resolution=32
    )
    connectors = {
        f"{stream}_connector_{name}": value
        for stream in ("video", "audio")
        for name, value in {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_learnable_registers": 8,
        }.items()
    }
    pipe = _pipe(
        diffusers.LTX2Pipeline,
        "ltx2",
        vae=vae.eval(),
        audio_vae=sound.eval(),
        connectors=LTX2TextConnectors(
            caption_channels=16, text_proj_in_factor=1, rope_double_precision=False, **connectors
        ).eval(),
        # With the guidance that leaves attention out of some blocks.
        transformer=FAMILIES["ltx2"].make(perturbed_attn=True),
    )
    prompt = _guided(16, 8)
    return pipe, {"num_frames": 33, "height": 256, "width": 384, "spatio_temporal_guidance_blocks": [1]} | prompt


def _cogvideox() -> Pipeline:
    vae, scheduler = diffusers.AutoencoderKLCogVideoX(**_COGVIDEOX_VAE).eval(), diffusers.CogVideoXDDIMScheduler()
    return _pipe(diffusers.CogVideoXPipeline, "cogvideox", vae=vae, scheduler=scheduler), SIZE | _prompts(8)


def _wan_vae() -> Any:
    return tiny_wan.vae(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)


def _kandinsky5() -> Pipeline:
    embeds = {"prompt_embeds_qwen": _noise(1, TEXT, 16), "prompt_embeds_clip": _noise(1, 8)}
    prompt = _both({"prompt_cu_seqlens": torch.tensor([0, TEXT])}, **embeds)
    return _pipe(diffusers.Kandinsky5T2VPipeline, "kandinsky5"), SIZE | prompt


class _NothingToCheck:
    """In place of what checks prompts and decoded frames: there are none."""

    def to(self, device: Any) -> None:
        pass


def _cosmos(cls: Any = diffusers.Cosmos2_5_PredictBasePipeline, config: Any = None, **parts: Any) -> Pipeline:
    pipe = _pipe(
        cls,
        "cosmos",
        # The condition's mask is a channel of the latents.
        transformer=FAMILIES["cosmos"].make(in_channels=5, **config or {}),
        vae=_wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        safety_checker=_NothingToCheck(),
        **parts,
    )
    return pipe, SIZE | _prompts(16)


class _Control(diffusers.ModelMixin):
    """In place of the controlnet: what it adds to the first block changes with the latents and the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Parameter(_noise(1, math.prod(GRID), 24))

    def forward(self, latents: torch.Tensor, encoder_hidden_states: Any, **inputs: Any) -> tuple[list[torch.Tensor]]:
        return ([self.places + latents.mean() + encoder_hidden_states[0].mean()],)


def _cosmos_transfer() -> Pipeline:
    # The prompt is a tuple of the text's tokens and an image's.
    image = {"img_context_dim_in": 4, "img_context_dim_out": 24, "img_context_num_tokens": 3}
    config = {"controlnet_block_every_n": 2} | image
    pipe, call = _cosmos(diffusers.Cosmos2_5_TransferPipeline, config, controlnet=_Control())
    return pipe, call | {"controls": [_image()] * SIZE["num_frames"], "num_frames_per_chunk": SIZE["num_frames"]}


def _motif() -> Pipeline:
    # Beside the latents, those of a condition and their mask.
    transformer, guider = FAMILIES["motif"].make(in_channels=9), ClassifierFreeGuidance(guidance_scale=2.0)
    pipe = _pipe(diffusers.MotifVideoPipeline, "motif", transformer=transformer, vae=_wan_vae(), guider=guider)
    return pipe, SIZE | _guided(16)


def _kandinsky6() -> Pipeline:
    pipe = _pipe(
        diffusers.Kandinsky6TI2VAPipeline,
        "kandinsky6",
        audio_vae=diffusers.MMAudioVAE(
            mel_bins=8, latent_channels=4, hidden_channels=8, channel_multipliers=(1,), layers_per_block=1
        ).eval(),
        vocoder=diffusers.MMAudioVocoder(
            num_mels=8,
            upsample_initial_channel=4,
            upsample_rates=(2,),
            upsample_kernel_sizes=(4,),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1,),),
        ).eval(),
    )
    return pipe, SIZE | _prompts(16) | _both({}, pooled_prompt_embeds=_noise(1, 8))


def _mochi() -> Pipeline:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    pipe = _pipe(diffusers.MochiPipeline, "mochi", scheduler=scheduler)
    # Its frames are compressed by six.
    return pipe, SIZE | {"num_frames": 13} | _guided(16)


def _allegro() -> Pipeline:
    pipe = _pipe(diffusers.AllegroPipeline, "allegro", scheduler=diffusers.EulerAncestralDiscreteScheduler())
    return pipe, SIZE | _guided(8) | {"negative_prompt": None}


def _easyanimate() -> Pipeline:
    vae = diffusers.AutoencoderKLMagvit(
        latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=4
    )
    return _pipe(diffusers.EasyAnimatePipeline, "easyanimate", vae=vae.eval()), SIZE | _guided(16)


def _consisid() -> Pipeline:
    # By its module: diffusers itself names the pipeline only where OpenCV is installed.
    pipe = _pipe(
        ConsisIDPipeline,
        "consisid",
        vae=diffusers.AutoencoderKLCogVideoX(**_COGVIDEOX_VAE).eval(),
        # Beside the latents, those of the image.
        transformer=FAMILIES["consisid"].make(in_channels=8),
        scheduler=diffusers.CogVideoXDPMScheduler(),
    )
    return pipe, SIZE | _prompts(8) | {"image": _image()}


def _anyflow() -> Pipeline:
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    pipe = _pipe(diffusers.AnyFlowPipeline, "anyflow", vae=_wan_vae(), scheduler=scheduler)
    return pipe, SIZE | _prompts(16) | {"guidance_scale": 2.0}


def _helios() -> Pipeline:
    pipe = _pipe(diffusers.HeliosPipeline, "helios", vae=_wan_vae(), scheduler=diffusers.HeliosScheduler(stages=1))
    return pipe, SIZE | _prompts(16) | {"num_latent_frames_per_chunk": 3}


class _FramepackPipeline(diffusers.HunyuanVideoFramepackPipeline):
    """Without an encoder of images."""

    def encode_image(self, image: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
        return _noise(1, 5, 16)


def _framepack() -> Pipeline:
    pipe, call = _hunyuan(_FramepackPipeline, transformer=FAMILIES["framepack"].make())
    # Two sections of the grid, one after the other.
    return pipe, call | {"image": _image(), "latent_window_size": 3, "num_frames": 18}


def _cosmos3() -> Pipeline:
    transformer = FAMILIES["cosmos3"].make(latent_channel=4, latent_patch_size=2, patch_latent_dim=16)
    tokenizer = SimpleNamespace(eos_token_id=0, convert_tokens_to_ids=len, __module__=__name__)
    parts = transformer, tokenizer, _wan_vae(), diffusers.UniPCMultistepScheduler()
    pipe = diffusers.Cosmos3OmniPipeline(*parts, enable_safety_checker=False)
    pipe.tokenize_prompt = lambda *_, **__: (list(range(TEXT)), [1])
    return pipe, SIZE | {"prompt": ""}


def _minimax_h3(blocks: str = "MiniMaxH3CoreDenoiseStep", component: str = "transformer") -> Pipeline:
    pipe = getattr(modular_blocks_minimax_h3, blocks)().init_pipeline()
    pipe.update_components(
        **{component: FAMILIES["minimax-h3"].make(in_channels=24, audio_in_channels=32)},
        scheduler=diffusers.MiniMaxH3Scheduler(),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(shift=3.0),
    )
    size = {"num_frames": 124, "height": 64, "width": 96}
    # Its steps count the last noise level, which is none. The sequence divides by two.
    prompt = {"prompt_embeds": _noise(1, 8, 8), "text_token_tags": torch.ones(8, dtype=torch.long)}
    return pipe, size | prompt | {"num_inference_steps": 5, "output": "latents"}


def _minimax_h3_references() -> Pipeline:
    """With an image of the video's size and another sound before its own."""
    pipe, call = _minimax_h3("MiniMaxH3Ref2VACoreDenoiseStep", "transformer_ref")
    kinds = [SimpleNamespace(kind="image"), SimpleNamespace(kind="audio")]
    latents = {"condition_latents": [_noise(1, 24, 1, 4, 6)], "audio_condition_latents": [_noise(6, 32)]}
    return pipe, call | latents | {"normalized_references": kinds}


PIPELINES = {
    "hunyuan": _hunyuan,
    "skyreels": _skyreels,
    "hunyuan15": _hunyuan15,
    "ltx": _ltx,
    "ltx-condition": _ltx_condition,
    "ltx2": _ltx2,
    "cogvideox": _cogvideox,
    "kandinsky5": _kandinsky5,
    "cosmos": _cosmos,
    "cosmos-transfer": _cosmos_transfer,
    "motif": _motif,
    "kandinsky6": _kandinsky6,
    "mochi": _mochi,
    "allegro": _allegro,
    "easyanimate": _easyanimate,
    "consisid": _consisid,
    "anyflow": _anyflow,
    "helios": _helios,
    "framepack": _framepack,
    "cosmos3": _cosmos3,
    "minimax-h3": _minimax_h3,
    "minimax-h3-references": _minimax_h3_references,
}


def pipeline(name: str) -> Pipeline:
    """A pipeline, and what to call it with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, call = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"num_inference_steps": 4, "output_type": "latent"} | call


def sample(pipe: Any, call: dict[str, Any]) -> torch.Tensor:
    out = pipe(**call, generator=torch.Generator().manual_seed(1))
    frames = next((getattr(out, name) for name in ("frames", "video") if hasattr(out, name)), out)
    # Framepack gives what there is after each section.
    return frames[-1] if isinstance(frames, list) else frames
