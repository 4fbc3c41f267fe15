"""Saving and loading what a processor and LoRA layers have learnt, in one file; nothing is skipped silently.

The file is safetensors. Tensors have their names in the pipeline, "transformer.blocks.0.attn1.processor.…". LoRA layers
have diffusers' names, and their settings lie in diffusers' metadata, so that `load_lora_weights` of a stock pipeline
loads the LoRA part. The metadata entry "vmonarch_adapter" is JSON: version, processor, its config, and for each
transformer the facts that must agree with the one that the file is loaded to.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vmonarch.configs import as_json
from vmonarch.families import diffusers_class
from vmonarch.files import AtomicFiles
from vmonarch.hooks import record_of
from vmonarch.installation import Installation, bind_all, find_transformers, install, parameters_of
from vmonarch.own import ours_of

VERSION = 1
_ENTRY = "vmonarch_adapter"
# diffusers' name for the settings of LoRA layers.
_LORA_ENTRY = "lora_adapter_metadata"
_LORA_NAME = "vmonarch"
# Modules of the processors that learn.
_PROCESSORS = {"BasedProcessor": "vmonarch.based", "ControlProcessor": "vmonarch.eval.controls"}
# Entries of a transformer's config that decide the shapes of learnt tensors and the meaning of layers.
_FACTS = ("num_layers", "num_attention_heads", "attention_head_dim", "patch_size", "in_channels", "vace_layers")
# Options that may differ from the saved ones, because no parameter depends on them.
_FREE_OPTIONS = ("dense_steps", "grid", "implementation")
# Settings of PEFT that say what the layers compute.
_LORA_SETTINGS = ("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern")


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """The contents of a file: tensors by name, LoRA settings and facts by transformer."""

    source: Path
    processor: str
    config: dict[str, Any]
    transformers: dict[str, dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    lora: dict[str, dict[str, Any]]


def save_adapter(
    pipe_or_transformer: Any, path: str | Path, *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> None:
    """Write the learnt parameters of the applied processor, and of LoRA layers if there are any, to one file.

    Args:
        pipe_or_transformer: as in `vmonarch.apply`; of a pipeline all transformers are saved.
        path: the file, which ends with .safetensors.
        dtype: that of the saved tensors; None for each parameter's own.
        overwrite: replace an existing file.

    Raises:
        TypeError: `pipe_or_transformer` has no supported transformer.
        ValueError: a transformer has no processor with parameters, or another one than the rest; it has several LoRA
            adapters, or one that changed the weights below it, is disabled or has a weight other than 1; `path` has
            another suffix; a value does not fit `dtype`.
        FileExistsError: the file exists, and `overwrite` is False.
        FileNotFoundError: its folder does not exist.
        NotImplementedError: the weights are offloaded to where only hooks find them.
    """
    path = Path(path).expanduser()
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end with .safetensors, got {str(path)!r}")
    tensors: dict[str, torch.Tensor] = {}
    lora_settings: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    applied: dict[str, dict[str, Any]] = {}
    for name, transformer in find_transformers(pipe_or_transformer).items():
        record = record_of(transformer)
        learnt = {} if record is None else _learnt(transformer, {attn: ours_of(attn) for attn in record.modules})
        if record is None or not learnt:
            raise ValueError(
                f"{name} has no processor with parameters: apply a BasedProcessor, or save the other alone"
            )
        layers, settings = _lora_of(name, transformer)
        tensors |= {f"{name}.{key}": _to_save(f"{name}.{key}", x, dtype) for key, x in (learnt | layers).items()}
        lora_settings |= {f"{name}.{key}": value for key, value in settings.items()}
        facts[name] = _facts(transformer)
        applied[name] = {"processor": type(record.processor).__name__, "config": record.processor.config}
    first, *others = applied.values()
    if any(other != first for other in others):
        raise ValueError(f"{' and '.join(applied)} have different processors: save each transformer by itself")
    metadata = {
        "format": "pt",
        _ENTRY: json.dumps({"version": VERSION, **first, "transformers": facts}, sort_keys=True),
    }
    if lora_settings:
        metadata[_LORA_ENTRY] = json.dumps(lora_settings, sort_keys=True)
    with AtomicFiles(overwrite=overwrite) as files:
        # Written like any other file: save_file would make it readable for its owner alone.
        files.stage(path).write_bytes(save(tensors, metadata))


def load_adapter(pipe_or_transformer: Any, path: str | Path, **options: Any) -> Installation:
    """Apply the processor that `save_adapter` saved, with everything that it and its LoRA layers had learnt.

    Nothing changes unless everything fits. `vmonarch.restore` removes what was loaded, including LoRA layers.

    Args:
        pipe_or_transformer: as in `vmonarch.apply`.
        path: the file.
        options: `dense_steps`, `grid` and `implementation` of the processor, in place of the saved ones; all others
            must equal the saved ones.

    Returns:
        The installation, as from `vmonarch.apply`.

    Raises:
        TypeError: `pipe_or_transformer` has no supported transformer, or the processor no such option.
        ValueError: the file is no adapter, or one of another version or for another model; parameters are missing,
            unexpected or of another shape, and the error names them; or the transformer has parameters of a processor
            or LoRA layers already.
    """
    transformers = find_transformers(pipe_or_transformer)
    adapter = _read(Path(path).expanduser())
    if adapter.processor not in _PROCESSORS:
        raise ValueError(f"{path} is for {adapter.processor}, supported: {', '.join(_PROCESSORS)}")
    cls = getattr(importlib.import_module(_PROCESSORS[adapter.processor]), adapter.processor)
    processor = cls(**adapter.config | options)
    for name in sorted(options.keys() - set(_FREE_OPTIONS)):
        if processor.config[name] != adapter.config[name]:
            raise ValueError(f"{name} is {adapter.config[name]} in {path}, got {processor.config[name]}")
    _check_models(adapter, transformers)
    with_lora: dict[str, Any] = {name: each for name, each in transformers.items() if name in adapter.lora}
    for name, transformer in with_lora.items():
        if there := getattr(transformer, "peft_config", None):
            raise ValueError(
                f"{name} has adapters of PEFT already ({', '.join(there)}): fuse or delete, and unload them"
            )

    made = bind_all(pipe_or_transformer, processor)
    parameters = {name: _learnt(transformer, bound) for name, (transformer, bound) in made.items()}
    try:
        for name, transformer in with_lora.items():
            parameters[name] |= _add_lora(adapter.lora[name], transformer)
        wanted = {f"{name}.{key}": x for name, of in parameters.items() for key, x in of.items()}
        _check_names(adapter, wanted)
    except BaseException:
        for transformer in with_lora.values():
            if getattr(transformer, "peft_config", None):
                transformer.unload_lora()
            vars(transformer).pop("_hf_peft_config_loaded", None)
        raise
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(adapter.tensors[name])
    installation = install(processor, made)
    for transformer in with_lora.values():
        record: Any = record_of(transformer)
        record.lora = _LORA_NAME
    return installation


def _read(path: Path) -> _Adapter:
    """The contents of an adapter file; raises as `load_adapter`."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} is no complete safetensors file: {error}") from error
    if _ENTRY not in metadata:
        raise ValueError(f"{path} is no adapter that vmonarch.save_adapter wrote: its metadata has no {_ENTRY}")
    lora: dict[str, dict[str, Any]] = {}
    try:
        entry = json.loads(metadata[_ENTRY])
        if entry["version"] != VERSION:
            raise ValueError(f"{path} is an adapter of version {entry['version']}, supported: {VERSION}")
        for key, value in json.loads(metadata.get(_LORA_ENTRY, "{}")).items():
            name, _, setting = key.partition(".")
            lora.setdefault(name, {})[setting] = value
        return _Adapter(path, entry["processor"], entry["config"], entry["transformers"], tensors, lora)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} has a damaged {_ENTRY} in its metadata: {error!r}") from error


def _learnt(transformer: torch.nn.Module, bound: Mapping[torch.nn.Module, Any]) -> dict[str, torch.Tensor]:
    """The parameters of the processors that modules have or get, by their names in the transformer."""
    return {
        f"{place}.processor.{name}": parameter
        for place, module in transformer.named_modules()
        for name, parameter in parameters_of(bound.get(module)).items()
    }


def _to_save(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    saved = tensor.detach().to("cpu", dtype).contiguous()
    if dtype is not None and not torch.equal(torch.isfinite(saved), torch.isfinite(tensor.detach().cpu())):
        raise ValueError(f"dtype={dtype} is too narrow for the values of {name}")
    return saved


def _facts(transformer: Any) -> dict[str, Any]:
    """What must be the same in the transformer that an adapter is loaded to, as JSON has it."""
    # Others subclass the models of diffusers.
    stock: Any = diffusers_class(transformer)
    config = transformer.config
    return {"class": stock.__name__} | {key: as_json(config[key]) for key in _FACTS if key in config}


def _check_models(adapter: _Adapter, transformers: Mapping[str, torch.nn.Module]) -> None:
    if set(adapter.transformers) != set(transformers):
        raise ValueError(
            f"{adapter.source} is for {' and '.join(adapter.transformers)}, but there is {' and '.join(transformers)}"
        )
    for name, transformer in transformers.items():
        saved, here = adapter.transformers[name], _facts(transformer)
        different = [key for key in sorted({*saved, *here}) if saved.get(key) != here.get(key)]
        if different:
            facts = ", ".join(f"{key} {saved.get(key)} (here {here.get(key)})" for key in different)
            raise ValueError(f"{adapter.source} is for another model than {name}: {facts}")


def _check_names(adapter: _Adapter, wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless the adapter has exactly the parameters with these names and shapes."""
    expected, given = ({name: tuple(x.shape) for name, x in of.items()} for of in (wanted, adapter.tensors))
    of_both = [name for name in expected if name in given and given[name] != expected[name]]
    problems = {
        "missing": [name for name in expected if name not in given],
        "unexpected": [name for name in given if name not in expected],
        "of another shape": [f"{name} {given[name]} (here {expected[name]})" for name in of_both],
    }
    found = [f"{problem}: {', '.join(sorted(names))}" for problem, names in problems.items() if names]
    if found:
        raise ValueError(f"{adapter.source} does not fit: {'; '.join(found)}")


def _lora_of(name: str, transformer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """LoRA layers of a transformer under diffusers' names, and their settings; empty if it has none."""
    adapters = getattr(transformer, "peft_config", None) or {}
    if not adapters:
        return {}, {}
    from peft import get_peft_model_state_dict

    (adapter, config), *more = adapters.items()
    if more or getattr(config, "init_lora_weights", None) not in (True, False, "gaussian"):
        raise ValueError(
            f"{name} must have one adapter of plain LoRA, which leaves the weights below it alone, got"
            f" {', '.join(adapters)}"
        )
    for place, layer in transformer.named_modules():
        if adapter in getattr(layer, "scaling", ()):
            whole = layer.lora_alpha[adapter] / (layer.r[adapter] ** 0.5 if config.use_rslora else layer.r[adapter])
            if layer.disable_adapters or abs(layer.scaling[adapter] / whole - 1) > 1e-6:
                raise ValueError(
                    f"{name}.{place} has LoRA with another weight than 1, or disabled, which the file does not hold:"
                    f" enable_lora, and set_adapters({adapter!r}, 1.0)"
                )
    settings = {key: getattr(config, key) for key in _LORA_SETTINGS}
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    layers = get_peft_model_state_dict(transformer, adapter_name=adapter)
    # The processor's parameters are no LoRA layers, even if PEFT saves them as well.
    return {key: value for key, value in layers.items() if ".processor." not in key}, settings


def _add_lora(settings: Mapping[str, Any], transformer: Any) -> dict[str, torch.Tensor]:
    """Add LoRA layers with these settings to a transformer; returns their tensors by their names in files."""
    from peft import LoraConfig, get_peft_model_state_dict

    learning = [(parameter, parameter.requires_grad) for parameter in transformer.parameters()]
    transformer.add_adapter(LoraConfig(**settings), adapter_name=_LORA_NAME)
    # PEFT freezes everything else, and `restore` could not tell that from what was frozen before.
    for parameter, flag in learning:
        parameter.requires_grad_(flag)
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(transformer, adapter_name=_LORA_NAME)
    return found
