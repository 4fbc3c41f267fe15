"""Train a transformer on the embedded model's scenes and write a folder that `WanPipeline.from_pretrained` loads.

    python -m vmonarch.finetune.embedded --output my-model

VAE, tokenizer and text encoder are the embedded model's; a new transformer learns from latents and captions of
rendered clips, on a GPU with bfloat16 products and compiled. Its size is that of the shipped model's config.

`--proxy` trains a larger transformer on the same scenes drawn twice as large: 240 tokens a frame and 36 M parameters,
where the embedded model has 60 tokens. Its `proxy.json` says how it was trained.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.training_utils import EMAModel
from torch import nn
from transformers import AutoTokenizer, UMT5EncoderModel

from vmonarch.files import write_json
from vmonarch.finetune.export import appears
from vmonarch.finetune.models import compile_options
from vmonarch.finetune.objective import Draw, Expert, Objective
from vmonarch.finetune.scenes import SceneBatch, render, sample_scenes, write_captions
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.environment import choose_device, environment, shown_command
from vmonarch.pipelines.model_folder import PROXY_RECORD

CAPTIONS_PER_CLIP, TRAIN_TOKENS, CAPTION_DROPOUT, UNIFORM_SHARE = 4, 55, 0.1, 0.1
TEXT_LENGTH = 512
"""Rows of prompt embedding the stock Wan pipeline gives the transformer; rows past the prompt's tokens are zero."""


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; the defaults are what the shipped model's transformer was trained with.

    Args:
        scale: of the pixels, see `vmonarch.finetune.scenes.render`.
        transformer: what differs from the config of the embedded model's.
    """

    clips: int = 64_000
    steps: int = 10_534
    batch: int = 256
    learning_rate: float = 1.5e-3
    seed: int = 0
    scale: int = 1
    flow_shift: float = EMBEDDED_SETTINGS.flow_shift
    transformer: dict[str, int] = field(default_factory=dict)


# Four times the tokens show the same scene through twice the noise. By the seed they are other clips.
PROXY = Settings(
    clips=8192, steps=4000, batch=24, learning_rate=1e-3, seed=104_728, scale=2, flow_shift=5.0,
    transformer={"num_attention_heads": 8, "ffn_dim": 2048, "num_layers": 8},
)  # fmt: skip


def encode_clips(vae: AutoencoderKLWan, scenes: SceneBatch, device: torch.device, scale: int) -> torch.Tensor:
    """Normalised latents of every clip, drawn `scale` times as large: [B, 16, 16, 12·scale, 20·scale], float16."""
    mean, std = (
        torch.tensor(vae.config[f"latents_{name}"], device=device)[:, None, None, None] for name in ("mean", "std")
    )
    parts = []
    for rows in torch.arange(len(scenes)).split(64 // scale**2):
        video = render(scenes.map(operator.itemgetter(rows)), device, scale=scale)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            means = vae.encode(video).latent_dist.mode().float()
        parts.append(((means - mean) / std).half())
    return torch.cat(parts)


def make_data(origin: Path, settings: Settings, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(latents [N, C, F, Y, X], tokens [N, K, L] of K captions each) of the clips that are trained on.

    Args:
        origin: the pipeline whose VAE and tokenizer are taken.
    """
    scenes = sample_scenes(settings.clips, settings.seed + 1)
    captions = write_captions(scenes, settings.seed + 2, CAPTIONS_PER_CLIP)
    how = {"padding": "max_length", "max_length": TRAIN_TOKENS, "truncation": True, "return_tensors": "pt"}
    tokens = AutoTokenizer.from_pretrained(origin / "tokenizer")(captions, **how).input_ids
    vae = AutoencoderKLWan.from_pretrained(origin / "vae").to(device).eval()
    latents = encode_clips(vae, scenes, device, settings.scale)
    print(f"latents {list(latents.shape)}, deviation {latents[:256].float().std():.3f}", flush=True)
    return latents, tokens.unflatten(0, (len(scenes), CAPTIONS_PER_CLIP)).to(device)


def draw_batch(
    latents: torch.Tensor, tokens: torch.Tensor, settings: Settings
) -> tuple[Draw, torch.Tensor, torch.Tensor]:
    """(what is random, latents [B, C, F, Y, X], tokens [B, L]) of clips, each with one of its captions or none."""
    batch, device = settings.batch, latents.device
    rows = torch.randint(len(latents), (batch,), device=device)
    clean = latents[rows].float()
    ids = tokens[rows, torch.randint(tokens.shape[1], (batch,), device=device)]
    empty = F.one_hot(torch.zeros_like(rows), ids.shape[1])  # the token that ends a text, and padding
    ids = torch.where(torch.rand(batch, 1, device=device) < CAPTION_DROPOUT, empty, ids)
    # Logit-normal, a tenth of them uniform, then shifted towards noise as Wan's.
    uniform, shift = torch.rand(batch, device=device) < UNIFORM_SHARE, settings.flow_shift
    u = torch.where(uniform, torch.rand(batch, device=device), torch.randn(batch, device=device).sigmoid())
    sigma = (shift * u / (1 + (shift - 1) * u)).clamp(1e-4, 1.0)
    return Draw(Expert("transformer"), sigma, torch.randn_like(clean), torch.zeros_like(uniform)), clean, ids


def train(
    origin: Path, latents: torch.Tensor, tokens: torch.Tensor, settings: Settings
) -> tuple[WanTransformer3DModel, list[dict[str, float]]]:
    """(a transformer with the averaged weights of its training, the mean loss of every 100 steps).

    Args:
        latents, tokens: see `make_data`.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    device, seed, steps = latents.device, settings.seed, settings.steps
    torch.manual_seed(seed)
    text_encoder = UMT5EncoderModel.from_pretrained(origin / "text_encoder").to(device).eval()
    config = WanTransformer3DModel.load_config(origin / "transformer") | settings.transformer
    transformer = WanTransformer3DModel.from_config(config)
    # Zero output at the start: the first prediction is zero, not noise.
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    transformer.to(device).train()
    if device.type == "cuda":
        transformer.compile(dynamic=False, options=compile_options())
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for name, parameter in transformer.named_parameters():
        parts["blocks." in name and parameter.ndim == 2].append(parameter)
    # Muon for matrices, AdamW for the rest.
    adam = torch.optim.AdamW(parts[0], betas=(0.9, 0.98), weight_decay=0.0)
    muon = torch.optim.Muon(parts[1], weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    average, objective = EMAModel(transformer.parameters(), decay=0.999, foreach=True), Objective()
    log, recent, begun = [], [], time.monotonic()
    for step in range(steps):
        torch.manual_seed(seed * 1_000_003 + step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            draw, clean, ids = draw_batch(latents, tokens, settings)
            with torch.no_grad():
                mask = ids != 0
                text = text_encoder(ids, mask.long()).last_hidden_state.float() * mask[..., None]
            text = F.pad(text, (0, 0, 0, TEXT_LENGTH - text.shape[1]))
            loss = objective.losses(transformer, draw, clean, text, {}).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        # Constant after a warm-up of 200 steps, and falling to zero over the last 35 % of the run.
        rate = settings.learning_rate * min(1, (step + 1) / 200, (1 - step / steps) / 0.35)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        transformer.zero_grad(set_to_none=True)
        average.step(transformer.parameters())
        recent.append(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            mean = torch.stack(recent).mean().item()
            recent.clear()
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is not finite at step {step}")
            log.append({"step": step + 1, "loss": mean, "seconds": round(time.monotonic() - begun, 1)})
            print(json.dumps(log[-1]), flush=True)
    average.copy_to(transformer.parameters())
    return transformer, log


def run(settings: Settings, output: Path, proxy: bool, command: str) -> None:
    """Train and save; see the module's docstring."""
    device, origin = choose_device("auto"), embedded_model_path()
    latents, tokens = make_data(origin, settings, device)
    transformer, log = train(origin, latents, tokens, settings)
    with appears(output) as folder:
        # A stock folder, whose configs let its float16 weights be loaded as float32.
        shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "transformer"))
        scheduler = UniPCMultistepScheduler.from_pretrained(origin / "scheduler", flow_shift=settings.flow_shift)
        scheduler.save_pretrained(folder / "scheduler")
        transformer.to("cpu").half().save_pretrained(folder / "transformer")
        if proxy:
            height, width = (8 * size for size in latents.shape[3:])
            generation: dict[str, Any] = {**vars(EMBEDDED_SETTINGS), "height": height, "width": width}
            record = {
                "command": command,
                "environment": environment(device),
                "training": vars(settings),
                "generation": generation | {"flow_shift": settings.flow_shift},
                "parameters": transformer.num_parameters(),
                "log": log,
            }
            write_json(folder / PROXY_RECORD, record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vmonarch.finetune.embedded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline to write; must not exist")
    parser.add_argument("--proxy", action="store_true", help="train the larger model")
    options = parser.parse_args(arguments)
    if options.output.exists():
        parser.error(f"--output: {options.output} exists; nothing is overwritten")
    settings = PROXY if options.proxy else Settings()
    command = shown_command(("python", "-m", "vmonarch.finetune.embedded"), arguments)
    run(settings, options.output, options.proxy, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
