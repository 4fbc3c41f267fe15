"""vLLM-Omni: VMonarch as an attention backend of its diffusion models.

    VMONARCH_METHOD=vmonarch:coarse=2,dense_steps=8 vllm serve MODEL --omni \\
        --diffusion-attention-config '{"per_role": {"self": {"backend": "VMONARCH"}}}'

vLLM-Omni calls `register` in each of its processes, through the entry point of the group `vllm_omni.general_plugins`.

Shapes: B batch, S = T·H·W tokens of the video, S' ≥ S with padding at the end, h heads of this rank, D head dim.

Source: vllm-omni 0.30.0, `diffusion/attention/layer.py`, `backends/abstract.py` and `backends/registry.py`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.engines import add_member
from vmonarch.grid import LatentGrid
from vmonarch.plan import method_attention
from vmonarch.validation import is_dense

NAME = "VMONARCH"
# vLLM-Omni's configuration of a backend has no place for our options, but its processes inherit the environment.
METHOD = "VMONARCH_METHOD"


def register() -> None:
    """Make `VMONARCH` a backend in vLLM-Omni's configuration of attention. It may be called again."""
    add_member(DiffusionAttentionBackendEnum, NAME, f"{__name__}.{VMonarchBackend.__name__}")


class VMonarchBackend(AttentionBackend):
    """The backend's answers to vLLM-Omni."""

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        """True: with a `video_layout`, a mask only masks padding, which is cut off."""
        return True

    @classmethod
    def validate_available(cls) -> None:
        """Raise InputError if the method cannot be computed in vLLM-Omni, before a model is built."""
        chosen_method()

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[VMonarchImpl]:
        return VMonarchImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> None:
        return None


def chosen_method() -> Any:
    """The processor of the method that `VMONARCH_METHOD` names, `vmonarch` by default.

    Raises:
        InputError: the method is unknown or of another processor, or an option needs more than vLLM-Omni tells.
    """
    name = os.environ.get(METHOD, "vmonarch")
    method = resolve_method(name, argument=METHOD)
    if method.processor_name not in ("vmonarch", "two_resolution"):
        supported = "must be of the processors vmonarch or two_resolution"
        raise InputError(METHOD, f"{supported}, {name} is of {method.processor_name}")
    processor: Any = method.processor()
    if processor.refresh is not None:
        raise InputError(f"{METHOD}.refresh", "must be null: vLLM-Omni does not tell the branch of guidance")
    if isinstance(processor.dense_layers, float):
        raise InputError(f"{METHOD}.dense_layers", "must be a count or indices: vLLM-Omni tells no number of layers")
    for option in ("plan", "bias"):
        if getattr(processor, option, None) is not None:
            raise InputError(f"{METHOD}.{option}", "must be null: a rank is not told which heads it has")
    return processor


class VMonarchImpl(AttentionImpl):
    """Self-attention of one layer: query, key, value [B, S', h, D] -> [B, S', h, D].

    The backend that vLLM-Omni would choose by itself computes dense layers and steps.

    Raises:
        ValueError: the layer is no self-attention of a video; or ring or all-gather parallelism, which give a backend
            parts of the keys or leave it out. Ulysses and tensor parallelism are supported.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        role: str = "self",
        **others: Any,
    ) -> None:
        if role != "self":
            raise ValueError(
                f"{NAME} must be chosen for the role self alone, not for {role!r}: set per_role.self.backend of"
                " --diffusion-attention-config"
            )
        if causal or num_kv_heads not in (None, num_heads):
            raise ValueError(f"{NAME} supports neither causal attention nor fewer heads of keys than of queries")
        parallel = getattr(get_current_diffusion_config_or_none(), "parallel_config", None)
        for degree in ("ring_degree", "allgather_degree"):
            if getattr(parallel, degree, 1) > 1:
                raise ValueError(f"{degree} must be 1 with {NAME}; use ulysses_degree")
        self.method, self.scale = chosen_method(), softmax_scale
        layers = self.method.dense_layers
        # The prefix is a name such as `blocks.3.attn1`.
        numbers = [int(part) for part in prefix.split(".") if part.isdigit()]
        if layers and len(numbers) != 1:
            raise ValueError(
                f"{METHOD}.dense_layers must be 0: the name of the layer {prefix!r} does not have one number"
            )
        self.dense = bool(layers) and is_dense("dense_layers", layers, numbers[0], sys.maxsize)
        backend, _ = get_attn_backend_for_role(role, head_size, allow_trtllm_default=False)
        self.exact = backend.get_impl_cls()(
            num_heads=num_heads, head_size=head_size, softmax_scale=softmax_scale, prefix=prefix, role=role, **others
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attention of a layer.

        Raises:
            ValueError: the model does not publish the grid of a video with padding, or publishes another grid.
            RuntimeError: `dense_steps` is set, but the pipeline does not tell its step.
        """
        grid = _grid(attn_metadata)
        tokens = query.shape[1]
        if key.shape != query.shape or tokens < grid.tokens:
            raise ValueError(
                f"grid {tuple(grid)} has {grid.tokens} tokens, but {NAME} was given {tokens} queries and"
                f" {key.shape[1]} keys"
            )
        q, k, v = (x[:, : grid.tokens] for x in (query, key, value))
        if self.dense or self._step_is_dense():
            out = self.exact.forward(q, k, v, None)
        else:
            given = {"grid": grid, "scale": self.scale, "implementation": self.method.implementation}
            out = method_attention(q, k, v, self.method.options, **given)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, tokens - grid.tokens))

    def _step_is_dense(self) -> bool:
        dense = self.method.dense_steps
        if not dense:
            return False
        step = total = None
        if is_forward_context_available():
            context = get_forward_context()
            step, total = context.denoise_step_idx, context.total_denoise_steps
        if step is None:
            raise RuntimeError(f"{METHOD}.dense_steps must be 0: this pipeline does not tell vLLM-Omni its step")
        if total is None and isinstance(dense, float):
            raise RuntimeError(
                f"{METHOD}.dense_steps must be a count or indices, got {dense}: this pipeline does not tell"
                " vLLM-Omni how many steps it has"
            )
        return is_dense("dense_steps", dense, step, sys.maxsize if total is None else total)


def _grid(metadata: AttentionMetadata | None) -> LatentGrid:
    if metadata is None or metadata.video_layout is None:
        raise ValueError(f"{NAME} needs AttentionMetadata.video_layout, which this model does not publish")
    layout = metadata.video_layout
    more = layout.latent_grid is None or layout.prefix_len or layout.video_spans
    if more or metadata.joint_query is not None or metadata.full_attn_spans is not None:
        raise ValueError(f"{NAME} supports nothing but one video, and padding after it, in a sequence, got {layout}")
    return LatentGrid.parse(tuple(layout.latent_grid), argument="video_layout.latent_grid")
