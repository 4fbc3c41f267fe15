"""From prompts to latents to frames, with a clock.

Legend: B videos of a batch, F frames, H and W pixels.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.installation import is_applied
from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.video_io import open_image
from vmonarch.reports import Report, report

# Bytes that Wan's VAEs take to decode whole frames in float32, for each pixel of one: the most in docs/choose.md.
_DECODED_PIXEL = 28_000


@dataclass(frozen=True)
class Batch:
    """Videos that were sampled together.

    Args:
        frames: float32 [B, F, 3, H, W] in [0, 1] on the CPU, before any encoding; None if they were not decoded.
        latents: as the pipeline returns them where they were not; None if they were.
        seconds: of the whole batch: in the text encoders' forward calls (text), in the decoder's (decode), in all else
            (denoise), in the transformers' forward calls within that (transformer), and total.
        transformer_calls: how many of these there were.
        report: of `vmonarch.report`; None with stock attention.
    """

    frames: Any
    latents: Any
    seconds: dict[str, float]
    transformer_calls: int
    report: Report | None


def sample(
    model: LoadedModel,
    config: SamplingConfig,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int | None = None,
    decode: bool = True,
    progress: str | None = None,
) -> Batch:
    """A video for each pair of `prompts[i]` and `seeds[i]`, with the attention that the pipeline carries.

    Args:
        config: a completed config.
        steps: instead of `config.steps`.
        decode: whether to make frames of the latents, or leave it at these.
        progress: title of a progress bar; None for none.
    """
    pipe, device, traits = model.pipe, model.device, model.folder.traits
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    names = {**{name: name for name in ("height", "width", "num_frames")}, **traits.arguments}
    arguments: dict[str, Any] = {name: getattr(config, setting) for setting, name in names.items()}
    if config.image is not None:
        arguments["image"], _ = open_image(config.image, arguments["height"], arguments["width"])
    arguments |= {
        "prompt": list(prompts),
        "negative_prompt": [config.negative_prompt or ""] * len(prompts),
        "num_inference_steps": steps or config.steps,
        "generator": generators,
        "output_type": "pt" if decode else "latent",
    }
    pipe.set_progress_bar_config(disable=progress is None, desc=progress, leave=False)
    traits.prepare(pipe, config)
    if decode:
        _tile(model, config)
    if hasattr(pipe.scheduler, "generator"):
        # Pipelines give it to no step.
        pipe.scheduler.generator = generators
    start = _now(device)
    with (
        torch.no_grad(),
        deterministic_convolutions(),
        _marks([getattr(pipe, name, None) for name in ("text_encoder", "text_encoder_2")], device) as text,
        _marks([getattr(pipe, name, None) for name in ("transformer", "transformer_2")], device) as forward,
        _marks([pipe.vae.decoder], device) as decoding,
    ):
        found = pipe(**{name: value for name, value in arguments.items() if value is not None}).frames
    seconds = {"total": _now(device) - start, "text": _between(text)}
    seconds |= {"transformer": _between(forward), "decode": _between(decoding)}
    seconds["denoise"] = seconds["total"] - seconds["text"] - seconds["decode"]
    frames, latents = (found.float().cpu(), None) if decode else (None, found)
    ran = report(pipe) if is_applied(pipe) else None
    return Batch(frames, latents, seconds, len(forward) // 2, ran)


def _tile(model: LoadedModel, config: SamplingConfig) -> None:
    """Let the VAE decode in tiles where the model always does, or where a card is too small to decode whole frames."""
    traits, vae, device = model.folder.traits, model.pipe.vae, model.device
    needs = traits.wan * (config.height or 0) * (config.width or 0) * _DECODED_PIXEL
    short = device.type == "cuda" and needs > 0.9 * torch.cuda.get_device_properties(device).total_memory
    if short:
        warnings.warn(f"the VAE decodes in tiles: whole frames may need {needs / 1e9:.0f} GB", stacklevel=3)
    (vae.enable_tiling if traits.tiled or short else vae.disable_tiling)()


@contextlib.contextmanager
def deterministic_convolutions() -> Iterator[None]:
    """Let cuDNN take no algorithm whose sums depend on the order of threads; settings return to what they were."""
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
        yield


def _now(device: torch.device) -> float:
    """Seconds, once all that a GPU has been given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _marks(components: Sequence[Any], device: torch.device) -> Iterator[list[Any]]:
    """When forward calls of some modules (None: none) begin and end while the block runs, one after the other.

    On a GPU these are events, not synchronisations: measuring must not stall its queue.
    """
    marks: list[Any] = []

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    modules = [module for module in components if module is not None]
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
