"""Tiny random Wan models and pipelines, built in code: no download, under a second each."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    ChronoEditTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

import vmonarch
from vmonarch.finetune.data.parquet import Sample

HEIGHT, WIDTH, FRAMES = 32, 48, 9
GRID = (3, 2, 3)  # of the size above: 3 latent frames of 4 × 6 latents, cut into patches of 2 × 2
PROMPT, NEGATIVE = "a red circle moves right", "blurry"

_TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}


def _seeded(model_class: Any, seed: int = 0, **config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(**config).eval()
        for name, parameter in model.named_parameters():
            # Larger queries and keys than at initialisation: attention that is far from uniform tells methods apart.
            if "attn1.norm_q" in name or "attn1.norm_k" in name:
                torch.nn.init.normal_(parameter, 1.5, 0.5)
    return model


transformer = partial(_seeded, WanTransformer3DModel, **_TRANSFORMER)
chronoedit_transformer = partial(_seeded, ChronoEditTransformer3DModel, **_TRANSFORMER)
skyreels_transformer = partial(_seeded, SkyReelsV2Transformer3DModel, **_TRANSFORMER)
_VACE = {"vace_layers": [0, 2], "vace_in_channels": 96, "num_layers": 3}
vace_transformer = partial(_seeded, WanVACETransformer3DModel, **_TRANSFORMER | _VACE)
_ANIMATE = {
    "in_channels": 36,
    "latent_channels": 16,
    "image_dim": 16,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
animate_transformer = partial(_seeded, WanAnimateTransformer3DModel, **_TRANSFORMER | _ANIMATE)


def inputs(
    grid: tuple[int, int, int] = GRID, batch: int = 1, seed: int = 0, channels: int = 16, dtype: Any = torch.float32
) -> dict[str, Any]:
    """Keyword arguments of a transformer's forward for a latent grid of tokens, patches of 1×2×2."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = grid
    return {
        "hidden_states": torch.randn(batch, channels, frames, 2 * height, 2 * width, generator=generator).to(dtype),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, 7, 16, generator=generator).to(dtype),
        "return_dict": False,
    }


def run(model: Any, grid: tuple[int, int, int] = GRID, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(grid, **options))[0]


def tokenizer(text: str = f"{PROMPT} {NEGATIVE} blue square", **options: Any) -> PreTrainedTokenizerFast:
    """Words in a row, those of `text`, and an end."""
    known = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *text.split()])}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)


def vae(**config: Any) -> AutoencoderKLWan:
    sizes = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return _seeded(AutoencoderKLWan, 2, **sizes | {"temperal_downsample": [False, True, True]} | config)


def _parts() -> dict[str, Any]:
    text_config = UMT5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    text_encoder = _seeded(lambda: UMT5EncoderModel(text_config), 1)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return {"tokenizer": tokenizer(), "text_encoder": text_encoder, "vae": vae(), "scheduler": scheduler}


def _image_parts() -> dict[str, Any]:
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    return {
        "image_encoder": _seeded(lambda: CLIPVisionModel(config), 3),
        "image_processor": CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    }


_IMAGE = {"image_dim": 16, "added_kv_proj_dim": 24}
_TWO = {"boundary_ratio": 0.9}
# Of each kind: the pipeline, its transformer, what that and what the pipeline is told.
_PIPELINES: dict[str, tuple[str, Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "t2v": ("WanPipeline", transformer, {}, {}),
    "t2v-2.2": ("WanPipeline", transformer, {}, _TWO),
    "t2v-2.2-low-noise-only": ("WanPipeline", transformer, {}, {"boundary_ratio": 1.1}),
    "t2v-5b": ("WanPipeline", transformer, {}, {"expand_timesteps": True}),
    "i2v-2.1": ("WanImageToVideoPipeline", transformer, {"in_channels": 36, **_IMAGE}, {}),
    "i2v-2.2": ("WanImageToVideoPipeline", transformer, {"in_channels": 36}, _TWO),
    "i2v-5b": ("WanImageToVideoPipeline", transformer, {}, {"expand_timesteps": True}),
    "vace": ("WanVACEPipeline", vace_transformer, {}, {}),
    "vace-2.2": ("WanVACEPipeline", vace_transformer, {}, _TWO),
    "v2v": ("WanVideoToVideoPipeline", transformer, {}, {}),
    "animate": ("WanAnimatePipeline", animate_transformer, _IMAGE, {}),
    "chronoedit": ("ChronoEditPipeline", chronoedit_transformer, {"in_channels": 36, **_IMAGE}, {}),
    "skyreels": ("SkyReelsV2Pipeline", skyreels_transformer, {}, {}),
    "lucy-edit": ("LucyEditPipeline", transformer, {"in_channels": 32}, {}),
}


def pipeline(kind: str = "t2v") -> Any:
    """A pipeline of `kind`."""
    name, build, config, options = _PIPELINES[kind]
    parts = _parts() | (_image_parts() if "image_dim" in config else {}) | options
    parts["transformer"] = None if kind.endswith("low-noise-only") else build(**config)
    if "boundary_ratio" in options:
        # For the lower noise levels.
        parts["transformer_2"] = build(seed=9, **config)
    pipe = getattr(diffusers, name)(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


KINDS = ("t2v", "t2v-2.2", "t2v-2.2-low-noise-only", "t2v-5b", "i2v-2.1", "i2v-2.2", "i2v-5b", "vace", "vace-2.2",
         "v2v", "animate")  # fmt: skip
RELATIVES = ("chronoedit", "skyreels", "lucy-edit")


def transformers_of(pipe: Any) -> list[Any]:
    components = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    return [component for component in components if component is not None]


def applied(kind: str = "t2v", **options: Any) -> Any:
    """A pipeline with VMonarch of these options."""
    pipe = pipeline(kind)
    vmonarch.apply(pipe, vmonarch.VMonarchProcessor(**options))
    return pipe


def applied_transformer(num_layers: int = 2, **options: Any) -> WanTransformer3DModel:
    model = transformer(num_layers=num_layers)
    vmonarch.apply(model, vmonarch.VMonarchProcessor(**options))
    return model


def jitter(model: Any) -> Any:
    """What processors and LoRA layers learn begins alike in all heads, or as identity: move it away from there."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "processor" in name or ".lora_" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def offload(model: Any, kind: str) -> None:
    """With the hooks that move weights, as on a machine whose accelerator is the CPU."""
    cpu = torch.device("cpu")
    if kind == "sequential":
        accelerate.cpu_offload(model, execution_device=cpu)
        assert model.blocks[0].attn1.to_q.weight.device.type == "meta"
    elif kind == "model":
        accelerate.cpu_offload_with_hook(model, execution_device=cpu)
        assert hasattr(model, "_hf_hook")
    else:
        size = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type=kind, **size)
        assert hasattr(model, "_diffusers_hook")


def offload_from_gpu(pipe: Any, kind: str) -> None:
    pipe.to("cpu")
    if kind == "model":
        pipe.enable_model_cpu_offload()
    elif kind == "sequential":
        pipe.enable_sequential_cpu_offload()
    else:
        size = {"num_blocks_per_group": 1} if kind == "block_level" else {"use_stream": kind == "stream"}
        pipe.enable_group_offload(
            onload_device=torch.device("cuda"),
            offload_device=torch.device("cpu"),
            offload_type="block_level" if kind == "block_level" else "leaf_level",
            **size,
        )


def stop_after(step: int) -> Any:
    """A callback that ends a pipeline's run after a step."""

    def callback(pipe: Any, number: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        pipe._interrupt = number == step
        return {}

    return callback


def image(seed: int = 0, height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def generate(pipe: Any, steps: int = 3, guidance: float = 5.0, seed: int = 0, **options: Any) -> torch.Tensor:
    """The latents (or frames) of a pipeline's video, whatever its kind."""
    name = type(pipe).__name__
    call = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "height": HEIGHT,
        "width": WIDTH,
        "num_frames": FRAMES,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent",
    }
    if "Edit" in name:
        call["video"] = [image(i) for i in range(FRAMES)]
    if "Chrono" in name:
        del call["video"]
    if "ImageToVideo" in name or "Chrono" in name:
        call["image"] = image()
    if "VideoToVideo" in name:
        call["video"] = [image(i) for i in range(FRAMES)]
        call["strength"] = 0.6
        del call["num_frames"]
    if "Animate" in name:
        del call["num_frames"]
        call |= {
            "image": image(),
            "pose_video": [image(i) for i in range(FRAMES)],
            "face_video": [image(i, 16, 16) for i in range(FRAMES)],
            "segment_frame_length": FRAMES,
        }
    return pipe(**call | options).frames


def quickly(pipe: Any, steps: int, **options: Any) -> torch.Tensor:
    """`generate` with one call of the transformer a step."""
    return generate(pipe, steps=steps, guidance=1.0, **options)


def another(pipe: Any, *, own_scheduler: bool = False) -> diffusers.WanVideoToVideoPipeline:
    """Video to video with the parts of `pipe`."""
    parts = {name: getattr(pipe, name) for name in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")}
    if own_scheduler:
        parts["scheduler"] = copy.deepcopy(pipe.scheduler)
    other = diffusers.WanVideoToVideoPipeline(**parts)
    other.set_progress_bar_config(disable=True)
    return other


def clips(first: int, count: int, *, huge: int | None = None, image: bool = False) -> list[Sample]:
    """Clips that are functions of their numbers; that of number `huge` is finite as stored, and not when squared."""
    found = []
    for number in range(first, first + count):
        random = torch.Generator().manual_seed(number)
        latents, encoded = (torch.randn(16, 3, 4, 6, generator=random) for _ in range(2))
        feature, text = (torch.randn(tokens, 16, generator=random) for tokens in (5, 1 + number % 5))
        latents = torch.full_like(latents, 1e30) if number == huge else latents
        extras = {"first_frame_latent": encoded, "clip_feature": feature} if image else {}
        found.append(Sample(f"clip-{number}", latents, text, extras=extras))
    return found


def logged(output: Path, name: str = "loss") -> dict[int, float]:
    """A value of a finetune run by the steps at which it was logged. A line of a run that was killed may be torn."""
    text = (output / "log.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line[name] for line in lines if name in line}


def settings(folder: Any, **values: Any) -> Any:
    """Completed settings for a pipeline in a `ModelFolder`, at the size above."""
    from vmonarch.pipelines.config import GenerateConfig, complete

    size = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "steps": 2, "negative_prompt": "", "device": "cpu"}
    given = {"prompts": (PROMPT,), **size, **values, "model": str(folder.path)}
    return complete(GenerateConfig(**given), folder)


def load(model: Any, **values: Any) -> Any:
    """The pipeline in a folder, loaded for such settings."""
    from vmonarch.pipelines.loading import load_model
    from vmonarch.pipelines.model_folder import find_model

    folder = find_model(str(model))
    return load_model(settings(folder, **values), folder)
