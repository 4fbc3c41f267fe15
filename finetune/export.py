"""From a run's checkpoint to what others load: `vmonarch export RUN --output FOLDER`.

Full weights become a pipeline folder that stock diffusers loads, LoRA layers a file for `pipe.load_lora_weights` (a
folder of them for Wan2.2's two transformers) or for ComfyUI, and the parameters of an attention processor (with LoRA
layers, if there are any) a file for `vmonarch.load_adapter`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from vmonarch.configs import InputError
from vmonarch.finetune.checkpoints import AVERAGE, WEIGHTS, CheckpointError, Checkpoints, check, load_weights, read_run
from vmonarch.finetune.config import FinetuneConfig, finetune_config
from vmonarch.finetune.models import COMPONENTS, Experts, ModelFacts, load_experts, model_facts
from vmonarch.pipelines.model_folder import ModelFolder, find_wan_model

WHICH, NAMES = ("auto", "last", "ema"), ("diffusers", "comfyui")
# Of FSDP in a checkpoint, by accelerate.
SPREAD_WEIGHTS = "pytorch_model_fsdp_0"
# Names of Wan's layers in diffusers, and those that its authors gave them.
_COMFYUI = (
    (r"blocks\.(\d+)\.attn1\.to_([qkv])", r"blocks.\1.self_attn.\2"),
    (r"blocks\.(\d+)\.attn1\.to_out\.0", r"blocks.\1.self_attn.o"),
    (r"blocks\.(\d+)\.attn2\.to_([qkv])", r"blocks.\1.cross_attn.\2"),
    (r"blocks\.(\d+)\.attn2\.add_([kv])_proj", r"blocks.\1.cross_attn.\2_img"),
    (r"blocks\.(\d+)\.attn2\.to_out\.0", r"blocks.\1.cross_attn.o"),
    (r"blocks\.(\d+)\.ffn\.net\.0\.proj", r"blocks.\1.ffn.0"),
    (r"blocks\.(\d+)\.ffn\.net\.2", r"blocks.\1.ffn.2"),
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"proj_out", "head.head"),
)


def export(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    weights: str = "auto",
    names: str = "diffusers",
    dtype: torch.dtype | None = None,
    model: str | None = None,
) -> Path:
    """Write the weights of a checkpoint as files that need no training code.

    Args:
        run: the run's output folder.
        output: the .safetensors file to write; of a run on full weights, or on LoRA layers of two transformers, the
            folder. Must not exist.
        step: of the checkpoint; None for the newest.
        weights: "ema" for the averaged ones, "last" for those of the step, "auto" for the averaged if there are any.
        names: of LoRA layers: "diffusers", for `pipe.load_lora_weights`, or "comfyui", for both.
        dtype: to store in; None for that of the model's own weights.
        model: where the model is now, if it was moved since.

    Returns:
        what was written.

    Raises:
        InputError: an argument that cannot be used.
        CheckpointError: no such checkpoint, or it does not fit the model.
        ModelError: the model cannot be loaded.
    """
    output = Path(output).expanduser()
    if output.exists():
        raise InputError("output", f"must not exist, {str(output)!r} does; nothing is overwritten")
    for argument, value, known in (("weights", weights, WHICH), ("names", names, NAMES)):
        if value not in known:
            raise InputError(argument, f"must be one of {', '.join(known)}, got {value!r}")
    config, folder, facts, experts = _trained(Path(run).expanduser(), step, weights, model)
    dtypes = {name: dtype or facts.dtypes[name] for name in experts.parts}
    learns = any(".processor." in name for name, _ in experts.named_parameters())
    one_file = learns or (config.lora.rank > 0 and len(experts.parts) == 1)
    if one_file != (output.suffix == ".safetensors"):
        form = "end with .safetensors" if one_file else "be a folder"
        raise InputError("output", f"must {form} for what this run trained, got {str(output)!r}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("output", f"{str(output)!r} cannot be written: {error.strerror or error}") from error
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.partial{output.suffix}")
    try:
        if learns:
            _write_adapter(experts, temporary, next(iter(dtypes.values())))
        elif config.lora.rank:
            _write_layers(experts, temporary, dtypes, names)
        else:
            _write_pipeline(folder, experts, temporary, dtypes)
        # It appears whole or not at all.
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
    return output


def _trained(
    run: Path, step: int | None, weights: str, model: str | None
) -> tuple[FinetuneConfig, ModelFolder, ModelFacts, Experts]:
    """(settings of the run, its model and what that says, the transformers with the weights of a checkpoint)."""
    checkpoints = Checkpoints(run / "checkpoints")
    if not checkpoints.folder.is_dir():
        raise InputError("run", f"must be the output folder of a run; there is no folder {str(checkpoints.folder)!r}")
    if step is not None and step not in checkpoints.steps():
        listed = ", ".join(map(str, checkpoints.steps())) or "none"
        raise CheckpointError(f"{run} has no checkpoint of step {step}; it has: {listed}")
    path = checkpoints.latest() if step is None else checkpoints.path(step)
    if path is None:
        raise CheckpointError(f"{run} holds no checkpoint")
    check(path)
    record = read_run(path)
    config = finetune_config(record["config"])
    config = dataclasses.replace(
        config,
        model=model or config.model,
        gradient_checkpointing=False,
        objective=dataclasses.replace(config.objective, distillation=0.0),
    )
    folder = find_wan_model(config.model, config.revision)
    if folder.fingerprint() != record["model"]:
        raise CheckpointError(f"{path} was trained from another model than {folder.path}")
    if weights == "ema" and not config.ema:
        raise InputError("weights", "cannot be ema: the run has no average")
    facts = model_facts(folder, config)
    experts, _ = load_experts(folder, facts, config)
    trained = {name: p.detach() for name, p in experts.named_parameters() if p.requires_grad}
    if config.ema and weights != "last":
        load_weights(path / AVERAGE, trained)
    elif (path / WEIGHTS).exists():
        load_weights(path / WEIGHTS, trained)
    else:
        # FSDP's, each process its part.
        with warnings.catch_warnings(action="ignore"):
            torch.distributed.checkpoint.load({"model": trained}, checkpoint_id=path / SPREAD_WEIGHTS, no_dist=True)
    return config, folder, facts, experts.eval()


def _write_adapter(experts: Experts, path: Path, dtype: torch.dtype) -> None:
    """A processor's parameters, with LoRA layers if there are any, as an adapter of ours."""
    from vmonarch import save_adapter

    save_adapter(types.SimpleNamespace(**{**dict.fromkeys(COMPONENTS), **experts.parts}), path, dtype=dtype)


def _write_layers(experts: Experts, path: Path, dtypes: dict[str, torch.dtype], names: str) -> None:
    """LoRA layers as diffusers' or ComfyUI's own file: of two transformers a file each, as they are loaded."""
    from diffusers import WanPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    for name, part in experts.parts.items():
        file = path if len(experts.parts) == 1 else path / f"{name}.safetensors"
        layers = get_peft_model_state_dict(part)
        if names == "comfyui":
            layers = {comfyui_name(key): _scaled(part, key, x) for key, x in layers.items()}
        layers = {key: x.to(dtypes[name]).contiguous() for key, x in layers.items()}
        if names == "comfyui":
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(layers, file, metadata={"format": "pt"})
        else:
            # Without the settings of the layers, alpha would be lost.
            settings = _collate_lora_metadata({"transformer": part})
            WanPipeline.save_lora_weights(file.parent, layers, weight_name=file.name, **settings)


def comfyui_name(key: str) -> str:
    """ComfyUI's name of a tensor of LoRA layers, which is the one that Wan's authors gave its layer.

    Args:
        key: diffusers' name, such as `blocks.0.attn1.to_q.lora_A.weight`.

    Raises:
        InputError: it has none.
    """
    layer, _, tensor = key.rpartition(".lora_")
    for ours, theirs in _COMFYUI:
        layer, changed = re.subn(f"^{ours}$", theirs, layer)
        if changed:
            return f"diffusion_model.{layer}.lora_{tensor}"
    raise InputError("names", f"cannot be comfyui: {layer} has no name there; give diffusers")


def _scaled(part: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """With alpha over rank in the second factor, where no file says what alpha is."""
    layer, _, factor = key.rpartition(".lora_")
    scale: float = part.get_submodule(layer).scaling["default"]
    return tensor * scale if factor.startswith("B") else tensor


def _write_pipeline(folder: ModelFolder, experts: Experts, path: Path, dtypes: dict[str, torch.dtype]) -> None:
    """A copy of the model's folder with other weights."""
    from vmonarch import restore
    from vmonarch.installation import is_applied

    shutil.copytree(folder.path, path, ignore=shutil.ignore_patterns(*experts.parts, "*.py", "__pycache__"))
    for name in experts.parts:
        part: Any = experts.parts[name]
        if is_applied(part):
            restore(part)
        _narrow(part, dtypes[name])
        part.save_pretrained(path / name, safe_serialization=True)


def _narrow(part: Any, dtype: torch.dtype) -> None:
    """Cast the weights, all but those of modules that diffusers keeps in float32."""
    kept = set(part._keep_in_fp32_modules or ())
    for name, parameter in part.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


if __name__ == "__main__":
    from vmonarch.cli import main

    sys.exit(main(["export", *sys.argv[1:]]))
