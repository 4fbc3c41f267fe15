"""Joint training of the text encoder and the transformer by flow matching, on latents kept on the device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5EncoderModel

from vmonarch.files import AtomicFiles
from vmonarch.finetune.embedded import loop, parallel
from vmonarch.finetune.embedded.optimizer import StackedMuon
from vmonarch.finetune.embedded.text import TEXT_DIM, TEXT_LENGTH, AttributeHeads, encode_text
from vmonarch.finetune.embedded.vae import (
    LATENT_CHANNELS,
    encode_means,
    encode_parallel,
    latent_statistics,
)
from vmonarch.finetune.models import compile_options
from vmonarch.finetune.scenes import SceneBatch, render

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


class TrainingAttention:
    """Attention processor that computes what `WanAttnProcessor` computes, in less time where gradients are needed.

    The rotary embedding is written without in-place assignment, which compilers fuse badly. In cross-attention the last
    text row stands for `padding` equal rows: the stock pipeline pads every prompt with zero rows to 512, equal rows
    have equal keys and values, and n equal keys are one key whose logit is log n higher. That logit rides along in
    eight more channels of query and key.
    """

    _attention_backend = None
    _parallel_config = None

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = project(attn, hidden_states, source, rotary_emb)
        dim = query.shape[-1]
        if encoder_hidden_states is not None:
            bias = torch.zeros(source.shape[1], device=key.device)
            bias[-1] = math.log(self.padding)
            query = torch.cat((query, query.new_full((*query.shape[:3], 8), dim**0.5 / 8)), -1)
            spread = bias[None, :, None, None].expand(*key.shape[:3], 8).to(key.dtype)
            key, value = torch.cat((key, spread), -1), F.pad(value, (0, 8))
        query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))  # [B, H, S, D]
        output = F.scaled_dot_product_attention(query, key, value, scale=dim**-0.5)
        return attn.to_out[0](output.transpose(1, 2)[..., :dim].flatten(2, 3))


def project(
    attn: Any, hidden_states: torch.Tensor, source: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query of `hidden_states`, key and value of `source`, normalised and rotated: each [B, S, H, D]."""
    query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source)), attn.to_v(source)
    query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
    if rotary_emb is not None:
        cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]
        query, key = (_rotate(x, cos, sin) for x in (query, key))
    return query, key, value


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


@torch.no_grad()
def encode_clips(
    vae: AutoencoderKLWan, scenes: SceneBatch, device: str, batch: int = 64, compile: bool = False, scale: int = 1
) -> torch.Tensor:
    """Normalised latents of every clip, drawn `scale` times as large: [B, 16, 16, 12·scale, 20·scale], float16."""
    mean, std = latent_statistics(vae, device)
    encode = torch.compile(encode_parallel, dynamic=False) if compile else encode_parallel
    parts = []
    for start in range(0, len(scenes), batch):
        rows = slice(start, start + batch)
        video = render(scenes.map(lambda tensor, rows=rows: tensor[rows]), device, scale=scale)
        # A compiled form is made for one batch size; the last, smaller batch goes without.
        means = encode_means(vae, video, encode if len(video) == batch else encode_parallel)
        parts.append(((means - mean) / std).half())
    return torch.cat(parts)


def sample_sigmas(batch: int, shift: float, device: str) -> torch.Tensor:
    """Noise levels in (0, 1): logit-normal, a tenth of them uniform, then shifted towards noise as Wan's."""
    u = torch.where(
        torch.rand(batch, device=device) < 0.1,
        torch.rand(batch, device=device),
        torch.randn(batch, device=device).sigmoid(),
    )
    return (shift * u / (1 + (shift - 1) * u)).clamp(1e-4, 1.0)


def draw_clips(
    latents: torch.Tensor, tokens: torch.Tensor, batch: int, caption_dropout: float, sigma_shift: float
) -> tuple[torch.Tensor, ...]:
    """Rows [B] of latents [N, C, F, Y, X], these, token numbers [B, L] of one of the captions (tokens [N, K, L]) or of
    an empty one, whether it is empty [B], noise, and its levels [B].
    """
    device = str(latents.device)
    rows = torch.randint(len(latents), (batch,), device=device)
    clean = latents[rows].float()
    ids = tokens[rows, torch.randint(tokens.shape[1], (batch,), device=device)]
    dropped = torch.rand(batch, device=device) < caption_dropout
    ids = torch.where(dropped[:, None], F.pad(torch.ones_like(ids[:, :1]), (0, ids.shape[1] - 1)), ids)
    return rows, clean, ids, dropped, torch.randn_like(clean), sample_sigmas(batch, sigma_shift, device)


def velocity(
    transformer: Callable[..., Any], clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """The predicted velocity at `x = (1 − σ)·clean + σ·noise`, float32 [B, C, F, Y, X].

    Args:
        transformer: called as `WanTransformer3DModel` is, with timestep = 1000·σ.
        clean, noise: [B, C, F, Y, X]; sigma: [B]; text: [B, 512, D].
    """
    s = sigma.view(-1, 1, 1, 1, 1)
    return transformer(
        hidden_states=(1 - s) * clean + s * noise, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False
    )[0].float()


def flow_matching_loss(
    transformer: Callable[..., Any], clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """Mean squared error of `velocity` against `noise − clean`, one per clip."""
    predicted = velocity(transformer, clean, noise, sigma, text)
    return (predicted - (noise - clean)).square().flatten(1).mean(1)


def _optimizers(modules: nn.ModuleDict, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside transformer and encoder blocks, AdamW for everything else."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        inside = "blocks." in name or ".block." in name
        (matrices if inside and parameter.ndim == 2 and "relative" not in name else others).append(parameter)
    muon = StackedMuon(matrices, lr=learning_rate, weight_decay=0.02)
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
    transformer: WanTransformer3DModel | None = None,
    checkpoint: Path | None = None,
    learning_rate: float = 1.5e-3,
    caption_dropout: float = 0.1,
    sigma_shift: float = 3.0,
    decay_share: float = 0.35,
    time_limit: float = math.inf,
    compile: bool = False,
    config: dict[str, Any] | None = None,
    on_checkpoint: Callable[[int, WanTransformer3DModel, UMT5EncoderModel], None] | None = None,
    checkpoint_every: int = 1000,
) -> tuple[WanTransformer3DModel, UMT5EncoderModel, list[dict[str, Any]]]:
    """Train from scratch, or resume from `checkpoint` where that file exists; with others inside a process group.

    Args:
        latents: normalised, [N, 16, F, Y, X], float16, on `device`.
        tokens: [N, K, L] int16, K captions of each clip, on `device`; drawn anew at every visit.
        targets: [N, A] attribute classes for the auxiliary text loss, on `device`.
        text_encoder: trained in place, from its current weights.
        steps, batch, seed, device: the run; the learning rate is constant after a warm-up and falls to zero linearly
            over the last `decay_share` of the steps.
        time_limit: seconds; a run that cannot do all its steps in this time decays and ends earlier.
        transformer: trained in place, from its current weights, and called as Wan's is; a fresh one of `config` by
            default.
        checkpoint: file written every `checkpoint_every` steps and at the end.
        on_checkpoint: called with the step and the averaged models at the same times.

    Returns:
        the averaged transformer and text encoder in float32, and the logged losses.
    """
    torch.manual_seed(seed)
    if transformer is None:
        transformer = WanTransformer3DModel(**(config or TRANSFORMER_CONFIG))
        # Zero output at the start: the first prediction is zero, not noise.
        nn.init.zeros_(transformer.proj_out.weight)
        nn.init.zeros_(transformer.proj_out.bias)
    transformer = transformer.train().to(device)
    text_encoder.train()
    heads = AttributeHeads().to(device)
    modules = nn.ModuleDict({"transformer": transformer, "text": text_encoder.to(device), "heads": heads})
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
    if isinstance(transformer, WanTransformer3DModel):
        transformer.set_attn_processor(TrainingAttention(TEXT_LENGTH - tokens.shape[-1]))
    compiled = lambda module: torch.compile(module, dynamic=False, options=compile_options()) if compile else module
    model, encoder = compiled(transformer), compiled(text_encoder)

    def losses(step: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(parallel.own_seed(seed * 1_000_003 + step))
        rows, clean, ids, dropped, noise, sigma = draw_clips(latents, tokens, batch, caption_dropout, sigma_shift)
        with loop.autocast(device):
            text, pooled = encode_text(encoder, ids, padding=1)
            flow = flow_matching_loss(model, clean, noise, sigma, text.float())
            attributes = heads(pooled, targets[rows])
        loss = flow.mean() + 0.05 * (attributes * ~dropped).mean()
        return {"loss": loss, "flow": flow.mean(), "text": attributes.mean()}

    def save(step: int, last: bool) -> None:
        if parallel.rank() > 0 or not (last or step % checkpoint_every == 0):
            return
        if checkpoint is not None:
            state = {
                "modules": modules.state_dict(),
                "average": average.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "log": log,
            }
            with AtomicFiles(overwrite=True) as files:
                torch.save(state, files.stage(checkpoint))
        if on_checkpoint is not None:
            on_checkpoint(step, average["transformer"], average["text"])

    rate = loop.trapezoid(learning_rate, 200, decay_share)
    limits: dict[str, Any] = {"steps": steps, "first": first, "time_limit": time_limit}
    learnt = modules.parameters(), average.parameters()
    loop.train("transformer", *learnt, optimizers, losses, rate=rate, ema=0.999, log=log, after=save, **limits)
    average.eval().requires_grad_(False)
    return average["transformer"], average["text"], log
