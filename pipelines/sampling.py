"""From prompts to latents to frames, with a clock.

Legend: B videos of a batch, F frames, H and W pixels, C latent channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vmonarch.pipelines.config import SamplingConfig, open_image
from vmonarch.pipelines.devices import synchronize
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.outputs import GenerationError

if TYPE_CHECKING:
    import torch


class TransformerClock:
    """Measures the forward calls of a pipeline's transformers from outside, while its block runs.

    with TransformerClock(pipe, device) as clock:
        pipe(...)
    clock.calls, clock.seconds()
    """

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._transformers = [getattr(pipe, name, None) for name in ("transformer", "transformer_2")]
        self._device = device
        self._hooks: list[Any] = []
        self._marks: list[Any] = []

    def __enter__(self) -> TransformerClock:
        for transformer in filter(None, self._transformers):
            self._hooks += [
                transformer.register_forward_pre_hook(lambda *_: self._marks.append(self._now()), prepend=True),
                transformer.register_forward_hook(lambda *_: self._marks.append(self._now())),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        # Ctrl-C may have struck within a call: nothing here may fail for want of its end.
        for hook in self._hooks:
            hook.remove()

    def _now(self) -> Any:
        import torch

        if self._device.type != "cuda":
            return time.perf_counter()
        # An event, not a synchronisation: measuring must not stall the GPU's queue.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def calls(self) -> int:
        """How many forward calls there were; classifier-free guidance makes two a step, batched or not."""
        return len(self._marks) // 2

    def seconds(self) -> float:
        """Time in all of them together."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._device.type != "cuda":
            return sum(end - start for start, end in pairs)
        synchronize(self._device)
        return sum(start.elapsed_time(end) for start, end in pairs) / 1000


@dataclass(frozen=True)
class Latents:
    """What the denoising loop made.

    Args:
        latents: [B, C, T, h, w], normalised, on the model's device; of a `Batch` on the CPU.
        seconds: of the stages text, denoise, and of the transformers' forward calls within it, for the whole batch.
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


def denoise(
    model: LoadedModel,
    config: SamplingConfig,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int | None = None,
    batch_guidance: bool = False,
    progress: str | None = None,
) -> Latents:
    """Latents for each pair of `prompts[i]` and `seeds[i]`, with the attention that the pipeline carries.

    Args:
        config: a completed config.
        steps: instead of `config.steps`.
        batch_guidance: see `GenerateConfig`.
        progress: title of a progress bar; None for none.

    Raises:
        ValueError: no prompt, or not as many seeds as prompts.
        GenerationError: the pipeline returned another number of videos.
    """
    import torch

    from vmonarch.guidance import batched_guidance

    if len(prompts) != len(seeds) or not prompts:
        raise ValueError(f"seeds must have one entry for each of the {len(prompts)} prompts, got {len(seeds)}")
    pipe, device = model.pipe, model.device
    pipe.set_progress_bar_config(disable=progress is None, desc=progress, leave=False)
    with torch.no_grad(), deterministic_convolutions():
        start = _mark(device)
        embeds, negative_embeds = pipe.encode_prompt(
            prompt=list(prompts),
            negative_prompt=[config.negative_prompt or ""] * len(prompts),
            do_classifier_free_guidance=config.guidance is not None and config.guidance > 1,
            max_sequence_length=config.max_sequence_length,
            device=device,
        )
        encoded = _mark(device)
        arguments: dict[str, Any] = {
            "prompt_embeds": embeds,
            "negative_prompt_embeds": negative_embeds,
            "height": config.height,
            "width": config.width,
            "num_frames": config.num_frames,
            "num_inference_steps": steps or config.steps,
            "guidance_scale": config.guidance,
            "max_sequence_length": config.max_sequence_length,
            "generator": [torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            "output_type": "latent",
        }
        if config.guidance_2 is not None:
            arguments["guidance_scale_2"] = config.guidance_2
        if config.image is not None:
            arguments["image"] = open_image(config.image)
        guidance = batched_guidance(pipe) if batch_guidance else contextlib.nullcontext()
        with TransformerClock(pipe, device) as clock, guidance:
            latents = pipe(**arguments).frames
        done = _mark(device)
    if len(latents) != len(prompts):
        raise GenerationError(f"the pipeline returned {len(latents)} videos for {len(prompts)} prompts")
    seconds = {"text": encoded - start, "denoise": done - encoded, "transformer": clock.seconds()}
    return Latents(latents, seconds, clock.calls)


def sample(
    model: LoadedModel,
    config: SamplingConfig,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    batch_guidance: bool = False,
    progress: str | None = None,
) -> Batch:
    """One video for each pair of `prompts[i]` and `seeds[i]`: `denoise`, then `decode`."""
    result = denoise(model, config, prompts, seeds, batch_guidance=batch_guidance, progress=progress)
    start = _mark(model.device)
    frames = decode(model.pipe, result.latents)
    seconds = result.seconds | {"decode": _mark(model.device) - start}
    seconds["total"] = seconds["text"] + seconds["denoise"] + seconds["decode"]
    return Batch(result.latents.cpu(), seconds, result.transformer_calls, frames)


def _mark(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def deterministic_convolutions() -> Iterator[None]:
    """Let cuDNN take no algorithm whose sums depend on the order of threads; settings return to what they were."""
    import torch

    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
        yield


def decode(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Frames [B, F, 3, H, W], float32 in [0, 1] on the CPU, of latents [B, C, T, h, w]; NaN stays NaN.

    One video at a time: memory does not grow with the batch, nor do a video's bits depend on its neighbours here.
    """
    import torch

    vae = pipe.vae
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, vae.dtype)
    # Divided by the inverse, as diffusers does it, to keep its bits.
    inverse_std = (1.0 / torch.tensor(vae.config.latents_std).view(shape)).to(latents.device, vae.dtype)
    videos = []
    with torch.no_grad(), deterministic_convolutions():
        for latent in latents.to(vae.dtype).split(1):
            decoded = vae.decode(latent / inverse_std + mean, return_dict=False)[0]
            videos.append((decoded[0].float() / 2 + 0.5).clamp(0, 1).transpose(0, 1).cpu())
    pipe.maybe_free_model_hooks()
    return torch.stack(videos)
