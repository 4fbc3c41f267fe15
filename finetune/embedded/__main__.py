"""Train the embedded model from scratch and write a folder that `diffusers.WanPipeline.from_pretrained` loads.

    python -m vmonarch.finetune.embedded --output my-model

The VAE comes first, then captions and tokenizer, latents of all clips, text encoder and transformer together, on a GPU
with bfloat16 products and these two compiled. The sizes of layers are those in the shipped model's configs.

`--proxy` trains a larger transformer on the same scenes drawn twice as large: 240 tokens a frame and 36 M parameters,
where the embedded model has 60 tokens. VAE, tokenizer and, to begin with, text encoder are the embedded model's. Its
`proxy.json` says how it was trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import operator
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.training_utils import EMAModel
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from vmonarch.files import write_json
from vmonarch.finetune.embedded.models import Reconstruction, TextToVideo, attribute_targets
from vmonarch.finetune.export import appears
from vmonarch.finetune.models import compile_options
from vmonarch.finetune.scenes import SceneBatch, render, sample_scenes, write_captions
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.environment import choose_device, environment, shown_command
from vmonarch.pipelines.model_folder import PROXY_RECORD

CAPTIONS_PER_CLIP, TRAIN_TOKENS, VOCABULARY = 4, 55, 1024


@dataclass(frozen=True)
class Settings:
    """Sizes of a run; the defaults are what the shipped model was trained with.

    Args:
        scale: of the pixels, see `vmonarch.finetune.scenes.render`.
        transformer: what differs from the config of the embedded model's.
    """

    clips: int = 64_000
    steps: int = 10_534
    batch: int = 256
    learning_rate: float = 1.5e-3
    seed: int = 0
    vae_steps: int = 3200
    vae_batch: int = 8
    statistics_clips: int = 256
    scale: int = 1
    flow_shift: float = EMBEDDED_SETTINGS.flow_shift
    transformer: dict[str, int] = field(default_factory=dict)


# Four times the tokens show the same scene through twice the noise. By the seed they are other clips.
PROXY = Settings(
    clips=8192, steps=4000, batch=24, learning_rate=1e-3, seed=104_728, scale=2, flow_shift=5.0,
    transformer={"num_attention_heads": 8, "ffn_dim": 2048, "num_layers": 8},
)  # fmt: skip


def fit(
    model: nn.Module,
    inputs: Callable[[int], Sequence[torch.Tensor]],
    is_matrix: Callable[[str, nn.Parameter], bool],
    rate: Callable[[float], float],
    device: torch.device,
    *,
    steps: int,
    seed: int,
    decay: float,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
) -> list[dict[str, float]]:
    """Train a module that gives scalars by name, of which it minimises `loss`; leaves the averaged weights in it.

    Args:
        inputs: of the module at a step.
        is_matrix: parameters that Muon trains, as matrices of shape (out, everything else); AdamW trains the others.
        rate: learning rate at the share of the run that is over, in [0, 1).
        decay: of the average.
        weight_decay: of Muon.

    Returns:
        the means over every 100 steps.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    model.to(device).train()
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if is_matrix(name, parameter) else others).append(parameter)
    # Muon takes matrices alone; these share the kernels' memory.
    views = [nn.Parameter(parameter.detach().view(len(parameter), -1)) for parameter in matrices]
    muon = torch.optim.Muon(views, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, betas=(0.9, beta2), weight_decay=0.0)
    average = EMAModel(model.parameters(), decay=decay, foreach=True)
    log: list[dict[str, float]] = []
    recent: list[dict[str, torch.Tensor]] = []
    begun = time.monotonic()
    for step in range(steps):
        torch.manual_seed(seed * 1_000_003 + step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = model(*inputs(step))
        found["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for view, parameter in zip(views, matrices, strict=True):
            assert parameter.grad is not None
            view.grad = parameter.grad.flatten(1)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = rate(step / steps)
            optimizer.step()
        model.zero_grad(set_to_none=True)
        average.step(model.parameters())
        recent.append({name: value.detach() for name, value in found.items()})
        if (step + 1) % 100 == 0 or step + 1 == steps:
            means = {name: torch.stack([entry[name] for entry in recent]).mean().item() for name in found}
            recent.clear()
            if not math.isfinite(means["loss"]):
                raise FloatingPointError(f"the loss is not finite at step {step}")
            log.append({"step": step + 1, **means, "seconds": round(time.monotonic() - begun, 1)})
            print(json.dumps(log[-1]), flush=True)
    average.copy_to(model.parameters())
    return log


def train_vae(vae: AutoencoderKLWan, settings: Settings, device: torch.device) -> None:
    """Train the VAE on whole rendered clips, and set its `latents_mean` and `latents_std` to those of other clips."""
    seed, steps = settings.seed, settings.vae_steps
    clips = lambda step: [render(sample_scenes(settings.vae_batch, seed * 1_000_003 + step), device)]

    def is_kernel(name: str, parameter: nn.Parameter) -> bool:
        outer = "conv_in" in name or "decoder.conv_out" in name
        return parameter.ndim >= 4 and parameter[0].numel() > 1 and not outer

    rate = lambda progress: 1e-3 * min(1, 50 * (progress + 1 / steps)) * (1 + math.cos(math.pi * progress))
    fit(Reconstruction(vae), clips, is_kernel, rate, device, steps=steps, seed=seed, decay=0.995)
    z_dim = vae.config.z_dim
    vae.register_to_config(latents_mean=[0.0] * z_dim, latents_std=[1.0] * z_dim)
    latents = encode_clips(vae, sample_scenes(settings.statistics_clips, seed + 7_919), device)
    channels = latents.transpose(0, 1).flatten(1).float()
    vae.register_to_config(latents_mean=channels.mean(1).tolist(), latents_std=channels.std(1).tolist())


def encode_clips(vae: AutoencoderKLWan, scenes: SceneBatch, device: torch.device, scale: int = 1) -> torch.Tensor:
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


def make_data(
    vae: AutoencoderKLWan, origin: Path, settings: Settings, device: torch.device, learn_words: bool
) -> tuple[str, Sequence[torch.Tensor]]:
    """Latents [N, C, F, Y, X], tokens [N, K, L] and attributes [N, A] of the clips that are trained on.

    Args:
        origin: the pipeline whose tokenizer is taken, with `learn_words` for other words, those of the captions.

    Returns:
        (the tokenizer as JSON, the tensors).
    """
    scenes = sample_scenes(settings.clips, settings.seed + 1)
    captions = write_captions(scenes, settings.seed + 2, CAPTIONS_PER_CLIP)
    words = (origin / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8")
    if learn_words:
        untrained = AutoTokenizer.from_pretrained(origin / "tokenizer")
        learnt = untrained.train_new_from_iterator(captions[:200_000], VOCABULARY)
        words = learnt.backend_tokenizer.to_str(pretty=True)
    tokenizer = Tokenizer.from_str(words)
    tokenizer.enable_truncation(TRAIN_TOKENS)
    tokenizer.enable_padding(length=TRAIN_TOKENS)
    tokens = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch_fast(captions)], device=device)
    latents = encode_clips(vae, scenes, device, settings.scale)
    print(f"latents {list(latents.shape)}, deviation {latents[:256].float().std():.3f}", flush=True)
    return words, (latents, tokens.unflatten(0, (len(scenes), CAPTIONS_PER_CLIP)), attribute_targets(scenes).to(device))


def train_transformer(
    origin: Path, data: Sequence[torch.Tensor], settings: Settings, device: torch.device, proxy: bool
) -> tuple[UMT5EncoderModel, WanTransformer3DModel, list[dict[str, float]]]:
    """(text encoder, transformer, log); the first is new too, but for a proxy's."""
    torch.manual_seed(settings.seed)
    if proxy:
        text_encoder = UMT5EncoderModel.from_pretrained(origin / "text_encoder")
    else:
        text_encoder = UMT5EncoderModel(UMT5Config.from_pretrained(origin / "text_encoder"))
    config = WanTransformer3DModel.load_config(origin / "transformer") | settings.transformer
    transformer = WanTransformer3DModel.from_config(config)
    # Zero output at the start: the first prediction is zero, not noise.
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    if device.type == "cuda":
        for part in (text_encoder, transformer):
            part.compile(dynamic=False, options=compile_options())

    def is_matrix(name: str, parameter: nn.Parameter) -> bool:
        return ("blocks." in name or ".block." in name) and parameter.ndim == 2 and "relative" not in name

    # Constant after a warm-up of 200 steps, and falling to zero over the last 35 % of the run.
    rate = lambda progress: (
        settings.learning_rate * min(1, (progress * settings.steps + 1) / 200, (1 - progress) / 0.35)
    )
    model = TextToVideo(text_encoder, transformer, settings.flow_shift, settings.batch)
    how: dict[str, Any] = {"steps": settings.steps, "seed": settings.seed, "beta2": 0.98, "weight_decay": 0.02}
    log = fit(model, lambda step: data, is_matrix, rate, device, decay=0.999, **how)
    return text_encoder, transformer, log


def run(settings: Settings, output: Path, proxy: bool, command: str) -> None:
    """Train and save; see the module's docstring."""
    torch.backends.cudnn.benchmark = True
    device, origin = choose_device("auto"), embedded_model_path()
    torch.manual_seed(settings.seed)
    if proxy:
        vae = AutoencoderKLWan.from_pretrained(origin / "vae")
    else:
        vae = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(origin / "vae"))
        train_vae(vae, settings, device)
    words, data = make_data(vae.to(device).eval(), origin, settings, device, learn_words=not proxy)
    text_encoder, transformer, log = train_transformer(origin, data, settings, device, proxy)
    with appears(output) as folder:
        models = {"vae": vae, "text_encoder": text_encoder, "transformer": transformer}
        save_pipeline(folder, origin, words, models, settings.flow_shift)
        if proxy:
            height, width = (8 * size for size in data[0].shape[3:])
            generation = {**vars(EMBEDDED_SETTINGS), "height": height, "width": width}
            record = {
                "command": command,
                "environment": environment(device),
                "training": vars(settings),
                "generation": generation | {"flow_shift": settings.flow_shift},
                "parameters": transformer.num_parameters(),
                "log": log,
            }
            write_json(folder / PROXY_RECORD, record)


def save_pipeline(folder: Path, origin: Path, words: str, models: dict[str, Any], flow_shift: float) -> None:
    """Write a copy of a stock `WanPipeline` folder with other models, in float16 safetensors, and another tokenizer.

    The models become float16. The folder's configs let them be loaded as float32.
    """
    shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.safetensors", PROXY_RECORD))
    (folder / "tokenizer" / "tokenizer.json").write_text(words, encoding="utf-8")
    scheduler = UniPCMultistepScheduler.from_pretrained(origin / "scheduler", flow_shift=flow_shift)
    scheduler.save_pretrained(folder / "scheduler")
    for name, model in models.items():
        model.to("cpu").half().save_pretrained(folder / name)
    # transformers loads in the precision that the config names, diffusers' models load in float32 by default.
    shutil.copy(origin / "text_encoder" / "config.json", folder / "text_encoder")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vmonarch.finetune.embedded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline to write; must not exist")
    parser.add_argument("--proxy", action="store_true", help="train the larger model")
    sizes = ("clips", "steps", "batch", "learning_rate", "seed")
    for name in sizes:
        value, proxy = getattr(Settings(), name), getattr(PROXY, name)
        help = f"default {value}, {proxy} for a proxy"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=help)
    options = parser.parse_args(arguments)

    chosen = {name: value for name in sizes if (value := getattr(options, name)) is not None}
    for name, value in chosen.items():
        if not (value >= 0 if name == "seed" else value > 0):
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if options.output.exists():
        parser.error(f"--output: {options.output} exists; nothing is overwritten")
    settings = dataclasses.replace(PROXY if options.proxy else Settings(), **chosen)
    command = shown_command(("python", "-m", "vmonarch.finetune.embedded"), arguments)
    run(settings, options.output, options.proxy, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
