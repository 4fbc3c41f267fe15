"""From a run's checkpoint to what others load: `vmonarch export RUN --output FOLDER`.

Full weights become a pipeline folder that stock diffusers loads, LoRA layers a file for `pipe.load_lora_weights` (a
folder of them for Wan2.2's two transformers) or for ComfyUI, and the parameters of an attention processor (with LoRA
layers, if there are any) a file for `vmonarch.load_adapter`.
"""

from __future__ import annotations

import re
import shutil
import types
from pathlib import Path

import torch
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file

from vmonarch import restore, save_adapter
from vmonarch.configs import InputError, check_choice
from vmonarch.files import AtomicFiles, check_output
from vmonarch.finetune import checkpoints
from vmonarch.finetune.checkpoints import CheckpointError
from vmonarch.finetune.config import FinetuneConfig, require
from vmonarch.finetune.models import Experts, cast, load_experts, objective_of
from vmonarch.pipelines.config import build_config
from vmonarch.pipelines.model_folder import ModelFolder, find_wan_model

NAMES = ("diffusers", "comfyui")
# Names of Wan's layers in diffusers, and those that its authors gave them.
_COMFYUI = (
    (r"(blocks\.\d+)\.attn1\.to_([qkv])", r"\1.self_attn.\2"),
    (r"(blocks\.\d+)\.attn1\.to_out\.0", r"\1.self_attn.o"),
    (r"(blocks\.\d+)\.attn2\.to_([qkv])", r"\1.cross_attn.\2"),
    (r"(blocks\.\d+)\.attn2\.add_([kv])_proj", r"\1.cross_attn.\2_img"),
    (r"(blocks\.\d+)\.attn2\.to_out\.0", r"\1.cross_attn.o"),
    (r"(blocks\.\d+)\.ffn\.net\.0\.proj", r"\1.ffn.0"),
    (r"(blocks\.\d+)\.ffn\.net\.2", r"\1.ffn.2"),
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
    names: str = "diffusers",
    dtype: torch.dtype | None = None,
    model: str | None = None,
) -> Path:
    """Write the weights of a checkpoint, averaged if the run has an average, as files that need no training code.

    Args:
        run: the run's output folder.
        output: the .safetensors file to write; of a run on full weights, or on LoRA layers of two transformers, the
            folder. Must not exist.
        step: of the checkpoint; None for the newest.
        names: of LoRA layers: "diffusers", for `pipe.load_lora_weights`, or "comfyui", for both.
        dtype: to store in; None for that of the model's own weights.
        model: where the model is now, if it was moved since.

    Returns:
        `output`.

    Raises:
        InputError: an argument that cannot be used.
        CheckpointError: no such checkpoint, or it does not fit the model.
        ModelError: the model cannot be loaded.
    """
    run, output = Path(run).expanduser(), Path(output).expanduser()
    require(not output.exists(), "output", f"must not exist, {str(output)!r} does; nothing is overwritten")
    check_choice("names", names, NAMES)
    path = _find_checkpoint(run, step)
    record = checkpoints.read(path)
    # Validation has had other settings, and is of no account here.
    told = record["config"] | {"validation": {}, "gradient_checkpointing": False} | ({"model": model} if model else {})
    config = build_config(FinetuneConfig, told, {"objective": {"distillation": 0.0}})
    folder = find_wan_model(config.model, config.revision)
    if folder.fingerprint() != record["model"]:
        raise CheckpointError(f"{path} was trained from another model than {folder.path}")
    require(config.lora.rank > 0 or names == "diffusers", "names", f"cannot be {names}: the run has no LoRA layers")
    experts, _ = load_experts(folder, objective_of(folder, config).experts, config)
    kind = checkpoints.AVERAGE if config.ema else checkpoints.WEIGHTS
    trained = {kind + name: p.detach() for name, p in experts.eval().named_parameters() if p.requires_grad}
    checkpoints.read_tensors(path, trained)
    dtypes = {name: dtype or _stored_dtype(folder.path / name) for name in experts.parts}
    learns = any(".processor." in name for name, _ in experts.named_parameters())
    form = "end with .safetensors" if learns or (config.lora.rank and len(dtypes) == 1) else "be a folder"
    problem = f"must {form} for what this run trained, got {str(output)!r}"
    require((form != "be a folder") == (output.suffix == ".safetensors"), "output", problem)
    check_output(output)
    with AtomicFiles() as files:
        partial = files.stage(output)
        if learns:
            save_adapter(types.SimpleNamespace(**experts.parts), partial, dtype=next(iter(dtypes.values())))
        elif config.lora.rank:
            _write_layers(experts, partial, dtypes, names)
        else:
            _write_pipeline(folder, experts, partial, dtypes)
    return output


def _find_checkpoint(run: Path, step: int | None) -> Path:
    """The run's checkpoint of a step, or its newest."""
    saved = run / "checkpoints"
    require(saved.is_dir(), "run", f"must be the output folder of a run; there is no folder {str(saved)!r}")
    path = checkpoints.newest(saved) if step is None else checkpoints.path_of(saved, step)
    if path is None or not path.exists():
        listed = ", ".join(map(str, checkpoints.steps_in(saved))) or "none"
        raise CheckpointError(f"{run} has no checkpoint{'' if step is None else f' of step {step}'}; it has: {listed}")
    return path


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of a component's first weight."""
    with safe_open(min(folder.glob("*.safetensors")), "pt") as file:
        dtype: torch.dtype = file.get_tensor(next(iter(file.keys()))).dtype
    return dtype


def _write_layers(experts: Experts, path: Path, dtypes: dict[str, torch.dtype], names: str) -> None:
    """LoRA layers as a file that diffusers or ComfyUI loads: of two transformers a file each, as they are loaded."""
    for name, part in experts.parts.items():
        file = path if len(experts.parts) == 1 else path / f"{name}.safetensors"
        layers = {}
        for key, x in get_peft_model_state_dict(part).items():
            layer, _, factor = key.rpartition(".lora_")
            # The file does not say what alpha is: it is in the second factor, over the rank.
            scale = part.get_submodule(layer).scaling["default"] if factor.startswith("B") else 1.0
            shown = comfyui_name(key) if names == "comfyui" else f"transformer.{key}"
            layers[shown] = (x * scale).to(dtypes[name]).contiguous()
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(layers, file, metadata={"format": "pt"})


def comfyui_name(key: str) -> str:
    """ComfyUI's name of a tensor of LoRA layers, which is the one that Wan's authors gave its layer.

    Args:
        key: diffusers' name, such as `blocks.0.attn1.to_q.lora_A.weight`.

    Raises:
        InputError: it has none.
    """
    layer, _, tensor = key.rpartition(".lora_")
    for ours, theirs in _COMFYUI:
        if found := re.fullmatch(ours, layer):
            return f"diffusion_model.{found.expand(theirs)}.lora_{tensor}"
    raise InputError("names", f"cannot be comfyui: {layer} has no name there; give diffusers")


def _write_pipeline(folder: ModelFolder, experts: Experts, path: Path, dtypes: dict[str, torch.dtype]) -> None:
    """A copy of the model's folder with other weights."""
    shutil.copytree(folder.path, path, ignore=shutil.ignore_patterns(*experts.parts, "*.py", "__pycache__"))
    for name, part in experts.parts.items():
        restore(part)
        cast(part, dtypes[name])
        part.save_pretrained(path / name, safe_serialization=True)
