"""Settings of a generation, checked and completed by the model's recommendations."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from vmonarch.configs import InputError, Settings, build, choice, deep_merge, number, presets
from vmonarch.configs.methods import AttentionMethod, merge_attention, resolve_method
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.environment import DTYPES, choose_device, choose_dtype
from vmonarch.pipelines.lora import LORA, find_lora
from vmonarch.pipelines.model_folder import PROXY_RECORD, ModelFolder, read_json
from vmonarch.pipelines.traits import IMAGE_TO_VIDEO, TEXT_TO_VIDEO, TRAITS

# Text tokens that any of the models takes.
_MAX_TEXT_TOKENS = 512
# Frames per second that are encoded and read back as they are.
FPS = (0.1, 240.0)
Config = TypeVar("Config", bound="SamplingConfig")
AnySettings = TypeVar("AnySettings", bound=Settings)


# Metadata of a field: special arguments of its command-line option.
_LORA_OPTION = {"option": {"action": "append", "nargs": None, "metavar": "FILE[:SCALE]"}}


@dataclass(frozen=True)
class SamplingConfig(Settings):
    """What to sample, from which model and how. None means: what the model recommends.

    Args:
        prompts: one or more texts; every prompt is combined with every seed.
        seeds: one or several distinct integers in [0, 2^63); every prompt gets each (default 0).
        model: embedded (default), the folder of a pipeline, or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
        revision: branch, tag or commit of a hub model.
        lora: LoRA layers to fuse with the weights, a file, a folder with one, or OWNER/NAME/FILE of the hub; may be
            repeated.
        lora_2: the same for the low-noise transformer of models with two, such as Wan 2.2 A14B.
        image: first frame, a picture that is cropped to fit, for image-to-video models.
        negative_prompt: what guidance leads away from.
        height, width: pixels, a multiple of 16 (of 32 for some models).
        num_frames: 4·k + 1 (LTX: 8·k + 1).
        steps: denoising steps, up to 1000.
        guidance: classifier-free guidance scale; 1 or less turns it off. In HunyuanVideo it is a number that the
            transformer is told, and takes no second forward call.
        guidance_2: the same for the low-noise transformer of models with two; unused where guidance is off.
        true_guidance: classifier-free guidance scale of HunyuanVideo, beside its embedded one.
        scheduler: unipc, euler or lcm, for models of a few steps of the Wan family (default: the model's own).
        sigmas: noise levels of euler's or lcm's steps, falling, in (0, 1], such as 1,0.757,0.522; flow_shift does not
            move them.
        flow_shift: shift of the scheduler's noise levels towards noise.
        fps: frames per second of the mp4, from 0.1 to 240.
        max_sequence_length: text tokens that the transformer sees, up to 512; fixed in some models.
        dtype: auto (default: float32 on CPU, bfloat16 on CUDA), float32, bfloat16 or float16; the VAE stays float32.
        device: auto (default: cuda where there is one), cpu, cuda or cuda:N.
        offload: none (default), model (one component at a time on the GPU) or group (a few layers at a time).
        batch_size: videos sampled together (default 1).
        output_dir: created when missing.

    Raises:
        InputError: a value that no pipeline supports; the error names the field.
    """

    prompts: tuple[str, ...] = ()
    seeds: tuple[int, ...] = number((0,), "[0, 9223372036854775807]", option={"also": ["--seed"]})
    model: str = "embedded"
    revision: str | None = None
    lora: tuple[str, ...] = field(default=(), metadata=_LORA_OPTION)
    lora_2: tuple[str, ...] = field(default=(), metadata=_LORA_OPTION)
    image: str | None = None
    negative_prompt: str | None = None
    height: int | None = number(None, "[1, inf)")
    width: int | None = number(None, "[1, inf)")
    num_frames: int | None = number(None, "[1, inf)")
    # Models are trained on 1000 noise levels; more steps would repeat them.
    steps: int | None = number(None, "[1, 1000]")
    guidance: float | None = number(None, "[0, inf)")
    guidance_2: float | None = number(None, "[0, inf)")
    true_guidance: float | None = number(None, "[0, inf)")
    scheduler: str | None = choice(None, "unipc", "euler", "lcm")
    sigmas: tuple[float, ...] = number(
        (), "[1e-6, 1]", option={"type": lambda word: word.split(","), "nargs": None, "metavar": "S,S,…"}
    )
    flow_shift: float | None = number(None, "[1e-6, inf)")
    fps: float | None = number(None, f"[{FPS[0]}, {FPS[1]}]")
    max_sequence_length: int | None = number(None, f"[1, {_MAX_TEXT_TOKENS}]")
    dtype: str = choice("auto", *DTYPES)
    device: str = "auto"
    offload: str = choice("none", "none", "model", "group")
    batch_size: int = number(1, "[1, inf)")
    output_dir: str = "outputs/generate"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "negative_prompt"):
            texts = getattr(self, name)
            for text in (texts,) if isinstance(texts, str) else texts or ():
                _check_text(name, text)
        if not 0 < len(set(self.seeds)) == len(self.seeds):
            raise InputError(
                "seeds", f"must be one or more that differ, or the same video is made twice; got {self.seeds}"
            )
        if self.sigmas:
            if self.scheduler not in ("euler", "lcm"):
                raise InputError("sigmas", f"needs scheduler euler or lcm, got {self.scheduler!r}")
            if list(self.sigmas) != sorted(set(self.sigmas), reverse=True):
                raise InputError("sigmas", f"must fall from step to step, got {self.sigmas}")
            if self.steps not in (None, len(self.sigmas)):
                raise InputError("sigmas", f"must be {self.steps}, as many as steps, got {len(self.sigmas)}")
            object.__setattr__(self, "steps", len(self.sigmas))
        check_sizes(self, (16, 16), 4)
        if not self.output_dir or "\0" in self.output_dir:
            raise InputError("output_dir", f"must be a folder, got {self.output_dir!r}")

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """The methods that compute self-attention, by the field that names them."""
        return {}

    def batches(self) -> list[list[tuple[str, int]]]:
        """Prompt and seed of every video, prompts outermost, cut into the batches that are sampled together."""
        jobs = [(prompt, seed) for prompt in self.prompts for seed in self.seeds]
        return [jobs[i : i + self.batch_size] for i in range(0, len(jobs), self.batch_size)]


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig):
    """`SamplingConfig`, plus how to compute self-attention and what to write.

    Args:
        attention: name of a method in `configs/attention.yaml` (`vmonarch`, `full`, …) or of a recipe in
            `configs/recipes.yaml`, `name:key=value,…`, a mapping of name and parameters, or an `AttentionMethod`.
        contact_sheet: a PNG of twelve frames beside each video.
    """

    attention: Any = "near-lossless"
    contact_sheet: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "attention", resolve_method(self.attention, recipes=True))

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"attention": (self.attention,)}


def check_sizes(config: Any, multiples: tuple[int, int], temporal: int, where: str = "") -> None:
    """Raise InputError unless the given sizes are these multiples, and num_frames is `temporal`·k + 1."""
    for name, multiple in zip(("height", "width"), multiples, strict=True):
        value = getattr(config, name)
        if value is not None and value % multiple:
            below = value // multiple * multiple
            nearest = " or ".join(str(size) for size in (below, below + multiple) if size > 0)
            raise InputError(name, f"must be a multiple of {multiple}{where}, got {value}; nearest: {nearest}")
    frames = config.num_frames
    if frames is not None and frames % temporal != 1 % temporal:
        below = (frames - 1) // temporal * temporal + 1
        raise InputError(
            "num_frames",
            f"must be {temporal}·k + 1{where}, got {frames}; nearest: {below} or {below + temporal}",
        )


def _check_text(name: str, text: str) -> None:
    """Raise InputError for text that no encoder sees completely, or that no file can hold (half a surrogate pair)."""
    if re.search("[\0\ud800-\udfff]", text) or (name == "prompts" and not text.strip()):
        raise InputError(name, f"must not be empty, nor hold NUL characters or half a surrogate pair, got {text!r}")


def build_config(schema: type[AnySettings], *layers: Mapping[str, Any]) -> AnySettings:
    """Settings from layers of plain values (YAML, JSON, overrides), later ones over earlier ones.

    Parameters under `attention` add to the layer below as long as the name stays; another name drops them.

    Raises:
        InputError: an unknown key, or a value of another type or out of range.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        merged = deep_merge(values, layer)
        if "attention" in layer:
            below = values.get("attention", getattr(schema, "attention", "full"))
            merged["attention"] = merge_attention(below, layer["attention"])
        values = merged
    return build(schema, values)


def read_prompts(path: str) -> tuple[str, ...]:
    """The prompts of a UTF-8 text file, one a line; empty lines are left out.

    Raises:
        InputError: the file is missing, holds no prompt or is not UTF-8.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"must be UTF-8 text with a prompt a line; {path!r} cannot be read: {error}"
        raise InputError("prompt_file", problem) from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise InputError("prompt_file", f"must hold at least one prompt; {path!r} is empty")
    return prompts


def recommended_settings(model: ModelFolder) -> dict[str, Any]:
    """Recommended settings of a model: those of the embedded model (also finetuned), of a proxy, or of its class.

    Raises:
        InputError: the pipeline has a part that is not supported.
    """
    proxy = model.path / PROXY_RECORD
    if proxy.is_file() or _is_embedded(model):
        settings = read_json(proxy)["generation"] if proxy.is_file() else vars(EMBEDDED_SETTINGS)
        ours = {"num_inference_steps": "steps", "guidance_scale": "guidance"}
        found: dict[str, Any] = {ours.get(name, name): value for name, value in settings.items()}
        return found | {"fps": float(found["fps"]), "max_sequence_length": 512, "negative_prompt": ""}
    of_class = presets("defaults")[TEXT_TO_VIDEO if model.traits.wan else model.pipeline]
    return of_class | model.traits.recommended(model.outline)


def _is_embedded(model: ModelFolder) -> bool:
    """Whether a model has the VAE of the embedded model, which need not be installed."""
    try:
        config, embedded = (path / "vae" / "config.json" for path in (model.path, embedded_model_path()))
    except FileNotFoundError:
        return False
    return read_json(config) == read_json(embedded)


def complete(config: Config, model: ModelFolder) -> Config:
    """`config` with the model's recommendation in place of every None, checked against what the model can do.

    Raises:
        InputError: sizes that the VAE cannot decode or that the transformer has no places for, a method that cannot
            compute such a video or run on the device, a setting that the pipeline does not have, or an image where none
            can be used or one is needed.
    """
    _check_settings(config, model)
    recommended = recommended_settings(model)
    missing: dict[str, Any] = {key: value for key, value in recommended.items() if getattr(config, key) is None}
    # A record must find the model and all files from any folder.
    missing |= {"model": model.word, "revision": model.revision or config.revision}
    missing |= {name: tuple(find_lora(name, word).word for word in getattr(config, name)) for name in LORA}
    if config.image is not None:
        missing["image"] = str(Path(config.image).expanduser().resolve())
    config = dataclasses.replace(config, **missing)
    if not config.prompts:
        raise InputError("prompts", "must hold at least one prompt")
    check_sizes(config, model.multiples, model.temporal, " for this model")
    _check_video(config, model)
    if config.image is not None:
        from vmonarch.pipelines.video_io import open_image

        assert config.height is not None and config.width is not None
        _, changes = open_image(config.image, config.height, config.width)
        if changes:
            warnings.warn(f"image: {changes}", stacklevel=2)
    return config


def _check_settings(config: SamplingConfig, model: ModelFolder) -> None:
    """Check that the pipeline has every setting that is given, and carries every method."""
    traits, what = model.traits, f"a {model.pipeline}"
    for name in ("true_guidance", "max_sequence_length"):
        if getattr(config, name) is not None and name not in traits.arguments:
            those = ", ".join(pipeline for pipeline, other in TRAITS.items() if name in other.arguments)
            raise InputError(name, f"is not a setting of this model, {what}, but of {those}")
    unguided = "true_guidance" in traits.arguments and (config.true_guidance or 0) <= 1
    needs_image = model.image_conditioned or model.pipeline == IMAGE_TO_VIDEO
    two = "is for models with two transformers; this one has one"
    for argument, wrong, problem in (
        ("scheduler", config.scheduler and not traits.wan, f"is for the Wan family, and this model is {what}"),
        ("negative_prompt", config.negative_prompt and unguided, f"needs true_guidance above 1 in {what}"),
        ("guidance_2", config.guidance_2 is not None and model.boundary is None, two),
        ("lora_2", config.lora_2 and model.boundary is None, two),
        ("image", config.image is None and needs_image, "is needed: this is an image-to-video model"),
        (
            "image",
            config.image is not None and not model.image_capable,
            "cannot be used: this is a text-to-video model",
        ),
    ):
        if wrong:
            raise InputError(argument, problem)
    for argument, methods in config.attention_methods.items():
        for method in methods:
            if method.processor_name == "based" and not traits.wan:
                raise InputError(argument, f"cannot be {method.label!r}, which is for the Wan family, in {what}")
            if method.additions.linears and config.offload == "group":
                raise InputError("offload", "cannot be group with quantised linear layers; supported: none, model")


def _check_video(config: SamplingConfig, model: ModelFolder) -> None:
    """Check a completed config's sizes and methods against the model."""
    assert config.num_frames is not None and config.height is not None and config.width is not None
    grid = model.grid(config.num_frames, config.height, config.width)
    for name, tokens, most, patch in zip(
        ("num_frames", "height", "width"), grid, model.traits.most_tokens(model.config), model.patch, strict=True
    ):
        if most is not None and tokens > most:
            frames = name == "num_frames"
            limit = (most * patch - 1) * model.temporal + 1 if frames else most * patch * model.spatial
            raise InputError(name, f"must be at most {limit} for this model, got {getattr(config, name)}")
    if not config.attention_methods:
        return
    import torch

    from vmonarch.kernels.common.launch import why_not_triton

    device, reason = choose_device(config.device), None
    # GPUs have kernels. Asking for their dtype would initialise one before a process knows which is its own.
    if device.type == "cpu":
        reason = why_not_triton(torch.empty(1, 1, 1, 1, dtype=choose_dtype(config.dtype, device)))
    assert config.steps is not None
    for argument, methods in config.attention_methods.items():
        for method in methods:
            method.check_run(argument, grid, config.steps, model.layers, reason)
