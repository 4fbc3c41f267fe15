"""The node in ComfyUI itself, on the CPU, beside diffusers.

    COMFYUI=… pytest -m deep tests/pipelines/test_comfyui_engine.py

COMFYUI is a checkout of its repository, whose requirements this Python has. A server is started in a folder of its own,
with a tiny random Wan checkpoint in ComfyUI's format. The workflow that ships with the node is queued by the server's
API, and the latents are compared with those of a diffusers pipeline that has the same weights, noise and schedule.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vmonarch.configs.methods import resolve_method
from vmonarch.pipelines import comfyui

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif("COMFYUI" not in os.environ, reason="needs COMFYUI, a checkout of ComfyUI"),
]
NODE = Path(comfyui.__file__).resolve().parent
STEPS, SEED, GUIDANCE, SHIFT = 8, 3, 4.0, 8.0
HEADS, HEAD_DIM, LAYERS, FFN, TEXT = 2, 128, 3, 512, 4096
DIM = HEADS * HEAD_DIM
# In pixels and frames: a grid of 5 × 6 × 8 tokens.
WIDTH, HEIGHT, LENGTH = 128, 96, 17
# A conditioning without a text encoder.
CONDITIONING = f"""
import torch

class RandomConditioning:
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "test"
    INPUT_TYPES = classmethod(lambda cls: {{"required": {{"seed": ("INT", {{}})}}}})
    def make(self, seed):
        return ([[torch.randn(1, 512, {TEXT}, generator=torch.Generator().manual_seed(seed)), {{}}]],)

NODE_CLASS_MAPPINGS = {{"RandomConditioning": RandomConditioning}}
"""
# Heads that differ, and one layer that stays exact; every block of every head exact, through the op.
PLANS = {
    "plan": {"methods": {"t1": {"num_iterations": 1, "exact": None}, "band": {"exact": {"band": 1}}, "full": None},
             "layers": {"transformer": [["t1", "band"], ["full", "full"], ["full", "t1"]]}},
    "exact": {"methods": {"all": {"exact": {"band": 1000}}}, "layers": {"transformer": [["all"] * HEADS] * LAYERS}},
}  # fmt: skip


def checkpoint():
    """Random weights of a small Wan text-to-video model under ComfyUI's names."""
    generator, weights = torch.Generator().manual_seed(0), {}
    sizes = {"patch_embedding": (DIM, 16, 1, 2, 2), "text_embedding.0": (DIM, TEXT), "text_embedding.2": (DIM, DIM),
             "time_embedding.0": (DIM, 256), "time_embedding.2": (DIM, DIM), "time_projection.1": (6 * DIM, DIM),
             "head.head": (64, DIM)}  # fmt: skip
    for block in (f"blocks.{layer}" for layer in range(LAYERS)):
        projections = (f"{block}.{attention}.{name}" for attention in ("self_attn", "cross_attn") for name in "qkvo")
        sizes |= dict.fromkeys(projections, (DIM, DIM)) | {f"{block}.ffn.0": (FFN, DIM), f"{block}.ffn.2": (DIM, FFN)}
        norms = [f"{block}.{attention}.norm_{x}" for attention in ("self_attn", "cross_attn") for x in "qk"]
        for name in (*norms, f"{block}.norm3"):
            # Sharper than a random model's attention usually is.
            scale = 1.0 if name.endswith("norm3") else 1.5
            weights[f"{name}.weight"] = scale * (1 + 0.1 * torch.randn(DIM, generator=generator))
        weights[f"{block}.norm3.bias"] = 0.1 * torch.randn(DIM, generator=generator)
        weights[f"{block}.modulation"] = torch.randn(1, 6, DIM, generator=generator) * DIM**-0.5
    weights["head.modulation"] = torch.randn(1, 2, DIM, generator=generator) * DIM**-0.5
    for name, (out, *fan_in) in sizes.items():
        weights[f"{name}.weight"] = torch.randn(out, *fan_in, generator=generator) * torch.Size(fan_in).numel() ** -0.5
        weights[f"{name}.bias"] = 0.1 * torch.randn(out, generator=generator)
    return weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(node): (latents or None, the report or the error) of the workflow, with settings of our node."""
    base = tmp_path_factory.mktemp("comfyui")
    for name in ("custom_nodes", "models/diffusion_models", "input", "output"):
        (base / name).mkdir(parents=True)
    (base / "custom_nodes" / "vmonarch").symlink_to(NODE)
    (base / "custom_nodes" / "conditioning.py").write_text(CONDITIONING)
    save_file(checkpoint(), base / "models" / "diffusion_models" / "tiny.safetensors")
    for name, plan in PLANS.items():
        (base / "input" / f"{name}.json").write_text(json.dumps({"format": "vmonarch-plan-1", **plan}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"

    def ask(path, data=None):
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def queue(node):
        graph = json.loads((NODE / "wan-t2v.api.json").read_text())
        graph["model"]["inputs"]["unet_name"] = "tiny.safetensors"
        for seed, name in enumerate(("prompt", "negative"), 10):
            graph[name] = {"class_type": "RandomConditioning", "inputs": {"seed": seed}}
        graph["latent"]["inputs"] = {"width": WIDTH, "height": HEIGHT, "length": LENGTH, "batch_size": 1}
        graph["sampler"]["inputs"] |= {"seed": SEED, "steps": STEPS, "cfg": GUIDANCE, "sampler_name": "euler"}
        graph["shift"]["inputs"]["shift"] = SHIFT
        for name in ("text", "vae", "decode", "video"):
            del graph[name]
        graph["save"] = {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "x"}}
        graph["vmonarch"]["inputs"] |= node or {}
        if node is None:
            del graph["vmonarch"], graph["report"]
            graph["sampler"]["inputs"]["model"] = ["shift", 0]
        name = ask("/prompt", {"prompt": graph})["prompt_id"]
        while not (history := ask(f"/history/{name}")):
            time.sleep(0.2)
        outputs, status = history[name]["outputs"], history[name]["status"]
        if status["status_str"] != "success":
            ((_, what),) = [message for message in status["messages"] if message[0] == "execution_error"]
            return None, what["exception_message"].strip()
        saved = outputs["save"]["latents"][0]
        latents = load_file(base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]
        return latents, outputs.get("report", {}).get("text", [""])[0]

    queue.inputs = base / "input"
    command = [sys.executable, "main.py", "--cpu", "--port", address.rpartition(":")[2], "--base-directory", str(base)]
    log = (base / "log.txt").open("w")
    with log, subprocess.Popen(command, cwd=os.environ["COMFYUI"], stdout=log, stderr=log) as server:
        try:
            for _ in range(360):
                with contextlib.suppress(OSError):
                    ask("/system_stats")
                    break
                assert server.poll() is None, (base / "log.txt").read_text()[-3000:]
                time.sleep(0.5)
            yield queue
        finally:
            server.terminate()


def diffusers_latents(method):
    """What a diffusers pipeline makes of the same weights, noise, prompts and schedule, as ComfyUI scales it."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    # ComfyUI's "simple" schedule: every n-th of 1000 shifted levels.
    levels = [SHIFT * t / (1 + (SHIFT - 1) * t) for t in (torch.arange(1, 1001) / 1000).tolist()]
    sigmas = [levels[-(1 + int(x * len(levels) / STEPS))] for x in range(STEPS)]

    class Schedule(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps=None, device=None, **_):
            super().set_timesteps(sigmas=sigmas, device=device)

    transformer = WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=LAYERS, ffn_dim=FFN, text_dim=TEXT
    )
    transformer.load_state_dict(convert_wan_transformer_to_diffusers(checkpoint()))
    vae = AutoencoderKLWan(base_dim=8, num_res_blocks=1)
    pipe = WanPipeline(None, None, vae, Schedule(shift=1.0), transformer.eval())
    resolve_method(method).install(pipe)
    prompts = [torch.randn(1, 512, TEXT, generator=torch.Generator().manual_seed(seed)) for seed in (10, 11)]
    noise = torch.randn((1, 16, (LENGTH - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8), generator=torch.manual_seed(SEED))
    latents = pipe(
        prompt_embeds=prompts[0], negative_prompt_embeds=prompts[1], latents=noise, width=WIDTH, height=HEIGHT,
        num_frames=LENGTH, num_inference_steps=STEPS, guidance_scale=GUIDANCE, output_type="latent",
    ).frames  # fmt: skip
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    return latents * std + mean


def assert_near(x, true, error):
    assert (x - true).norm() <= error * true.norm()


@pytest.mark.parametrize("node, method", [
    (None, "full"),
    ({"plan": "exact.json", "refresh": "none"}, "full"),
    ({}, "near-lossless"),
    ({"preset": "vmonarch"}, "vmonarch"),
    ({"preset": "two-resolution"}, "two-resolution"),
    ({"preset": "vmonarch", "dense_blocks": "0, 2"}, "vmonarch:dense_layers=[0,2]"),
    ({"plan": "plan.json", "refresh": "2"}, "vmonarch:plan={plan},refresh=2"),
], ids=lambda value: str(value))  # fmt: skip
def test_comfyui_makes_what_diffusers_makes(run, node, method):
    latents, report = run(node)
    assert latents is not None and (node is None or report.startswith("VMonarch on WanModel: latent grid 5×6×8")), (
        report
    )
    expected = diffusers_latents(method.format(plan=run.inputs / "plan.json"))
    # Kept residuals are of int8, whose rounding may differ.
    assert_near(latents, expected, 5e-4 if "refresh" in method or method == "near-lossless" else 1e-5)


def test_what_does_not_fit_the_model_is_an_error_in_the_editor(run):
    latents, error = run({"dense_blocks": "9"})
    assert latents is None and "dense_blocks" in error
