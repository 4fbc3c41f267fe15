"""The small `AutoencoderKLWan` of the embedded model, over all frames at once.

`AutoencoderKLWan.encode` and `.decode` walk through a video in chunks of four frames and keep a feature cache, which is
slow to train. Outside the resampling layers a cached causal convolution *is* a causal convolution over the whole clip,
and the resampling layers treat the first frame apart, as `_resample` does here.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from torch import nn

from vmonarch.finetune.models import compile_options

KL_WEIGHT = 2e-5


def _resample(layer: WanResample, x: torch.Tensor) -> torch.Tensor:
    """`WanResample` over a whole clip: x [B, C, F, Y, X]; the first frame takes no part in temporal resampling."""
    if layer.mode == "upsample3d" and x.shape[2] > 1:
        doubled = layer.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))  # [B, 2, C, F-1, Y, X]
        x = torch.cat((x[:, :, :1], doubled.movedim(1, 3).flatten(2, 3)), 2)
    batch, frames = len(x), x.shape[2]
    flat = layer.resample(x.transpose(1, 2).flatten(0, 1))
    x = flat.unflatten(0, (batch, frames)).transpose(1, 2)
    if layer.mode == "downsample3d" and frames > 1:
        x = torch.cat((x[:, :, :1], layer.time_conv(x)), 2)
    return x


def encode_parallel(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Moments of the posterior, all frames at once; equals `vae.encode(video)[0].parameters`.

    Args:
        vae: with a patch size, and not of the residual kind.
        video: [B, 3, 1 + 4n, Y, X] in [-1, 1].

    Returns:
        [B, 2·z, 1 + n, Y/8, X/8]: means, then log-variances.
    """
    encoder = vae.encoder
    x = encoder.conv_in(patchify(video, vae.config.patch_size))
    for layer in encoder.down_blocks:
        x = _resample(layer, x) if isinstance(layer, WanResample) else layer(x)
    x = encoder.mid_block(x)
    return vae.quant_conv(encoder.conv_out(encoder.nonlinearity(encoder.norm_out(x))))


def decode_parallel(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Pixels, all frames at once and not clamped; clamped to [-1, 1] it equals `vae.decode(latents).sample`.

    Args:
        vae: as in `encode_parallel`.
        latents: [B, z, 1 + n, Y/8, X/8], not normalised.

    Returns:
        [B, 3, 1 + 4n, Y, X].
    """
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = resnet(x)
        if block.upsamplers is not None:
            x = _resample(block.upsamplers[0], x)
    return unpatchify(decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x))), vae.config.patch_size)


def encode_means(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Posterior means [B, z, 1 + n, Y/8, X/8] of clips [B, 3, 1 + 4n, Y, X], in float32, not normalised."""
    with torch.no_grad(), torch.autocast(video.device.type, torch.bfloat16, enabled=video.is_cuda):
        return encode_parallel(vae, video).float()[:, : vae.config.z_dim]


def _reconstruct(vae: AutoencoderKLWan, video: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(video, mean, log-variance) of the posterior's sample, in one call, so that it compiles as a whole."""
    mean, log_variance = encode_parallel(vae, video).float().chunk(2, dim=1)
    log_variance = log_variance.clamp(-20, 10)
    return decode_parallel(vae, mean + noise * (0.5 * log_variance).exp()).float(), mean, log_variance


class Reconstruction(nn.Module):
    """What the VAE learns: L1 + 2·MSE + 2e-5·KL on whole clips."""

    def __init__(self, vae: AutoencoderKLWan, compile: bool = False) -> None:
        super().__init__()
        self.vae, self._call = vae, _reconstruct
        if compile:
            self._call = torch.compile(_reconstruct, dynamic=False, options=compile_options())

    def forward(self, video: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scalars by name, `loss` among them, of clips [B, 3, 1 + 4n, Y, X] in [-1, 1]."""
        batch, _, frames, height, width = video.shape
        noise = torch.randn(batch, self.vae.config.z_dim, 1 + frames // 4, height // 8, width // 8, device=video.device)
        output, mean, log_variance = self._call(self.vae, video, noise)
        l1, mse = (output - video).abs().mean(), (output - video).square().mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        psnr = -10 * torch.log10((mse.detach() / 4).clamp(min=1e-12))
        return {"loss": l1 + 2 * mse + KL_WEIGHT * kl, "l1": l1, "psnr": psnr, "kl": kl}
