"""Train a proxy of larger models: a transformer on the embedded model's scenes, drawn twice as large.

    python -m vmonarch.finetune.proxy --output proxy

It has 36 M parameters and 240 tokens a frame, where the embedded model has 60. VAE, tokenizer and text encoder are the
embedded model's; the transformer learns from latents and captions of rendered clips, on a GPU with bfloat16 products
and compiled. `WanPipeline.from_pretrained` loads the folder; its `proxy.json` says how it was trained.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.training_utils import EMAModel
from torch import nn
from transformers import AutoTokenizer, UMT5EncoderModel

from vmonarch.configs import InputError
from vmonarch.files import AtomicFiles, check_output, write_json
from vmonarch.finetune.data.parquet import TEXT_LENGTH
from vmonarch.finetune.models import compile_options
from vmonarch.finetune.objective import Draw, Expert, Objective
from vmonarch.finetune.scenes import caption, render, sample_scene
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.environment import choose_device, environment, shown_command
from vmonarch.pipelines.model_folder import PROXY_RECORD

CAPTIONS_PER_CLIP, TRAIN_TOKENS, CAPTION_DROPOUT, UNIFORM_SHARE = 4, 55, 0.1, 0.1
# The seed makes them other clips than the embedded model's.
CLIPS, STEPS, BATCH, LEARNING_RATE, SEED = 8192, 4000, 24, 1e-3, 104_728
# In pixels. Four times the tokens show the same scene through twice the noise.
SCALE, FLOW_SHIFT = 2, 5.0
# Differences to the config of the embedded model.
TRANSFORMER = {"num_attention_heads": 8, "ffn_dim": 2048, "num_layers": 8}


def make_data(origin: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised latents [N, 16, 16, 12·SCALE, 20·SCALE] in float16, tokens [N, K, L] of K captions each) of clips.

    Args:
        origin: the pipeline whose VAE and tokenizer are taken.
    """
    scenes, rng = [sample_scene(SEED + number) for number in range(CLIPS)], random.Random(SEED)
    captions = [caption(scene.shown, rng) for scene in scenes for _ in range(CAPTIONS_PER_CLIP)]
    how = {"padding": "max_length", "max_length": TRAIN_TOKENS, "truncation": True, "return_tensors": "pt"}
    tokens = AutoTokenizer.from_pretrained(origin / "tokenizer")(captions, **how).input_ids
    vae = AutoencoderKLWan.from_pretrained(origin / "vae").to(device).eval()
    mean, std = (
        torch.tensor(vae.config[f"latents_{name}"], device=device)[:, None, None, None] for name in ("mean", "std")
    )
    parts = []
    for rows in torch.arange(CLIPS).split(64 // SCALE**2):
        video = torch.stack([render(scenes[row], device, scale=SCALE) for row in rows.tolist()])
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            means = vae.encode(video).latent_dist.mode().float()
        parts.append(((means - mean) / std).half())
    latents = torch.cat(parts)
    print(f"latents {list(latents.shape)}, deviation {latents[:256].float().std():.3f}", flush=True)
    return latents, tokens.unflatten(0, (CLIPS, CAPTIONS_PER_CLIP)).to(device)


def draw_batch(latents: torch.Tensor, tokens: torch.Tensor) -> tuple[Draw, torch.Tensor, torch.Tensor]:
    """(what is random, latents [B, C, F, Y, X], tokens [B, L]) of clips, each with one of its captions or none."""
    device = latents.device
    rows = torch.randint(len(latents), (BATCH,), device=device)
    clean = latents[rows].float()
    ids = tokens[rows, torch.randint(tokens.shape[1], (BATCH,), device=device)]
    empty = F.one_hot(torch.zeros_like(rows), ids.shape[1])  # the token that ends a text, and padding
    ids = torch.where(torch.rand(BATCH, 1, device=device) < CAPTION_DROPOUT, empty, ids)
    # Logit-normal, a tenth of them uniform, then shifted towards noise as Wan's.
    uniform = torch.rand(BATCH, device=device) < UNIFORM_SHARE
    u = torch.where(uniform, torch.rand(BATCH, device=device), torch.randn(BATCH, device=device).sigmoid())
    sigma = (FLOW_SHIFT * u / (1 + (FLOW_SHIFT - 1) * u)).clamp(1e-4, 1.0)
    return Draw(Expert("transformer"), sigma, torch.randn_like(clean), torch.zeros_like(uniform)), clean, ids


def train(
    origin: Path, latents: torch.Tensor, tokens: torch.Tensor
) -> tuple[WanTransformer3DModel, list[dict[str, float]]]:
    """(a transformer with the averaged weights of its training, the mean loss of every 100 steps).

    Args:
        latents, tokens: see `make_data`.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    device = latents.device
    torch.manual_seed(SEED)
    text_encoder = UMT5EncoderModel.from_pretrained(origin / "text_encoder").to(device).eval()
    config = WanTransformer3DModel.load_config(origin / "transformer") | TRANSFORMER
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
    for step in range(STEPS):
        torch.manual_seed(SEED * 1_000_003 + step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            draw, clean, ids = draw_batch(latents, tokens)
            with torch.no_grad():
                mask = ids != 0
                text = text_encoder(ids, mask.long()).last_hidden_state.float() * mask[..., None]
            text = F.pad(text, (0, 0, 0, TEXT_LENGTH - text.shape[1]))
            loss = objective.losses(transformer, draw, clean, text, {}).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        # Constant after a warm-up of 200 steps, and falling to zero over the last 35 % of the run.
        rate = LEARNING_RATE * min(1, (step + 1) / 200, (1 - step / STEPS) / 0.35)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        transformer.zero_grad(set_to_none=True)
        average.step(transformer.parameters())
        recent.append(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == STEPS:
            mean = torch.stack(recent).mean().item()
            recent.clear()
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is not finite at step {step}")
            log.append({"step": step + 1, "loss": mean, "seconds": round(time.monotonic() - begun, 1)})
            print(json.dumps(log[-1]), flush=True)
    average.copy_to(transformer.parameters())
    return transformer, log


def run(output: Path, command: str) -> None:
    """Train and save; see the module's docstring."""
    device, origin = choose_device("auto"), embedded_model_path()
    latents, tokens = make_data(origin, device)
    transformer, log = train(origin, latents, tokens)
    with AtomicFiles() as files:
        folder = files.stage(output)
        # A stock folder, whose configs let its float16 weights be loaded as float32.
        shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "transformer"))
        scheduler = UniPCMultistepScheduler.from_pretrained(origin / "scheduler", flow_shift=FLOW_SHIFT)
        scheduler.save_pretrained(folder / "scheduler")
        transformer.to("cpu").half().save_pretrained(folder / "transformer")
        height, width = (8 * size for size in latents.shape[3:])
        size = {"height": height, "width": width, "flow_shift": FLOW_SHIFT}
        record = {
            "command": command,
            "environment": environment(device),
            "training": {"clips": CLIPS, "steps": STEPS, "batch": BATCH, "learning_rate": LEARNING_RATE, "seed": SEED},
            "generation": vars(EMBEDDED_SETTINGS) | size,
            "parameters": transformer.num_parameters(),
            "log": log,
        }
        write_json(folder / PROXY_RECORD, record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vmonarch.finetune.proxy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline to write; must not exist")
    output = parser.parse_args(arguments).output
    if output.exists():
        parser.error(f"--output: {output} exists; nothing is overwritten")
    try:
        check_output(output)
    except InputError as error:
        parser.error(str(error))
    run(output, shown_command(("python", "-m", "vmonarch.finetune.proxy"), arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
