"""The nodes, which only ComfyUI can import."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folder_paths
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.latest import ComfyExtension, io, ui

from vmonarch.configs import InputError, described
from vmonarch.pipelines.comfyui.override import KEY, OverrideAttention
from vmonarch.plan import plan_names
from vmonarch.requirements import check_versions

_CATEGORY = "model_patches/vmonarch"
_ADVANCED = ("plan_part", "offload_residuals")


def _whole(plan: str) -> str:
    """The path of a plan in ComfyUI's input folder; one that ships, none, and a whole path stay what they are."""
    return plan if not plan or plan in plan_names() else str(Path(folder_paths.get_input_directory()) / plan)


def _inputs() -> Iterator[Any]:
    """An input for each setting of `OverrideAttention`, whose docstring is what the editor shows of it."""
    about = described(OverrideAttention)
    for field in dataclasses.fields(OverrideAttention):
        name, default = field.name, field.default
        told = {"default": default, "tooltip": about[name][0].upper() + about[name][1:] + "."}
        told |= {"advanced": True} if name in _ADVANCED else {}
        if "choices" in field.metadata:
            yield io.Combo.Input(name, options=list(field.metadata["choices"]), **told)
        elif isinstance(default, float):
            yield io.Float.Input(name, min=0.0, max=1.0, step=0.01, **told)
        else:
            yield (io.Boolean if isinstance(default, bool) else io.String).Input(name, **told)


class VMonarch(io.ComfyNode):
    """Puts VMonarch on a model."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="VMonarch",
            display_name="VMonarch Attention",
            category=_CATEGORY,
            description="Makes the self-attention of Wan, HunyuanVideo and LTX-Video models cheaper on long videos.",
            search_aliases=["sparse attention", "monarch"],
            inputs=[io.Model.Input("model"), *_inputs()],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def fingerprint_inputs(cls, plan: str | None, **others: Any) -> Any:
        """The hash of the plan's file: ComfyUI keeps the node's output as long as this is equal.

        Args:
            plan: the input; None if it comes from another node that has not run yet.
            others: the other inputs, which ComfyUI compares itself.
        """
        if plan is None:
            # Equal to nothing. Not math.nan: in ComfyUI's keys an object would be equal to itself.
            return float("nan")
        path = Path(_whole(plan))
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

    @classmethod
    def execute(cls, model: Any, plan: str, **settings: Any) -> Any:
        """A copy of `model` with VMonarch on it, in place of an earlier one."""
        check_versions()
        attention, patched = OverrideAttention(plan=_whole(plan), **settings), model.clone()
        attention.install(patched, CallbacksMP, WrappersMP)
        return io.NodeOutput(patched)


class VMonarchReport(io.ComfyNode):
    """Says what VMonarch did in the latest sampling run."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="VMonarchReport",
            display_name="VMonarch Report",
            category=_CATEGORY,
            description="What VMonarch computed in the latest sampling run, what it left untouched, and why.",
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model that was sampled with."),
                io.Latent.Input("samples", tooltip="What the sampler made: the report waits for it."),
            ],
            outputs=[io.Latent.Output(display_name="samples"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, model: Any, samples: Any) -> Any:
        """The samples, and the report."""
        attention = model.get_attachment(KEY)
        if attention is None:
            raise InputError("model", "has no VMonarch node before it")
        text = "VMonarch has not run yet." if attention.report is None else str(attention.report)
        return io.NodeOutput(samples, text, ui=ui.PreviewText(text))


class VMonarchExtension(ComfyExtension):
    """The nodes of this folder, for ComfyUI."""

    async def get_node_list(self) -> list[Any]:
        return [VMonarch, VMonarchReport]
