"""Models in memory: device, precision, offloading, and whether prompts fit the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.files import prepare_output_dir
from vmonarch.installation import find_transformers
from vmonarch.pipelines.config import Config, SamplingConfig, complete
from vmonarch.pipelines.environment import choose_device, choose_dtype
from vmonarch.pipelines.lora import LORA, find_lora, fuse_lora
from vmonarch.pipelines.model_folder import MODELS, ModelFolder, cannot_be_loaded, find_model
from vmonarch.pipelines.outputs import check_sources
from vmonarch.pipelines.processes import ALONE, Shard
from vmonarch.pipelines.recipes import quantize_for_good
from vmonarch.pipelines.traits import IMAGE_TO_VIDEO


@dataclass(frozen=True)
class LoadedModel:
    """A pipeline ready to sample from.

    Args:
        pipe: a stock diffusers pipeline.
        folder: where it came from.
        device, dtype: what it computes on and in (the VAE in float32).
        config: the completed settings it was loaded for.
    """

    pipe: Any
    folder: ModelFolder
    device: torch.device
    dtype: torch.dtype
    config: SamplingConfig


def complete_and_load(
    config: Config,
    model: LoadedModel | None,
    *,
    shard: Shard = ALONE,
    recorded: Mapping[str, Any] | None = None,
) -> tuple[Config, LoadedModel]:
    """The completed config and a pipeline that it can be run on; its output folder is there and can be written to.

    Args:
        model: a pipeline loaded before with the same model settings, or None.
        shard: as in `load_model`.
        recorded: a record to reproduce; the files that `config` takes from it must be unchanged.

    Raises:
        InputError, ModelError: as `generate`.
    """
    folder = model.folder if model else find_model(config.model, config.revision)
    config = complete(config, folder)
    if shard.size > 1 and not folder.traits.wan:
        problem = f"must be of the Wan family for {shard.size} processes that share a video; it is a {folder.pipeline}"
        raise InputError("model", problem)
    if recorded is not None:
        check_sources(recorded, config, folder)
    prepare_output_dir(config.output_dir)
    if model is None:
        return config, load_model(config, folder, shard)
    check_loaded(config, model)
    return config, model


def load_model(config: SamplingConfig, folder: ModelFolder, shard: Shard = ALONE) -> LoadedModel:
    """Load the pipeline for a completed `config` onto its device; what can be is checked before the weights are read.

    Args:
        shard: this process among several, of which each takes the GPU of its number.

    Raises:
        InputError: a prompt is too long, or device, dtype, offload, flow_shift or LoRA layers do not fit.
        ModelError: a component cannot be loaded.
    """
    import diffusers

    device = choose_device(config.device)
    if shard.size > 1 and device.type == "cuda":
        device = choose_device(f"cuda:{shard.local_rank}")
        torch.cuda.set_device(device)
    dtype = choose_dtype(config.dtype, device)
    if config.offload != "none" and device.type == "cpu":
        raise InputError("offload", f"{config.offload} needs a CUDA device; supported on the CPU: none")
    check_prompt_lengths(config, folder)
    cls = getattr(diffusers, IMAGE_TO_VIDEO if config.image is not None else folder.pipeline)
    parts = {name: part for name, part in folder.outline.components.items() if name.startswith("tokenizer")}
    pipe = read_pipeline(cls, folder, dtype, scheduler=_scheduler(folder.outline.scheduler, config), **parts)
    for argument in LORA:
        for word in getattr(config, argument):
            fuse_lora(pipe, argument, find_lora(argument, word))
    # One video at a time, so that its bits do not depend on the rest of the batch. Some pipelines hand over latents in
    # the transformer's type.
    pipe.vae.enable_slicing()
    pipe.vae.decoder.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
    methods = [method for several in config.attention_methods.values() for method in several]
    # Several methods that take turns each have their own.
    if len(methods) == 1 and (linears := methods[0].additions.linears):
        for transformer in find_transformers(pipe).values():
            quantize_for_good(transformer, linears, device)
    if config.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif config.offload == "group":
        pipe.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=True)
    else:
        pipe.to(device)
    return LoadedModel(pipe, folder, device, dtype, config)


def read_pipeline(cls: Any, folder: ModelFolder, dtype: torch.dtype, **parts: Any) -> Any:
    """The pipeline in a folder as `cls`, on the CPU, its VAE in float32; `parts` stand for components not to be read.

    Raises:
        ModelError: a component cannot be loaded.
    """
    for name in MODELS:
        if name in folder.components and name not in parts:
            parts[name] = folder.read_model(name, torch.float32 if name == "vae" else dtype)
    with cannot_be_loaded(folder.path):
        return cls.from_pretrained(folder.path, local_files_only=True, **parts)


def _scheduler(own: Any, config: SamplingConfig) -> Any:
    """A model's own scheduler, or the one that is asked for, with the same flow shift unless another is given."""
    key = next((key for key in ("flow_shift", "shift") if key in own.config), None)
    if config.scheduler is not None:
        from vmonarch.pipelines.schedulers import few_step_scheduler

        shift = config.flow_shift or (own.config[key] if key else 1.0)
        return few_step_scheduler(config.scheduler, shift, config.sigmas)
    changed: dict[str, Any] = {}
    if config.flow_shift is not None:
        if own.config.get("use_dynamic_shifting"):
            raise InputError("flow_shift", "cannot be set: this model's shift follows from the size of the video")
        if key is None:
            raise InputError("flow_shift", f"cannot be set: {type(own).__name__} has no flow shift")
        changed[key] = config.flow_shift
    return type(own).from_config(own.config, **changed)


def check_loaded(config: SamplingConfig, model: LoadedModel) -> None:
    """Check that a completed `config` can be run on a pipeline loaded before.

    Raises:
        InputError: a setting that loading depends on differs, or a prompt is too long.
    """
    for name in ("dtype", "device", "offload", "scheduler", "sigmas", "flow_shift", *LORA):
        wanted, has = getattr(config, name), getattr(model.config, name)
        if wanted != has:
            raise InputError(name, f"must be {has!r}, with which the pipeline was loaded, got {wanted!r}")
    if (config.image is None) != (model.config.image is None):
        raise InputError("image", "must be given to load the pipeline too, or neither time")
    check_prompt_lengths(config, model.folder)


def check_prompt_lengths(config: SamplingConfig, folder: ModelFolder) -> None:
    """Check that no prompt is longer than the text encoders of a pipeline may see: nothing is cut off silently.

    Raises:
        InputError: a prompt has more tokens than the limit; the error gives both numbers.
    """
    texts = [("prompts", prompt) for prompt in config.prompts]
    if config.negative_prompt:
        texts.append(("negative_prompt", config.negative_prompt))
    for name, text in texts:
        for tokens, limit, which in folder.traits.lengths(folder.outline, text, config.max_sequence_length):
            if tokens > limit:
                problem = f"must have at most {limit} tokens{which} for this model's text encoder"
                raise InputError(name, f"{problem}; {text[:40]!r} has {tokens}")
