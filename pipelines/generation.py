"""From prompts to videos on disk: the library behind `vmonarch generate`.

    from vmonarch.pipelines.generation import GenerateConfig, generate

    videos = generate(GenerateConfig(prompts=("a red circle moving right",), seeds=(0, 1), attention="vmonarch"))
    videos[0].video, videos[0].record_path, videos[0].record["seconds"]

Beside each mp4 lie a contact sheet (PNG) and a record (JSON), from which `load_record` and `generate` make the same
video again, bit for bit on the same machine. Precision: `dtype="auto"` is float32 on the CPU and bfloat16 on CUDA; the
VAE always runs in float32, because its decoder shows banding below that. Noise is drawn on the CPU, so a seed means the
same noise on every device.

Legend: B videos of a batch, F frames, H and W pixels, C latent channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vmonarch.configs import InputError, build, check_keys, file_sha256, read_yaml
from vmonarch.configs.methods import AttentionMethod, merge_attention, resolve_method
from vmonarch.files import AtomicFiles, short_hash
from vmonarch.pipelines.model_folder import (
    IMAGE_TO_VIDEO,
    MODELS,
    PROXY_RECORD,
    ModelError,
    ModelFolder,
    find_model,
    read_json,
)
from vmonarch.pipelines.processes import Shard, check_sharing, shared_videos

if TYPE_CHECKING:
    import torch

    from vmonarch.grid import LatentGrid

RECORD_FORMAT = "vmonarch-generate-1"
DTYPES = ("auto", "float32", "bfloat16", "float16")
OFFLOADS = ("none", "model", "group")
_MAX_SEED = 2**63 - 1
# Noise levels that Wan is trained on; more steps would repeat them.
_MAX_STEPS = 1000
# Text tokens that Wan is trained on.
_MAX_TEXT_TOKENS = 512
# Frames per second that are encoded and read back as they are.
FPS = (0.1, 240.0)

Config = TypeVar("Config", bound="SamplingConfig")


class GenerationError(RuntimeError):
    """Generation ran, but some of what it should have made could not be made or written; `videos` are those on disk."""

    def __init__(self, message: str, videos: Sequence[GeneratedVideo] = ()) -> None:
        super().__init__(message)
        self.videos = tuple(videos)


@dataclass(frozen=True)
class SamplingConfig:
    """What to sample, from which model and how. None means: what the model recommends.

    Args:
        prompts: one or more texts; every prompt is combined with every seed.
        seeds: distinct integers in [0, 2^63).
        model: `embedded`, the folder of a Wan pipeline, or a hub id.
        revision: branch, tag or commit of a hub model.
        image: path of the first frame, for image-to-video models.
        negative_prompt: what guidance leads away from.
        height, width: pixels, multiples of 16 (of 32 for some models).
        num_frames: 4·k + 1.
        steps: denoising steps, up to 1000.
        guidance: classifier-free guidance scale; 1 or less turns guidance off.
        guidance_2: the same for the low-noise transformer of two-stage models.
        flow_shift: shift of the scheduler's noise levels towards noise.
        fps: frames per second of the mp4, from 0.1 to 240.
        max_sequence_length: text tokens that the transformer sees, up to 512.
        dtype: auto, float32, bfloat16 or float16, of everything but the VAE.
        device: auto, cpu, cuda or cuda:N.
        offload: `model` keeps one component at a time on the GPU, `group` a few layers at a time, `none` everything.
        batch_size: videos sampled together.
        output_dir: created when missing.
        overwrite: number from 0001 and replace files of the same name, instead of taking the next free number.

    Raises:
        InputError: a value that no Wan pipeline supports; the error names the field.
    """

    prompts: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    model: str = "embedded"
    revision: str | None = None
    image: str | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    guidance_2: float | None = None
    flow_shift: float | None = None
    fps: float | None = None
    max_sequence_length: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    offload: str = "none"
    batch_size: int = 1
    output_dir: str = "outputs/generate"
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("prompts", "seeds"):
            value = getattr(self, name)
            if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
                raise InputError(name, f"must be a sequence, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        self._check_prompts()
        self._check_seeds()
        for name in ("height", "width", "num_frames", "steps", "max_sequence_length", "batch_size"):
            value = getattr(self, name)
            if name != "batch_size" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(name, f"must be an integer, got {value!r}")
            if value < 1:
                raise InputError(name, f"must be at least 1, got {value}")
        for name, most in (("steps", _MAX_STEPS), ("max_sequence_length", _MAX_TEXT_TOKENS)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise InputError(name, f"must be at most {most}, got {value}")
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is not None and value % 16:
                raise InputError(name, f"must be a multiple of 16, got {value}; nearest: {_nearest(value, 16)}")
        if self.num_frames is not None and self.num_frames % 4 != 1:
            raise InputError(
                "num_frames", f"must be 4·k + 1, got {self.num_frames}; {_nearest_frames(self.num_frames, 4)}"
            )
        for name in ("guidance", "guidance_2"):
            self._check_number(name, positive=False)
        for name in ("flow_shift", "fps"):
            self._check_number(name, positive=True)
        if self.fps is not None and not FPS[0] <= self.fps <= FPS[1]:
            raise InputError("fps", f"must lie between {FPS[0]:g} and {FPS[1]:g}, got {self.fps:g}")
        for name, choices in (("dtype", DTYPES), ("offload", OFFLOADS)):
            if getattr(self, name) not in choices:
                raise InputError(name, f"must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise InputError("device", f"must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if not self.output_dir or "\0" in self.output_dir:
            raise InputError("output_dir", f"must be a folder, got {self.output_dir!r}")

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """The methods that compute self-attention, by the field that names them."""
        return {}

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise InputError for a setting that does not fit videos of this latent grid."""

    def batches(self) -> list[list[tuple[str, int]]]:
        """Prompt and seed of every video, prompts outermost, cut into the batches that are sampled together."""
        jobs = [(prompt, seed) for prompt in self.prompts for seed in self.seeds]
        return [jobs[i : i + self.batch_size] for i in range(0, len(jobs), self.batch_size)]

    def _check_prompts(self) -> None:
        for prompt in self.prompts:
            if not isinstance(prompt, str):
                raise InputError("prompts", f"must be texts, got {prompt!r}")
            if not prompt.strip():
                raise InputError("prompts", f"must not be empty, got {prompt!r}")
            if "\0" in prompt:
                raise InputError("prompts", "must not hold NUL characters")
            _check_unicode("prompts", prompt)
        if self.negative_prompt is not None:
            if not isinstance(self.negative_prompt, str):
                raise InputError("negative_prompt", f"must be a text, got {self.negative_prompt!r}")
            _check_unicode("negative_prompt", self.negative_prompt)

    def _check_seeds(self) -> None:
        if not self.seeds:
            raise InputError("seeds", "must hold at least one seed")
        for seed in self.seeds:
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise InputError("seeds", f"must be integers, got {seed!r}")
            if not 0 <= seed <= _MAX_SEED:
                raise InputError("seeds", f"must lie between 0 and 2^63 - 1, got {seed}")
        repeated = sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1})
        if repeated:
            raise InputError("seeds", f"must differ, or the same video is made twice; repeated: {repeated}")

    def _check_number(self, name: str, *, positive: bool) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(name, f"must be a number, got {value!r}")
        if not math.isfinite(value):
            raise InputError(name, f"must be finite, got {value}")
        if value < 0 or (positive and value == 0):
            raise InputError(name, f"must be {'above' if positive else 'at least'} 0, got {value}")

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain values, methods with all their parameters."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {key: _plain(value) for key, value in plain.items()}


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig):
    """`SamplingConfig`, plus how to compute self-attention and what to write.

    Args:
        attention: name of a method in `configs/attention/` (`vmonarch`, `full`, …), `name:key=value,…`, a mapping of
            name and parameters, or an `AttentionMethod`.
        batch_guidance: compute both predictions of guidance in one forward call (`vmonarch.batched_guidance`).
        contact_sheet: write a PNG of twelve frames beside each video.
    """

    attention: Any = "vmonarch"
    batch_guidance: bool = False
    contact_sheet: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.attention, AttentionMethod):
            object.__setattr__(self, "attention", resolve_method(self.attention))

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"attention": (self.attention,)}


def _check_unicode(name: str, text: str) -> None:
    """Raise InputError for half a surrogate pair, which no file and no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(name, f"must be Unicode text, got {text!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, AttentionMethod):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _nearest(value: int, multiple: int) -> str:
    """The multiples around `value`, in words."""
    below = value // multiple * multiple
    return " or ".join(str(size) for size in (below, below + multiple) if size > 0)


def _nearest_frames(frames: int, temporal: int) -> str:
    below = (frames - 1) // temporal * temporal + 1
    return f"nearest: {below} or {below + temporal}"


def build_config(schema: type[Config], *layers: Mapping[str, Any]) -> Config:
    """A config from layers of plain values (YAML, JSON, overrides), later ones over earlier ones.

    Parameters under `attention` add to the layer below as long as the name stays; another name drops them.

    Raises:
        InputError: an unknown key, or a value of another type or out of range.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        check_keys(schema, layer)
        layer = dict(layer)
        if "attention" in layer:
            layer["attention"] = merge_attention(values.get("attention", "vmonarch"), layer["attention"])
        values |= layer
    return build(schema, values)


def read_prompts(path: str) -> tuple[str, ...]:
    """The prompts of a UTF-8 text file, one a line; empty lines are left out.

    Raises:
        InputError: the file is missing, holds no prompt or is not UTF-8.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(
            "prompt_file", f"must be a text file with a prompt a line; there is no file {path!r}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("prompt_file", f"must be UTF-8 text; {path!r} cannot be read: {error}") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise InputError("prompt_file", f"must hold at least one prompt; {path!r} is empty")
    return prompts


def recommended_settings(model: ModelFolder) -> dict[str, Any]:
    """What a model is best run with: its own settings if it is the embedded one, a finetune or a proxy, else Wan's."""
    proxy = model.path / PROXY_RECORD
    if model.name == "embedded" or proxy.is_file() or _has_embedded_vae(model):
        from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, GenerationSettings

        settings = GenerationSettings(**read_json(proxy)["generation"]) if proxy.is_file() else EMBEDDED_SETTINGS
        return {
            "height": settings.height,
            "width": settings.width,
            "num_frames": settings.num_frames,
            "steps": settings.num_inference_steps,
            "guidance": settings.guidance_scale,
            "flow_shift": settings.flow_shift,
            "fps": float(settings.fps),
            "max_sequence_length": 512,
            "negative_prompt": "",
        }
    return read_yaml("wan", group="defaults")


def _has_embedded_vae(model: ModelFolder) -> bool:
    from vmonarch.pipelines.embedded import embedded_model_path

    config = Path("vae") / "config.json"
    return (model.path / config).read_bytes() == (embedded_model_path() / config).read_bytes()


def complete(config: Config, model: ModelFolder) -> Config:
    """`config` with the model's recommendation in place of every None, checked against what the model can do.

    Raises:
        InputError: sizes that the VAE cannot decode or that the transformer has no places for, a method that cannot
            compute such a video or run on the device, or an image where none can be used or one is needed.
    """
    recommended = recommended_settings(model)
    missing: dict[str, Any] = {key: value for key, value in recommended.items() if getattr(config, key) is None}
    # The record must find the model from any folder, and the embedded one on any machine.
    missing["model"] = model.name if model.name == "embedded" or model.revision else str(model.path)
    if model.revision is not None:
        missing["revision"] = model.revision
    if config.image is not None:
        missing["image"] = str(Path(config.image).expanduser().resolve())
    config = dataclasses.replace(config, **missing)
    if not config.prompts:
        raise InputError("prompts", "must hold at least one prompt")
    for name, multiple in (("height", model.height_multiple), ("width", model.width_multiple)):
        size = getattr(config, name)
        if size % multiple:
            raise InputError(
                name,
                f"must be a multiple of {multiple} for this model, got {size}; nearest: {_nearest(size, multiple)}",
            )
    assert config.num_frames is not None
    if config.num_frames % model.temporal != 1 % model.temporal:
        raise InputError(
            "num_frames",
            f"must be {model.temporal}·k + 1 for this model, got {config.num_frames};"
            f" {_nearest_frames(config.num_frames, model.temporal)}",
        )
    _check_video(config, model)
    if config.guidance_2 is not None and not model.two_stage:
        raise InputError("guidance_2", "is for models with two transformers; this one has one")
    if config.image is None and (model.image_conditioned or model.pipeline == IMAGE_TO_VIDEO):
        raise InputError("image", "is needed: this is an image-to-video model")
    if config.image is not None:
        if not model.image_capable:
            raise InputError("image", "cannot be used: this is a text-to-video model")
        _open_image(config.image)
    return config


def _check_video(config: SamplingConfig, model: ModelFolder) -> None:
    """Check a completed config's sizes and methods against the model."""
    assert config.num_frames is not None and config.height is not None and config.width is not None
    grid = model.grid(config.num_frames, config.height, config.width)
    most = [model.axis_tokens * patch for patch in model.patch]
    for name, tokens, limit in (
        ("num_frames", grid.frames, (most[0] - 1) * model.temporal + 1),
        ("height", grid.height, most[1] * model.spatial),
        ("width", grid.width, most[2] * model.spatial),
    ):
        if tokens > model.axis_tokens:
            raise InputError(name, f"must be at most {limit} for this model, got {getattr(config, name)}")
    config.check_grid(grid)
    if not config.attention_methods:
        return
    import torch

    from vmonarch.kernels.common.launch import why_not_triton

    device, reason = choose_device(config.device), None
    # GPUs have kernels; to ask for their dtype would begin to use one, before a process knows which is its own.
    if device.type == "cpu":
        reason = why_not_triton(torch.empty(1, 1, 1, 1, dtype=choose_dtype(config.dtype, device)))
    assert config.steps is not None
    for argument, methods in config.attention_methods.items():
        for method in methods:
            method.check_video(argument, grid, config.steps, model.layers, reason)


def _open_image(path: str) -> Any:
    """The picture at `path` as RGB."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise InputError("image", f"must be a picture file, {path!r} cannot be read: {error}") from error


def choose_device(device: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:N`; auto takes CUDA when there is any.

    Raises:
        InputError: CUDA was asked for and is not there, or has no device of that number.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                "device", f"{device} cannot be used: this torch sees no CUDA device; supported here: auto, cpu"
            )
        if (chosen.index or 0) >= torch.cuda.device_count():
            raise InputError("device", f"must be cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {device}")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype for `auto` or a name: float32 on the CPU, bfloat16 on CUDA (float16 where that is missing).

    Raises:
        InputError: float16 on the CPU.
    """
    import torch

    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if dtype == "float16" and device.type == "cpu":
        raise InputError("dtype", "float16 cannot be used on the CPU; supported there: auto, float32, bfloat16")
    chosen = getattr(torch, dtype)
    assert isinstance(chosen, torch.dtype)
    return chosen


def prepare_output_dir(output_dir: str) -> Path:
    """The folder for outputs, created when missing.

    Raises:
        InputError: the path is a file, or files cannot be created there.
    """
    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError("output_dir", f"must be a folder; {output_dir!r} is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The one sure test; permission bits say nothing about read-only file systems, quotas or root.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError("output_dir", f"{output_dir!r} cannot be written to: {error.strerror or error}") from error
    return folder


def _load_tokenizer(model: ModelFolder) -> Any:
    cls = model.component_class("tokenizer")
    try:
        return cls.from_pretrained(model.path / "tokenizer")
    except Exception as error:
        raise ModelError(f"{model.path / 'tokenizer'} cannot be loaded: {error}") from error


def check_prompt_lengths(config: SamplingConfig, tokenizer: Any) -> None:
    """Check that no prompt is longer than the text encoder may see: nothing is cut off silently.

    Raises:
        InputError: a prompt has more tokens than the limit; both numbers are told.
    """
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    assert config.max_sequence_length is not None
    limit = min(config.max_sequence_length, tokenizer.model_max_length)
    texts = [("prompts", prompt) for prompt in config.prompts]
    if config.negative_prompt:
        texts.append(("negative_prompt", config.negative_prompt))
    for name, text in texts:
        tokens = len(tokenizer(prompt_clean(text), truncation=False, verbose=False).input_ids)
        if tokens > limit:
            raise InputError(
                name, f"must have at most {limit} tokens for this model's text encoder; {_shorten(text)!r} has {tokens}"
            )


def _shorten(text: str, length: int = 40) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(frozen=True)
class LoadedModel:
    """A pipeline ready to sample from.

    Args:
        pipe: a stock diffusers pipeline.
        folder: where it came from.
        device, dtype: what it computes on and in (the VAE in float32).
        seconds: how long loading took.
        config: the completed settings it was loaded for.
    """

    pipe: Any
    folder: ModelFolder
    device: torch.device
    dtype: torch.dtype
    seconds: float
    config: SamplingConfig


def read_pipeline(cls: Any, folder: ModelFolder, dtype: torch.dtype, **parts: Any) -> Any:
    """The pipeline in a folder as `cls`, on the CPU, its VAE in float32; `parts` stand for components not to be read.

    Raises:
        ModelError: a component cannot be loaded.
    """
    import torch

    models = {
        name: folder.read_component(name, torch.float32 if name == "vae" else dtype)
        for name in MODELS
        if name in folder.components and name not in parts
    }
    try:
        return cls.from_pretrained(folder.path, local_files_only=True, **models, **parts)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder.path} cannot be loaded: {type(error).__name__}: {reason}") from error


def load_model(config: SamplingConfig, folder: ModelFolder, shard: Shard | None = None) -> LoadedModel:
    """Load the pipeline for a completed `config` onto its device; prompts are checked before the weights are read.

    Args:
        shard: this process among several, of which each takes the GPU of its number.

    Raises:
        InputError: a prompt is too long, or device, dtype, offload or flow_shift do not fit.
        ModelError: a component cannot be loaded.
    """
    import diffusers
    import torch

    device = choose_device(config.device)
    if shard is not None and shard.size > 1 and device.type == "cuda":
        device = choose_device(f"cuda:{shard.local_rank}")
        torch.cuda.set_device(device)
    dtype = choose_dtype(config.dtype, device)
    if config.offload != "none" and device.type == "cpu":
        raise InputError("offload", f"{config.offload} needs a CUDA device; supported on the CPU: none")
    start = time.perf_counter()
    tokenizer = _load_tokenizer(folder)
    check_prompt_lengths(config, tokenizer)
    cls = getattr(diffusers, IMAGE_TO_VIDEO if config.image is not None else folder.pipeline)
    pipe = read_pipeline(cls, folder, dtype, tokenizer=tokenizer)
    if config.flow_shift is not None:
        pipe.scheduler = _shifted(pipe.scheduler, config.flow_shift)
    if config.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif config.offload == "group":
        pipe.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=True)
    else:
        pipe.to(device)
    return LoadedModel(pipe, folder, device, dtype, time.perf_counter() - start, config)


def check_loaded(config: SamplingConfig, model: LoadedModel) -> None:
    """Check that a completed `config` can be run on a pipeline loaded before.

    Raises:
        InputError: a setting that loading depends on differs, or a prompt is too long.
    """
    for name in ("dtype", "device", "offload", "flow_shift"):
        wanted, has = getattr(config, name), getattr(model.config, name)
        if wanted != has:
            raise InputError(name, f"must be {has!r}, with which the pipeline was loaded, got {wanted!r}")
    if (config.image is None) != (model.config.image is None):
        raise InputError("image", "must be given to load the pipeline too, or neither time")
    check_prompt_lengths(config, model.pipe.tokenizer)


def complete_and_load(config: Config, model: LoadedModel | None) -> tuple[Config, LoadedModel]:
    """The completed config and a pipeline that it can be run on; its output folder can be written to.

    Args:
        model: a pipeline loaded before with the same model settings, or None.

    Raises:
        InputError, ModelError: as `generate`.
    """
    folder = model.folder if model else find_model(config.model, config.revision)
    config = complete(config, folder)
    prepare_output_dir(config.output_dir)
    if model is None:
        return config, load_model(config, folder)
    check_loaded(config, model)
    return config, model


def _shifted(scheduler: Any, flow_shift: float) -> Any:
    """The scheduler with another flow shift, whichever name its class has for it."""
    for key in ("flow_shift", "shift"):
        if key in scheduler.config:
            return type(scheduler).from_config(scheduler.config, **{key: flow_shift})
    raise InputError("flow_shift", f"cannot be set: {type(scheduler).__name__} has no flow shift")


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


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device's queue; nothing on the CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Latents:
    """What the denoising loop made.

    Args:
        latents: [B, C, T, h, w], normalised, on the model's device.
        seconds: of the stages text, denoise, and of the transformers' forward calls within it, for the whole batch.
        transformer_calls: how many of these there were.
    """

    latents: torch.Tensor
    seconds: dict[str, float]
    transformer_calls: int


@dataclass(frozen=True)
class Batch:
    """Sampled videos.

    Args:
        frames: float32 [B, F, 3, H, W] in [0, 1] on the CPU, before any encoding.
        latents: [B, C, T, h, w] as the denoising loop left them.
        seconds: of each stage (text, denoise, transformer, decode, total) for the whole batch.
        transformer_calls: forward calls of the transformers.
    """

    frames: torch.Tensor
    latents: torch.Tensor
    seconds: dict[str, float]
    transformer_calls: int


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
            arguments["image"] = _open_image(config.image)
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
    return Batch(frames, result.latents.cpu(), seconds, result.transformer_calls)


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


@dataclass(frozen=True)
class GeneratedVideo:
    """A video on disk.

    Args:
        video, contact_sheet, record_path: its mp4, PNG (None if not asked for) and JSON.
        record: contents of the JSON.
        reproduced: whether it equals the recorded one bit for bit; None when nothing was to be reproduced.
    """

    video: Path
    contact_sheet: Path | None
    record_path: Path
    record: dict[str, Any]
    reproduced: bool | None = None


@dataclass(frozen=True)
class Recorded:
    """A record read back: its config, and the batch that its video was sampled in.

    Batched matrix products round differently from single ones, so the same bits need the same batch.
    """

    values: dict[str, Any]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    index: int
    frames_sha256: str
    model: dict[str, Any]
    environment: dict[str, Any]


def load_record(path: str) -> Recorded:
    """Read the JSON beside a generated video.

    Raises:
        InputError: no such file, no JSON, or no record of ours.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(
            "from_json", f"must be the JSON beside a generated video; there is no file {path!r}"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("from_json", f"{path!r} cannot be read as JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        raise InputError("from_json", f"{path!r} is no record of a generated video (format {RECORD_FORMAT})")
    try:
        batch = record["batch"]
        recorded = Recorded(
            # What was replaced when it was made is not to be replaced again.
            values={key: value for key, value in record["config"].items() if key != "overwrite"},
            prompts=tuple(batch["prompts"]),
            seeds=tuple(batch["seeds"]),
            index=batch["index"],
            frames_sha256=record["frames_sha256"],
            model=dict(record["model"]),
            environment=dict(record["environment"]),
        )
        if not 0 <= recorded.index < len(recorded.prompts) == len(recorded.seeds):
            raise ValueError("its batch is inconsistent")
        return recorded
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError("from_json", f"{path!r} is an incomplete record: {error}") from error


def check_same_model(recorded: Recorded, model: ModelFolder) -> None:
    """Check that the model is still the recorded one.

    Raises:
        InputError: its config files or weights have changed.
    """
    now = model.fingerprint()
    for key in ("configs_sha256", "weights_sha256", "weights_sizes_sha256"):
        if recorded.model.get(key) != now[key]:
            what = "config files" if key.startswith("configs") else "weights"
            raise InputError("from_json", f"names a model whose {what} have changed since: {model.path}")
    image = recorded.values.get("image")
    if image is not None and file_sha256(image) != recorded.model.get("image_sha256"):
        raise InputError("from_json", f"names an image that has changed since: {image}")


def environment_differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between a recorded environment and this one, in words: why bits may differ."""
    pairs = {key: (recorded.get(key), value) for key, value in now.items() if key not in ("packages", "git_commit")}
    # Records from before videos could be shared do not say it.
    pairs["processes"] = recorded.get("processes", 1), now.get("processes", 1)
    packages = recorded.get("packages") or {}
    pairs |= {name: (packages.get(name), version) for name, version in now["packages"].items()}
    return [f"{name} was {before}, is {after}" for name, (before, after) in pairs.items() if before != after]


@dataclass(frozen=True)
class _Job:
    """One video of a batch; only those with `write` reach the disk."""

    prompt: str
    seed: int
    write: bool = True


def _jobs(config: SamplingConfig, recorded: Recorded | None) -> list[list[_Job]]:
    """The batches to sample: those of `config`, or the recorded one if `config` still asks for its video."""
    if recorded and (config.prompts, config.seeds) == (
        (recorded.prompts[recorded.index],),
        (recorded.seeds[recorded.index],),
    ):
        pairs = zip(recorded.prompts, recorded.seeds, strict=True)
        return [[_Job(prompt, seed, i == recorded.index) for i, (prompt, seed) in enumerate(pairs)]]
    return [[_Job(*job) for job in batch] for batch in config.batches()]


def generate(
    config: GenerateConfig,
    *,
    recorded: Recorded | None = None,
    progress: bool = False,
    model: LoadedModel | None = None,
    shard: Shard | None = None,
) -> list[GeneratedVideo]:
    """Generate every prompt with every seed and write mp4, contact sheet and record of each.

    Args:
        recorded: a record to reproduce, from which `config` was made; its model must be unchanged.
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings (`load_model`), to save loading it again.
        shard: this process among several that make the same call and compute every video together, each on a GPU of its
            own; the first one writes. A pipeline given as `model` serves no more afterwards. None: this process alone.

    Returns:
        The videos in order: prompts outermost, then seeds; none in processes that do not write.

    Raises:
        InputError: an argument that cannot be used, found before anything is loaded where possible.
        ModelError: the model folder is missing something, damaged or unsupported.
        GenerationError: a video came out constant or with NaN, or could not be written. The others are on disk all
            the same, and of the broken one the raw tensors, at the path in the message.
    """
    shard = shard or Shard()
    check_sharing(config, shard)
    folder = model.folder if model else find_model(config.model, config.revision)
    config = complete(config, folder)
    if recorded is not None and recorded.values.get("model") == config.model:
        check_same_model(recorded, folder)
    output = prepare_output_dir(config.output_dir)
    if model is None:
        model = load_model(config, folder, shard)
    else:
        check_loaded(config, model)
    with shared_videos(model, config, shard):
        config.attention.install(model.pipe)
        return _generate(config, recorded, progress, model, shard, output)


def _generate(
    config: GenerateConfig,
    recorded: Recorded | None,
    progress: bool,
    model: LoadedModel,
    shard: Shard,
    output: Path,
) -> list[GeneratedVideo]:
    """`generate` with everything in place."""
    batches = _jobs(config, recorded)
    if shard.rank > 0:
        # The first process decodes and writes.
        for jobs in batches:
            prompts, seeds = [job.prompt for job in jobs], [job.seed for job in jobs]
            denoise(model, config, prompts, seeds, batch_guidance=config.batch_guidance)
        return []
    total = sum(job.write for batch in batches for job in batch)
    about = facts(config, model)
    about["environment"]["processes"] = shard.size
    videos: list[GeneratedVideo] = []
    failures: list[GenerationError] = []
    for jobs in batches:
        _reset_peak_memory(model.device)
        title = f"video {len(videos) + len(failures) + 1} of {total}" if progress else None
        prompts, seeds = [job.prompt for job in jobs], [job.seed for job in jobs]
        result = sample(model, config, prompts, seeds, batch_guidance=config.batch_guidance, progress=title)
        for index, job in enumerate(jobs):
            if not job.write:
                continue
            record = _record(config, model, about, jobs, index, result)
            number = len(videos) + len(failures) + 1 if config.overwrite else None
            try:
                video = _write(output, number, config, record, result.frames[index], result.latents[index])
            except GenerationError as error:
                failures.append(error)
                continue
            if recorded is not None:
                same = recorded.frames_sha256 == record["frames_sha256"]
                video = dataclasses.replace(video, reproduced=same)
            videos.append(video)
    if failures:
        made = f"; {len(videos)} of {total} videos were made" if total > 1 else ""
        raise GenerationError("; ".join(map(str, failures)) + made, videos) from failures[0].__cause__
    return videos


def _reset_peak_memory(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def frames_sha256(frames: torch.Tensor) -> str:
    """Hash of the exact bits of float32 frames [F, 3, H, W]."""
    return hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()


def facts(config: SamplingConfig, model: LoadedModel) -> dict[str, Any]:
    """What a record says about model and machine: the same for all videos of a run."""
    from vmonarch.pipelines.environment import environment

    return {
        "model": {
            "name": model.folder.name,
            # The embedded model is part of the package: where that lies says nothing about the video.
            "path": None if model.folder.name == "embedded" else str(model.folder.path),
            "revision": model.folder.revision,
            "pipeline": type(model.pipe).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "vae_dtype": str(model.pipe.vae.dtype).removeprefix("torch."),
            "scheduler": type(model.pipe.scheduler).__name__,
            "image_sha256": file_sha256(config.image) if config.image else None,
            **model.folder.fingerprint(),
        },
        "environment": environment(model.device),
    }


def _record(
    config: GenerateConfig,
    model: LoadedModel,
    about: dict[str, Any],
    jobs: Sequence[_Job],
    index: int,
    result: Batch,
) -> dict[str, Any]:
    from vmonarch.pipelines.environment import peak_memory_bytes

    job = jobs[index]
    values = dataclasses.replace(config, prompts=(job.prompt,), seeds=(job.seed,)).to_dict()
    return {
        "format": RECORD_FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompt": job.prompt,
        "seed": job.seed,
        "config": values,
        "batch": {"prompts": [job.prompt for job in jobs], "seeds": [job.seed for job in jobs], "index": index},
        **about,
        # Of the whole batch: its videos are sampled together.
        "seconds": {"load": model.seconds} | result.seconds,
        "transformer_calls": result.transformer_calls,
        "peak_memory_bytes": peak_memory_bytes(model.device),
        "frames_shape": list(result.frames[index].shape),
        "frames_sha256": frames_sha256(result.frames[index]),
    }


@contextlib.contextmanager
def reserve_number(folder: Path, number: int | None = None) -> Iterator[str]:
    """A four-digit output number that nothing else in `folder` has, held against other processes while in use.

    Args:
        number: take this one, whatever has it.
    """
    if number is not None:
        yield f"{number:04d}"
        return
    taken = [int(found.group(1)) for path in folder.iterdir() if (found := re.match(r"\.?(\d{4,})[-.]", path.name))]
    number = max(taken, default=0) + 1
    while True:
        mark = folder / f".{number:04d}.reserved"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            number += 1
    try:
        yield f"{number:04d}"
    finally:
        mark.unlink(missing_ok=True)


def _write(
    output: Path,
    number: int | None,
    config: GenerateConfig,
    record: dict[str, Any],
    frames: torch.Tensor,
    latents: torch.Tensor,
) -> GeneratedVideo:
    """Write one video with its sheet and record, checked before it gets its name."""
    from vmonarch.pipelines.video_io import (
        VideoError,
        check_frames,
        contact_sheet,
        encode_video,
        to_uint8,
        verify_video,
    )

    assert config.fps is not None
    settings = {key: value for key, value in record["config"].items() if key not in ("output_dir", "overwrite")}
    with contextlib.ExitStack() as stack:
        stem = "video"
        try:
            digits = stack.enter_context(reserve_number(output, number))
            stem = f"{digits}-{short_hash(settings)}"
            paths = {suffix: output / f"{stem}.{suffix}" for suffix in ("mp4", "png", "json")}
            check_frames(frames)
            pictures = to_uint8(frames)
            with AtomicFiles(overwrite=config.overwrite) as files:
                video = files.stage(paths["mp4"])
                encode_video(video, pictures, config.fps)
                verify_video(video, pictures)
                record = record | {"video": paths["mp4"].name, "contact_sheet": None}
                if config.contact_sheet:
                    record["contact_sheet"] = paths["png"].name
                    title = f"{record['prompt']} · seed {record['seed']} · {config.attention.label}"
                    contact_sheet(pictures, title=title).save(files.stage(paths["png"]))
                text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
                files.stage(paths["json"]).write_text(text, encoding="utf-8")
        except (OSError, VideoError) as error:
            what = f"prompt {_shorten(record['prompt'])!r}, seed {record['seed']}"
            raise GenerationError(f"{what}: {error}; {_keep_raw(output, stem, frames, latents)}") from error
    return GeneratedVideo(paths["mp4"], paths["png"] if config.contact_sheet else None, paths["json"], record)


def keep_elsewhere(name: str, write: Callable[[Path], object]) -> str:
    """Write what its folder has no room for into a folder of its own among the system's temporary ones; says where."""
    try:
        path = Path(tempfile.mkdtemp(prefix="vmonarch-")) / name
        write(path)
    except Exception:
        # safetensors reports a full disk by an exception of its own; whatever it is, the first error matters more.
        return f"there was no room to keep {name}"
    return f"{name} is kept at {path}"


def _keep_raw(output: Path, stem: str, frames: torch.Tensor, latents: torch.Tensor) -> str:
    """Save what could not become a video where there is room for it, and say where."""
    from safetensors.torch import save_file

    for choose_folder in (lambda: output, lambda: Path(tempfile.mkdtemp(prefix="vmonarch-"))):
        try:
            path = choose_folder() / f"{stem}.raw.safetensors"
            with AtomicFiles(overwrite=True) as files:
                save_file({"frames": frames.contiguous(), "latents": latents.contiguous()}, files.stage(path))
            return f"raw frames and latents are kept in {path}"
        except Exception:
            # safetensors reports a full disk by an exception of its own; whatever it is, the next folder may do.
            continue
    return "there was no room to keep the raw frames either"
