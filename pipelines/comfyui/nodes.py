"""The nodes, which only ComfyUI can import."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import folder_paths
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.latest import ComfyExtension, io, ui

from vmonarch.configs import InputError
from vmonarch.configs.methods import OLD_METHODS
from vmonarch.pipelines.comfyui.override import KEY, PRESETS, OverrideAttention
from vmonarch.plan import plan_names
from vmonarch.requirements import check_versions

_CATEGORY = "model_patches/vmonarch"


def _whole(plan: str) -> str:
    """The path of a plan in ComfyUI's input folder; one that ships, none, and a whole path stay what they are."""
    return plan if not plan or plan in plan_names() else str(Path(folder_paths.get_input_directory()) / plan)


def _percent(name: str, default: float, when: str) -> Any:
    tooltip = f"Attention is exact {when} this part of the schedule."
    return io.Float.Input(name, default=default, min=0.0, max=1.0, step=0.01, tooltip=tooltip)


class VMonarch(io.ComfyNode):
    """Puts VMonarch on a model."""

    @classmethod
    def define_schema(cls) -> Any:
        """The inputs, whose names are those of `OverrideAttention`'s settings."""
        return io.Schema(
            node_id="VMonarch",
            display_name="VMonarch Attention",
            category=_CATEGORY,
            description="Makes the self-attention of Wan, HunyuanVideo and LTX-Video models cheaper on long videos.",
            search_aliases=["sparse attention", "monarch"],
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    default=PRESETS[0],
                    tooltip="near-lossless is the nearest to exact attention. Presets without refresh need no memory"
                    " for residuals.",
                ),
                io.String.Input(
                    "refresh",
                    default="",
                    tooltip="Steps with exact attention, which renews the residuals: a count (6), a fraction (0.28),"
                    " indices (0, 1, 3, 7) or none. Empty: what the preset says.",
                ),
                _percent("start_percent", 0.0, "before"),
                _percent("end_percent", 1.0, "after"),
                io.String.Input(
                    "dense_blocks",
                    default="",
                    tooltip="Transformer blocks whose attention stays exact, such as 0, 1, 38-39.",
                ),
                io.String.Input(
                    "plan",
                    default="",
                    tooltip="A plan of vmonarch calibrate: the path of its JSON, or its name in ComfyUI's input folder."
                    " It decides what every head computes; of the preset only the refresh remains.",
                ),
                io.Combo.Input(
                    "plan_part",
                    options=["transformer", "transformer_2"],
                    default="transformer",
                    tooltip="Which model of the plan this is. Wan 2.2 A14B has two: high noise, then low noise.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "residuals",
                    options=["int8", "bfloat16"],
                    default="int8",
                    tooltip="How residuals are kept between steps.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "offload_residuals",
                    default=False,
                    tooltip="Keep residuals in RAM instead of VRAM; they come back one layer ahead.",
                    advanced=True,
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def fingerprint_inputs(cls, plan: str | None, **others: Any) -> Any:
        """What tells one plan's file from another of the same name: ComfyUI keeps the node's output while it is equal.

        Args:
            plan: the input; None if it comes from another node, which ComfyUI has not asked yet.
            others: which ComfyUI compares itself.
        """
        if plan is None:
            # Equal to nothing. Not math.nan: in ComfyUI's keys an object would be equal to itself.
            return float("nan")
        path = Path(_whole(plan))
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

    @classmethod
    def validate_inputs(cls, preset: str | None) -> bool | str:
        """Whether there is such a preset, which ComfyUI then does not look up in the list, where old names are not.

        Args:
            preset: the input; None if it comes from another node.
        """
        known = preset is None or preset in (*PRESETS, *OLD_METHODS)
        return known or f"preset must be one of {', '.join(PRESETS)}, got {preset!r}"

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
    """What the folder gives to ComfyUI."""

    async def get_node_list(self) -> list[Any]:
        return [VMonarch, VMonarchReport]
