"""The shape of a Wan pipeline, on which its speed depends: from `configs/models/`, a YAML file or a pipeline's folder.

A YAML file holds the arguments of `WanTransformer3DModel`; beside them `vae` and `text_encoder`, arguments that differ
from those of Wan2.1's, and `boundary_ratio` (there are two transformers) and `expand_timesteps` (a timestep for every
token) as in `WanPipeline`. Its weights are random; a folder or a model of the hub brings its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError, preset_names, read_yaml, suggest
from vmonarch.grid import LatentGrid
from vmonarch.pipelines.kinds import TEXT_TO_VIDEO
from vmonarch.pipelines.model_folder import ModelFolder, find_model, read_json

# The encoder of google/umt5-xxl, which all Wan models share.
UMT5_XXL: dict[str, Any] = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


# What a YAML file may have beside the transformer's arguments.
_BESIDE = ("vae", "text_encoder", "boundary_ratio", "expand_timesteps")


@dataclass(frozen=True)
class WanModel:
    """The shape of a text-to-video pipeline, and how to build its parts.

    Args:
        name: as the user gave it.
        transformer, vae, text_encoder: arguments of their classes (of `UMT5Config`).
        boundary_ratio: noise level below which a second transformer takes over; None if there is none.
        expand_timesteps: the transformer gets a timestep for every token.
        folder: where the weights are; None for random ones.
    """

    name: str
    transformer: dict[str, Any]
    vae: dict[str, Any] = field(default_factory=dict)
    text_encoder: dict[str, Any] = field(default_factory=lambda: dict(UMT5_XXL))
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    folder: ModelFolder | None = None

    @property
    def scale(self) -> tuple[int, int, int]:
        """Frames, and pixels of height and width, of one latent."""
        space = self.vae.get("scale_factor_spatial") or 8
        return self.vae.get("scale_factor_temporal") or 4, space, space

    @property
    def transformers(self) -> tuple[str, ...]:
        """Names of the pipeline's transformers."""
        return ("transformer",) if self.boundary_ratio is None else ("transformer", "transformer_2")

    def latents(self, frames: int, height: int, width: int, *, argument: str) -> tuple[int, int, int]:
        """Latent [T, h, w] of a video.

        Raises:
            InputError: the VAE or the patches do not divide it.
        """
        temporal, *spatial = self.scale
        if frames < 1 or (frames - 1) % temporal:
            raise InputError(argument, f"must have frames 1 more than a multiple of {temporal}, got {frames}")
        for name, pixels, scale, patch in zip(
            ("height", "width"), (height, width), spatial, self.transformer["patch_size"][1:], strict=True
        ):
            if pixels < 1 or pixels % (scale * patch):
                raise InputError(argument, f"must have a {name} that is a multiple of {scale * patch}, got {pixels}")
        return (frames - 1) // temporal + 1, height // spatial[0], width // spatial[1]

    def grid(self, latents: tuple[int, int, int]) -> LatentGrid:
        """The transformer's tokens."""
        return LatentGrid(*(n // patch for n, patch in zip(latents, self.transformer["patch_size"], strict=True)))

    def check_parts(self, *, argument: str) -> None:
        """Check that VAE and text encoder fit the transformer, before any of them is built.

        Raises:
            InputError: they do not.
        """
        z_dim, text_dim = self.vae.get("z_dim", 16), self.text_encoder["d_model"]
        for name, ours, theirs, of in (
            ("in_channels", self.transformer["in_channels"], z_dim, "vae.z_dim"),
            ("text_dim", self.transformer["text_dim"], text_dim, "text_encoder.d_model"),
        ):
            if ours != theirs:
                raise InputError(argument, f"{self.name!r} has {name} {ours} but {of} {theirs}: they must be equal")

    def parameters(self, *, transformer_only: bool) -> int:
        """Of what is in memory at a time: all transformers, or the text encoder."""
        from diffusers import WanTransformer3DModel
        from transformers import UMT5Config, UMT5EncoderModel

        with torch.device("meta"):
            parts = [WanTransformer3DModel.from_config(self.transformer)]
            if not transformer_only:
                parts.append(UMT5EncoderModel(UMT5Config(**self.text_encoder)))
        counts = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
        return max([len(self.transformers) * counts[0], *counts[1:]])

    def build_transformer(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
        """One of `transformers`, for inference; what diffusers keeps in float32 is in float32."""
        from diffusers import WanTransformer3DModel

        if self.folder is not None:
            return self._loaded(name, device, dtype)
        torch.manual_seed(self.transformers.index(name))
        with device:
            model = WanTransformer3DModel(**self.transformer)
        kept = set(WanTransformer3DModel._keep_in_fp32_modules)
        for path, parameter in model.named_parameters():
            if not kept & set(path.split(".")):
                parameter.data = parameter.data.to(dtype)
        return model.eval().requires_grad_(False)

    def build_vae(self, device: torch.device) -> torch.nn.Module:
        """The VAE, in float32."""
        from diffusers import AutoencoderKLWan

        if self.folder is not None:
            return self._loaded("vae", device, torch.float32)
        with device:
            return AutoencoderKLWan(**self.vae).eval().requires_grad_(False)

    def build_text_encoder(self, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
        """The text encoder."""
        from transformers import UMT5Config, UMT5EncoderModel

        if self.folder is not None:
            return self._loaded("text_encoder", device, dtype)
        with device:
            return UMT5EncoderModel(UMT5Config(**self.text_encoder)).to(dtype).eval().requires_grad_(False)

    def _loaded(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
        assert self.folder is not None
        model: torch.nn.Module = self.folder.read_component(name, dtype)
        return model.to(device).eval().requires_grad_(False)


def read_model_config(name: str, *, argument: str = "model") -> WanModel:
    """The model of a YAML file: a path, or a name of `configs/models/`.

    Raises:
        InputError: there is no such file, or it has an unknown or an unusable key; the message names it.
    """
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config

    contents = read_yaml(name, group="models", argument=argument)
    contents = {"vae": {}, "text_encoder": {}, "boundary_ratio": None, "expand_timesteps": False} | contents
    vae, text_encoder, boundary_ratio, expand_timesteps = (contents.pop(key) for key in _BESIDE)
    for part, values, known in (
        ("", contents, [*_defaults(WanTransformer3DModel), *_BESIDE]),
        ("vae", vae, list(_defaults(AutoencoderKLWan))),
        ("text_encoder", text_encoder, list(UMT5Config().to_dict())),
    ):
        if not isinstance(values, Mapping):
            raise InputError(argument, f"{name!r} must have a mapping as {part}, got {values!r}")
        for key in (key for key in values if key not in known):
            shown = f"{part}.{key}" if part else key
            problem = f"no usable key {shown}{suggest(key, known)}; known: {', '.join(sorted(known))}"
            raise InputError(argument, f"{name!r} has {problem}")
    if boundary_ratio is not None and not (isinstance(boundary_ratio, float) and 0 < boundary_ratio < 1):
        raise InputError(argument, f"{name!r} must have a boundary_ratio between 0 and 1, got {boundary_ratio!r}")
    if not isinstance(expand_timesteps, bool):
        raise InputError(argument, f"{name!r} must have true or false as expand_timesteps, got {expand_timesteps!r}")
    transformer = _defaults(WanTransformer3DModel) | contents
    text = UMT5_XXL | text_encoder
    # Folders of this machine are nobody else's.
    model = WanModel(Path(name).name, transformer, dict(vae), text, boundary_ratio, expand_timesteps)
    return _text_to_video(model, argument)


def read_model(name: str, *, argument: str = "model") -> WanModel:
    """The model of a YAML file, of a pipeline's folder, or of the hub (downloaded when needed).

    Raises:
        InputError: it is none of these, or no text-to-video model.
        ModelError: the folder holds no complete Wan pipeline.
    """
    path = Path(name).expanduser()
    if name in preset_names("models") or path.is_file() or path.suffix in (".yaml", ".yml"):
        return read_model_config(name, argument=argument)
    if not path.is_dir() and "/" not in name and name != "embedded":
        known = ", ".join(preset_names("models"))
        raise InputError(
            argument,
            f"must be one of {known}, a YAML file, the folder of a Wan pipeline, embedded or a hub id such as"
            f" Wan-AI/Wan2.1-T2V-1.3B-Diffusers; got {name!r}{suggest(name, preset_names('models'))}",
        )
    folder = find_model(name)
    if folder.pipeline != TEXT_TO_VIDEO:
        raise InputError(argument, f"{name!r} is a {folder.pipeline}; supported: {TEXT_TO_VIDEO}")
    index = read_json(folder.path / "model_index.json")
    transformer, vae, text = (
        read_json(folder.path / part / "config.json") for part in ("transformer", "vae", "text_encoder")
    )
    model = WanModel(
        folder.path.name if path.is_dir() else name,
        transformer,
        vae,
        text,
        index.get("boundary_ratio") if folder.two_stage else None,
        bool(index.get("expand_timesteps")),
        folder,
    )
    return _text_to_video(model, argument)


def _defaults(cls: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def _text_to_video(model: WanModel, argument: str) -> WanModel:
    if model.transformer.get("image_dim") is not None or model.transformer.get("added_kv_proj_dim") is not None:
        raise InputError(argument, f"{model.name!r} takes an image; supported: text-to-video models")
    return model
