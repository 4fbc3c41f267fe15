"""VMonarch as a custom node of ComfyUI: link or copy this folder into ComfyUI's `custom_nodes` (docs/comfyui.md).

ComfyUI starts this file under a name of its own. All other code is that of the installed package `vmonarch`.
"""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    """What ComfyUI asks a folder of nodes for."""
    from vmonarch.pipelines.comfyui.nodes import VMonarchExtension

    return VMonarchExtension()
