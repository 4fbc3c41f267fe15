"""Tiny random pipelines of the families beyond Wan, without text encoders: prompts are given as embeddings."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from PIL import Image
from tiny_families import FAMILIES, TEXT

# 3 × 4 × 6 tokens in all of them but LTX, whose latents are of 32 × 32 pixels and 8 frames.
SIZE = {"num_frames": 9, "height": 64, "width": 96}
LTX_SIZE = {"num_frames": 17, "height": 128, "width": 192}
GRID = (3, 4, 6)

_VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _hunyuan(cls: Any = diffusers.HunyuanVideoPipeline, **config: Any) -> tuple[Any, dict[str, Any]]:
    mask = torch.ones(1, TEXT)
    mask[:, TEXT - 2 :] = 0
    pipe = cls(
        text_encoder=None,
        tokenizer=None,
        transformer=FAMILIES["hunyuan"].make(**config),
        vae=diffusers.AutoencoderKLHunyuanVideo(**_VAE).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder_2=None,
        tokenizer_2=None,
    )
    prompt = {
        "prompt_embeds": _noise(1, TEXT, 16),
        "pooled_prompt_embeds": _noise(1, 8),
        "prompt_attention_mask": mask,
    }
    return pipe, SIZE | prompt


def _skyreels() -> tuple[Any, dict[str, Any]]:
    pipe, call = _hunyuan(diffusers.HunyuanSkyreelsImageToVideoPipeline, in_channels=8)
    negative = {f"negative_{name}": 1 - call[name] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    image = Image.fromarray(np.zeros((SIZE["height"], SIZE["width"], 3), np.uint8))
    return pipe, call | negative | {
        "negative_prompt_attention_mask": call["prompt_attention_mask"],
        "image": image,
        "true_cfg_scale": 2.0,
    }


def _hunyuan15() -> tuple[Any, dict[str, Any]]:
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    pipe = diffusers.HunyuanVideo15Pipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=FAMILIES["hunyuan15"].make(),
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder_2=None,
        tokenizer_2=None,
        guider=ClassifierFreeGuidance(guidance_scale=2.0),
    )
    mask = torch.ones(1, TEXT)
    prompt = {}
    for sign, factor in (("", 1), ("negative_", -1)):
        for suffix, dim in (("", 16), ("_2", 8)):
            prompt[f"{sign}prompt_embeds{suffix}"] = factor * _noise(1, TEXT, dim)
            prompt[f"{sign}prompt_embeds_mask{suffix}"] = mask
    return pipe, SIZE | prompt


def _ltx(cls: Any = diffusers.LTXPipeline) -> tuple[Any, dict[str, Any]]:
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    pipe = cls(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=FAMILIES["ltx"].make(),
    )
    return pipe, LTX_SIZE | _guided(16)


def _guided(dim: int, text: int = TEXT) -> dict[str, Any]:
    masks = {f"{sign}prompt_attention_mask": torch.ones(1, text, dtype=torch.long) for sign in ("", "negative_")}
    return {"prompt_embeds": _noise(1, text, dim), "negative_prompt_embeds": -_noise(1, text, dim), **masks}


def _ltx_condition() -> tuple[Any, dict[str, Any]]:
    pipe, call = _ltx(diffusers.LTXConditionPipeline)
    image = Image.fromarray(np.zeros((LTX_SIZE["height"], LTX_SIZE["width"], 3), np.uint8))
    # In the middle, so that its tokens are added before the video's.
    return pipe, call | {"image": image, "frame_index": 8}


def _ltx2() -> tuple[Any, dict[str, Any]]:
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
    pipe = diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        audio_vae=sound.eval(),
        text_encoder=None,
        tokenizer=None,
        connectors=LTX2TextConnectors(
            caption_channels=16, text_proj_in_factor=1, rope_double_precision=False, **connectors
        ).eval(),
        # With the guidance that leaves attention out of some blocks.
        transformer=FAMILIES["ltx2"].make(perturbed_attn=True),
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
        ).eval(),
    )
    prompt = _guided(16, 8)
    return pipe, {"num_frames": 33, "height": 256, "width": 384, "spatio_temporal_guidance_blocks": [1]} | prompt


def _cogvideox() -> tuple[Any, dict[str, Any]]:
    config = _VAE | {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    }
    pipe = diffusers.CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKLCogVideoX(**config).eval(),
        transformer=FAMILIES["cogvideox"].make(),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )
    prompt = {"prompt_embeds": _noise(1, TEXT, 8), "negative_prompt_embeds": -_noise(1, TEXT, 8)}
    return pipe, SIZE | prompt


PIPELINES = {
    "hunyuan": _hunyuan,
    "skyreels": _skyreels,
    "hunyuan15": _hunyuan15,
    "ltx": _ltx,
    "ltx-condition": _ltx_condition,
    "ltx2": _ltx2,
    "cogvideox": _cogvideox,
}


def pipeline(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline, and what to call it with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, call = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe, call | {"num_inference_steps": 4, "output_type": "latent"}


def sample(pipe: Any, call: dict[str, Any]) -> torch.Tensor:
    frames: torch.Tensor = pipe(**call, generator=torch.Generator().manual_seed(1)).frames
    return frames
