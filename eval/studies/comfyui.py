"""The node in ComfyUI itself, on the CPU, beside diffusers: `python -m vmonarch.eval.studies.comfyui COMFYUI`.

COMFYUI is a checkout of its repository, whose requirements this Python has. A server is started in a folder of its own,
with a tiny random Wan checkpoint in ComfyUI's format. The workflow that ships with the node is queued by the server's
API with the node off and on, and the latents are compared with those of a diffusers pipeline that has the same weights,
noise and schedule. Then, without a server, tiny models of ComfyUI's other classes are called with the node's override.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import made, markdown
from vmonarch.files import write_json
from vmonarch.pipelines import comfyui

ROOT = Path(__file__).resolve().parents[2]
NODE = Path(comfyui.__file__).resolve().parent
WORKFLOW = NODE / "wan-t2v.api.json"
STEPS, SEED, GUIDANCE, SHIFT = 8, 3, 4.0, 8.0
HEADS, HEAD_DIM, LAYERS, FFN, TEXT = 2, 128, 3, 512, 4096
# In pixels and frames: a grid of 5 × 6 × 8 tokens.
WIDTH, HEIGHT, LENGTH = 128, 96, 17
# What ComfyUI and, where it finds them, transformers import, and this study never calls. Each name in it is a class.
STAND_INS = (
    "torchvision.io",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2.functional",
    "torchaudio.functional",
    "torchaudio.transforms",
)
STAND_IN = """
__version__ = "0.0"

class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

def __getattr__(name):
    return getattr(Anything("", (), {}), name)
"""
# Nodes of this study: a conditioning without a text encoder, and a node that puts an override of its own on the seam.
STUDY_NODES = f"""
import torch

class StudyConditioning:
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "study"
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"seed": ("INT", {{}})}}}}
    def make(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return ([[torch.randn(1, 512, {TEXT}, generator=generator), {{}}]],)

class StudyOverride:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "study"
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"model": ("MODEL",)}}}}
    def patch(self, model):
        model, seen = model.clone(), []
        def override(func, *args, **kwargs):
            seen.append("self" if args[0].shape == args[1].shape else "cross")
            return func(*args, **kwargs)
        def tell(patcher):
            print("\\nStudyOverride: self", seen.count("self"), "cross", seen.count("cross"), flush=True)
            seen.clear()
        model.model_options["transformer_options"]["optimized_attention_override"] = override
        model.add_callback("on_cleanup", tell)
        return (model,)

NODE_CLASS_MAPPINGS = {{"StudyConditioning": StudyConditioning, "StudyOverride": StudyOverride}}
"""


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a small Wan text-to-video model under ComfyUI's names."""
    generator, dim = torch.Generator().manual_seed(seed), HEADS * HEAD_DIM
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, out: int, *fan_in: int) -> None:
        size = torch.Size(fan_in).numel()
        weights[f"{name}.weight"] = torch.randn(out, *fan_in, generator=generator) * size**-0.5
        weights[f"{name}.bias"] = 0.1 * torch.randn(out, generator=generator)

    def norm(name: str, scale: float = 1.0) -> None:
        weights[f"{name}.weight"] = scale * (1 + 0.1 * torch.randn(dim, generator=generator))

    linear("patch_embedding", dim, 16, 1, 2, 2)
    for name, sizes in {
        "text_embedding.0": (dim, TEXT),
        "text_embedding.2": (dim, dim),
        "time_embedding.0": (dim, 256),
        "time_embedding.2": (dim, dim),
        "time_projection.1": (6 * dim, dim),
    }.items():
        linear(name, *sizes)
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        weights[f"{block}.modulation"] = torch.randn(1, 6, dim, generator=generator) * dim**-0.5
        for attention in ("self_attn", "cross_attn"):
            for name in ("q", "k", "v", "o"):
                linear(f"{block}.{attention}.{name}", dim, dim)
            # Sharper than a random model's attention usually is.
            norm(f"{block}.{attention}.norm_q", 1.5)
            norm(f"{block}.{attention}.norm_k", 1.5)
        norm(f"{block}.norm3")
        weights[f"{block}.norm3.bias"] = 0.1 * torch.randn(dim, generator=generator)
        linear(f"{block}.ffn.0", FFN, dim)
        linear(f"{block}.ffn.2", dim, FFN)
    weights["head.modulation"] = torch.randn(1, 2, dim, generator=generator) * dim**-0.5
    linear("head.head", 64, dim)
    return weights


def lora(seed: int) -> dict[str, torch.Tensor]:
    """A LoRA of rank 4 on self-attention, under ComfyUI's names."""
    generator, dim = torch.Generator().manual_seed(seed), HEADS * HEAD_DIM
    return {
        f"diffusion_model.blocks.{layer}.self_attn.{name}.lora_{half}.weight": torch.randn(shape, generator=generator)
        / 8
        for layer in range(LAYERS)
        for name in ("q", "v")
        for half, shape in (("A", (4, dim)), ("B", (dim, 4)))
    }


def merged(
    weights: dict[str, torch.Tensor], added: dict[str, torch.Tensor], strength: float
) -> dict[str, torch.Tensor]:
    """The weights with a LoRA in them."""
    weights = dict(weights)
    for name, A in added.items():
        if name.endswith(".lora_A.weight"):
            target = name.removeprefix("diffusion_model.").replace(".lora_A", "")
            weights[target] = weights[target] + strength * added[name.replace("lora_A", "lora_B")] @ A
    return weights


def plan() -> dict[str, Any]:
    """Heads that differ, and one layer that stays exact."""
    methods = {"t1": {"num_iterations": 1, "exact": None}, "band": {"exact": {"band": 1}}, "full": None}
    layers = {"transformer": [["t1", "band"], ["full", "full"], ["full", "t1"]]}
    return {"format": "vmonarch-plan-1", "methods": methods, "layers": layers}


def exact_plan() -> dict[str, Any]:
    """Every block of every head exact, through the op."""
    methods, rows = {"all": {"exact": {"band": 1000}}}, [["all"] * HEADS] * LAYERS
    return {"format": "vmonarch-plan-1", "methods": methods, "layers": {"transformer": rows}}


def write_stand_ins(folder: Path) -> list[str]:
    """Modules without contents for what is not installed; their names."""
    missing = [name for name in STAND_INS if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in missing:
        path = folder
        for part in name.split("."):
            path = path / part
            path.mkdir(parents=True, exist_ok=True)
            (path / "__init__.py").write_text(STAND_IN)
    return sorted({name.partition(".")[0] for name in missing})


class Server:
    """A running ComfyUI."""

    def __init__(self, port: int, base: Path) -> None:
        self.address, self.base = f"http://127.0.0.1:{port}", base

    def ask(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()}") from error
        return json.loads(text) if text else None

    def run(self, workflow: dict[str, Any]) -> tuple[torch.Tensor | None, str]:
        """(latents, the report's text or that of the error) of a workflow."""
        name = self.ask("/prompt", {"prompt": workflow})["prompt_id"]
        while not (history := self.ask(f"/history/{name}")):
            time.sleep(0.2)
        outputs, status = history[name]["outputs"], history[name]["status"]
        if status["status_str"] != "success":
            ((_, what),) = [message for message in status["messages"] if message[0] == "execution_error"]
            return None, what["exception_message"].strip()
        saved = outputs["save"]["latents"][0]
        latents = load_file(self.base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]
        return latents, outputs.get("report", {}).get("text", [""])[0]


@contextlib.contextmanager
def serving(source: Path, log: Path) -> Iterator[tuple[Server, list[str]]]:
    """ComfyUI in a folder of its own; and which modules have stand-ins."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        base, stand_ins = Path(folder) / "base", Path(folder) / "stand_ins"
        for name in ("custom_nodes", "models/diffusion_models", "models/loras", "input", "output"):
            (base / name).mkdir(parents=True)
        (base / "custom_nodes" / "vmonarch").symlink_to(NODE)
        (base / "custom_nodes" / "study.py").write_text(STUDY_NODES)
        save_file(checkpoint(0), base / "models" / "diffusion_models" / "tiny.safetensors")
        save_file(lora(1), base / "models" / "loras" / "tiny.safetensors")
        # The editor complains about what is not there.
        for node in json.loads(WORKFLOW.read_text()).values():
            for name, group in {
                "unet_name": "diffusion_models",
                "clip_name": "text_encoders",
                "vae_name": "vae",
            }.items():
                if name in node["inputs"]:
                    (base / "models" / group).mkdir(exist_ok=True)
                    (base / "models" / group / node["inputs"][name]).touch()
        (base / "input" / "plan.json").write_text(json.dumps(plan()))
        (base / "input" / "exact.json").write_text(json.dumps(exact_plan()))
        missing = write_stand_ins(stand_ins)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["--cpu", "--port", str(port), "--base-directory", str(base), "--disable-api-nodes"]
        paths = os.pathsep.join([str(ROOT), str(stand_ins)])
        server = Server(port, base)
        with subprocess.Popen(
            [sys.executable, "main.py", *options],
            cwd=source,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                deadline = time.monotonic() + 180
                while True:
                    with contextlib.suppress(OSError):
                        server.ask("/system_stats")
                        break
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"ComfyUI does not start; see {log}")
                    time.sleep(0.5)
                yield server, missing
            finally:
                process.terminate()


def workflow(
    node: dict[str, Any] | None,
    sampler: dict[str, Any] | None = None,
    around: Callable[[dict[str, Any]], None] | None = None,
    batch: int = 1,
) -> dict[str, Any]:
    """The workflow that ships, with this study's model, prompts and size.

    Args:
        node: settings of the VMonarch node; None to leave it out.
        sampler: settings of the sampler.
        around: puts in further nodes.
    """
    graph = json.loads(WORKFLOW.read_text())
    graph["model"]["inputs"]["unet_name"] = "tiny.safetensors"
    for seed, name in enumerate(("prompt", "negative"), 10):
        graph[name] = {"class_type": "StudyConditioning", "inputs": {"seed": seed}}
    graph["latent"]["inputs"] = {"width": WIDTH, "height": HEIGHT, "length": LENGTH, "batch_size": batch}
    graph["sampler"]["inputs"] |= {"seed": SEED, "steps": STEPS, "cfg": GUIDANCE, "sampler_name": "euler"}
    graph["sampler"]["inputs"] |= sampler or {}
    graph["shift"]["inputs"]["shift"] = SHIFT
    for name in ("text", "vae", "decode", "video"):
        del graph[name]
    graph["save"] = {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "study"}}
    if node is None:
        del graph["vmonarch"], graph["report"]
        graph["sampler"]["inputs"]["model"] = ["shift", 0]
    else:
        graph["vmonarch"]["inputs"] |= node
    if around is not None:
        around(graph)
    return graph


def diffusers_latents(
    weights: dict[str, torch.Tensor], sigmas: Sequence[float], method: str | None, batch: int = 1
) -> torch.Tensor:
    """What a diffusers pipeline makes of the same weights, noise, prompts and schedule, as ComfyUI scales it."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    from vmonarch.configs.methods import resolve_method

    class Schedule(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, **_: Any) -> None:
            super().set_timesteps(sigmas=list(sigmas[:-1]), device=device)

    transformer = WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=LAYERS, ffn_dim=FFN, text_dim=TEXT
    )
    transformer.load_state_dict(convert_wan_transformer_to_diffusers(dict(weights)))
    vae = AutoencoderKLWan(base_dim=8, num_res_blocks=1)
    pipe = WanPipeline(None, None, vae, Schedule(shift=1.0), transformer.eval())
    pipe.set_progress_bar_config(disable=True)
    if method is not None:
        resolve_method(method).install(pipe)
    prompts = [torch.randn(1, 512, TEXT, generator=torch.Generator().manual_seed(seed)) for seed in (10, 11)]
    shape = (batch, 16, (LENGTH - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8)
    noise = torch.randn(shape, generator=torch.manual_seed(SEED))
    latents = pipe(
        prompt_embeds=prompts[0].repeat(batch, 1, 1),
        negative_prompt_embeds=prompts[1].repeat(batch, 1, 1),
        latents=noise,
        width=WIDTH,
        height=HEIGHT,
        num_frames=LENGTH,
        num_inference_steps=len(sigmas) - 1,
        guidance_scale=GUIDANCE,
        output_type="latent",
    ).frames
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    return latents * std + mean


def schedule(steps: int) -> list[float]:
    """The noise levels of ComfyUI's "simple" schedule: every n-th of 1000 shifted ones."""
    levels = [SHIFT * t / (1 + (SHIFT - 1) * t) for t in (torch.arange(1, 1001) / 1000).tolist()]
    return [levels[-(1 + int(x * len(levels) / steps))] for x in range(steps)] + [0.0]


def distance(x: torch.Tensor, true: torch.Tensor) -> float:
    """The difference in the norm, relative to that of `true`."""
    return float((x - true).norm() / true.norm())


# Settings of the node, and the method of diffusers that they stand for.
COMPARED: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "without the node": (None, None),
    "plan of exact blocks": ({"plan": "exact.json", "refresh": "none"}, None),
    "near-lossless": ({}, "near-lossless"),
    "vmonarch": ({"preset": "vmonarch"}, "vmonarch"),
    "vmonarch, refresh 0, 3": ({"preset": "vmonarch", "refresh": "0, 3"}, "vmonarch:refresh=[0,3]"),
    "two-resolution": ({"preset": "two-resolution"}, "two-resolution"),
    "dense blocks 0, 2": ({"preset": "vmonarch", "dense_blocks": "0, 2"}, "vmonarch:dense_layers=[0,2]"),
    "plan": ({"plan": "plan.json", "refresh": "none"}, "vmonarch:plan={plan}"),
    "plan, refresh 2": ({"plan": "plan.json", "refresh": "2"}, "vmonarch:plan={plan},refresh=2"),
}


def compare(server: Server, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every entry of `COMPARED`, in ComfyUI and in diffusers."""
    sigmas, weights, rows = schedule(STEPS), checkpoint(0), []
    exact: torch.Tensor | None = None
    for name, (node, method) in COMPARED.items():
        latents, report = server.run(workflow(node))
        assert latents is not None, report
        exact = latents if exact is None else exact
        if method is not None:
            method = method.format(plan=server.base / "input" / "plan.json")
        reference = diffusers_latents(weights, sigmas, method)
        row = {"case": name, "to_diffusers": distance(latents, reference), "to_exact": distance(latents, exact)}
        rows.append(row | {"report": report})
        say(f"{name}: {row['to_diffusers']:.1e} from diffusers, {row['to_exact']:.1e} from ComfyUI without the node")
    return rows


def check(server: Server, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """What nodes beside it, other samplers and unloading change."""
    base, sigmas = workflow({}), schedule(STEPS)
    plain, _ = server.run(base)
    assert plain is not None

    def with_lora(graph: dict[str, Any], before: bool) -> None:
        inputs = {"lora_name": "tiny.safetensors", "strength_model": 0.7}
        source, user = (("shift", "vmonarch"), ("vmonarch", "sampler"))[not before]
        graph["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs | {"model": [source, 0]}}
        graph[user]["inputs"]["model"] = ["lora", 0]

    def with_override(graph: dict[str, Any], before: bool) -> None:
        source, user = (("shift", "vmonarch"), ("vmonarch", "sampler"))[not before]
        graph["override"] = {"class_type": "StudyOverride", "inputs": {"model": [source, 0]}}
        graph[user]["inputs"]["model"] = ["override", 0]

    def with_two(graph: dict[str, Any]) -> None:
        graph["second"] = copy.deepcopy(graph["vmonarch"])
        graph["second"]["inputs"] |= {"model": ["vmonarch", 0], "preset": "vmonarch"}
        graph["sampler"]["inputs"]["model"] = graph["report"]["inputs"]["model"] = ["second", 0]

    def run(name: str, graph: dict[str, Any], true: torch.Tensor | None, unloaded: bool = False) -> dict[str, Any]:
        if unloaded:
            server.ask("/free", {"unload_models": True, "free_memory": True})
            time.sleep(2)
        latents, report = server.run(graph)
        row: dict[str, Any] = {"case": name, "report": report}
        if latents is not None:
            targets = {"to_expected": true, "to_plain": plain}
            row |= {
                name: distance(latents, x) for name, x in targets.items() if x is not None and x.shape == latents.shape
            }
        say(
            f"{name}: {report} {' '.join(f'{key} {row[key]:.1e}' for key in ('to_expected', 'to_plain') if key in row)}"
        )
        return row

    tuned = diffusers_latents(merged(checkpoint(0), lora(1), 0.7), sigmas, "near-lossless")
    second = diffusers_latents(checkpoint(0), sigmas, "vmonarch")
    two = diffusers_latents(checkpoint(0), sigmas, "near-lossless", batch=2)
    node: dict[str, Any] = {}
    return [
        run("LoRA before the node", workflow(node, around=lambda graph: with_lora(graph, True)), tuned),
        run("LoRA after the node", workflow(node, around=lambda graph: with_lora(graph, False)), tuned),
        run("unloaded, then run again", workflow(node, {"seed": SEED}), plain, unloaded=True),
        run("override before the node", workflow(node, around=lambda graph: with_override(graph, True)), plain),
        run("override after the node", workflow(node, around=lambda graph: with_override(graph, False)), plain),
        run("two nodes, the second vmonarch", workflow(node, around=with_two), second),
        run("batch of 2", workflow(node, batch=2), two),
        run("heun", workflow(node, {"sampler_name": "heun"}), None),
        run("uni_pc", workflow(node, {"sampler_name": "uni_pc"}), None),
        run("dpmpp_2m_sde", workflow(node, {"sampler_name": "dpmpp_2m_sde"}), None),
        run("denoise 0.5", workflow(node, {"denoise": 0.5}), None),
        run("start_percent 0.3", workflow({"start_percent": 0.3}), None),
        run("4 steps, refresh 6", workflow({"refresh": "6"}, {"steps": 4}), None),
        run("dense block 9", workflow({"dense_blocks": "9"}), None),
    ]


def edit(server: Server, picture: Path) -> None:
    """Load the example workflow in the editor, check that it asks for what the API's asks for, and take a picture.

    Raises:
        AssertionError: it asks for something else.
    """
    from playwright.sync_api import sync_playwright

    example = json.loads(next((NODE / "example_workflows").glob("*.json")).read_text())
    ready = (
        "window.app?.graph && document.querySelector('canvas') && Object.keys(LiteGraph.registered_node_types).length"
    )
    view = "() => { app.canvas.ds.scale = 0.8; app.canvas.ds.offset = [90, 170]; app.graph.setDirtyCanvas(true, true) }"
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 690}, device_scale_factor=1.5)
        page.goto(server.address, wait_until="domcontentloaded")
        page.wait_for_function(ready, timeout=240_000)
        page.wait_for_timeout(10_000)
        for name in ("Comfy.Minimap.Visible", "Comfy.Graph.CanvasInfo"):
            page.evaluate("name => app.ui.settings.setSettingValueAsync(name, false)", name)
        page.evaluate("workflow => app.loadGraphData(workflow)", example)
        page.wait_for_timeout(3_000)
        page.evaluate(view)
        # The template browser opens in a folder without workflows.
        page.keyboard.press("Escape")
        page.wait_for_timeout(2_000)
        page.screenshot(path=picture)
        asked = page.evaluate("async () => (await app.graphToPrompt()).output")
        browser.close()
    assert _by_class(asked) == _by_class(json.loads(WORKFLOW.read_text())), "the example is another workflow"
    with Image.open(picture) as image:
        image.convert("RGB").quantize(128).save(picture, optimize=True)


def _by_class(workflow: dict[str, Any]) -> list[Any]:
    """The nodes of a workflow without their names: links tell the class of the node that they come from."""
    source = lambda value: [workflow[value[0]]["class_type"], value[1]] if isinstance(value, list) else value
    nodes = (
        [node["class_type"], sorted((name, str(source(value))) for name, value in node["inputs"].items())]
        for node in workflow.values()
    )
    return sorted(json.loads(json.dumps(node).replace('.0"', '"')) for node in nodes)


def call_families() -> list[dict[str, Any]]:
    """Tiny models of ComfyUI's classes, each called with VMonarch and, as a check, with exact blocks through the op."""
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.hunyuan_video.model import HunyuanVideo
    from comfy.ldm.lightricks.model import LTXVModel
    from comfy.ldm.wan import model as wan

    from vmonarch import VMonarchOptions
    from vmonarch.pipelines.comfyui.seam import SeamAttention, Settings

    wan_config: dict[str, Any] = dict(
        dim=96, ffn_dim=128, num_heads=2, num_layers=2, text_dim=32, in_dim=16, out_dim=16
    )
    hunyuan: dict[str, Any] = dict(
        in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=32, hidden_size=96, mlp_ratio=2.0
    )
    hunyuan |= dict(num_heads=2, depth=1, depth_single_blocks=2, axes_dim=[16, 16, 16], theta=256, patch_size=[1, 2, 2])
    hunyuan |= dict(qkv_bias=True, guidance_embed=False, image_model="hunyuan_video", byt5=False, meanflow=False)
    hunyuan |= dict(use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False)
    ltx: dict[str, Any] = dict(
        in_channels=16, cross_attention_dim=96, attention_head_dim=48, num_attention_heads=2, num_layers=2
    )
    random = torch.Generator().manual_seed(0)
    tensor = lambda *shape: torch.randn(shape, generator=random)
    x, text, two_steps = tensor(1, 16, 3, 8, 12), tensor(1, 9, 32), [1.0, 0.5, 0.0]
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "WanModel": (wan.WanModel, wan_config, {}),
        "WanModel, reference image": (
            wan.WanModel,
            wan_config | {"in_dim_ref_conv": 16},
            {"reference_latent": tensor(1, 16, 8, 12)},
        ),
        "VaceWanModel": (
            wan.VaceWanModel,
            wan_config | {"model_type": "vace", "vace_layers": 1, "vace_in_dim": 24},
            {"vace_context": tensor(1, 1, 24, 3, 8, 12), "vace_strength": [1.0]},
        ),
        "CameraWanModel": (wan.CameraWanModel, wan_config | {"model_type": "camera_2.2"}, {}),
        "HumoWanModel": (
            wan.HumoWanModel,
            wan_config | {"model_type": "humo", "audio_token_num": 4},
            {"reference_latent": tensor(1, 16, 1, 8, 12)},
        ),
        "HunyuanVideo": (HunyuanVideo, hunyuan, {"y": tensor(1, 32)}),
        "LTXVModel": (LTXVModel, ltx | {"caption_channels": 32}, {"attention_mask": None}),
    }
    rows = []
    for name, (kind, config, arguments) in cases.items():
        torch.manual_seed(0)
        with torch.random.fork_rng():
            model = kind(**config, dtype=torch.float32, device="cpu", operations=comfy.ops.manual_cast)
        with torch.no_grad():
            for parameter in model.parameters():
                fan_in = parameter[0].numel() if parameter.ndim > 1 else 9
                parameter.copy_(torch.randn(parameter.shape, generator=random) * fan_in**-0.5)
        for dtype in (torch.float32, torch.bfloat16):
            sampling = types.SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)
            objects = {"diffusion_model": model, "model_sampling": sampling}
            patcher = types.SimpleNamespace(get_model_object=objects.get)

            def call(seam: Any, model: Any = model, dtype: Any = dtype, arguments: Any = arguments) -> torch.Tensor:
                options = {"sigmas": torch.tensor([1.0]), "sample_sigmas": torch.tensor(two_steps), "uuids": [0]}
                if seam is not None:
                    options["wrappers"] = {"diffusion_model": {"vmonarch": [seam.forward]}}
                given = {key: value.to(dtype) if torch.is_tensor(value) else value for key, value in arguments.items()}
                time = torch.tensor([1000.0 if not isinstance(model, HunyuanVideo) else 1.0])
                return model(x.to(dtype), time, text.to(dtype), transformer_options=options, **given).float()

            with torch.inference_mode():
                stock = call(None)
                ours = SeamAttention(Settings(preset="vmonarch-t3"))
                all_exact = SeamAttention(Settings(preset="vmonarch"))
                all_exact.processor.options = VMonarchOptions(exact={"band": 1000})
                distances = []
                for seam in (all_exact, ours):
                    seam.begin_run(patcher)
                    distances.append(distance(call(seam), stock))
                    seam.end_run(patcher)
            about = {"case": name, "dtype": str(dtype).removeprefix("torch."), "report": str(ours.report)}
            rows.append(about | dict(zip(("all_exact_to_stock", "vmonarch_to_stock"), distances, strict=True)))
    return rows


def families(source: Path) -> list[dict[str, Any]]:
    """`call_families` in a process of its own, where ComfyUI's modules can be imported."""
    with tempfile.TemporaryDirectory() as folder:
        write_stand_ins(Path(folder))
        paths = os.pathsep.join([str(ROOT), folder, str(source)])
        code = "import json, vmonarch.eval.studies.comfyui as study; print(json.dumps(study.call_families()))"
        # Not in the root folder, whose `kernels` hides a package.
        found = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    rows: list[dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])
    return rows


def study_table(results: dict[str, Any]) -> str:
    """How far ComfyUI is from diffusers, and for scale from itself without the node."""
    shown = lambda number: f"{number:.1e}" if number else "0"
    rows = [[row["case"], shown(row["to_diffusers"]), shown(row["to_exact"])] for row in results["compared"]]
    heading = ["node", "ComfyUI to diffusers", "ComfyUI to itself without the node"]
    return made(results, markdown(heading, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = script_parser("studies.comfyui", __doc__, whole=True)
    parser.add_argument("comfyui", type=Path, help="a checkout of ComfyUI's repository")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "comfyui.json")
    parser.add_argument(
        "--picture", type=Path, help="where to save a picture of the editor; needs playwright, chromium"
    )
    options = parser.parse_args(arguments)
    record = script_record("studies.comfyui", arguments, "cpu")
    version: dict[str, str] = {}
    exec((options.comfyui / "comfyui_version.py").read_text(), version)
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    server_log = Path(tempfile.gettempdir()) / "comfyui-study.log"
    with serving(options.comfyui.resolve(), server_log) as (server, stand_ins):
        if options.picture is not None:
            edit(server, options.picture)
        rows, checks = compare(server, say), check(server, say)
    called = families(options.comfyui.resolve())
    for row in called:
        say(
            f"{row['case']}, {row['dtype']}: all exact {row['all_exact_to_stock']:.1e} from stock, vmonarch-t3"
            f" {row['vmonarch_to_stock']:.1e}. {row['report']}"
        )
    said = [line for line in server_log.read_text().splitlines() if line.startswith(("VMonarch on", "StudyOverride:"))]
    result = {"comfyui": version["__version__"], "stand_ins": stand_ins, "compared": rows, "checks": checks}
    write_json(options.output, record | result | {"families": called})
    log = ["$ " + record["command"], *lines, "", "What ComfyUI's log says:", *said]
    options.output.with_suffix(".log").write_text("\n".join(log) + "\n")


if __name__ == "__main__":
    main()
