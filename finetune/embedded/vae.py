"""The small `AutoencoderKLWan` of the embedded model: a time-parallel forward for training, and the training loop.

`AutoencoderKLWan.encode` and `.decode` walk through a video in chunks of four frames and keep a feature cache. Training
wants all frames at once. `encode_parallel` and `decode_parallel` compute the same function that way: outside the
resampling layers a cached causal convolution *is* a causal convolution over the whole clip, and the resampling layers
treat the first frame apart, as `_resample` does here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, WanUpBlock, patchify, unpatchify
from torch import nn

from vmonarch.finetune.embedded import loop, parallel
from vmonarch.finetune.embedded.optimizer import StackedMuon
from vmonarch.finetune.models import compile_options
from vmonarch.finetune.scenes import render, sample_scenes

LATENT_CHANNELS = 16
VAE_CONFIG: dict[str, Any] = {
    "base_dim": 24,
    "decoder_base_dim": 28,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "latents_mean": [0.0] * LATENT_CHANNELS,
    "latents_std": [1.0] * LATENT_CHANNELS,
}
"""Pixels folded into channels by a 2×2 patch, as in Wan2.2, then two stages that halve time, height and width."""


def _resample(layer: WanResample, x: torch.Tensor) -> torch.Tensor:
    """`WanResample` over a whole clip: x [B, C, F, Y, X]; the first frame takes no part in temporal resampling."""
    batch, channels, frames = x.shape[:3]
    if layer.mode == "upsample3d" and frames > 1:
        rest = layer.time_conv(x[:, :, 1:])
        height, width = rest.shape[3:]
        rest = rest.reshape(batch, 2, channels, frames - 1, height, width)
        rest = torch.stack((rest[:, 0], rest[:, 1]), 3).reshape(batch, channels, 2 * (frames - 1), height, width)
        x = torch.cat((x[:, :, :1], rest), 2)
        frames = x.shape[2]
    flat = layer.resample(x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, *x.shape[3:]))
    x = flat.reshape(batch, frames, *flat.shape[1:]).permute(0, 2, 1, 3, 4)
    if layer.mode == "downsample3d" and frames > 1:
        x = torch.cat((x[:, :, :1], layer.time_conv(x)), 2)
    return x


def encode_parallel(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Moments of the posterior, all frames at once; equals `vae.encode(video)[0].parameters`.

    Args:
        video: [B, 3, 1 + 4n, Y, X] in [-1, 1].

    Returns:
        [B, 2·z, 1 + n, Y/8, X/8]: means, then log-variances.

    Raises:
        ValueError: the number of frames is not 1 + 4n, or the VAE is of the residual kind.
    """
    _require_plain(vae)
    if (video.shape[2] - 1) % 4:
        raise ValueError(f"video must have 1 + 4n frames, got {video.shape[2]}")
    encoder = vae.encoder
    x = video if vae.config.patch_size is None else patchify(video, vae.config.patch_size)
    x = encoder.conv_in(x)
    for layer in encoder.down_blocks:
        x = _resample(layer, x) if isinstance(layer, WanResample) else layer(x)
    x = encoder.mid_block(x)
    x = encoder.conv_out(encoder.nonlinearity(encoder.norm_out(x)))
    return vae.quant_conv(x)


def decode_parallel(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Pixels, all frames at once and not clamped; clamped to [-1, 1] it equals `vae.decode(latents).sample`.

    Args:
        latents: [B, z, 1 + n, Y/8, X/8], not normalised.

    Returns:
        [B, 3, 1 + 4n, Y, X].

    Raises:
        ValueError: the VAE is of the residual kind.
    """
    _require_plain(vae)
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        assert isinstance(block, WanUpBlock)
        for resnet in block.resnets:
            x = resnet(x)
        if block.upsamplers is not None:
            x = _resample(block.upsamplers[0], x)
    x = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
    return x if vae.config.patch_size is None else unpatchify(x, vae.config.patch_size)


def _require_plain(vae: AutoencoderKLWan) -> None:
    if vae.config.is_residual:
        raise ValueError("vae must not be of the residual kind (config.is_residual)")


class _Autoencoder(nn.Module):
    """Encode, sample the posterior, decode: one call, so that it compiles as a whole."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, video: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = encode_parallel(self.vae, video).float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-20, 10)
        return decode_parallel(self.vae, mean + noise * (0.5 * log_variance).exp()).float(), mean, log_variance


def weighted_errors(
    output: torch.Tensor, video: torch.Tensor, object_weight: float, first_frame_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean absolute and mean squared error of clips [B, 3, F, Y, X], where a pixel's error counts
    1 + `object_weight` (if it is of an object) + `first_frame_weight` (if it is in the first frame) times.
    """
    # Saturated pixels belong to objects: a small share of a clip that plain means hardly see.
    saturated = (video.amax(1, keepdim=True) - video.amin(1, keepdim=True) > 0.7).float()
    weight = 1 + object_weight * saturated
    weight[:, :, 0] += first_frame_weight
    error = output - video
    return (weight * error.abs()).mean(), (weight * error.square()).mean()


def train_vae(
    *,
    steps: int,
    batch: int,
    seed: int,
    device: str,
    learning_rate: float = 1.5e-3,
    kl_weight: float = 2e-5,
    object_weight: float = 0.0,
    first_frame_weight: float = 0.0,
    compile: bool = False,
    config: dict[str, Any] | None = None,
    statistics_clips: int = 256,
) -> tuple[AutoencoderKLWan, list[dict[str, Any]]]:
    """Train from scratch on whole rendered clips; sets `latents_mean` and `latents_std` in the config from data.

    The learning rate rises over 2 % of the steps and falls to zero along a cosine. Errors on the objects' pixels count
    1 + `object_weight` times, and those in the first frame, which has a latent frame to itself, `first_frame_weight`
    times more.

    Returns:
        the VAE in float32 on `device` (exponential moving average of the weights), and the logged losses.
    """
    torch.manual_seed(seed)
    vae = AutoencoderKLWan(**(config or VAE_CONFIG)).to(device)
    average = copy.deepcopy(vae)
    kernels: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in vae.named_parameters():
        outer = parameter.ndim < 4 or parameter[0].numel() == 1 or "conv_in" in name or "decoder.conv_out" in name
        (others if outer else kernels).append(parameter)
    optimizers = [
        StackedMuon(kernels, lr=learning_rate),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    model: nn.Module = _Autoencoder(vae)
    step_function = torch.compile(model, dynamic=False, options=compile_options()) if compile else model
    if parallel.world_size() > 1:
        torch.manual_seed(parallel.own_seed(seed))

    def losses(step: int) -> dict[str, torch.Tensor]:
        video = render(sample_scenes(batch, parallel.own_seed(seed * 1_000_003 + step)), device)
        frames, height, width = video.shape[2:]
        noise = torch.randn(batch, vae.config.z_dim, 1 + (frames - 1) // 4, height // 8, width // 8, device=device)
        with loop.autocast(device):
            output, mean, log_variance = step_function(video, noise)
        l1, mse = weighted_errors(output, video, object_weight, first_frame_weight)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        psnr = -10 * torch.log10(((output.detach() - video).square().mean() / 4).clamp(min=1e-12))
        return {"loss": l1 + 2 * mse + kl_weight * kl, "l1": l1, "psnr": psnr, "kl": kl}

    def rate(step: int, progress: float) -> float:
        return learning_rate * min(1, 50 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * progress))

    log: list[dict[str, Any]] = []
    loop.train(
        "vae", vae.parameters(), average.parameters(), optimizers, losses, steps=steps, rate=rate, ema=0.995, log=log
    )
    average.eval().requires_grad_(False)
    set_latent_statistics(average, seed=seed + 1, device=device, clips=statistics_clips)
    return average, log


@torch.no_grad()
def set_latent_statistics(vae: AutoencoderKLWan, *, seed: int, device: str, clips: int = 256, batch: int = 8) -> None:
    """Write the channels' mean and standard deviation over `clips` rendered clips into the VAE's config."""
    total = torch.zeros(vae.config.z_dim, dtype=torch.float64, device=device)
    square, count = torch.zeros_like(total), 0
    for start in range(0, clips, batch):
        scenes = sample_scenes(min(batch, clips - start), seed * 7_919 + start)
        latents = encode_means(vae, render(scenes, device)).double()
        total += latents.sum((0, 2, 3, 4))
        square += latents.square().sum((0, 2, 3, 4))
        count += latents[:, 0].numel()
    mean = total / count
    std = (square / count - mean**2).clamp(min=1e-6).sqrt()
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def encode_means(
    vae: AutoencoderKLWan, video: torch.Tensor, encode: Callable[..., torch.Tensor] = encode_parallel
) -> torch.Tensor:
    """Posterior means [B, z, 1 + n, Y/8, X/8] of clips [B, 3, 1 + 4n, Y, X], in float32, not normalised.

    Args:
        encode: `encode_parallel`, or a compiled form of it.
    """
    with loop.autocast(video.device.type):
        return encode(vae, video).float()[:, : vae.config.z_dim]


def latent_statistics(vae: AutoencoderKLWan, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """The config's `latents_mean` and `latents_std`, each [1, z, 1, 1, 1]."""
    shape = (1, -1, 1, 1, 1)
    mean, std = (torch.tensor(vae.config[name], device=device).view(shape) for name in ("latents_mean", "latents_std"))
    return mean, std


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """PSNR in dB per clip [B] of the stock encode and decode; video [B, 3, F, Y, X] in [-1, 1]."""
    output = vae.decode(vae.encode(video).latent_dist.mode()).sample
    error = ((output.float() - video).square() / 4).flatten(1).mean(1)
    return -10 * torch.log10(error.clamp(min=1e-12))
