"""What the tests of benchmarks share."""

import json
import multiprocessing.forkserver
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vmonarch.cli import main

TINY = """
num_attention_heads: 2
attention_head_dim: 16
in_channels: 4
out_channels: 4
text_dim: 8
freq_dim: 8
ffn_dim: 48
num_layers: 2
vae: {base_dim: 4, z_dim: 4, dim_mult: [1, 1, 1, 1], num_res_blocks: 1, latents_mean: [0, 0, 0, 0],
      latents_std: [1, 1, 1, 1]}
text_encoder: {vocab_size: 32, d_model: 8, d_kv: 4, d_ff: 16, num_layers: 1, num_heads: 2}
"""


@pytest.fixture(scope="session")
def tiny_yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """File of a model that takes no time: 2 layers, 2 heads of 16 channels."""
    path = tmp_path_factory.mktemp("model") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def run_command(tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """run_command(name, *words) of `vmonarch bench`, on the CPU: (exit code, the JSON that it wrote, or None)."""

    def run(name: str, *words: str) -> tuple[int, Any]:
        output = tmp_path / f"{name}.json"
        code = main(["bench", name, "--device", "cpu", "--output", str(output), *words])
        return code, json.loads(output.read_text()) if output.exists() else None

    return run


@pytest.fixture(scope="session")
def forkserver() -> Iterator[Any]:
    """A context that, as "spawn", pickles what a process is given, but imports what takes long once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accelerate", "peft", "diffusers.pipelines.wan.pipeline_wan"])
    yield context
    multiprocessing.forkserver._forkserver._stop()
