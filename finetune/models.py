"""The trained models: transformers of a Wan pipeline folder with the run's attention, and their objective.

Only the transformers' weights are read. Text encoder and VAE did their work when the data were made.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from torch import nn

from vmonarch.base import FullAttentionProcessor
from vmonarch.configs import InputError
from vmonarch.context_parallel import context_parallel_config
from vmonarch.families import known_family
from vmonarch.finetune.config import FinetuneConfig, require
from vmonarch.finetune.objective import Expert, Objective
from vmonarch.installation import own_processors
from vmonarch.own import Bound, ours_of
from vmonarch.pipelines.model_folder import ModelFolder
from vmonarch.pipelines.recipes import allow_versions

COMPONENTS = ("transformer", "transformer_2")


def objective_of(folder: ModelFolder, config: FinetuneConfig) -> Objective:
    """The loss of a run, which names the transformers that are trained.

    Raises:
        InputError: `train` names a transformer that the pipeline has not, or `objective` does not fit the model.
    """
    there = [Expert(name) for name in COMPONENTS if name in folder.components]
    if (boundary := folder.boundary) is not None:
        there = [Expert("transformer", boundary, 1.0), Expert("transformer_2", 0.0, boundary)]
    names = ", ".join(expert.name for expert in there)
    experts = tuple(expert for expert in there if config.train in ("all", expert.name))
    require(experts, "train", f"must be all or one of {names}, got {config.train!r}")
    told, scheduler = config.objective, folder.outline.scheduler.config
    problem = f"must be 0 for {folder.name}, where all clips have a first frame given, or none, got {told.image_share}"
    both = folder.image_capable and not folder.image_conditioned
    require(both or told.image_share == 0, "objective.image_share", problem)
    return Objective(
        experts,
        config.seed,
        told,
        shift=told.flow_shift or float(scheduler.get("flow_shift", scheduler.get("shift", 1.0))),
        channels=folder.image_conditioned,
        takes_image=folder.config.image_dim is not None,
        patch=folder.patch,
    )


class Experts(nn.Module):
    """The transformers that are trained, as one module: one forward call goes to one of them.

    Args:
        parts: by the names in COMPONENTS.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # mypy takes what is in a ModuleDict for bare modules.
        self.parts: Any = nn.ModuleDict(dict(parts))

    def forward(self, expert: str, *, transfer: bool = False, **arguments: Any) -> Any:
        """The call of a `WanTransformer3DModel`; with `transfer`, `transfer_loss` of it."""
        part = self.parts[expert]
        return transfer_loss(part, arguments) if transfer else part(**arguments)


def load_experts(
    folder: ModelFolder, trained: Iterable[Expert], config: FinetuneConfig, frozen: torch.dtype = torch.float32
) -> tuple[Experts, Callable[..., Any] | None]:
    """(the trained transformers, with the run's attention; the teacher with full attention if the run distils).

    Args:
        trained: the transformers.
        frozen: dtype of the weights that LoRA leaves as they are, except layers that the model keeps in float32. All
            trained parameters are float32.

    Raises:
        InputError: an attention that does not fit, or LoRA layers on top of those that an attention adapter brings.
        ModelError: the weights cannot be loaded.
    """
    lora, method = config.lora, config.attention
    dtype = frozen if lora.rank else torch.float32
    parts: dict[str, Any] = {expert.name: folder.read_model(expert.name, dtype) for expert in trained}
    experts, teacher = Experts(parts), None
    if config.objective.distillation:
        teacher = before_lora(experts) if lora.rank else copy.deepcopy(experts).eval().requires_grad_(False)
    for component, model in parts.items():
        # Full attention at the first steps of sampling has no counterpart here, where every noise level is as likely.
        try:
            method.without_dense().install(model)
        except (TypeError, ValueError) as error:
            raise InputError("attention", f"{method.label} does not fit {component}: {error}") from error
        if lora.rank:
            brings = getattr(model, "peft_config", None)
            require(not brings, "lora.rank", f"must be 0 with {method.label}, which brings LoRA layers")
            # peft passes over targets that are no layer, if one is.
            layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv3d)]
            for target in lora.targets:
                known = ", ".join(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "", name) for name in layers))
                problem = f"names {target!r}, with which no layer's name ends; the layers are: {known}"
                require(any(f".{name}".endswith(f".{target}") for name in layers), "lora.targets", problem)
            torch.manual_seed(config.seed)
            alpha = lora.alpha or lora.rank
            model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(lora.targets)))
            for layer in model.modules():
                if isinstance(layer, LoraLayer):
                    # Autocast does it, without a copy in float32.
                    layer.cast_input_dtype_enabled = False
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not lora.rank or ".lora_" in name or ".processor." in name)
        cast_training_params(model, torch.float32)
        if config.gradient_checkpointing:
            model.enable_gradient_checkpointing()
    return experts.train(), teacher


def cast(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters of a model of diffusers a dtype, but for those that diffusers keeps in float32."""
    kept = set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def compile_options() -> dict[str, Any]:
    """The `options` of torch.compile for what is trained.

    With `mix_order_reduction` torch 2.11 sums wrongly over many tokens: in the backward pass of Wan's blocks the
    gradient of `scale_shift_table` is off by 160 times its norm (H100, 11,648 tokens).
    """
    name = "triton.mix_order_reduction"
    return {name: False} if name in torch._inductor.list_options() else {}


def compile_blocks(*models: Any) -> None:
    """Let torch compile the transformers' blocks, in a version for every attention that they come to have."""
    allow_versions()
    for model in models:
        model.compile_repeated_blocks(dynamic=False, options=compile_options())


def share_clips(experts: Experts, size: int, device: torch.device) -> None:
    """Spread the tokens of every clip over `size` neighbouring processes (diffusers' context parallelism).

    Each process then has the gradients of its own tokens: those of a clip are the sum over its processes.

    Raises:
        InputError: the transformers do not support it, or the processes cannot share their heads.
    """
    shape = dist.get_world_size() // size, 1, size
    mesh = dist.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=("data", "ring", "ulysses"))
    attn: Any
    for name, model in experts.parts.items():
        config = ContextParallelConfig(ulysses_degree=size, mesh=mesh["ring", "ulysses"])
        try:
            for _, attn in known_family(model).layers(model):
                if (ours := ours_of(attn)) is None:
                    attn.set_processor(ours := FullAttentionProcessor().around(attn.processor))
                ours.spec.check_context_parallel(config, attn.heads)
            model.enable_parallelism(config=config)
        except (ValueError, NotImplementedError) as error:
            raise InputError("sequence_parallel_size", f"cannot be {size} for {name}: {error}") from error


# Attention that changes while a model is trained


def layers_of(model: nn.Module) -> list[tuple[Any, Bound, Any]]:
    """(attention module, our processor, full attention in its place) of each layer that has one of ours.

    Full attention is the processor that was there before, unless processes share clips.
    """
    layers = []
    for attn, ours, full in own_processors(model):
        if context_parallel_config(ours._parallel_config) is not None:
            full = FullAttentionProcessor().around(full)
            full._parallel_config = ours._parallel_config
        layers.append((attn, ours, full))
    return layers


@contextlib.contextmanager
def _processors(given: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Let attention modules have other processors for a while."""
    before = [(attn, attn.processor, processor) for attn, processor in given]
    try:
        for attn, _, processor in before:
            attn.set_processor(processor)
        yield
    finally:
        for attn, processor, _ in before:
            attn.set_processor(processor)


class _Compared(nn.Module):
    """Full attention as an attention processor, which measures how far a layer would be from it on the same input."""

    loss: torch.Tensor

    def __init__(self, ours: Any, full: Any) -> None:
        super().__init__()
        self.ours, self.full = ours, full

    def forward(self, attn: Any, hidden_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        """[B, S, C] -> [B, S, C]; sets `loss`, the mean squared distance over the variance of the result."""
        exact = self.full(attn, hidden_states, *given, **named)
        with torch.enable_grad():
            distance = self.ours(attn, hidden_states, *given, **named).float() - exact.float()
            self.loss = distance.square().mean() / exact.float().var()
        return exact


def transfer_loss(model: nn.Module, arguments: Mapping[str, Any]) -> torch.Tensor:
    """[1]: how far each layer whose attention learns is from full attention, which the model computes meanwhile.

    The gradient of a layer's distance reaches that layer alone.
    """
    compared = [(attn, _Compared(ours, full)) for attn, ours, full in layers_of(model) if ours.spec.LEARNS]
    with _processors(compared), torch.no_grad():
        model(**arguments)
    return torch.stack([processor.loss for _, processor in compared]).mean()[None]


def before_lora(experts: Experts) -> Callable[..., Any]:
    """A teacher of LoRA layers: the transformers without these and with full attention, in the same weights."""

    # Found in the first call, when processes may share clips; torch.compile would compile anew for others.
    @functools.cache
    def full(expert: str) -> list[tuple[Any, Any]]:
        return [(attn, exact) for attn, _, exact in layers_of(experts.parts[expert])]

    @torch.no_grad()
    def teacher(expert: str, **arguments: Any) -> Any:
        with _processors(full(expert)), rescale_adapter_scale(experts.parts[expert], 0.0):
            return experts(expert, **arguments)

    return teacher
