"""Our backend in vLLM-Omni's own Wan, layer by layer, on a CPU.

It needs the published packages vllm-omni 0.30.0 and vllm 0.30.0 (`pip install --no-deps` suffices), and vmonarch
installed, so that its entry point is found. Two things stand in for what is not there: a platform, which takes torch's
attention for the default, and the package of Wan's pipelines, whose transformer alone is imported. As a program,
`RANK FOLDER METHOD`, it is one of two processes.
"""

import os
import subprocess
import sys
import types
from importlib import util
from pathlib import Path

import pytest
import torch

from vmonarch import flash_entropy_attention
from vmonarch.configs.methods import resolve_method
from vmonarch.plan import method_attention

pytestmark = pytest.mark.deep
GRID, LAYERS = (3, 4, 4), 2
CONFIG = {"num_attention_heads": 2, "attention_head_dim": 16, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32,
          "num_layers": LAYERS, "rope_max_seq_len": 64}  # fmt: skip


def load_wan(store, rank=0, ranks=1):
    """The module of vLLM-Omni's Wan transformer; our plug-in is loaded as its processes load it."""
    platforms = pytest.importorskip("vllm_omni.platforms", reason="needs vllm-omni", exc_type=ImportError)
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

    class Platform(OmniPlatform):
        _omni_enum, device_type, dist_backend = OmniPlatformEnum.CUDA, "cpu", "gloo"
        get_device_count = classmethod(lambda cls: 0)
        get_torch_device = classmethod(lambda cls, local_rank=None: torch.device("cpu"))

        @classmethod
        def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
            from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum as Backends

            if selected_backend is not None:
                cls.validate_diffusion_attn_backend(selected_backend)
            return Backends[(selected_backend or "TORCH_SDPA").upper()].get_path()

    # Before others import it.
    platforms._current_omni_platform = Platform()
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.plugins import load_omni_plugins_by_group

    models = util.find_spec("vllm_omni.diffusion.models").submodule_search_locations[0]
    package = types.ModuleType("vllm_omni.diffusion.models.wan2_2")
    package.__path__ = [str(Path(models) / "wan2_2")]
    sys.modules[package.__name__] = package
    load_omni_plugins_by_group("vllm_omni.general_plugins")["vmonarch"]()
    torch.distributed.init_process_group("gloo", store=store, world_size=ranks, rank=rank)
    parallel_state.init_distributed_environment(ranks, rank, backend="gloo")
    parallel_state.initialize_model_parallel(sequence_parallel_size=ranks, ulysses_degree=ranks, backend="gloo")
    from vllm_omni.diffusion.models.wan2_2 import wan2_2_transformer

    return wan2_2_transformer


@torch.no_grad()
def forward(wan, method, step=0, ranks=1):
    """(query, key, value, out) [B, S, H, D] of every self-attention of a forward call, and what the model returns."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.attention.selector import _cached_get_backend_cls
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import AttentionConfig
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.registry import _apply_sequence_parallel_if_enabled

    os.environ["VMONARCH_METHOD"] = method
    parallel = types.SimpleNamespace(ring_degree=1, allgather_degree=1, mask_sp_padding=False)
    parallel.sequence_parallel_size = parallel.ulysses_degree = ranks
    attention = AttentionConfig(per_role={"self": {"backend": "VMONARCH"}})
    config = types.SimpleNamespace(diffusion_attention_config=attention, parallel_config=parallel)
    config.model_class_name = None
    # The method may have changed, which it does in no process of theirs.
    _cached_get_backend_cls.cache_clear()
    torch.manual_seed(0)
    seen, device = [], VllmConfig(device_config=DeviceConfig(device="cpu"))
    with (
        set_current_vllm_config(device),
        set_current_diffusion_config(config),
        set_forward_context(omni_diffusion_config=config, denoise_step_idx=step),
    ):
        model = wan.WanTransformer3DModel(**CONFIG).eval()
        for name, parameter in model.named_parameters():
            # Attention that is far from uniform.
            parameter.copy_(torch.randn_like(parameter) * (2 if "norm_" in name else 0.2))
        for block in model.blocks:
            block.attn1.attn.register_forward_hook(lambda _, inputs, out: seen.append((*inputs[:3], out)))
        _apply_sequence_parallel_if_enabled(types.SimpleNamespace(transformer=model), config)
        latents = torch.randn(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2])
        (out,) = model(latents, torch.tensor([500]), torch.randn(1, 512, 16), return_dict=False)
    return seen, out


@pytest.fixture(scope="module")
def wan():
    yield load_wan(torch.distributed.HashStore())
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_method(monkeypatch):
    monkeypatch.setenv("VMONARCH_METHOD", "vmonarch")


def among(dense, index):
    return index < dense if isinstance(dense, int) else index in dense


@pytest.mark.parametrize("name, step", [
    ("vmonarch", 0),
    ("vmonarch-lite", 0),
    ("two-resolution:share=0.25,tile=[1,2,2]", 0),
    ("vmonarch:num_iterations=3,coarse=2,dense_layers=[1]", 0),
    ("vmonarch:dense_steps=2", 1),
    ("vmonarch:dense_steps=[0]", 1),
])  # fmt: skip
def test_every_layer_computes_the_method_or_exact_attention(wan, name, step):
    processor = resolve_method(name).processor()
    seen, _ = forward(wan, name, step)
    assert len(seen) == LAYERS
    for layer, (*inputs, out) in enumerate(seen):
        q, k, v = (x.double() for x in inputs)
        if among(processor.dense_steps, step) or among(processor.dense_layers, layer):
            expected = flash_entropy_attention(q, k, v)[0]
        else:
            expected = method_attention(q, k, v, processor.options, grid=GRID)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=float(3e-6 * expected.abs().max()))


def test_two_processes_compute_what_one_does(wan, tmp_path):
    name = "vmonarch:coarse=2"
    seen, expected = forward(wan, name)
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path), name]) for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    for rank in range(2):
        tokens, out = torch.load(tmp_path / f"{rank}.pt")
        assert 2 * tokens == seen[0][0].shape[1], "each has half of them"
        torch.testing.assert_close(out, expected, rtol=0, atol=float(1e-5 * expected.abs().max()))


if __name__ == "__main__":
    own, folder, method = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    layers, result = forward(load_wan(torch.distributed.FileStore(str(folder / "store"), 2), own, 2), method, ranks=2)
    torch.save((layers[0][0].shape[1], result), folder / f"{own}.pt")
    torch.distributed.destroy_process_group()
