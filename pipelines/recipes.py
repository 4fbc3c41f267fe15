"""Recipes: attention and everything else that makes a video fast, switched on by one word and off by another.

    from vmonarch.pipelines import recipes

    recipes.apply(pipe, "stack-fast")                 # or "stack-fast:linears=null", or a mapping
    video = pipe("a lighthouse in a storm").frames[0]
    recipes.apply(pipe, "full")                       # stock again

A recipe is an entry of `configs/recipes.yaml`: an attention method and `Additions` (`vmonarch.configs.methods`), such
as compiled blocks and quantised linear layers.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import Additions, AttentionMethod, resolve_method
from vmonarch.engines import CUDNN, fa3_backend
from vmonarch.installation import find_transformers

# Attributes of a transformer with a recipe: what undoes the recipe, and how its weights were quantised for good.
_UNDO, _FOR_GOOD = "_vmonarch_undo", "_vmonarch_linears"
# A block is one function to torch.compile, with a version for every method and every kind of step.
_VERSIONS = 64
# Other sizes of linear layers have no float8 products.
_FLOAT8_MULTIPLE = 16
# Ada: the first GPUs with float8 products.
_FLOAT8_CAPABILITY = (8, 9)


def apply(
    pipe: Any,
    recipe: str | Mapping[str, Any] | AttentionMethod,
    *,
    compile_backend: str = "inductor",
) -> AttentionMethod:
    """Put a recipe or an attention method on a pipeline of diffusers, in place of what it carries of either.

    Quantised weights are also kept in their own type, for the next call; `quantize_for_good` saves that memory.

    Args:
        recipe: a name in `configs/recipes.yaml` or `configs/attention.yaml`, `name:key=value,…`, or what
            `resolve_method` gave.
        compile_backend: of torch.compile.

    Returns:
        the method.

    Raises:
        InputError: an unknown name or option, or what the pipeline or its device cannot do.
    """
    method = resolve_method(recipe, argument="recipe", recipes=True)
    transformers: list[Any] = list(find_transformers(pipe).values())
    # The device of the computation: offloaded weights are elsewhere.
    device = getattr(pipe, "_execution_device", None) or next(transformers[0].parameters()).device
    for transformer in transformers:
        _take_off(transformer, method.additions, device)
    method.install(pipe)
    for transformer in transformers:
        _put_on(transformer, method.additions, device, compile_backend)
    return method


def quantize_for_good(transformer: torch.nn.Module, linears: str, device: torch.device) -> None:
    """Quantise the linear layers of a transformer's blocks, block by block on `device`; the weights are not kept.

    Every block returns to its place, so that at most one block in its own type has to fit on the device.

    Raises:
        InputError: the device cannot compute them, torchao is missing, or there are no such layers.
    """
    check_linears(linears, device)
    chosen = _linears(transformer, linears)
    for block in repeated_blocks(transformer):
        home = next(block.parameters()).device
        _quantise(block.to(device), linears, chosen)
        block.to(home)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    setattr(transformer, _FOR_GOOD, linears)


def check_linears(linears: str, device: torch.device) -> None:
    """Raise InputError if linear layers cannot be quantised so on a device."""
    if importlib.util.find_spec("torchao") is None:
        raise InputError("linears", f"{linears!r} needs torchao: pip install 'vmonarch[float8]'")
    if linears == "float8-weights":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        problem = f"{linears!r} needs a GPU of Ada, Hopper or newer; elsewhere use float8-weights or null"
        raise InputError("linears", problem)


def allow_versions() -> None:
    """Let torch.compile make as many versions of a block as methods and kinds of steps may need, from now on."""
    torch._dynamo.config.recompile_limit = max(_VERSIONS, torch._dynamo.config.recompile_limit)


def repeated_blocks(transformer: Any) -> list[Any]:
    """The repeated blocks of a transformer, as diffusers names them."""
    return [m for m in transformer.modules() if type(m).__name__ in (transformer._repeated_blocks or ())]


def _linears(transformer: Any, linears: str) -> set[Any]:
    """The linear layers of a transformer's blocks that are quantised.

    Raises:
        InputError: there are none.
    """
    parts = repeated_blocks(transformer)
    if linears == "float8-feed-forward":
        parts = [m for block in parts for m in block.modules() if "FeedForward" in type(m).__name__]
    layers = (m for part in parts for m in part.modules() if isinstance(m, torch.nn.Linear))
    found = {m for m in layers if not (m.in_features % _FLOAT8_MULTIPLE or m.out_features % _FLOAT8_MULTIPLE)}
    if not found:
        raise InputError("linears", f"cannot be {linears!r}: {type(transformer).__name__} has no such layers")
    return found


def _quantise(module: torch.nn.Module, linears: str, chosen: set[Any]) -> None:
    """Quantise the weights of those linear layers of a module that are chosen."""
    from torchao import quantization as torchao

    # torchao's settings of inductor, which hold for the whole process, make a block compile for minutes.
    ours = {"set_inductor_config": False}
    config = (
        torchao.Float8WeightOnlyConfig(**ours)
        if linears == "float8-weights"
        else torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow(), **ours)
    )
    torchao.quantize_(module, config, filter_fn=lambda layer, name: layer in chosen)


def _take_off(transformer: Any, additions: Additions, device: torch.device) -> None:
    """Check that the transformer can carry what a recipe adds, and leave it as it was before any.

    Raises:
        InputError: it cannot; what it carries stays.
    """
    for_good = getattr(transformer, _FOR_GOOD, None)
    if for_good and additions.linears != for_good:
        raise InputError(
            "linears", f"must be {for_good!r}, got {additions.linears!r}: the model was quantised for good"
        )
    if additions.linears:
        check_linears(additions.linears, device)
        _linears(transformer, additions.linears)
    if additions.backend:
        try:
            fa3_backend(device)
        except (ImportError, ValueError) as error:
            raise InputError("backend", str(error)) from error
    if additions.compile and not repeated_blocks(transformer):
        name = type(transformer).__name__
        raise InputError("compile", f"cannot be used: diffusers names no repeated blocks of {name}")
    vars(transformer).pop(_UNDO, contextlib.ExitStack()).close()


def _put_on(transformer: Any, additions: Additions, device: torch.device, backend: str) -> None:
    undo = contextlib.ExitStack()
    setattr(transformer, _UNDO, undo)
    blocks = repeated_blocks(transformer)
    if additions.linears and not hasattr(transformer, _FOR_GOOD):
        chosen = _linears(transformer, additions.linears)
        for module in chosen:
            undo.callback(setattr, module, "weight", module.weight)
        _quantise(transformer, additions.linears, chosen)
    if exact := additions.backend or (CUDNN if additions.compile and device.type == "cuda" else None):
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

        default, _ = registry.get_active_backend()
        transformer.set_attention_backend(exact)
        # diffusers has made it the default for all other models as well.
        registry.set_active_backend(default)
        undo.callback(transformer.reset_attention_backend)
    if additions.compile:
        allow_versions()
        for block in blocks:
            # Not block.compile(): it would also compile the hooks of diffusers' caches, which are no graph.
            if "forward" in vars(block):
                undo.callback(setattr, block, "forward", block.forward)
            else:
                undo.callback(delattr, block, "forward")
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
