"""vLLM-Omni's seam, played by a stand-in of the few names that we use; `test_vllm_omni_engine.py` has the real one."""

import dataclasses
import enum
import importlib
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from vmonarch import two_resolution_attention, vmonarch_attention
from vmonarch.configs import InputError

GRID = (3, 2, 3)


@dataclasses.dataclass
class Layout:
    prefix_len: int | None = 0
    latent_grid: tuple[int, int, int] | None = GRID
    video_spans: tuple[Any, ...] = ()


@dataclasses.dataclass
class Metadata:
    attn_mask: Any = None
    joint_query: Any = None
    full_attn_spans: Any = None
    video_layout: Layout | None = dataclasses.field(default_factory=Layout)


class Backends(enum.Enum):
    TORCH_SDPA = "torch"


class Exact:
    """Their backend for dense layers and steps: [B, S, H, D]."""

    def __init__(self, softmax_scale, **others):
        self.scale = softmax_scale

    def forward(self, query, key, value, metadata):
        assert metadata is None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2)


@pytest.fixture
def omni(monkeypatch):
    """Our module, and what the stand-in tells it: `told.parallel`, and the step, of the `told.context`."""
    told = types.SimpleNamespace(parallel=types.SimpleNamespace(ulysses_degree=2), context=None)
    backend = types.SimpleNamespace(get_impl_cls=lambda: Exact)
    modules = {
        "attention.backends.abstract": {
            "AttentionBackend": type("AttentionBackend", (), {}),
            "AttentionImpl": type("AttentionImpl", (), {}),
            "AttentionMetadata": Metadata,
        },
        "attention.backends.registry": {"DiffusionAttentionBackendEnum": Backends},
        "attention.selector": {
            "get_attn_backend_for_role": lambda role, head_size, allow_trtllm_default: (backend, None)
        },
        "config": {
            "get_current_diffusion_config_or_none": lambda: types.SimpleNamespace(parallel_config=told.parallel),
        },
        "forward_context": {
            "get_forward_context": lambda: told.context,
            "is_forward_context_available": lambda: told.context is not None,
        },
    }
    for name, attributes in modules.items():
        module = types.ModuleType(f"vllm_omni.diffusion.{name}")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm_omni", *(f"vllm_omni.diffusion{rest}" for rest in ("", ".attention", ".attention.backends"))):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.delenv("VMONARCH_METHOD", raising=False)
    monkeypatch.delitem(sys.modules, "vmonarch.vllm_omni", raising=False)
    told.module = importlib.import_module("vmonarch.vllm_omni")
    yield told
    del sys.modules["vmonarch.vllm_omni"]


def layer(omni, **changes):
    given = {"num_heads": 2, "head_size": 8, "softmax_scale": 0.3, "causal": False, "num_kv_heads": 2, "role": "self"}
    others = {"prefix": "blocks.1.attn1", "qkv_layout": "BSND", "backend_kwargs": None, "backend_explicit": True}
    return omni.module.VMonarchImpl(**{**given, **others, **changes})


def qkv(padding=0):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 18 + padding, 2, 8, generator=generator) for _ in range(3))
    return q, k, v


def step(index, total=None):
    return types.SimpleNamespace(denoise_step_idx=index, total_denoise_steps=total)


def test_the_entry_point_adds_a_backend_by_name(omni):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    place, _, function = project["entry-points"]["vllm_omni.general_plugins"]["vmonarch"].partition(":")
    for _ in range(2):
        getattr(importlib.import_module(place), function)()
    place, _, name = Backends["VMONARCH"].value.rpartition(".")
    backend = getattr(importlib.import_module(place), name)
    assert backend.get_impl_cls() is omni.module.VMonarchImpl
    assert backend.get_name() == "VMONARCH" and backend.supports_attention_mask()


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    ("method", "function", "options"),
    [
        ("vmonarch", vmonarch_attention, {}),
        ("vmonarch:num_iterations=3,coarse=2", vmonarch_attention, {"num_iterations": 3, "coarse": 2}),
        ("two-resolution:share=0.5", two_resolution_attention, {"share": 0.5}),
    ],
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_a_layer_computes_the_method_that_the_environment_names(omni, monkeypatch, method, function, options, padding):
    monkeypatch.setenv("VMONARCH_METHOD", method)
    tensors = qkv(padding)
    # Where the padding is masked, too: it has nothing to do with the video.
    found = layer(omni).forward(*tensors, Metadata(attn_mask=torch.ones(2, 18 + padding) if padding else None))
    expected = function(*(x[:, :18] for x in tensors), grid=GRID, scale=0.3, **options)
    torch.testing.assert_close(found[:, :18], expected)
    assert found.shape == tensors[0].shape and not found[:, 18:].any()


@pytest.mark.parametrize(
    ("method", "context", "prefix", "dense"),
    [
        ("vmonarch:dense_steps=2", step(1), "blocks.1.attn1", True),
        ("vmonarch:dense_steps=2", step(2), "blocks.1.attn1", False),
        ("vmonarch:dense_steps=0.25", step(3, 12), "blocks.1.attn1", False),
        ("vmonarch:dense_layers=1", None, "blocks.0.attn1", True),
    ],
    ids=str,
)
def test_dense_layers_and_steps_are_left_to_their_own_backend(omni, monkeypatch, method, context, prefix, dense):
    monkeypatch.setenv("VMONARCH_METHOD", method)
    omni.context = context
    tensors = qkv(padding=3)
    found = layer(omni, prefix=prefix).forward(*tensors, Metadata())
    video = [x[:, :18] for x in tensors]
    expected = Exact(0.3).forward(*video, None) if dense else vmonarch_attention(*video, grid=GRID, scale=0.3)
    torch.testing.assert_close(found[:, :18], expected)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("flashbias", "must be of the processors vmonarch or two_resolution, flashbias is of flashbias"),
        ("near-lossless", "refresh must be null: vLLM-Omni does not tell the branch of guidance"),
        ("vmonarch:dense_layers=0.5", "dense_layers must be a count or indices"),
        ("vmonarch:plan=embedded-1.00", "plan must be null"),
        ("vmonarch:bias.reach=[1,2,2]", "bias must be null"),
    ],
)
def test_a_method_that_is_not_told_enough_is_refused_before_a_model_is_built(omni, monkeypatch, method, message):
    monkeypatch.setenv("VMONARCH_METHOD", method)
    with pytest.raises(InputError, match=message):
        omni.module.VMonarchBackend.validate_available()


@pytest.mark.parametrize(
    ("changes", "parallel", "metadata", "message"),
    [
        ({"role": "cross"}, {}, Metadata(), "must be chosen for the role self alone, not for 'cross'"),
        ({"num_kv_heads": 1}, {}, Metadata(), "nor fewer heads of keys"),
        ({}, {"ring_degree": 2}, Metadata(), "ring_degree must be 1"),
        ({}, {}, Metadata(video_layout=None), "needs AttentionMetadata.video_layout"),
        ({}, {}, Metadata(video_layout=Layout(prefix_len=2)), "nothing but one video"),
        ({}, {}, Metadata(video_layout=Layout(latent_grid=(3, 2, 4))), "24 tokens, but VMONARCH was given 18 queries"),
    ],
    ids=["role", "kv-heads", "ring", "no-layout", "prefix", "other-grid"],
)
def test_a_layer_and_a_call_that_are_no_whole_video_are_refused(omni, changes, parallel, metadata, message):
    omni.parallel = types.SimpleNamespace(**parallel)
    with pytest.raises(ValueError, match=message):
        layer(omni, **changes).forward(*qkv(), metadata)


@pytest.mark.parametrize(
    ("dense", "context", "message"),
    [
        ("2", None, "dense_steps must be 0: this pipeline does not tell"),
        ("0.5", step(0), "dense_steps must be a count or indices, got 0.5"),
    ],
    ids=str,
)
def test_steps_that_are_not_told_are_missed(omni, monkeypatch, dense, context, message):
    monkeypatch.setenv("VMONARCH_METHOD", f"vmonarch:dense_steps={dense}")
    omni.context = context
    with pytest.raises(RuntimeError, match=message):
        layer(omni).forward(*qkv(), Metadata())
