"""From a run's checkpoint to what others load: `vmonarch export RUN --output FOLDER`.

Full weights become a pipeline folder that stock diffusers loads, LoRA layers a file for `pipe.load_lora_weights` (a
folder of them for Wan2.2's two transformers), and the parameters of an attention processor (with LoRA layers, if there
are any) a file for `vmonarch.load_adapter`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.finetune.checkpoints import CheckpointError, Checkpoints
from vmonarch.finetune.config import FinetuneConfig, finetune_config
from vmonarch.finetune.models import COMPONENTS, Experts, ModelFacts, load_experts, model_facts
from vmonarch.pipelines.model_folder import ModelFolder, find_wan_model

WEIGHTS = ("auto", "last", "ema")


def export(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    weights: str = "auto",
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
    if weights not in WEIGHTS:
        raise InputError("weights", f"must be one of {', '.join(WEIGHTS)}, got {weights!r}")
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
            _write_layers(experts, temporary, dtypes)
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
    parts = checkpoints.load(path, wanted=["model", "run"])
    config = finetune_config(parts["run"]["config"])
    if model is not None:
        config = dataclasses.replace(config, model=model)
    config = dataclasses.replace(
        config, gradient_checkpointing=False, objective=dataclasses.replace(config.objective, distillation=0.0)
    )
    folder = find_wan_model(config.model, config.revision)
    if folder.fingerprint() != parts["run"]["model"]:
        raise CheckpointError(f"{path} was trained from another model than {folder.path}")
    tensors = parts["model"]
    if weights == "ema" and not config.ema:
        raise InputError("weights", "cannot be ema: the run has no average")
    if weights == "ema" or (weights == "auto" and config.ema):
        tensors = checkpoints.load(path, wanted=["ema"])["ema"]
    facts = model_facts(folder, config)
    experts, _ = load_experts(folder, facts, config)
    trained = {name: parameter for name, parameter in experts.named_parameters() if parameter.requires_grad}
    if trained.keys() != tensors.keys():
        raise CheckpointError(f"{path} does not fit the model: {sorted(trained.keys() ^ tensors.keys())[:3]}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])
    return config, folder, facts, experts.eval()


def _write_adapter(experts: Experts, path: Path, dtype: torch.dtype) -> None:
    """A processor's parameters, with LoRA layers if there are any, as an adapter of ours."""
    from vmonarch import save_adapter

    save_adapter(types.SimpleNamespace(**{**dict.fromkeys(COMPONENTS), **experts.parts}), path, dtype=dtype)


def _write_layers(experts: Experts, path: Path, dtypes: dict[str, torch.dtype]) -> None:
    """LoRA layers as diffusers' own file: of two transformers a file each, which is how it loads them."""
    from diffusers import WanPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft.utils import get_peft_model_state_dict

    for name, part in experts.parts.items():
        file = path if len(experts.parts) == 1 else path / f"{name}.safetensors"
        layers = {key: x.to(dtypes[name]).contiguous() for key, x in get_peft_model_state_dict(part).items()}
        # Without the settings of the layers, alpha would be lost.
        settings = _collate_lora_metadata({"transformer": part})
        WanPipeline.save_lora_weights(file.parent, layers, weight_name=file.name, **settings)


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
