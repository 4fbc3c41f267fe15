"""VMonarch as a custom node of ComfyUI: link or copy this folder into ComfyUI's `custom_nodes` (docs/comfyui.md).

ComfyUI starts this file under a name of its own. All other code is that of the installed package `vmonarch`.
"""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    """The function that ComfyUI calls in a folder of nodes."""
    from vmonarch.pipelines.comfyui.nodes import VMonarchExtension

    return VMonarchExtension()
