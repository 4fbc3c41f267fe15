"""The models that benchmarks measure: shapes, which speed depends on, with random weights or the model's own.

An entry of `configs/models.yaml` or a user's YAML file holds the arguments of `WanTransformer3DModel`. It may also have
`vae` and `text_encoder`, with the arguments that differ from Wan2.1's, and `boundary_ratio` (if there are two
transformers) and `expand_timesteps` (a timestep for every token) as in `WanPipeline`. Its weights are random; a
pipeline's folder or a hub model has weights of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError, read_yaml
from vmonarch.finetune.models import cast
from vmonarch.grid import LatentGrid
from vmonarch.pipelines.model_folder import ModelFolder, find_model, read_json
from vmonarch.pipelines.traits import TEXT_TO_VIDEO

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


@dataclass(frozen=True)
class WanModel:
    """The shape of a text-to-video pipeline, and how to build its parts.

    Args:
        name: as the user gave it.
        transformer, vae, text_encoder: arguments of their classes (for the text encoder, of `UMT5Config`).
        boundary_ratio: noise level below which a second transformer takes over; None if there is none.
        expand_timesteps: the transformer gets a timestep for every token.
        folder: where the weights are; None for random ones.
    """

    name: str
    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    folder: ModelFolder | None = None

    @property
    def transformers(self) -> tuple[str, ...]:
        """Names of the pipeline's transformers."""
        return ("transformer",) if self.boundary_ratio is None else ("transformer", "transformer_2")

    def latents(self, size: Sequence[int], *, argument: str) -> tuple[int, int, int]:
        """Latent [T, h, w] of a video of [frames, height, width].

        Raises:
            InputError: the size does not fit the VAE or the patches.
        """
        frames, *pixels = size
        temporal, space = self.vae.get("scale_factor_temporal") or 4, self.vae.get("scale_factor_spatial") or 8
        if frames < 1 or (frames - 1) % temporal:
            raise InputError(argument, f"must have frames 1 more than a multiple of {temporal}, got {frames}")
        for name, side, patch in zip(("height", "width"), pixels, self.transformer["patch_size"][1:], strict=True):
            if side < 1 or side % (space * patch):
                raise InputError(argument, f"must have a {name} that is a multiple of {space * patch}, got {side}")
        return (frames - 1) // temporal + 1, pixels[0] // space, pixels[1] // space

    def grid(self, size: Sequence[int], *, argument: str) -> LatentGrid:
        """The transformer's token grid for a video of this size; raises as `latents` does."""
        latents = self.latents(size, argument=argument)
        return LatentGrid(*(n // patch for n, patch in zip(latents, self.transformer["patch_size"], strict=True)))

    def build(self, part: str, device: torch.device, dtype: torch.dtype) -> Any:
        """One part for inference: one of `transformers`, "vae" or "text_encoder"."""
        from diffusers import AutoencoderKLWan, WanTransformer3DModel
        from transformers import UMT5Config, UMT5EncoderModel

        if self.folder is not None:
            return self.folder.read_model(part, dtype).to(device).eval().requires_grad_(False)
        if part == "text_encoder":
            with device:
                return UMT5EncoderModel(UMT5Config(**self.text_encoder)).to(dtype).eval().requires_grad_(False)
        if part == "vae":
            return random_model(AutoencoderKLWan, self.vae, device, dtype)
        return random_model(WanTransformer3DModel, self.transformer, device, dtype)


def random_model(cls: Any, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """A diffusers model with random weights, for inference; what diffusers keeps in float32 stays in float32."""
    torch.manual_seed(0)
    with device:
        model = cls(**config)
    for parameter in model.parameters():
        # Modulations start as zeros, which would switch attention off.
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    cast(model, dtype)
    return model.eval().requires_grad_(False)


def read_model_config(name: str) -> WanModel:
    """The model of a YAML file: a path, or an entry of `configs/models.yaml`.

    Raises:
        InputError: there is no such file, or it has an unknown or an unusable key; the message names it.
    """
    from diffusers import WanTransformer3DModel

    transformer = read_yaml(name, group="models", argument="model")
    vae, text = transformer.pop("vae", {}), transformer.pop("text_encoder", {})
    boundary, expand = transformer.pop("boundary_ratio", None), transformer.pop("expand_timesteps", False)
    try:
        inspect.signature(WanTransformer3DModel).bind(**transformer)
    except TypeError as error:
        raise InputError("model", f"{name!r} does not fit WanTransformer3DModel: {error}") from error
    defaults = {key: given.default for key, given in inspect.signature(WanTransformer3DModel).parameters.items()}
    # Without its folder, which means nothing on other machines.
    return WanModel(Path(name).name, defaults | transformer, dict(vae), UMT5_XXL | dict(text), boundary, expand)


def read_model(name: str) -> WanModel:
    """The model of a YAML file, of a pipeline's folder, or of the hub (downloaded when needed).

    Raises:
        InputError: it is none of these, or no text-to-video model.
        ModelError: the folder holds no complete Wan pipeline.
    """
    path = Path(name).expanduser()
    is_yaml = path.is_file() or path.suffix in (".yaml", ".yml")
    if is_yaml or not (path.is_dir() or "/" in name or name == "embedded"):
        return read_model_config(name)
    folder = find_model(name)
    if folder.pipeline != TEXT_TO_VIDEO:
        raise InputError("model", f"{name!r} is a {folder.pipeline}; supported: {TEXT_TO_VIDEO}")
    index = read_json(folder.path / "model_index.json")
    return WanModel(
        folder.path.name if path.is_dir() else name,
        **{part: read_json(folder.path / part / "config.json") for part in ("transformer", "vae", "text_encoder")},
        boundary_ratio=folder.boundary,
        expand_timesteps=bool(index.get("expand_timesteps")),
        folder=folder,
    )
