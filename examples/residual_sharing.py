"""Residual sharing, with its memory checked before the run: `python examples/residual_sharing.py`."""

import argparse

import diffusers
import torch

import vmonarch
from vmonarch.kernels.residual.api import residual_bytes
from vmonarch.pipelines.embedded import embedded_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--frames", type=int, default=29)
options = parser.parse_args()
size = {"height": 96, "width": 160, "num_frames": options.frames, "num_inference_steps": options.steps}

pipe = diffusers.WanPipeline.from_pretrained(embedded_model_path())
model, patch = pipe.transformer.config, 2 * pipe.vae_scale_factor_spatial
frames = 1 + (options.frames - 1) // pipe.vae_scale_factor_temporal
tokens = frames * (size["height"] // patch) * (size["width"] // patch)
layer = residual_bytes(1, tokens, model.num_attention_heads, model.attention_head_dim)
needed = 2 * model.num_layers * layer  # guidance has two branches
free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else float("inf")
refresh = vmonarch.Refresh(0.28, offload=needed > 0.8 * free)
print(f"residuals take {needed / 2**20:.1f} MiB; in the host's memory: {refresh.offload}")


def sample():
    generator = torch.Generator().manual_seed(0)
    return pipe(
        "a red circle moves right", **size, guidance_scale=4.0, generator=generator, output_type="latent"
    ).frames


full = sample()
for name, sharing in (("every step", None), ("residual sharing", refresh)):
    vmonarch.apply(pipe, vmonarch.VMonarchProcessor(num_iterations=1, exact=None, refresh=sharing))
    print(f"{name}: latents are {100 * (sample() - full).norm() / full.norm():.1f} % away from full attention's")
