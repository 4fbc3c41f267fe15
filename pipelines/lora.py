"""LoRA files: finding them, and adding what they have learnt to a pipeline's weights.

They are fused as soon as the pipeline is loaded, and nothing of them is left but changed weights. So they cost no time
in any step, and compiled blocks, quantised layers, CUDA graphs and offloading see plain layers; a layer that is
quantised already cannot be fused.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vmonarch.configs import InputError

# The transformer that each setting is for.
LORA = {"lora": "transformer", "lora_2": "transformer_2"}
_SUPPORTED = "must be PATH or PATH:SCALE, of a .safetensors file, a folder with one, or one of the hub, OWNER/NAME/FILE"
_ADAPTER = "vmonarch_fused"


class LoraFile(NamedTuple):
    """A file with LoRA layers, what they are multiplied by, and `PATH:SCALE` by which it is found from anywhere."""

    file: Path
    scale: float
    word: str


def find_lora(argument: str, word: str) -> LoraFile:
    """The file that `PATH`, `PATH:SCALE` or the same with a file of the hub stands for.

    What follows the last colon is part of the path unless it is a number.

    Raises:
        InputError: there is no such file, or it is no safetensors file.
    """
    from huggingface_hub import hf_hub_download
    from safetensors import safe_open

    name, colon, number = word.rpartition(":")
    try:
        scale = float(number if colon else "")
    except ValueError:
        name, scale = word, 1.0
    path = Path(name).expanduser()
    owner, model, file = [*name.split("/", 2), "", ""][:3]
    try:
        if not math.isfinite(scale):
            raise ValueError("SCALE must be finite")
        if not name.strip():
            raise ValueError("PATH is missing")
        if path.is_dir():
            found = sorted(path.glob("*.safetensors"))
            if len(found) != 1:
                raise FileNotFoundError(f"the folder holds {len(found)} .safetensors files")
            path = found[0]
        if path.exists():
            path = path.resolve()
            name = str(path)
        elif file.endswith(".safetensors") and owner not in ("", ".", "..", "~"):
            path = Path(hf_hub_download(f"{owner}/{model}", file))
        else:
            raise FileNotFoundError("there is no file of this name")
        with safe_open(path, "numpy"):
            return LoraFile(path, scale, f"{name}:{scale:g}")
    except Exception as error:
        raise InputError(argument, f"{_SUPPORTED}, got {word!r}: {in_words(error)}") from error


def fuse_lora(pipe: Any, argument: str, lora: LoraFile) -> None:
    """Add LoRA layers to the weights of a pipeline's transformer, which are still on the CPU.

    Args:
        argument: of `LORA`, which says of which transformer.

    Raises:
        InputError: the pipeline takes none, or has no place for the layers.
    """
    from safetensors.torch import load_file

    component = LORA[argument]
    if not hasattr(pipe, "load_lora_weights"):
        raise InputError(argument, f"cannot be used: diffusers loads no LoRA layers into a {type(pipe).__name__}")
    file, transformer = str(lora.file), getattr(pipe, component)
    second = {"load_into_transformer_2": True} if argument == "lora_2" else {}
    try:
        layers = pipe.lora_state_dict(file, local_files_only=True)
        pipe.load_lora_weights(file, adapter_name=_ADAPTER, local_files_only=True, **second)
        there = {key.replace(f".{_ADAPTER}", "") for key in transformer.state_dict() if f".{_ADAPTER}" in key}
        pipe.fuse_lora(components=[component], lora_scale=lora.scale, safe_fusing=True)
    except Exception as error:
        raise InputError(argument, f"{file} cannot be fused with the {component}: {in_words(error)}") from error
    transformer.unload_lora()
    # diffusers only logs what it passes over.
    lost = [key for key in layers if "lora_" in key and key.removeprefix("transformer.") not in there]
    if lost:
        problem = f"{file} holds {len(lost)} tensors that the {component} has no place for: {listed(lost)}"
        raise InputError(argument, problem)
    if not there:
        raise InputError(argument, f"{file} holds no LoRA layers of the {component}")
    # Its conversion drops differences of weights without a word: some are zero.
    known = list(layers.values())
    same = lambda value: any(value.shape == other.shape and value.equal(other) for other in known)
    differences = {key: value for key, value in load_file(file).items() if key.endswith((".diff", ".diff_b"))}
    dropped = [key for key, value in differences.items() if value.any() and not same(value)]
    if dropped:
        what = f"{len(dropped)} tensors of {lora.file.name}, which are not zero: {listed(dropped)}"
        warnings.warn(f"{argument}: diffusers leaves out {what}", stacklevel=2)


def listed(names: Iterable[str]) -> str:
    """The first of some names for an error, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def in_words(error: Exception) -> str:
    """An error of another library in one line: they raise all kinds, which are the same to the user."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" …")
