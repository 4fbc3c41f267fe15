"""From prompts to latents to frames, with a clock.

Legend: B videos of a batch, F frames, H and W pixels, C latent channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.kinds import kind_of
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.outputs import GenerationError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Latents:
    """What the denoising loop made.

    Args:
        latents: [B, C, T, h, w], normalised, on the model's device; of a `Batch` on the CPU.
        seconds: of the text encoders' forward calls, of all else (denoise), and of the transformers' forward calls
            within that, for the whole batch.
        transformer_calls: how many of these there were.
    """

    latents: torch.Tensor
    seconds: dict[str, float]
    transformer_calls: int


@dataclass(frozen=True)
class Batch(Latents):
    """Sampled videos, with what the denoising loop made; `seconds` also has the stages decode and total.

    Args:
        frames: float32 [B, F, 3, H, W] in [0, 1] on the CPU, before any encoding.
    """

    frames: torch.Tensor


def sample(
    model: LoadedModel,
    config: SamplingConfig,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    progress: str | None = None,
) -> Batch:
    """One video for each pair of `prompts[i]` and `seeds[i]`: `denoise`, then `decode`."""
    result = denoise(model, config, prompts, seeds, progress=progress)
    start = _now(model.device)
    frames = decode(model.pipe, result.latents)
    seconds = result.seconds | {"decode": _now(model.device) - start}
    seconds["total"] = seconds["text"] + seconds["denoise"] + seconds["decode"]
    return Batch(result.latents.cpu(), seconds, result.transformer_calls, frames)


def denoise(
    model: LoadedModel,
    config: SamplingConfig,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int | None = None,
    progress: str | None = None,
) -> Latents:
    """Latents for each pair of `prompts[i]` and `seeds[i]`, with the attention that the pipeline carries.

    Args:
        config: a completed config.
        steps: instead of `config.steps`.
        progress: title of a progress bar; None for none.

    Raises:
        ValueError: no prompt, or not as many seeds as prompts.
        GenerationError: the pipeline returned another number of videos.
    """
    import torch

    if len(prompts) != len(seeds) or not prompts:
        raise ValueError(f"seeds must have one entry for each of the {len(prompts)} prompts, got {len(seeds)}")
    pipe, device, kind = model.pipe, model.device, model.folder.kind
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    names = {**{name: name for name in ("height", "width", "num_frames")}, **kind.arguments}
    arguments: dict[str, Any] = {name: getattr(config, setting) for setting, name in names.items()}
    if config.image is not None:
        from vmonarch.pipelines.video_io import open_image

        arguments["image"], _ = open_image(config.image, arguments["height"], arguments["width"])
    arguments |= {
        "prompt": list(prompts),
        "negative_prompt": [config.negative_prompt or ""] * len(prompts),
        "num_inference_steps": steps or config.steps,
        "generator": generators,
        "output_type": "latent",
    }
    pipe.set_progress_bar_config(disable=progress is None, desc=progress, leave=False)
    kind.prepare(pipe, config)
    if hasattr(pipe.scheduler, "generator"):
        # Pipelines give it to no step.
        pipe.scheduler.generator = generators
    start = _now(device)
    with (
        torch.no_grad(),
        deterministic_convolutions(),
        _marks(pipe, ("text_encoder", "text_encoder_2"), device) as text,
        _marks(pipe, ("transformer", "transformer_2"), device) as forward,
    ):
        found = pipe(**{name: value for name, value in arguments.items() if value is not None}).frames
    spent = _now(device) - start
    if len(found) != len(prompts):
        raise GenerationError(f"the pipeline returned {len(found)} videos for {len(prompts)} prompts")
    encoding = _between(text)
    seconds = {"text": encoding, "denoise": spent - encoding, "transformer": _between(forward)}
    size = model.folder.latents(arguments["num_frames"], arguments["height"], arguments["width"])
    return Latents(kind.latents(pipe, found, size), seconds, len(forward) // 2)


def decode(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Frames [B, F, 3, H, W], float32 in [0, 1] on the CPU, of latents [B, C, T, h, w]; NaN stays NaN.

    In float32 with one video they are those of the pipeline itself, bit for bit; in bfloat16 the VAE stays in float32.
    One video at a time: memory does not grow with the batch, nor do a video's bits depend on its neighbours here.
    """
    import torch

    kind, videos = kind_of(pipe), []
    with torch.no_grad(), deterministic_convolutions():
        for latent in latents.split(1):
            decoded = kind.decode(pipe, latent)
            videos.append((decoded[0].float() / 2 + 0.5).clamp(0, 1).transpose(0, 1).cpu())
    pipe.maybe_free_model_hooks()
    return torch.stack(videos)


@contextlib.contextmanager
def deterministic_convolutions() -> Iterator[None]:
    """Let cuDNN take no algorithm whose sums depend on the order of threads; settings return to what they were."""
    import torch

    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
        yield


def _now(device: torch.device) -> float:
    """Seconds, once all that a GPU has been given is done."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _marks(pipe: Any, components: Sequence[str], device: torch.device) -> Iterator[list[Any]]:
    """When forward calls of some of a pipeline's components begin and end while the block runs, one after the other.

    On a GPU these are events, not synchronisations: measuring must not stall its queue.
    """
    import torch

    marks: list[Any] = []

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    modules = [module for name in components if (module := getattr(pipe, name, None)) is not None]
    hooks = [module.register_forward_pre_hook(mark, prepend=True) for module in modules]
    hooks += [module.register_forward_hook(mark) for module in modules]
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()


def _between(marks: Sequence[Any]) -> float:
    """Seconds in all forward calls together, which are over."""
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return sum(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000 for begin, end in pairs)
