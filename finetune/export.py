"""From a run's checkpoint to what others load: `python -m vmonarch.finetune.export RUN --output FOLDER`.

Full weights become a pipeline folder that stock diffusers loads, LoRA layers a file for `pipe.load_lora_weights`, and
the parameters of an attention processor (with LoRA layers, if there are any) a file for `vmonarch.load_adapter`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.finetune.checkpoints import CheckpointError, Checkpoints
from vmonarch.finetune.config import FinetuneConfig, finetune_config
from vmonarch.finetune.models import COMPONENTS, Experts, ModelFacts, load_experts, model_facts
from vmonarch.pipelines.model_folder import ModelFolder, find_model

WEIGHTS = ("auto", "last", "ema")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        output: of a run on full weights: the pipeline folder to write; else the .safetensors file. Must not exist.
        step: of the checkpoint; None for the newest.
        weights: "ema" for the averaged ones, "last" for those of the step, "auto" for the averaged if there are any.
        dtype: to store in; None for that of the model's own weights.
        model: where the model is now, if it was moved since.

    Returns:
        what was written.

    Raises:
        InputError: an argument that cannot be used.
        CheckpointError: no such checkpoint, or it does not fit the model.
    """
    output = Path(output)
    if output.exists():
        raise InputError("output", f"must not exist, {str(output)!r} does; nothing is overwritten")
    if weights not in WEIGHTS:
        raise InputError("weights", f"must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    config, folder, facts, experts = _trained(Path(run), step, weights, model)
    dtypes = {name: dtype or facts.dtypes[name] for name in experts.parts}
    output.parent.mkdir(parents=True, exist_ok=True)
    learns = any(".processor." in name for name, _ in experts.named_parameters())
    if config.lora.rank or learns:
        if output.suffix != ".safetensors":
            raise InputError("output", f"must end with .safetensors for LoRA layers, got {str(output)!r}")
        return _write_layers(experts, output, dtypes[next(iter(experts.parts))], learns)
    return _write_pipeline(folder, experts, output, dtypes)


def _trained(
    run: Path, step: int | None, weights: str, model: str | None
) -> tuple[FinetuneConfig, ModelFolder, ModelFacts, Experts]:
    """(settings of the run, its model and what that says, the transformers with the weights of a checkpoint)."""
    checkpoints = Checkpoints(run / "checkpoints")
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
    folder = find_model(config.model, config.revision)
    if folder.fingerprint() != parts["run"]["model"]:
        raise CheckpointError(f"{path} was trained from another model than {folder.path}")
    tensors = parts["model"]
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


def _write_layers(experts: Experts, output: Path, dtype: torch.dtype, learns: bool) -> Path:
    """LoRA layers as diffusers' own file, or with a processor's parameters as an adapter of ours."""
    from diffusers import WanPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft.utils import get_peft_model_state_dict

    parts = dict(experts.parts)
    if learns:
        from vmonarch import save_adapter

        save_adapter(types.SimpleNamespace(**{**dict.fromkeys(COMPONENTS), **parts}), output, dtype=dtype)
        return output
    layers = {}
    for name, part in parts.items():
        state = get_peft_model_state_dict(part)
        layers[f"{name}_lora_layers"] = {key: tensor.to(dtype).contiguous() for key, tensor in state.items()}
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.partial.safetensors")
    # Without the settings of the layers, alpha would be lost.
    settings = _collate_lora_metadata(parts)
    WanPipeline.save_lora_weights(output.parent, **layers, weight_name=temporary.name, **settings)
    os.replace(temporary, output)
    return output


def _write_pipeline(folder: ModelFolder, experts: Experts, output: Path, dtypes: dict[str, torch.dtype]) -> Path:
    """A copy of the model's folder with other weights; it appears whole or not at all."""
    from vmonarch import restore
    from vmonarch.installation import is_applied

    temporary = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        shutil.copytree(folder.path, temporary, ignore=shutil.ignore_patterns(*experts.parts, "*.py", "__pycache__"))
        for name in experts.parts:
            part: Any = experts.parts[name]
            if is_applied(part):
                restore(part)
            _narrow(part, dtypes[name])
            part.save_pretrained(temporary / name, safe_serialization=True)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def _narrow(part: Any, dtype: torch.dtype) -> None:
    """Cast the weights, all but those of modules that diffusers keeps in float32."""
    kept = set(part._keep_in_fp32_modules or ())
    for name, parameter in part.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.finetune.export", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output folder of the run")
    parser.add_argument("--output", type=Path, required=True, help="folder, or .safetensors file for LoRA layers")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto", help="averaged or last ones")
    parser.add_argument("--dtype", choices=DTYPES, help="to store in (default: the model's own)")
    parser.add_argument("--model", help="where the model is, if it was moved")
    options = parser.parse_args(arguments)
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    try:
        written = export(
            options.run, options.output, step=options.step, weights=options.weights, dtype=dtype, model=options.model
        )
    except InputError as error:
        parser.error(str(error))
    except CheckpointError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
