"""Joint training of the text encoder and the transformer by flow matching, on latents kept on the device."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5EncoderModel

from vmonarch.finetune.embedded.data import SceneBatch, render
from vmonarch.finetune.embedded.text import TEXT_DIM, AttributeHeads, encode_text
from vmonarch.finetune.embedded.vae import LATENT_CHANNELS, encode_means, latent_statistics

TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 256,
    "ffn_dim": 640,
    "num_layers": 6,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 128,
}


@torch.no_grad()
def encode_clips(vae: AutoencoderKLWan, scenes: SceneBatch, device: str, batch: int = 64) -> torch.Tensor:
    """Normalised latents of every clip: [B, 16, 16, 12, 20], float16, on `device`."""
    mean, std = latent_statistics(vae, device)
    parts = []
    for start in range(0, len(scenes), batch):
        latents = encode_means(vae, render(scenes[start : start + batch], device))
        parts.append(((latents - mean) / std).half())
    return torch.cat(parts)


def sample_sigmas(batch: int, shift: float, device: str) -> torch.Tensor:
    """Noise levels in (0, 1): logit-normal, a tenth of them uniform, then shifted towards noise as Wan's schedulers do."""
    u = torch.where(
        torch.rand(batch, device=device) < 0.1,
        torch.rand(batch, device=device),
        torch.randn(batch, device=device).sigmoid(),
    )
    return (shift * u / (1 + (shift - 1) * u)).clamp(1e-4, 1.0)


def flow_matching_loss(
    transformer: Callable[..., Any], clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """Mean squared error of the predicted velocity `noise − clean` at `x = (1 − σ)·clean + σ·noise`: one value per clip.

    Args:
        transformer: called as `WanTransformer3DModel` is, with timestep = 1000·σ.
        clean, noise: [B, C, F, Y, X]; sigma: [B]; text: [B, 512, D].
    """
    s = sigma.view(-1, 1, 1, 1, 1)
    velocity = transformer(
        hidden_states=(1 - s) * clean + s * noise, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False
    )[0]
    return (velocity.float() - (noise - clean)).square().flatten(1).mean(1)


def _optimizers(modules: nn.ModuleDict, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside transformer and encoder blocks, AdamW for everything else."""
    matrices, others = [], []
    for name, parameter in modules.named_parameters():
        inside = "blocks." in name or ".block." in name
        (matrices if inside and parameter.ndim == 2 and "relative" not in name else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]


def train_transformer(
    *,
    latents: torch.Tensor,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    text_encoder: UMT5EncoderModel,
    steps: int,
    batch: int,
    seed: int,
    device: str,
    checkpoint: Path | None = None,
    learning_rate: float = 1.5e-3,
    caption_dropout: float = 0.1,
    sigma_shift: float = 3.0,
    decay_share: float = 0.35,
    compile: bool = False,
    config: dict[str, Any] | None = None,
    on_checkpoint: Callable[[int, WanTransformer3DModel, UMT5EncoderModel], None] | None = None,
    checkpoint_every: int = 1000,
) -> tuple[WanTransformer3DModel, UMT5EncoderModel, list[dict[str, float]]]:
    """Train from scratch, or resume from `checkpoint` where that file exists.

    Args:
        latents: normalised, [N, 16, F, Y, X], float16, on `device`.
        tokens: [N, K, L] int16, K captions of each clip, on `device`; drawn anew at every visit.
        targets: [N, A] attribute classes for the auxiliary text loss, on `device`.
        text_encoder: trained in place, from its current weights.
        steps, batch, seed, device: the run; the learning rate is constant after a warm-up and falls to zero linearly over
            the last `decay_share` of the steps.
        checkpoint: file written every `checkpoint_every` steps and at the end.
        on_checkpoint: called with the step and the averaged models at the same times.

    Returns:
        the averaged transformer and text encoder in float32, and the logged losses.
    """
    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(**(config or TRANSFORMER_CONFIG)).to(device)
    modules = nn.ModuleDict({"transformer": transformer, "text": text_encoder.to(device), "heads": AttributeHeads().to(device)})
    # Zero output at the start: the first prediction is zero, not noise.
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    average = copy.deepcopy(modules)
    optimizers = _optimizers(modules, learning_rate)
    first, log = 0, []
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        modules.load_state_dict(state["modules"])
        average.load_state_dict(state["average"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, log = state["step"], state["log"]
    model = torch.compile(transformer) if compile else transformer
    started = time.monotonic()
    recent: list[torch.Tensor] = []
    for step in range(first, steps):
        torch.manual_seed(seed * 1_000_003 + step)
        rate = learning_rate * min(1, (step + 1) / 200, (steps - step) / max(1, decay_share * steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        rows = torch.randint(len(latents), (batch,), device=device)
        clean = latents[rows].float()
        ids = tokens[rows, torch.randint(tokens.shape[1], (batch,), device=device)]
        dropped = torch.rand(batch, device=device) < caption_dropout
        ids = torch.where(dropped[:, None], F.pad(torch.ones_like(ids[:, :1]), (0, ids.shape[1] - 1)), ids)
        noise, sigma = torch.randn_like(clean), sample_sigmas(batch, sigma_shift, device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            text, pooled = encode_text(text_encoder, ids)
            flow = flow_matching_loss(model, clean, noise, sigma, text.float())
            attributes = modules["heads"](pooled, targets[rows])
        loss = flow.mean() + 0.05 * (attributes * ~dropped).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            decay = min(0.999, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(modules.parameters()), 1 - decay)
        recent.append(torch.stack((flow.detach().mean(), attributes.detach().mean())))
        if (step + 1) % 100 == 0 or step + 1 == steps:
            values = torch.stack(recent).mean(0).tolist()
            recent.clear()
            if not math.isfinite(values[0]):
                raise FloatingPointError(f"the loss is not finite at step {step}")
            log.append({"step": step + 1, "flow": values[0], "attributes": values[1], "seconds": time.monotonic() - started})
            print(f"transformer {step + 1:6d}  flow {values[0]:.4f}  text {values[1]:.3f}  {log[-1]['seconds']:.0f}s", flush=True)
        if (step + 1) % checkpoint_every == 0 or step + 1 == steps:
            if checkpoint is not None:
                state = {
                    "modules": modules.state_dict(),
                    "average": average.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "step": step + 1,
                    "log": log,
                }
                torch.save(state, checkpoint.with_suffix(".partial"))
                checkpoint.with_suffix(".partial").replace(checkpoint)
            if on_checkpoint is not None:
                on_checkpoint(step + 1, average["transformer"], average["text"])
    average.eval().requires_grad_(False)
    return average["transformer"], average["text"], log
