"""Our backend in vLLM-Omni's own Wan, layer by layer: `python -m vmonarch.eval.studies.vllm_omni`.

It needs the published packages vllm-omni 0.30.0 and vllm 0.30.0, the latter without its extension
(`VLLM_TARGET_DEVICE=empty pip install --no-deps --no-build-isolation`), and vmonarch installed, so that its entry point
is found. It runs on a CPU in a minute. Two things stand in for what is not there: a platform, which takes torch's
attention for the default, and the package of Wan's pipelines, whose transformer alone is imported.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs.methods import resolve_method
from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import write_json
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.plan import method_attention

ROOT = Path(__file__).resolve().parents[2]
# What VMONARCH_METHOD names -> the denoising step that the transformer is called in.
CASES = {
    "vmonarch": 0,
    "vmonarch-lite": 0,
    "vmonarch-t1": 0,
    "two-resolution:share=0.25,tile=[1,2,2]": 0,
    "vmonarch:num_iterations=3,coarse=2,dense_layers=[1]": 0,
    "vmonarch:dense_steps=2": 1,
    "vmonarch:dense_steps=[0]": 1,
}
REFUSED = (
    "near-lossless",
    "vmonarch:dense_layers=0.5",
    "vmonarch:plan=embedded-1.00",
    "flashbias",
    "vmonarch:dense_steps=0.5",
)
GRID = (3, 4, 4)
CONFIG: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}


def study() -> dict[str, Any]:
    """What every case computes, against the op or exact attention in float64; and what is refused, with the error.

    Returns:
        differences: case -> for every layer, (dense?, largest difference of its attention by the largest entry).
        refused: case -> message.
    """
    omni = _Omni()
    record: dict[str, Any] = {"differences": {}, "refused": {}}
    for name, step in CASES.items():
        os.environ["VMONARCH_METHOD"] = name
        method: Any = resolve_method(name).processor()
        dense_step = _among(method.dense_steps, step)
        found = []
        for layer, (*inputs, out) in enumerate(omni.run("VMONARCH", step)):
            dense = dense_step or _among(method.dense_layers, layer)
            q, k, v = (x.double() for x in inputs)
            if dense:
                expected = flash_entropy_attention(q, k, v)[0]
            else:
                expected = method_attention(q, k, v, method.options, grid=GRID)
            found.append((dense, float((out - expected).abs().max() / expected.abs().max())))
        record["differences"][name] = found
    for name in REFUSED:
        os.environ["VMONARCH_METHOD"] = name
        record["refused"][name] = _refusal(omni, "self")
    os.environ["VMONARCH_METHOD"] = "vmonarch"
    record["refused"]["for cross-attention, too"] = _refusal(omni, "self", "cross")
    return record


def _among(dense: Any, index: int) -> bool:
    return index in dense if isinstance(dense, (list, tuple)) else index < dense


def _refusal(omni: _Omni, *roles: str) -> str:
    try:
        omni.run("VMONARCH", 0, roles)
    except (ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError(f"{os.environ['VMONARCH_METHOD']} for {roles} was not refused")


class _Omni:
    """vLLM-Omni in this process, on the CPU."""

    def __init__(self) -> None:
        import vllm_omni.platforms as platforms
        from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

        class Platform(OmniPlatform):
            _omni_enum = OmniPlatformEnum.CUDA
            device_type = "cpu"
            dist_backend = "gloo"

            @classmethod
            def get_device_count(cls) -> int:
                return 0

            @classmethod
            def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
                return torch.device("cpu")

            @classmethod
            def get_diffusion_attn_backend_cls(
                cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
            ) -> str:
                from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum as Backends

                if selected_backend is not None:
                    cls.validate_diffusion_attn_backend(selected_backend)
                path: str = Backends[(selected_backend or "TORCH_SDPA").upper()].get_path()
                return path

        platforms._current_omni_platform = Platform()
        package = util.find_spec("vllm_omni.diffusion.models")
        assert package is not None and package.submodule_search_locations is not None
        wan = types.ModuleType("vllm_omni.diffusion.models.wan2_2")
        wan.__path__ = [str(Path(package.submodule_search_locations[0]) / "wan2_2")]
        sys.modules[wan.__name__] = wan

        from vllm_omni.plugins import load_omni_plugins_by_group

        plugins = load_omni_plugins_by_group("vllm_omni.general_plugins")
        plugins["vmonarch"]()

    def run(self, backend: str, step: int, roles: Sequence[str] = ("self",)) -> list[tuple[torch.Tensor, ...]]:
        """(query, key, value, out), each [B, S, H, D], of every self-attention in a forward call of a tiny Wan."""
        from vllm_omni.diffusion.attention.selector import _cached_get_backend_cls
        from vllm_omni.diffusion.config import set_current_diffusion_config
        from vllm_omni.diffusion.data import AttentionConfig
        from vllm_omni.diffusion.forward_context import set_forward_context
        from vllm_omni.diffusion.models.wan2_2 import wan2_2_transformer as wan

        parallel = types.SimpleNamespace(sequence_parallel_size=1, ulysses_degree=1, ring_degree=1, allgather_degree=1)
        parallel.mask_sp_padding = False
        attention = AttentionConfig(per_role={role: {"backend": backend} for role in roles})
        config = types.SimpleNamespace(
            diffusion_attention_config=attention, parallel_config=parallel, model_class_name=None
        )
        # The method may have changed, which it does in no process of theirs.
        _cached_get_backend_cls.cache_clear()
        self._groups()
        seen: list[tuple[torch.Tensor, ...]] = []
        with (
            torch.no_grad(),
            self._vllm_config(),
            set_current_diffusion_config(config),
            set_forward_context(omni_diffusion_config=config, denoise_step_idx=step),
        ):
            model = wan.WanTransformer3DModel(**CONFIG).eval()
            for name, parameter in model.named_parameters():
                # Attention that is far from uniform.
                parameter.copy_(torch.randn_like(parameter) * (2 if "norm_" in name else 0.2))
            for block in model.blocks:
                block.attn1.attn.register_forward_hook(lambda _, inputs, out: seen.append((*inputs[:3], out)))
            latents = torch.randn(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2])
            model(latents, torch.tensor([500]), torch.randn(1, 512, 16))
        return seen

    @staticmethod
    def _vllm_config() -> Any:
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

        return set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu")))

    @staticmethod
    def _groups() -> None:
        from vllm_omni.diffusion.distributed import parallel_state

        if not torch.distributed.is_initialized():
            file = tempfile.NamedTemporaryFile(delete=False)
            torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}", world_size=1, rank=0)
            parallel_state.init_distributed_environment(1, 0, backend="gloo")
            parallel_state.initialize_model_parallel(backend="gloo")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = script_parser("studies.vllm_omni", __doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "vllm-omni.json")
    options = parser.parse_args(arguments)
    record = script_record("studies.vllm_omni", arguments, "cpu")
    torch.manual_seed(0)
    versions = {name: metadata.version(name) for name in ("vllm-omni", "vllm")}
    result = {**record, "versions": versions, **study()}
    write_json(options.output, result)
    print(json.dumps({name: result[name] for name in ("differences", "refused")}, indent=1))


if __name__ == "__main__":
    main()
