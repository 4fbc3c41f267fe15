"""LoRA files, schedulers and noise levels of models that are distilled to a few steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_wan import load

from vmonarch.configs import InputError
from vmonarch.pipelines.loading import check_loaded
from vmonarch.pipelines.sampling import sample

PROMPT = "a red circle moving right"
RANK, ALPHA, SCALE = 2, 3.0, 0.5
# diffusers' names of the layers of a block, and those of Wan's own code.
BLOCK = {
    **{f"attn1.to_{x}": f"self_attn.{x}" for x in "qkv"},
    "attn1.to_out.0": "self_attn.o",
    **{f"attn2.to_{x}": f"cross_attn.{x}" for x in "qkv"},
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
BLOCKS = {f"blocks.{i}.{ours}": f"blocks.{i}.{theirs}" for i in (0, 1) for ours, theirs in BLOCK.items()}
OUTER = {
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}


def weights(component: Path) -> dict[str, torch.Tensor]:
    return load_file(component / "diffusion_pytorch_model.safetensors")


def write_lora(form: str, component: Path, file: Path) -> dict[str, torch.Tensor]:
    """A file in diffusers' form or that of Wan's own code, and the transformer's weights with it at SCALE, by hand."""
    torch.manual_seed(3)
    merged, tensors = weights(component), {}
    original = form == "lightx2v"
    for ours, theirs in (BLOCKS | OUTER if original else BLOCKS).items():
        weight = merged[f"{ours}.weight"]
        down, up = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
        alpha = 1.0
        if original:
            name, bias = f"diffusion_model.{theirs}", torch.randn(weight.shape[0])
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.diff_b": bias}
            merged[f"{ours}.bias"] = merged[f"{ours}.bias"] + SCALE * bias
            if ours in BLOCKS:
                alpha, tensors[f"{name}.alpha"] = ALPHA / RANK, torch.tensor(ALPHA)
        else:
            tensors |= {f"transformer.{ours}.lora_A.weight": down, f"transformer.{ours}.lora_B.weight": up}
        merged[f"{ours}.weight"] = weight + SCALE * alpha * up @ down
    if original:
        # As those files have it: differences of norms that are zero.
        tensors["diffusion_model.blocks.0.self_attn.norm_q.diff"] = torch.zeros(24)
    save_file(tensors, file)
    return merged


@pytest.mark.parametrize("form", ["diffusers", "lightx2v"])
def test_lora_layers_of_every_form_become_the_weights_computed_by_hand(form, tiny_model, tmp_path) -> None:
    file = tmp_path / "layers.safetensors"
    expected = write_lora(form, tiny_model / "transformer", file)
    transformer = load(tiny_model, lora=(f"{file}:{SCALE}",)).pipe.transformer
    found = transformer.state_dict()
    assert found.keys() == expected.keys(), "nothing is left of the layers"
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)


def test_each_transformer_gets_its_own_lora_layers(folders, tmp_path) -> None:
    model = folders("t2v-2.2")
    files = {name: tmp_path / name / "layers.safetensors" for name in ("transformer", "transformer_2")}
    for file in files.values():
        file.parent.mkdir()
    expected = write_lora("lightx2v", model / "transformer_2", files["transformer_2"])
    # A folder stands for its only file.
    pipe = load(model, lora_2=(f"{files['transformer_2'].parent}:{SCALE}",)).pipe
    for name, weight in pipe.transformer_2.state_dict().items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5, msg=name)
    first = weights(model / "transformer")
    assert all(weight.equal(first[name]) for name, weight in pipe.transformer.state_dict().items())


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ({"transformer.blocks.7.attn1.to_q": 24}, "blocks.7.attn1.to_q"),
        ({"transformer.blocks.0.attn1.to_q": 20}, "size mismatch"),
        ({"transformer.blocks.0.attn1.to_q": 24, "transformer.blocks.2.ffn.net.2": 24}, "2 tensors"),
        ({"unet.blocks.0.attn1.to_q": 24}, "no place for: unet"),
        ({}, "no LoRA layers"),
    ],
    ids=["no such layer", "other size", "one of two layers", "other model", "nothing"],
)
def test_a_lora_file_of_another_model_is_refused(layers, problem, tiny_model, tmp_path) -> None:
    file = tmp_path / "layers.safetensors"
    tensors = {f"{name}.lora_A.weight": torch.ones(RANK, 24) for name in layers}
    save_file(tensors | {f"{name}.lora_B.weight": torch.ones(rows, RANK) for name, rows in layers.items()}, file)
    with pytest.raises(InputError, match=problem) as error:
        load(tiny_model, lora=(str(file),))
    assert error.value.argument == "lora"


def test_a_few_step_video_is_made_again_from_its_record(cli, tmp_path) -> None:
    file = tmp_path / "layers.safetensors"
    write_lora("lightx2v", cli.model / "transformer", file)
    settings = ["--scheduler", "lcm", "--sigmas", "1,0.757,0.522", "--guidance", 1, "--steps", 3]
    word = f"{file.relative_to(cli.folder)}:{SCALE}"
    cli.done("generate", PROMPT, PROMPT + " slowly", "--lora", word, "--seed", 4, *settings)
    record = cli.records()[1]
    assert record["config"]["lora"] == [f"{file}:{SCALE}"] and len(record["model"]["lora_sha256"][0]) == 64
    assert record["model"]["scheduler"] == "LCMScheduler" and record["config"]["sigmas"] == [1.0, 0.757, 0.522]
    assert record["transformer_calls"] == 3, "one call a step: guidance is off"
    cli.done("generate", PROMPT + " slowly", "--lora", word, "--seed", 4, *settings)
    record = cli.records()[2]
    again = cli.folder / "outputs/generate" / record["video"]
    cli.done("generate", "--from-json", again.with_suffix(".json"), tiny=False)
    assert cli.records()[3]["frames_sha256"] == record["frames_sha256"]
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    code, _, err = cli("generate", "--from-json", again.with_suffix(".json"), tiny=False)
    assert code == 2 and "LoRA file that has changed" in err


def test_euler_and_lcm_do_what_their_formulas_say(tiny_model) -> None:
    """A seed means the same in any batch; LCM's noise is each seed's own, drawn after the first."""
    found = {}
    for name in ("euler", "lcm"):
        model = load(tiny_model, steps=2, guidance=1.0, scheduler=name, sigmas=(1.0, 0.4), attention="full")
        velocities: list[torch.Tensor] = []
        hook = model.pipe.transformer.register_forward_hook(lambda m, a, out, v=velocities: v.append(out[0].clone()))
        found[name] = sample(model, model.config, [PROMPT, "a blue square"], [7, 8], decode=False).latents
        hook.remove()
        generators = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
        draw = lambda shape=found[name].shape, g=generators: torch.cat(
            [torch.randn(1, *shape[1:], generator=x) for x in g]
        )
        x = draw()
        for sigma, after, velocity in zip((1.0, 0.4), (0.4, 0.0), velocities, strict=True):
            clean = x - sigma * velocity
            x = (1 - after) * clean + after * draw() if name == "lcm" else x + (after - sigma) * velocity
        torch.testing.assert_close(found[name], x, atol=1e-5, rtol=1e-5)
        single = sample(model, model.config, ["a blue square"], [8], decode=False).latents
        torch.testing.assert_close(single[0], found[name][1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found["euler"], found["lcm"], atol=1e-2)


def test_fastwans_checkpoints_are_wan_pipelines_and_keep_their_noise_levels(broken_model) -> None:
    index = json.loads((broken_model / "model_index.json").read_text())
    (broken_model / "model_index.json").write_text(json.dumps(index | {"_class_name": "WanDMDPipeline"}))
    model = load(broken_model, steps=3, guidance=1.0, scheduler="lcm", sigmas=(1.0, 0.757, 0.522))
    assert sample(model, model.config, [PROMPT], [0], decode=False).transformer_calls == 3
    torch.testing.assert_close(model.pipe.scheduler.timesteps / 1000, torch.tensor([1.0, 0.757, 0.522]))
    with pytest.raises(InputError, match=r"sigmas must be \(1.0, 0.757, 0.522\), with which the pipeline was loaded"):
        check_loaded(dataclasses.replace(model.config, sigmas=(1.0, 0.757, 0.5)), model)
